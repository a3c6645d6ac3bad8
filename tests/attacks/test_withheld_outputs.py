"""A server that pushes tells the next one, in the client's name, that nobody needs its output. Who withholds it then is
honest, and the client gets it all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.request import PushedOther
from petalnode.node.client.session.recovery import Misled, StepEvent
from petalnode.node.client.session.step import PipelineStep
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import pushed_step
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.tiny_models import VOCABULARY, load_whole, save_tiny

PUSHED = "petalnode.node.server.requests.session.pushed_step"
TOKENS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("withheld"))


@pytest.fixture
def pool(folder: Path) -> Iterator[MemoryPool]:
    with memory_pool(folder) as pool:
        for blocks in ("0:3", "3:6"):
            pool.start(blocks)
        for server in pool.alive:
            assert server.ready
        yield pool


@pytest.mark.usefixtures("patient", "pushes_awaited")
def test_honest_server_is_not_blamed_for_its_inputs(
    pool: MemoryPool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    misled, found = PipelineStep._misled, []

    def noting(step: PipelineStep, error: PushedOther) -> StepEvent:
        found.append((error.peer_id, misled(step, error)))
        return found[-1][1]

    def lying(step: wire.Step, receipt_hash: bytes) -> wire.Step:
        pushed = pushed_step(step, receipt_hash)
        pushed.receipt_only = True
        told.append(pushed.sequence)
        return pushed

    monkeypatch.setattr(PUSHED, lying)
    monkeypatch.setattr(PipelineStep, "_misled", noting)
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = load_whole(folder).generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    with (
        pool.swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
        model.inference_session(max_length=TOKENS + 1) as session,
    ):
        for attempt in range(50):  # until the first server has its stream to the second one
            session.position, session.tokens = 0, None
            out = model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
            assert torch.equal(out, expected), attempt
            if found:
                break
        assert told and session.recoveries == 0
        assert found == [(session.route[1][0], Misled(proved=False))]
