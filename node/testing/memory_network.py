"""Nodes that reach each other over streams in memory: what clients and servers use of a `Swarm`, without a network.

All nodes of a network live in one trio loop and see every announcement at once. `run_autojumping` runs the loop with a
clock that never makes a test wait.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import trio
from trio.testing import MockClock

from ...crypto.identity import Identity
from ...protocols.announcement import Announcement, ServerState, freshened, is_overdue, sign_announcement
from ...protocols.framing import StreamClosed
from ..errors import unwrapped
from ..network.host import Host
from ..swarm.config import SwarmConfig
from ..swarm.streams import MessageStreams
from ..swarm.view import SwarmView
from ..trust.store import TrustStore
from .memory_stream import WINDOW, MemoryStream, stream_pair

_ADDR = "/ip4/127.0.0.1/tcp/1"
_LIFETIME = 300.0
NOTICED = 4.0
"""Seconds after which a connection on which nothing comes is given up, as by the real ones."""
RTT = 0.001
"""Seconds that `measure_rtt` tells unless the link has a delay."""

T = TypeVar("T")


def run_autojumping(main: Callable[..., Awaitable[T]], *args: object, threshold: float = 0.0) -> T:
    """`trio.run` with virtual time: when all tasks have waited for `threshold` real seconds, the next deadline is now.

    As long as a thread of `trio.to_thread.run_sync` runs, time stands still. Other threads are not known here: where
    one computes for the test, `threshold` must be longer than it takes.
    """
    clock, in_thread, running = MockClock(autojump_threshold=threshold), trio.to_thread.run_sync, 0

    async def run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal running
        if trio.lowlevel.current_clock() is not clock:
            return await in_thread(function, *args, **options)
        running += 1
        clock.autojump_threshold = float("inf")
        try:
            return await in_thread(function, *args, **options)
        finally:
            running -= 1
            if not running:
                clock.autojump_threshold = threshold

    with patch.object(trio.to_thread, "run_sync", run_sync):
        return trio.run(main, *args, clock=clock)


class Link:
    """The way between two nodes. Faults meet all streams on it, and those that are opened later.

    Attributes:
        down: no stream can be opened.
        used: a stream was opened since the start, or since one of the nodes was removed.
        delay: seconds, one way, of streams that are opened from now on.
        streams: with their protocols; the ends of who opened them.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.down = self.frozen = self.used = False
        self.delay = 0.0
        self.streams: list[tuple[str, MemoryStream]] = []
        self._nursery = nursery

    def live(self, protocol: str | None = None) -> Iterator[MemoryStream]:
        for name, stream in self.streams:
            if not stream.is_lost and protocol in (None, name):
                yield stream

    def cut(self, protocol: str | None = None) -> None:
        """Breaks the streams that there are, of one protocol or all; others can be opened."""
        for stream in list(self.live(protocol)):
            stream.cut()
        self.streams = [(name, stream) for name, stream in self.streams if not stream.is_lost]

    def take_down(self) -> None:
        self.down = True
        self.cut()

    def freeze(self, noticed: float = NOTICED) -> None:
        """Nothing comes through and nobody is told, until both notice after `noticed` seconds that nothing comes."""
        self.frozen = True
        for stream in self.live():
            stream.freeze()
        self._nursery.start_soon(self._notice, noticed)

    async def _notice(self, seconds: float) -> None:
        await trio.sleep(seconds)
        if self.frozen:
            self.cut()

    def mend(self) -> None:
        """As at the start, for what is opened from now on; what was frozen goes on."""
        self.down = self.frozen = False
        self.delay = 0.0
        for stream in self.live():
            stream.thaw()


