"""How a node finds its swarm, the servers there, and its swarm again.

`Discovery` is the one way in. Behind it are the peers to join by (named, of earlier runs, neighbours), other nodes'
directories, and provider records in Kademlia. What goes on in the background is one task, `run`.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import trio
from multiaddr import Multiaddr

from ...protocols.framing import PeerError
from ..errors import SwarmError
from ..network.addresses import is_loopback, parse_peer, without_peer
from ..network.host import Host, keep_up
from ..network.mdns import run_mdns, service_name
from ..network.shares import backoff
from .config import SwarmConfig
from .directory import Directory
from .peer_file import PeerStore, in_order
from .provider_records import SEARCH, ProviderRecords, blocks_sought, directories_sought, missing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiscoveryPolicy:
    """How a node looks for a swarm, and when it says that it has found none."""

    meeting: float = 6.0  # seconds that a peer has to answer
    at_once: int = 8  # peers tried side by side
    neighbours_answer: float = 2.0  # seconds after which the silence of a local network is an answer
    search: float = 12.0  # seconds after which a search is given up, whatever still seems to be on its way
    max_neighbours: int = 64
    first_pause: float = 0.5  # seconds between two tries to come back; each is longer by half, up to
    longest_pause: float = 60.0
    look: float = 5.0  # seconds between two looks whether there is still somebody
    first_note: float = 5.0  # seconds until the peers met are written down, and then every
    notes: float = 60.0


DISCOVERY: Final = DiscoveryPolicy()
Way = Literal["peers", "remembered", "neighbours"]


@dataclass(frozen=True)
class JoinResult:
    """How a node joined its swarm: through a named peer, one of an earlier run, or one of the local network."""

    way: Way
    peer_id: str


@dataclass(frozen=True)
class PeerCandidate:
    """A peer that may be there, at these addresses (without /p2p). `apart`: a neighbour that was told its swarm."""

    way: Way
    peer_id: str
    addrs: tuple[str, ...]
    apart: bool = False


def pause_before(attempt: int) -> float:
    """Seconds to wait before trying for the `attempt`th time (from 1) to come back into the swarm."""
    return backoff(attempt, DISCOVERY.first_pause, DISCOVERY.longest_pause, 1.5)


def is_local(listen: Iterable[str]) -> bool:
    """Whether a node that listens there is for this machine only: its neighbours have no business with it."""
    addrs = [Multiaddr(addr) for addr in listen]
    return bool(addrs) and all(map(is_loopback, addrs))


class Discovery:
    """The looking for peers and servers of one node.

    A node with named peers was told its swarm. Of the peers of earlier runs, and of its neighbours, it calls on those
    that belong to that swarm. So it does not join it to another one. Its neighbours are told so, and call on it when
    they look for a swarm.
    """

    def __init__(
        self, host: Host, directory: Directory, records: ProviderRecords, nursery: trio.Nursery, config: SwarmConfig
    ) -> None:
        self._host = host
        self._directory = directory
        self._records = records
        self._nursery = nursery
        self._deadline = config.bootstrap_deadline
        peers = [parse_peer(peer) for peer in config.peers]
        self._peers = [PeerCandidate("peers", peer_id, (addr,)) for peer_id, addr in peers]  # tried for ever
        self.named = [peer_id for peer_id, _ in peers]
        self._peer_store = None if config.remembered is None else PeerStore(config.remembered)
        self._service = service_name(config.psk) if config.mdns and not is_local(config.listen) else None
        self._listens = bool(config.listen)
        self._neighbours: dict[str, PeerCandidate] = {}
        self._neighbours_asked = trio.Event()
        self._calling: set[str] = set()
        self._called = trio.Event()
        self._failed: set[str] = set()  # of those remembered, since the last note
        self._stir, self._met = trio.Event(), trio.Event()
        self._wanted: set[bytes] = set()  # model versions that were asked for
        self.joined: JoinResult | None = None

    # --- joining

    async def join(self) -> None:
        """Meets the named peers; without any, looks for a swarm.

        Raises:
            SwarmError: none of those named has answered.
        """
        if self._peers:
            try:
                await self.refresh(sample=not self._listens, timeout=self._deadline)
            except SwarmError as error:
                raise SwarmError(
                    f"{error}. Check the addresses, and that these peers run; "
                    "those of a private swarm answer only who has its key."
                ) from error
            self.met("peers", next(filter(self._host.is_connected, self.named), self.named[0]))
        # Not before: those who were named have to answer, whoever else does.
        if self._service is not None:
            found, apart = self._on_neighbour, bool(self._peers)
            self._nursery.start_soon(run_mdns, self._service, self._host, found, self._neighbours_asked, apart)
        if not self._peers and (self._peer_store is not None or self._service is not None):
            await self._search()

    async def run(self) -> None:
        """For as long as the node runs: asks other directories, leaves this server's records, writes down who was met.
        Comes back whenever nobody is left."""
        self._host.on_lost(lambda _: self._stir.set())
        async with trio.open_nursery() as nursery:
            for part in (*self._directory.parts, self._records.provide_forever, self._return_forever):
                nursery.start_soon(keep_up, part)
            if self._peer_store is not None:
                nursery.start_soon(self._note_forever, self._peer_store)
            if self._peers and self._listens:
                # Two parts of a swarm that have lost sight of each other meet in the nodes that remember both.
                nursery.start_soon(self._greet_remembered)

    # --- servers

    async def refresh(
        self, *, model_version: bytes = b"", sample: bool = False, everything: bool = False, timeout: float
    ) -> None:
        """As `Swarm.refresh`. Where no directory answers, Kademlia is asked.

        It is asked as well where blocks of the model version have no servers: at once for a client that wants them for
        the first time, else in the background. Later on, servers that this node cannot connect to count as none.

        Raises:
            SwarmError: neither a directory nor a peer of a DHT has answered.
        """
        again = model_version in self._wanted
        self._wanted.add(model_version)
        sought = blocks_sought(model_version.hex()) if model_version else directories_sought()
        directory, records = self._directory, self._records
        pull = partial(
            directory.refresh,
            self._nursery,
            model_version=model_version,
            sample=sample,
            everything=everything,
            timeout=timeout,
        )
        try:
            await pull()
        except SwarmError:
            known = len(directory.view.records)
            if not await records.find(sought, timeout=timeout):
                raise
            if len(directory.view.records) > known:
                with suppress(SwarmError):  # those who were found know others
                    await pull()
            return
        if not model_version:
            return
        servers = directory.view.servers(model_version, now=time.time())
        if sample and not again and missing(servers):
            await records.find(sought, timeout=timeout)
            return
        if sample and again:
            servers = tuple(server for server in servers if self._host.is_connected(server.peer_id))
        if missing(servers):
            find = partial(records.find, timeout=SEARCH.seconds, again=SEARCH.again_quietly)
            self._nursery.start_soon(find, sought)

    # --- looking for a swarm

    async def _search(self) -> None:
        """Joins the swarm of the first remembered peer or neighbour that answers."""
        with trio.move_on_after(DISCOVERY.search):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_everywhere, nursery.cancel_scope)
                await self._met.wait()
                nursery.cancel_scope.cancel()

    async def _look_everywhere(self, search: trio.CancelScope) -> None:
        async with trio.open_nursery() as ways:
            ways.start_soon(self._try_remembered)
            ways.start_soon(self._await_neighbours)
        search.cancel()

    async def _try_remembered(self) -> None:
        await self._try(await self._remembered())

    async def _await_neighbours(self) -> None:
        """Returns when those who are there have had their time to answer, and to be called on."""
        if self._service is not None:
            await self._neighbours_asked.wait()
            await trio.sleep(DISCOVERY.neighbours_answer)
            while self._calling:
                await self._called.wait()
            await self._try([neighbour for neighbour in self._neighbours.values() if neighbour.apart])

    # --- meeting

    async def _meet(self, candidate: PeerCandidate) -> bool:
        """Whether this peer is there, and from now on known."""
        try:
            await self._directory.meet(candidate.peer_id, candidate.addrs, timeout=DISCOVERY.meeting)
        except PeerError as error:
            log.debug("%s (%s) was not met: %s", candidate.peer_id, candidate.way, error)
            if candidate.way == "remembered":
                self._failed.add(candidate.peer_id)
            return False
        except Exception:  # an error of ours must not take the node down, which may be serving sessions
            log.exception("%s could not be met", candidate.peer_id)
            return False
        self.met(candidate.way, candidate.peer_id)
        return True

    def met(self, way: Way, peer_id: str) -> None:
        if self.joined is None:
            self.joined = JoinResult(way, peer_id)
        self._met.set()

    async def _try(self, candidates: Sequence[PeerCandidate]) -> bool:
        """Calls on these peers, some at a time; returns whether one answered, as soon as one did."""
        waiting = iter(candidates)
        async with trio.open_nursery() as nursery:
            for _ in range(min(DISCOVERY.at_once, len(candidates))):
                nursery.start_soon(self._try_each, waiting, nursery.cancel_scope)
        return nursery.cancel_scope.cancel_called

    async def _try_each(self, waiting: Iterator[PeerCandidate], others: trio.CancelScope) -> None:
        for candidate in waiting:
            if await self._meet(candidate):
                others.cancel()

    async def _remembered(self) -> list[PeerCandidate]:
        if self._peer_store is None:
            return []
        known = await trio.to_thread.run_sync(self._peer_store.load, abandon_on_cancel=True)
        return [
            PeerCandidate("remembered", peer.peer_id, peer.addrs)
            for peer in in_order(known)
            if peer.peer_id != self._host.peer_id and (not self._peers or not set(self.named).isdisjoint(peer.named))
        ]

    async def _greet_remembered(self) -> None:
        for candidate in (await self._remembered())[: DISCOVERY.at_once]:
            if not self._host.is_connected(candidate.peer_id):
                self._nursery.start_soon(self._meet, candidate)

    # --- neighbours

    def _on_neighbour(self, peer_id: str, addrs: Sequence[str], apart: bool) -> None:
        if peer_id == self._host.peer_id:
            return
        self._neighbours.pop(peer_id, None)
        self._neighbours[peer_id] = candidate = PeerCandidate("neighbours", peer_id, tuple(addrs), apart)
        if len(self._neighbours) > DISCOVERY.max_neighbours:
            del self._neighbours[next(iter(self._neighbours))]
        # A client needs one way into the swarm only. One that is no member may be of another swarm.
        wanted = self._is_member(peer_id) if self._peers or apart else self._listens or self._is_alone()
        if wanted and peer_id not in self._calling and not self._host.is_connected(peer_id):
            self._nursery.start_soon(self._call_on, candidate)

    async def _call_on(self, neighbour: PeerCandidate) -> None:
        if len(self._calling) >= DISCOVERY.at_once:
            return  # a crowded network; most of them will learn of us from the others
        self._calling.add(neighbour.peer_id)
        try:
            await self._meet(neighbour)
        finally:
            self._calling.discard(neighbour.peer_id)
            self._called.set()
            self._called = trio.Event()

    # --- coming back

    def _is_member(self, peer_id: str) -> bool:
        """Whether a peer is known to this swarm."""
        return bool(self._directory.addrs_of(peer_id))

    def _may_return_to(self, neighbour: PeerCandidate) -> bool:
        """Whether a node that is alone may join a neighbour. A server is the first of a swarm of its own by now."""
        free = not self._peers and not (neighbour.apart and self._listens)
        return free or self._is_member(neighbour.peer_id)

    def _is_alone(self) -> bool:
        """Whether there is no connection to anybody who takes part; connections to other peers do not count."""
        return not any(self._directory.addrs_of(peer_id) for peer_id in self._host.connected())

    async def _return_forever(self) -> None:
        attempt = 0
        while True:
            if not self._is_alone():
                with trio.move_on_after(DISCOVERY.look) as quiet:
                    await self._stir.wait()
                self._stir = trio.Event()
                if quiet.cancelled_caught:
                    attempt = 0  # not for company that ends at once
                continue
            attempt += 1
            if attempt > 1:
                await trio.sleep(pause_before(attempt - 1) * random.uniform(0.8, 1.2))
            await self._try(self._all(await self._remembered()))

    def _all(self, remembered: Sequence[PeerCandidate]) -> list[PeerCandidate]:
        """Everybody to try, each peer once with all its addresses, the named ones first."""
        found: dict[str, PeerCandidate] = {}
        members = {peer.peer_id for peer in remembered}
        near = [peer for peer in self._neighbours.values() if peer.peer_id in members or self._may_return_to(peer)]
        for peer in (*self._peers, *near, *remembered):
            held = found.get(peer.peer_id)
            if held is not None:
                peer = PeerCandidate(held.way, peer.peer_id, tuple(dict.fromkeys((*held.addrs, *peer.addrs))))
            found[peer.peer_id] = peer
        found.pop(self._host.peer_id, None)
        return list(found.values())

    # --- remembering

    async def _note_forever(self, peer_store: PeerStore) -> None:
        pause = DISCOVERY.first_note
        try:
            while True:
                await self._note(peer_store)
                await trio.sleep(pause)
                pause = DISCOVERY.notes
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
                await self._note(peer_store)

    async def _note(self, peer_store: PeerStore) -> None:
        met, own = self._met_now(), self._own_entry()
        # With nobody met it may be this machine that has no network.
        failed = frozenset(self._failed if met else ())
        if met or own:
            update = partial(peer_store.update, met | own, failed, time.time(), self.named)
            await trio.to_thread.run_sync(update, abandon_on_cancel=True)
            self._failed -= failed

    def _own_entry(self) -> dict[str, list[str]]:
        """This node itself, for the person's other nodes on this machine, which may have no network at all."""
        if not self._listens:
            return {}
        loopback = {socket.AF_INET: "/ip4/127.0.0.1", socket.AF_INET6: "/ip6/::1"}
        here = [f"{loopback[family]}/tcp/{port}" for family, port in self._host.listen_ports()]
        others = [str(without_peer(Multiaddr(addr))) for addr in self._host.addrs()]
        return {self._host.peer_id: list(dict.fromkeys([*here, *others]))}

    def _met_now(self) -> dict[str, list[str]]:
        """The peers that we are connected to and that could be dialed another time, with where; what worked first."""
        met: dict[str, list[str]] = {}
        for peer_id in self._host.connected():
            paths = sorted(self._host.paths(peer_id), key=lambda path: not path.direct)
            worked = [path.remote_addr for path in paths if path.remote_addr is not None and not path.inbound]
            said = self._host.permitted(peer_id, self._directory.addrs_of(peer_id))
            addrs = list(dict.fromkeys([*worked, *said]))
            if addrs:
                met[peer_id] = addrs
        return met
