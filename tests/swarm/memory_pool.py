"""A pool of servers as that of `server_pool.py`, of which none is a process: for tests of what servers say and do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.client.core import SwarmClient, open_client
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models.sources.resolve import resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.testing import MemoryNode
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm, memory_swarm
from tests.swarm import false_blocks
from tests.swarm.faulty_server import spoil


class MemoryPool:
    """Starts servers of one model."""

    def __init__(self, swarm: MemorySwarm, folder: Path) -> None:
        self.servers: list[MemoryServer] = []
        self.swarm = swarm
        self._folder = folder
        self._identities: dict[str, Identity] = {}

    def start(
        self,
        blocks: str | None,
        *,
        identity: str = "",
        fault: Path | None = None,
        prepare: Callable[[MemoryNode], object] = lambda node: None,
        **options: Any,
    ) -> MemoryServer:
        """Returns at once; `ready` waits. `fault` is the control file of `faulty_server` and `false_blocks`, `identity`
        a name that the server comes back under, `prepare` may change the node before, `options` are fields of
        `ServerOptions`.
        """
        kept = self._identities.setdefault(identity, Identity.generate()) if identity else None

        def prepared(node: MemoryNode) -> None:
            if fault is not None:
                spoil(node, fault)
                false_blocks.follow(fault)
            prepare(node)

        server = self.swarm.start(self._folder, blocks, identity=kept, prepare=prepared, **options)
        self.servers.append(server)
        return server

    @property
    def alive(self) -> list[MemoryServer]:
        return [server for server in self.servers if server.alive]

    def of(self, peer_id: str) -> MemoryServer:
        return next(server for server in self.alive if server.is_ready and server.peer_id == peer_id)


@contextmanager
def memory_pool(folder: Path, kind: type[MemoryNode] = MemoryNode) -> Iterator[MemoryPool]:
    with false_blocks.installed(), memory_swarm(kind) as swarm:
        yield MemoryPool(swarm, folder)


def raw_node_of(pool: MemoryPool) -> Any:
    """Another node, in place of a `Swarm`. Its streams hold what sockets and muxer hold together."""
    node: Any = pool.swarm.change(lambda network: network.node())
    node.host.window = 16 << 20
    return node


def started(swarm: MemorySwarm, folder: Path, *blocks: str, **options: Any) -> list[MemoryServer]:
    """Servers of these blocks, which are ready; `options` as `MemorySwarm.start` has them."""
    servers = [swarm.start(folder, span, **options) for span in blocks]
    assert all(server.ready for server in servers)
    return servers


async def serving(swarm: MemorySwarm, folder: Path, *blocks: str, **options: Any) -> list[MemoryServer]:
    """As `started`, for what runs where the nodes live."""
    return await trio.to_thread.run_sync(partial(started, swarm, folder, *blocks, **options))


@asynccontextmanager
async def opened(
    swarm: MemorySwarm, folder: Path, identity: Identity | None = None
) -> AsyncIterator[tuple[SwarmClient, ClientModel]]:
    """A client in the swarm, and its part of the model."""
    config = SwarmConfig(identity=identity or Identity.generate(), listen=(), peers=(), serve_dht=False)
    async with swarm.network.open_swarm(config) as node:
        model = await identify_model(node, resolve(str(folder), need="client", offline=True))
        async with open_client(node, model) as client:
            yield client, load_client(folder)