class MemoryNetwork:
    """A network of nodes of one kind; its streams are handled in `nursery`. Each has an address of its own, unless
    `origins` says another."""

    def __init__(self, nursery: trio.Nursery, kind: type[MemoryNode] | None = None) -> None:
        self.nursery = nursery
        self._kind = kind or MemoryNode
        self.nodes: dict[str, MemoryNode] = {}
        self.origins: dict[str, str] = {}
        self.view = SwarmView()
        self.manifests: dict[bytes, bytes] = {}
        self._links: dict[frozenset[str], Link] = {}
        self._changed = trio.Event()

    def node(self, identity: Identity | None = None, trust: TrustStore | None = None) -> MemoryNode:
        node = self._kind(self, identity or Identity.generate(), trust)
        self.nodes[node.peer_id] = node
        return node

    def link(self, one: str, other: str) -> Link:
        """The way between two peers."""
        return self._links.setdefault(frozenset((one, other)), Link(self.nursery))

    def links_of(self, peer_id: str) -> list[Link]:
        return [self.link(peer_id, other) for other in self.nodes if other != peer_id]

    def remove(self, node: MemoryNode) -> None:
        """The node is gone at once, as when its process is killed."""
        if self.nodes.get(node.peer_id) is not node:
            return  # another one has its key now
        del self.nodes[node.peer_id]
        for peers, link in self._links.items():
            if node.peer_id in peers:
                link.used = False
                link.cut()

    @asynccontextmanager
    async def open_swarm(self, config: SwarmConfig) -> AsyncIterator[Any]:
        """As the real one, for whoever opens a swarm by a configuration."""
        node = self.node(config.identity, config.trust)
        try:
            await node.start(self.nursery)
            yield node
        finally:
            await node.retract()
            node.end()

    def publish(self, node: MemoryNode, announcement: Announcement) -> None:
        """
        Raises:
            ValueError: it is another node's, or one that no reader would accept.
        """
        if self.nodes.get(node.peer_id) is not node:
            return  # it was removed
        now, held = time.time(), self.view.records.get(node.peer_id)
        content = freshened(announcement, now=now, lifetime=_LIFETIME, after=held.content.sequence if held else 0)
        self.view = self.view.merge([sign_announcement(node.identity, content)], now)
        self._changed.set()
        self._changed = trio.Event()

    def renew(self) -> None:
        """Announces again those whose announcement is overdue or gone, as the real ones do from time to time."""
        now = time.time()
        for node in list(self.nodes.values()):
            if (own := node.announced) is None:
                continue
            held = self.view.records.get(node.peer_id)
            if held is None or is_overdue(held.content.expires - _LIFETIME, held.content.expires, now):
                self.publish(node, own)

    async def wait_changed(self) -> None:
        await self._changed.wait()


@asynccontextmanager
async def open_network(kind: type[MemoryNode] | None = None) -> AsyncIterator[MemoryNetwork]:
    """A network for the block, in the loop that runs it; whatever runs on it ends with the block.

    What the block raises comes out as it is, in no group.
    """
    with unwrapped(Exception):
        async with trio.open_nursery() as nursery:
            yield MemoryNetwork(nursery, kind)
            nursery.cancel_scope.cancel()


class _MemoryHost:
    """What `MessageStreams` needs of a host.

    Attributes:
        window: bytes that either end of a stream which this node opens may leave unread before the other waits.
    """

    is_serving = False
    window = WINDOW

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self.peer_id = peer_id
        self._network = network
        self._handlers: dict[str, Callable[[Any, str], Awaitable[None]]] = {}

    def set_stream_handler(self, protocol: str, handler: Callable[[Any, str], Awaitable[None]]) -> None:
        self._handlers[protocol] = handler

    def knows(self, peer_id: str) -> bool:
        return True

    def remember(self, peer_id: str, addrs: Sequence[str]) -> None:
        pass

    def learn(self, peer_id: str, addrs: Sequence[str]) -> None:
        pass

    def addrs(self) -> list[str]:
        return [f"{_ADDR}/p2p/{self.peer_id}"]  # well-formed; nobody is dialed

    def origin_of(self, peer_id: str) -> str:
        return self._network.origins.get(peer_id, peer_id)

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in self.connected()

    def connected(self) -> list[str]:
        """Those that a stream was opened to, or that have opened one."""
        nodes, link = self._network.nodes, self._network.link
        links = {peer: link(self.peer_id, peer) for peer in nodes if peer != self.peer_id}
        return [peer for peer, way in links.items() if way.used and not way.down]

    async def open_stream(self, peer_id: str, protocol: str, *, direct: bool = False) -> MemoryStream:
        await trio.lowlevel.checkpoint()
        other, link = self._network.nodes.get(peer_id), self._network.link(self.peer_id, peer_id)
        if other is None or link.down:
            raise ConnectionError(f"{peer_id} cannot be reached")
        link.used = True
        ours, theirs = stream_pair(self.window)
        ours.delay = theirs.delay = link.delay
        if link.frozen:
            ours.freeze()
        link.streams = [*((name, stream) for name, stream in link.streams if not stream.is_lost), (protocol, ours)]
        handler = cast(_MemoryHost, other.host)._handlers.get(protocol)
        if handler is None:
            ours.cut()  # the first read tells of it
        else:
            other.nursery.start_soon(handler, theirs, self.peer_id)
        return ours


