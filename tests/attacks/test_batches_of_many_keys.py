"""Batches and openings cost a server time: many keys at few addresses ask for more of them than all others together."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.node.blocks.passes import PassGenerator
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.server.compute_thread import ComputeThread
from tests.origins import At

KEYS = {f"key {number}": f"127.0.0.{2 + number % 5}" for number in range(20)}
ADDRESSES = KEYS | {"honest": "127.0.0.1"}
TIMEOUT = 30.0


@pytest.fixture
def order(blocks: BlockSpan) -> Callable[[Callable[[ComputeThread, str, list[str]], Awaitable[object]]], list[str]]:
    """The order in which each peer's requests are served, where all wait and the honest one came last."""

    def served(request: Callable[[ComputeThread, str, list[str]], Awaitable[object]]) -> list[str]:
        found: list[str] = []

        async def main() -> None:
            compute, go = ComputeThread(blocks, origins=At(ADDRESSES)), threading.Event()
            compute.start()
            try:
                with trio.fail_after(TIMEOUT):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(compute.call, go.wait)
                        for peer in ADDRESSES:
                            for _ in range(2):
                                nursery.start_soon(request, compute, peer, found)
                                await wait_all_tasks_blocked()
                        go.set()
            finally:
                go.set()
                await compute.stop()

        trio.run(main)
        return found

    return served


async def batch(compute: ComputeThread, peer: str, found: list[str]) -> None:
    def passing() -> PassGenerator[None]:
        found.append(peer)
        yield

    await compute.run_pass(passing(), peer=peer)


async def opening(compute: ComputeThread, peer: str, found: list[str]) -> None:
    await compute.call(partial(found.append, peer), peer)


@pytest.mark.parametrize("request_of", [batch, opening])
def test_requests_of_many_keys_wait_for_other_addresses(
    request_of: Callable[[ComputeThread, str, list[str]], Awaitable[object]],
    order: Callable[[Callable[[ComputeThread, str, list[str]], Awaitable[object]]], list[str]],
) -> None:
    served = order(request_of)
    assert len(served) == 2 * len(ADDRESSES)
    assert "honest" in served[:6]


@pytest.mark.parametrize("passes", [True, False])
async def test_requests_of_who_left_are_dropped_unserved(blocks: BlockSpan, passes: bool) -> None:
    found: list[str] = []
    compute, go = ComputeThread(blocks), threading.Event()
    compute.start()
    try:
        with trio.fail_after(TIMEOUT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(compute.call, go.wait)
                await wait_all_tasks_blocked()
                with trio.move_on_after(0.01):
                    await (batch if passes else opening)(compute, "left", found)
                go.set()
            await batch(compute, "stays", found)
            assert compute.depth == 0
    finally:
        go.set()
        await compute.stop()
    assert found == ["stays"]
