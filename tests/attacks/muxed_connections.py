"""Connections of an attacker and of an honest peer to one node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.yamux import Muxer
from tests.memory_muxer import MemoryRaw, OtherEnd, muxer

ATTACKER, HONEST = "203.0.113.7", "198.51.100.1"


@asynccontextmanager
async def connections(keys: int, origin: str, limits: NodeLimits) -> AsyncIterator[list[tuple[Muxer, OtherEnd]]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(muxer(MemoryRaw(origin=origin), limits=limits, key=10 + number))
            for number in range(keys)
        ]
