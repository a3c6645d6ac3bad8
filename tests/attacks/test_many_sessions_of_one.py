"""A peer may have many sessions: they make the batches of everybody longer, and its prompts stand before others'."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.server import turns
from petalnode.node.server.turns import BatchCost, CostFit
from tests.attacks.one_server import OneServer, one_server
from tests.noted_blocks import NotedBlocks
from tests.swarm.raw import RawSession, values

HOG, HONEST = Identity.generate(), Identity.generate()
SESSIONS = 9


@pytest.fixture(autouse=True)
def _rows_cost_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row costs as much as all others."""
    monkeypatch.setattr(CostFit, "cost", BatchCost(0.0, 1.0))


async def all_at_once(server: OneServer, steps: list[tuple[RawSession, bytes]]) -> None:
    """Sends a first step of each session; none is computed before all are there."""
    compute, go = server.service.context.compute, threading.Event()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.call, go.wait)
            for session, payload in steps:
                await session.send_step(1, 0, payload)
            while compute.depth < 1 + len(steps):
                await wait_all_tasks_blocked()
            go.set()
            for session, _ in steps:
                frame, _ = await session.receive()
                assert frame.HasField("reply")
    finally:
        go.set()


async def opened(server: OneServer, client: Identity, count: int = 1) -> list[RawSession]:
    sessions = [server.session(client) for _ in range(count)]
    for session in sessions:
        assert (await session.open(max_length=220)).HasField("granted")
    return sessions


@asynccontextmanager
async def noting(blocks: BlockSpan) -> AsyncIterator[tuple[OneServer, Callable[[], list[list[int]]]]]:
    """A server, and what tells the sessions of each batch of decode steps and of each part of a prompt, by the order in
    which they were opened."""
    batches: list[Sequence[SpanCache]] = []
    noted: Any = NotedBlocks(blocks, before=lambda caches, _: batches.append(caches))
    async with one_server(noted) as server:
        yield server, lambda: [[noted.made.index(cache) for cache in batch] for batch in batches]


async def test_step_is_not_computed_among_another_peers(blocks: BlockSpan) -> None:
    async with noting(blocks) as (server, computed):
        many, (one,) = await opened(server, HOG, SESSIONS), await opened(server, HONEST)
        await all_at_once(server, [(session, values(1)) for session in [*many, one]])
        assert len(computed()[0]) == 2 and SESSIONS in computed()[0]
        assert sum(map(len, computed())) == SESSIONS + 1


async def test_who_is_alone_has_all_steps_batched(blocks: BlockSpan) -> None:
    async with noting(blocks) as (server, computed):
        await all_at_once(server, [(session, values(1)) for session in await opened(server, HOG, SESSIONS)])
        assert list(map(len, computed())) == [SESSIONS]


async def test_short_prompt_does_not_wait_behind_another_peer(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PREFILL_CHUNK", 64)
    async with noting(blocks) as (server, computed):
        many, (one,) = await opened(server, HOG, 3), await opened(server, HONEST)
        await all_at_once(server, [*((session, values(200)) for session in many), (one, values(20))])
        assert [3] in computed()[:2] and len(computed()) == 3 * 4 + 1
