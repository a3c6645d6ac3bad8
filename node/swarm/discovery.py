"""How a node finds its swarm, and finds it again: by named peers, peers of earlier runs, and the local network.

Peers of earlier runs are kept in a small file, so that a node needs no `--peer`. There is one file for each swarm,
shared by all nodes of a person on a machine: who met whom is the same for a server and a chat. What to keep is decided
by pure functions; `PeerStore` reads and writes.
"""

from __future__ import annotations

import json
import logging
import random
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import trio
from filelock import FileLock, Timeout
from multiaddr import Multiaddr

from ...crypto.canonical import digest
from ...crypto.identity import make_private_folder, peer_id_to_bytes, write_private
from ...protocols.framing import PeerError
from ..network.addresses import is_loopback, without_peer
from ..network.host import Host
from ..network.mdns import run_mdns, service_name
from .config import SwarmConfig
from .directory import Directory

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
JoinBy = Sequence[tuple[str, str]]  # (peer id, address), tried for ever
Way = Literal["peers", "remembered", "neighbours"]


@dataclass(frozen=True)
class PeerFileLimits:
    """What is kept of the peers of earlier runs, and for how long."""

    max_peers: int = 64
    max_addrs: int = 6  # of one peer
    max_named: int = 8  # likewise
    max_bytes: int = 256 * 1024
    lock_patience: float = 1.0  # seconds
    failing_seconds: float = 3 * 86400.0  # of not answering while others did, and a peer is forgotten
    unseen_seconds: float = 60 * 86400.0  # without a meeting, likewise


PEER_FILE: Final = PeerFileLimits()


@dataclass(frozen=True)
class PeerRecord:
    """A peer met before: its addresses without /p2p, the best first; when it was last met, and since when it has not
    answered (0: it did), both in seconds since 1970. `named` are the peers that were named, to a node that met it, to
    join its swarm by."""

    peer_id: str
    addrs: tuple[str, ...]
    seen: float
    failing: float = 0.0
    named: tuple[str, ...] = ()


def updated(
    known: Iterable[PeerRecord],
    met: Mapping[str, Sequence[str]],
    failed: Iterable[str],
    now: float,
    named: Iterable[str] = (),
) -> tuple[PeerRecord, ...]:
    """What to remember, the latest met first, after having met these peers at these addresses (the best first).

    `failed` are those that did not answer, `named` those by which this node joined.
    """
    peers = {record.peer_id: record for record in known}
    for peer_id, addrs in met.items():
        held = peers.get(peer_id)
        merged = dict.fromkeys((*addrs, *(held.addrs if held is not None else ())))
        if merged:
            by = dict.fromkeys((*named, *(held.named if held is not None else ())))
            peers[peer_id] = PeerRecord(
                peer_id, tuple(merged)[: PEER_FILE.max_addrs], seen=now, named=tuple(by)[: PEER_FILE.max_named]
            )
    for peer_id in set(failed) - set(met):
        if peer_id in peers:
            peers[peer_id] = replace(peers[peer_id], failing=peers[peer_id].failing or now)
    kept = [peer for peer in peers.values() if now - peer.seen < PEER_FILE.unseen_seconds and not _hopeless(peer, now)]
    return tuple(sorted(kept, key=lambda record: (-record.seen, record.peer_id))[: PEER_FILE.max_peers])


def _hopeless(peer: PeerRecord, now: float) -> bool:
    return bool(peer.failing) and now - peer.failing > PEER_FILE.failing_seconds


def in_order(known: Iterable[PeerRecord]) -> list[PeerRecord]:
    """Whom to try first: those that answered the last time, the latest met before the others."""
    return sorted(known, key=lambda record: (bool(record.failing), -record.seen))


def peer_store_file(folder: Path, psk: str | None) -> Path:
    """Where the peers of one swarm are remembered: the public one, or the private one of this key."""
    swarm = "public" if psk is None else digest("petalnode/remembered/1", bytes.fromhex(psk)).hex()[:16]
    return folder / "peers" / f"{swarm}.json"


