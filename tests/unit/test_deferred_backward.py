"""A batch whose gradient comes later holds memory on loan only, and not for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from petalnode.node.blocks.batch_request import BatchRequest, run_request
from petalnode.node.blocks.passes import Batch, SpanPasses
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.server.budget import BudgetFull, MemoryBudget
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.node.server.requests import batch_requests
from petalnode.node.server.requests.batch_requests import DeferredBackward
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import Refusal
from petalnode.protocols.tensors import encode
from petalnode.protocols.training import MicroBatch
from tests.tiny_models import HIDDEN, NUM_BLOCKS, save_tiny

ALL = Span(0, NUM_BLOCKS)
HIDDEN_STATES, GRADIENT = torch.randn(2, 2, 20, HIDDEN, generator=torch.Generator().manual_seed(0))
TENSOR, PAYLOAD = encode(HIDDEN_STATES, "none")
BATCH = Batch(ALL, HIDDEN_STATES)
MESSAGE = wire.BatchRequest(sequence=1, tensors=[TENSOR, TENSOR], gradient_follows=True)
REQUEST = BatchRequest(MicroBatch(MESSAGE, ()), replace(BATCH, gradient=GRADIENT))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    folder: Path = tmp_path_factory.mktemp("model") / "llama"
    return load_span(save_tiny("llama", folder), ALL)


@asynccontextmanager
async def late_pass(blocks: BlockSpan) -> AsyncIterator[Any]:
    compute = ComputeThread(blocks)
    compute.start()
    budget = MemoryBudget(100)
    try:
        with trio.fail_after(60):
            lease = await budget.acquire(60, 1)
            yield (
                compute,
                SpanPasses(blocks, 1 << 40),
                DeferredBackward(BatchRequest(MicroBatch(MESSAGE, (PAYLOAD,)), BATCH)),
                budget,
                lease,
            )
    finally:
        await compute.stop()


async def test_a_gradient_that_comes_in_time(blocks: BlockSpan) -> None:
    async with late_pass(blocks) as (compute, passes, late, budget, lease):
        late.lend(lease)
        await late.recompute(compute, passes)
        late.settle(REQUEST)
        late.give_up("too late for that")
        request, first = await late.ready()
        with pytest.raises(BudgetFull):  # it is no longer offered to others
            await budget.acquire(60, 0.01)
        assert not lease.taken  # nobody needed it
        assert request is REQUEST and len(first.value.graphs) == NUM_BLOCKS
        second = await compute.run_pass(run_request(request, passes, first.value), resumed=True)
        [expected] = (await compute.run_pass(run_request(REQUEST, passes))).value
        assert torch.equal(second.value[0], expected)


async def test_who_needs_the_memory_takes_it(blocks: BlockSpan) -> None:
    async with late_pass(blocks) as (compute, passes, late, budget, lease):
        late.lend(lease)
        await late.recompute(compute, passes)
        await budget.acquire(60, 0.01)
        assert lease.taken and late.request is None  # and nothing else holds it
        with pytest.raises(Refusal, match="memory"):
            late.checked()
        late.settle(REQUEST)
        with pytest.raises(Refusal, match="memory") as caught:
            await late.ready()
        assert caught.value.code == wire.ERROR_BUSY and "batch request 1" in caught.value.message


async def test_a_gradient_that_does_not_come(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_requests, "BATCHES", batch_requests.BatchPolicy(gradient=0.05))
    async with late_pass(blocks) as (compute, passes, late, _budget, _lease):
        with pytest.raises(Refusal, match="did not come") as caught:
            await late.ready()
        assert caught.value.code == wire.ERROR_BUSY
        await late.recompute(compute, passes)  # nothing of it is computed any more
        with pytest.raises(Refusal, match="did not come"):
            await late.ready()


class TooLarge(SpanPasses):
    """Has no memory for the first half of a pass."""

    def recompute(self, batch: Batch) -> Any:
        yield
        raise torch.OutOfMemoryError("CUDA out of memory")


async def test_a_first_half_that_fails(blocks: BlockSpan) -> None:
    async with late_pass(blocks) as (compute, _passes, late, _budget, _lease):
        await late.recompute(compute, TooLarge(blocks, 1 << 40))
        late.settle(REQUEST)
        with pytest.raises(Refusal, match="memory"):
            await late.ready()
