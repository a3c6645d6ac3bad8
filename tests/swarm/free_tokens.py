"""What a server announces of its cache."""

from __future__ import annotations

import time

import trio

from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing.memory_servers import MemoryServer
from tests.swarm.processes import Node
from tests.swarm.raw import TIMEOUT

TOKENS = 200  # what `lone_server` has


async def announced_free(swarm: Swarm, server: Node | MemoryServer, expected: int) -> None:
    """Returns once the server announces the expected free tokens."""
    with trio.fail_after(TIMEOUT):
        while True:
            view = await swarm.refresh(timeout=10)
            (found,) = [announced for announced in view.servers(now=time.time()) if announced.peer_id == server.peer_id]
            if found.cache_tokens_free == expected:
                assert found.cache_tokens == TOKENS
                return
            await trio.sleep(0.1)