class PeerStore:
    """The file. Its methods block for as long as a small file takes, and never raise: a node does without it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[PeerRecord, ...]:
        """What the file holds; nothing if it is missing, damaged or cannot be read."""
        try:
            with self._path.open("rb") as file:
                text = file.read(PEER_FILE.max_bytes)
            entries = json.loads(text)["peers"]
            return tuple(peer for entry in entries if (peer := _peer_record(entry)) is not None)[: PEER_FILE.max_peers]
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("the peers remembered in %s cannot be read: %s", self._path, error)
            return ()

    def update(
        self, met: Mapping[str, Sequence[str]], failed: Iterable[str], now: float, named: Iterable[str] = ()
    ) -> None:
        """Adds what this run has learnt to what the file holds by now. Several processes may do so at once."""
        try:
            make_private_folder(self._path.parent)
            with FileLock(self._path.with_name(self._path.name + ".lock"), timeout=PEER_FILE.lock_patience):
                self._write(updated(self.load(), met, failed, now, named))
        except (OSError, Timeout) as error:
            log.debug("the peers met cannot be kept in %s: %s", self._path, error)

    def _write(self, peers: Sequence[PeerRecord]) -> None:
        text = json.dumps({"version": 1, "peers": [asdict(peer) for peer in peers]}, indent=1)
        write_private(self._path, text.encode())


def _peer_record(entry: Any) -> PeerRecord | None:
    """One entry of the file; None if it is not of the form that we write."""
    try:
        peer_id, addrs = str(entry["peer_id"]), entry["addrs"]
        peer_id_to_bytes(peer_id)
        if not addrs or not all(isinstance(addr, str) for addr in addrs):
            return None
        named = entry.get("named", [])
        if not isinstance(named, list) or not all(isinstance(other, str) for other in named):
            return None
        seen, failing = float(entry["seen"]), float(entry["failing"])
        return PeerRecord(
            peer_id, tuple(addrs)[: PEER_FILE.max_addrs], seen, failing, tuple(named)[: PEER_FILE.max_named]
        )
    except (KeyError, TypeError, ValueError):
        return None


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
    return min(DISCOVERY.first_pause * 1.5 ** min(attempt - 1, 20), DISCOVERY.longest_pause)


def is_local(listen: Iterable[str]) -> bool:
    """Whether a node that listens there is for this machine only: its neighbours have no business with it."""
    addrs = [Multiaddr(addr) for addr in listen]
    return bool(addrs) and all(map(is_loopback, addrs))


class Discovery:
    """The looking for peers of one node.

    A node with named `peers` was told its swarm: of the peers of earlier runs, and of its neighbours, it calls on those
    that belong to that swarm, so that it does not join it to another one. Its neighbours are told so, and call on it
    when they look for a swarm.
    """

    def __init__(
        self, host: Host, directory: Directory, nursery: trio.Nursery, peers: JoinBy, config: SwarmConfig
    ) -> None:
        self._host = host
        self._directory = directory
        self._nursery = nursery
        self._peers = [PeerCandidate("peers", peer_id, (addr,)) for peer_id, addr in peers]
        self._named = frozenset(peer_id for peer_id, _ in peers)
        self._peer_store = None if config.remembered is None else PeerStore(config.remembered)
        self._service = service_name(config.psk) if config.mdns and not is_local(config.listen) else None
        self._listens = bool(config.listen)
        self._neighbours: dict[str, PeerCandidate] = {}
        self._neighbours_asked = trio.Event()
        self._calling: set[str] = set()
        self._called = trio.Event()
        self._failed: set[str] = set()  # of those remembered, since the last note
        self._stir, self._met = trio.Event(), trio.Event()
        self.joined: JoinResult | None = None

    @property
    def searches(self) -> bool:
        """Whether there is any way to find a swarm without a named peer."""
        return self._peer_store is not None or self._service is not None

    def start(self) -> None:
        """Starts what goes on for as long as the node runs. Comes after the meeting with those who were named."""
        if self._service is not None:
            addrs, found, apart = self._host.addrs, self._on_neighbour, bool(self._peers)
            self._nursery.start_soon(run_mdns, self._service, addrs, found, self._neighbours_asked, apart)
        if self._peer_store is not None:
            self._nursery.start_soon(self._note_forever, self._peer_store)
        if self._peers and self._listens:
            # Two parts of a swarm that have lost sight of each other meet in the nodes that remember both.
            self._nursery.start_soon(self._greet_remembered)

    def start_returning(self) -> None:
        """From now on, comes back whenever there is nobody left."""
        self._host.on_lost(lambda _: self._stir.set())
        self._nursery.start_soon(self._return_forever)

    async def search(self) -> JoinResult | None:
        """Joins the swarm of the first remembered peer or neighbour that answers; None if nobody does."""
        with trio.move_on_after(DISCOVERY.search):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_everywhere, nursery.cancel_scope)
                await self._met.wait()
                nursery.cancel_scope.cancel()
        return self.joined

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
            if peer.peer_id != self._host.peer_id and (not self._named or self._named.intersection(peer.named))
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
        wanted = self._is_member(peer_id) if self._named or apart else self._listens or self._is_alone()
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
        """Whether a node that is alone may join a neighbour: a server is the first of a swarm of its own by now."""
        free = not self._named and not (neighbour.apart and self._listens)
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
        failed: frozenset[str] = frozenset()
        if met:  # else it may be this machine that has no network
            failed = frozenset(self._failed)
            self._failed.clear()
        if met or own:
            update = partial(peer_store.update, met | own, failed, time.time(), self._named)
            await trio.to_thread.run_sync(update, abandon_on_cancel=True)

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
