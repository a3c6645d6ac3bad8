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
TIMEOUT = 300.0


Request = Callable[[ComputeThread, str, list[str]], Awaitable[object]]


async def batch(compute: ComputeThread, peer: str, found: list[str]) -> None:
    def passing() -> PassGenerator[None]:
        found.append(peer)
        yield

    await compute.run_pass(passing(), peer=peer)


async def opening(compute: ComputeThread, peer: str, found: list[str]) -> None:
    await compute.call(partial(found.append, peer), peer)


@pytest.mark.parametrize("request_of", [batch, opening])
async def test_requests_of_many_keys_wait_for_other_addresses(request_of: Request, blocks: BlockSpan) -> None:
    """All wait, and the honest one came last."""
    found: list[str] = []
    compute, go = ComputeThread(blocks, origins=At(ADDRESSES)), threading.Event()
    compute.start()
    try:
        with trio.fail_after(TIMEOUT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(compute.call, go.wait)
                for peer in ADDRESSES:
                    for _ in range(2):
                        nursery.start_soon(request_of, compute, peer, found)
                        await wait_all_tasks_blocked()
                go.set()
    finally:
        go.set()
        await compute.stop()
    assert len(found) == 2 * len(ADDRESSES)
    assert "honest" in found[:6]


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