class MemoryNode(MessageStreams):
    """One node, in place of a `Swarm`. Its handlers run in `nursery`: end that, and they end with it."""

    named: Sequence[str] = ()
    """The peers that a person would have named."""
    psk: str | None = None
    """Its swarm is not private."""

    def __init__(self, network: MemoryNetwork, identity: Identity, trust: TrustStore | None = None) -> None:
        host = cast(Host, _MemoryHost(network, identity.peer_id))
        super().__init__(host)
        self.network = network
        self.nursery = network.nursery
        self.identity = identity
        self.trust = trust or TrustStore()
        self.peer_id = identity.peer_id
        self.addrs: list[str] = []
        self.announced: Announcement | None = None

    async def start(self, nursery: trio.Nursery) -> None:
        """From now on its handlers run in `nursery`."""
        self.nursery = nursery

    def end(self) -> None:
        """It is gone at once, as when its process is killed; a goodbye is for `retract`, before."""
        self.network.remove(self)

    def connected(self) -> list[str]:
        return [peer_id for peer_id in self.network.nodes if self.is_connected(peer_id)]

    def is_connected(self, peer_id: str) -> bool:
        there = peer_id != self.peer_id and peer_id in self.network.nodes
        return there and not self.network.link(self.peer_id, peer_id).down

    is_direct = is_connected

    def watch_direct(self, peer_id: str) -> trio.Event:
        event = trio.Event()
        if self.is_connected(peer_id):
            event.set()
        return event

    # --- announcements

    @property
    def view(self) -> SwarmView:
        self.network.renew()
        return self.network.view

    def announce(self, announcement: Announcement) -> None:
        self.announced = announcement
        self.network.publish(self, announcement)

    async def retract(self) -> None:
        if self.announced is not None:
            self.network.publish(self, replace(self.announced, state=ServerState.OFFLINE))
            self.announced = None

    async def wait_changed(self) -> None:
        await self.network.wait_changed()

    async def refresh(
        self, *, model_version: bytes | None = None, sample: bool = False, everything: bool = False, timeout: float
    ) -> SwarmView:
        await trio.lowlevel.checkpoint()
        return self.view

    async def exchange(self, peers: Collection[str], *, model_version: bytes, timeout: float) -> frozenset[str]:
        await trio.lowlevel.checkpoint()
        return frozenset(filter(self.is_connected, peers))

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        await trio.lowlevel.checkpoint()
        link = self.network.link(self.peer_id, peer_id)
        if not self.is_connected(peer_id) or link.frozen:
            raise StreamClosed(f"{peer_id} cannot be reached", peer_id)
        return 2 * link.delay or RTT

    # --- manifests

    def serve_manifest(self, model_version: bytes, manifest: bytes) -> None:
        self.network.manifests[model_version] = manifest

    async def manifests(
        self, name: str, num_blocks: int, *, pinned: str = "", timeout: float
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        await trio.lowlevel.checkpoint()
        for server in self.view.servers(now=time.time()):
            named = (server.model_name, server.num_blocks) == (name, num_blocks)
            if named and server.model_version.hex().startswith(pinned):
                yield server.model_version, self.network.manifests[server.model_version]

    async def publish_evidence(self, bundle: Any, *, recomputed: bool, one_bit: bool = False) -> None:
        """There is no gossip here: the ban stays this node's own."""
