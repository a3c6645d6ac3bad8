"""Nodes in memory whose announcements travel, by their own directories."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.dht import Dht
from petalnode.node.network.host import keep_up
from petalnode.node.swarm.announcer import Announcer
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.directory import Directory
from petalnode.node.swarm.view import SwarmView
from petalnode.node.testing import MemoryNetwork, MemoryNode
from petalnode.node.trust.store import TrustStore
from petalnode.protocols.announcement import Announcement, SignedAnnouncement
from petalnode.protocols.directory import DIRECTORY

_ADDR = "/ip4/127.0.0.1/tcp/1"
_LIFETIME = 300.0
_JOIN_TIMEOUT = 10.0


class _NoTable:
    """In place of a DHT: it finds nothing and keeps nothing."""

    async def add_peer(self, peer_id: str, addrs: Sequence[str]) -> None:
        pass

    async def put_announcement(self, record: SignedAnnouncement, *, timeout: float) -> None:
        pass

    async def get_announcement(self, peer_id: str, *, timeout: float) -> SignedAnnouncement | None:
        return None

    async def put_models(self, records: Iterable[SignedAnnouncement], *, timeout: float) -> None:
        pass

    async def get_models(self, *, timeout: float) -> list[SignedAnnouncement]:
        return []

    async def provide(self, shard: int, *, timeout: float) -> None:
        pass

    async def find_providers(self, shard: int, *, timeout: float) -> list[tuple[str, list[str]]]:
        return []


class DirectoryNode(MemoryNode):
    """A node that knows what others have told it: announcements travel, by its own directory and announcer.

    It joins at the node that was there first, and is connected to those that streams were opened to.
    """

    directory_kind = Directory

    def __init__(self, network: MemoryNetwork, identity: Identity, trust: TrustStore | None = None) -> None:
        super().__init__(network, identity, trust)
        peers = tuple(f"{_ADDR}/p2p/{peer}" for peer in list(network.nodes)[:1])
        config = SwarmConfig(identity, listen=(_ADDR,), peers=peers, announcement_ttl=_LIFETIME, trust=self.trust)
        table = cast(Dht, _NoTable())
        self.finder = self.directory = self.directory_kind(config, table, self)
        self._announcer = Announcer(config, self.host, table, self.directory)
        self._scope = trio.CancelScope()
        self.set_handler(DIRECTORY, self.directory.serve)

    async def start(self, nursery: trio.Nursery) -> None:
        """
        Raises:
            SwarmError: the node to join at does not answer.
        """
        await nursery.start(self._run)
        await self.refresh(timeout=_JOIN_TIMEOUT)

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        with self._scope:
            async with trio.open_nursery() as self.nursery:
                for part in self.directory.parts:
                    self.nursery.start_soon(keep_up, part)
                self.nursery.start_soon(self._announcer.run)
                task_status.started()

    def end(self) -> None:
        super().end()
        self._scope.cancel()

    def connected(self) -> list[str]:
        return self.host.connected()

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in self.host.connected()

    is_direct = is_connected

    @property
    def view(self) -> SwarmView:
        return self.directory.view

    def announce(self, announcement: Announcement) -> None:
        self._announcer.announce(announcement)

    async def retract(self) -> None:
        await self._announcer.retract()

    async def wait_changed(self) -> None:
        await self.directory.wait_changed()

    async def refresh(
        self, *, model_version: bytes | None = None, sample: bool = False, everything: bool = False, timeout: float
    ) -> SwarmView:
        kind = {"sample": sample, "everything": everything}
        await self.directory.refresh(self.nursery, model_version=model_version or b"", timeout=timeout, **kind)
        return self.view

    async def exchange(self, peers: Collection[str], *, model_version: bytes, timeout: float) -> frozenset[str]:
        return await self._announcer.exchange(peers, model_version=model_version, timeout=timeout)

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        return await self.directory.measure_rtt(peer_id, timeout=timeout)
