"""A server that says that a batch request took it a year: how long its next answers are waited for follows from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.node.client.batch.batch_client import BatchClient
from petalnode.node.client.batch.batch_stream import BatchOutput, BatchSpec, micro_batch
from petalnode.node.client.deadlines import batch_patience
from petalnode.node.client.request import WireTensor
from petalnode.node.swarm.routing import Hop
from petalnode.protocols.framing import wire_nbytes
from petalnode.protocols.ids import Span
from petalnode.protocols.training import FORWARD, MicroBatch
from petalnode.protocols.wire_pb2 import Tensor

pytestmark = pytest.mark.virtual_time

HOP = Hop("liar", Span(0, 2))
SHAPE = (3, 4, 8)
SECONDS = 2.0
YEAR = 365 * 24 * 3600.0


class Answers:
    """Takes `SECONDS` for every request, and says that it computed for as long as it likes."""

    takes_gradients_later = broken = False

    def __init__(self, says: list[float]) -> None:
        self._says = says
        self.patience: list[float] = []

    async def run(self, request: MicroBatch, patience: float) -> BatchOutput:
        self.patience.append(patience)
        await trio.sleep(SECONDS)
        return BatchOutput([], self._says.pop(0))


@pytest.mark.parametrize("says", [[YEAR] * 4, [0.5, YEAR, YEAR, YEAR], [0.0, YEAR, 0.0, YEAR]])
async def test_next_answers_are_awaited_as_honest_work_takes(says: list[float]) -> None:
    nbytes = wire_nbytes(SHAPE, "float32", "none")
    tensor = WireTensor(Tensor(shape=SHAPE, dtype="float32", codec="none", nbytes=nbytes), bytes(nbytes))
    answers: Any = Answers(list(says))
    client: Any = SimpleNamespace(note_tokens=lambda peer_id, tokens: None)
    batches = BatchClient(client)

    async def usable(*_: Any) -> Any:
        return answers

    batches._usable = usable  # type: ignore[method-assign]
    for _ in says:
        await batches.run(FORWARD, HOP, BatchSpec(bytes(32)), micro_batch([tensor]), None)
    assert max(answers.patience) <= batch_patience(SECONDS) * 1.001
