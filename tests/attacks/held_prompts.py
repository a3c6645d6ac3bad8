"""Prompts of sessions whose server is held up."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.identity import Identity
from tests.attacks.one_server import OneServer

CLIENT, PUSHER = Identity.generate(), Identity.generate()
TOKENS = 8
KEEP = 60_000

NEVER = 1e6


@asynccontextmanager
async def held_up(server: OneServer) -> AsyncIterator[None]:
    """Nothing is computed within this block. It ends when what has come to the compute thread is done, and the sessions
    have had the time to bring more."""
    compute, go = server.service.context.compute, threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(compute.call, go.wait)
        try:
            yield
        finally:
            go.set()
    for _ in range(10):
        while compute.depth:
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()


async def begins(server: OneServer) -> None:
    """Returns once one step, and no more, has come to the compute thread, which is held up."""
    while server.service.context.compute.depth < 2:
        await wait_all_tasks_blocked()
    await wait_all_tasks_blocked()
    assert server.service.context.compute.depth == 2
