"""A server that pushes tells the next one, in the client's name, that nobody needs its output. Who withholds it then is
honest, and the client gets it all the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE, PUSH
from tests.inspection import client_of
from tests.swarm.memory_pool import memory_pool
from tests.swarm.watched_streams import watch_opened
from tests.tiny_models import VOCABULARY, load_whole, save_tiny

TOKENS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("withheld"))


@pytest.mark.usefixtures("patient", "pushes_awaited")
def test_honest_server_is_not_blamed_for_its_inputs(folder: Path) -> None:
    """The client has to send it the step itself, and that once."""
    told: list[int] = []
    anew: list[str] = []

    def lie(stream: Any, frame: wire.PushFrame, payloads: Sequence[Any]) -> None:
        frame.push.step.receipt_only = True
        told.append(frame.push.step.sequence)

    def note(stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        if told and frame.WhichOneof("body") == "step" and stream.peer_id == session.route[1][0]:
            anew.append(stream.peer_id)

    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = load_whole(folder).generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    with memory_pool(folder) as pool:
        first = pool.start("0:3", prepare=lambda node: watch_opened(node, PUSH, sent=lie))
        assert first.ready and pool.start("3:6").ready
        with (
            pool.swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
            model.inference_session(max_length=TOKENS + 1) as session,
        ):
            swarm = client_of(model).swarm
            watch_opened(swarm, INFERENCE, sent=note)
            for attempt in range(50):  # until the first server has its stream to the second one
                session.position, session.tokens = 0, None
                out = model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
                assert torch.equal(out, expected), attempt
                if told:
                    break
            assert len(told) == len(anew) == 1 and session.recoveries == 0 and not swarm.trust.bans()
