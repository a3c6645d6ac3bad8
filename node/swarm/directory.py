"""The node's directory of servers: what it knows of them, the protocol that shares it, and the search for peers.

Owns the view, the questions asked of other directories, and the two loops that keep the view fresh. `answers.py`
answers other nodes, `announcer.py` owns what this node says of itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import trio

from ...protocols import directory as protocol
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import ServerState, SignedAnnouncement
from ...protocols.directory import NodeInfo
from ...protocols.framing import MessageStream, PeerError, ProtocolError, StreamTimeout
from ..errors import SwarmError
from ..network.addresses import parse_peer
from ..network.dht import SHARDS, Dht
from .answers import DirectoryAnswers
from .config import SwarmConfig
from .sample import (
    PACE,
    SAMPLING,
    Contacts,
    KnownShare,
    RefreshRate,
    Wave,
    in_turn,
    known_well,
    refresh_rate,
    round_robin,
)
from .streams import MessageStreams
from .view import SwarmView

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DirectoryPolicy:
    """Whom a directory asks, how many at once, and how long it waits for them."""

    asked_at_start: int = 8  # peers asked side by side by `refresh`
    waves: int = 4  # of asking those whom the last wave named
    patience_with_named: float = 2.0
    """Seconds for the first answer of those whom others have named: they may be gone, or silent."""
    tries: int = 4  # peers asked at most for each answer that is wanted in a round of the background
    first_pull: float = 0.5  # seconds; then longer and longer, up to a round
    unknown_met: int = 3  # whom the table led to, met in one look
    sampled_peers: int = 4  # asked side by side for a sample
    push_deadline: float = 4.0
    pull_deadline: float = 6.0
    table_deadline: float = 10.0
    find_deadline: float = 3.0
    table_round: float = 60.0  # seconds between two look-ups of unknown peers
    provide_round: float = 300.0
    met_kept: int = 256  # peers found otherwise whose addresses we keep
    checked_at_once: int = 16  # announcements of a page
    looked_at: int = 512  # records beside twice as many as are wanted, to find some of many sources
    own_model_rounds: int = 4  # each such question of a server in a large swarm is for all models
    connected_looked_at: int = 128  # peers, whose addresses take 0.05 ms each


ASKING: Final = DirectoryPolicy()
_KADEMLIA: Final = "Kademlia"  # the source of what stands there: anybody may have put it


class Directory:
    """What this node knows of the servers, and the traffic that keeps it so."""

    def __init__(self, config: SwarmConfig, dht: Dht, streams: MessageStreams) -> None:
        """A node that listens, by its `config`, has a sample of the servers in a large swarm."""
        self.view = SwarmView()
        self._identity = config.identity
        self._is_proven = config.trust.is_proven
        self._ttl = config.announcement_ttl
        self._streams = streams
        self._host = streams.host
        self.address_of = self._host.origin_of
        self._dht = dht
        self._bootstrap: dict[str, list[str]] = {}
        for peer_id, addr in map(parse_peer, config.peers):
            if peer_id != self._identity.peer_id:
                self._bootstrap.setdefault(peer_id, []).append(addr)
                self._host.remember(peer_id, [addr])
        self._sampled: bytes | None = None  # the model version that is sampled; empty: all; None: it wants everything
        self._listens = bool(config.listen)
        self._contacts = Contacts()
        self._share = KnownShare()
        self._received = 0  # bytes of answers in the background
        self._met: dict[str, tuple[str, ...]] = {}
        self._changed = trio.Event()
        self.about: Callable[[], NodeInfo] = lambda: NodeInfo("client")  # what this node answers about itself
        self.own: SignedAnnouncement | None = None  # this node's announcement, if it is a server
        self._answers = DirectoryAnswers(self)
        self.serve = self._answers.serve

    # --- the view

    def addrs_of(self, peer_id: str) -> list[str]:
        """Where a peer may be dialed, as far as announcements, our configuration and meetings say."""
        record = self.view.records.get(peer_id)
        announced = list(record.content.addrs) if record is not None else []
        return [*announced, *self._bootstrap.get(peer_id, ()), *self._met.get(peer_id, ())]

    async def find(self, peer_id: str) -> None:
        """Merges the announcement that Kademlia holds of a server, if it has any and gives it within some seconds."""
        record = await self._dht.get_announcement(peer_id, timeout=ASKING.find_deadline)
        if record is not None:
            self.merge([record], source=_KADEMLIA)

    def relays(self) -> set[str]:
        """The servers that announce free relay reservations."""
        servers = self.view.servers(now=time.time())
        return {server.peer_id for server in servers if server.relay is not None and server.relay.free}

    @property
    def announces(self) -> bool:
        """Whether this node is a server."""
        return self.own is not None

    def refresh_rate(self) -> RefreshRate:
        """How often this node tells and asks, by what it knows now."""
        return refresh_rate(len(self.view.records), self._ttl)

    def source_of(self, peer_id: str) -> str:
        return self.view.source_of(peer_id)

    def backing(self, model_version: bytes) -> int:
        return self.view.backing(model_version, now=time.time())

    def merge(self, records: Iterable[SignedAnnouncement], *, source: str = "", met: bool = False) -> None:
        """As `SwarmView.merge`."""
        before, now = self.view, time.time()
        self.view = before.merge(records, now, source=source, met=met, keep=self._stays)
        if self.view.records is not before.records:
            self._changed.set()
            self._changed = trio.Event()

    def _stays(self, peer_id: str) -> bool:
        return peer_id == self._identity.peer_id or self._is_proven(peer_id)

    async def wait_changed(self) -> None:
        await self._changed.wait()

    def is_unreached(self, peer_id: str) -> bool:
        """Whether a server that is known could not be reached since it announced itself."""
        return self._contacts.is_unreached(peer_id, self.view.records[peer_id].content.sequence / 1e9)

    # --- asking

    @contextlib.asynccontextmanager
    async def _stream(self, peer_id: str, timeout: float) -> AsyncIterator[MessageStream[wire.DirectoryFrame]]:
        """A stream to a peer's directory for `timeout` seconds, closed behind the block or reset if that fails.

        Raises:
            PeerError: the peer cannot be reached, or did not answer within `timeout` seconds.
        """
        opened, begun = False, time.time()
        try:
            with trio.move_on_after(timeout):
                async with self._streams.open_stream(peer_id, protocol.DIRECTORY, timeout=timeout) as stream:
                    opened = True
                    yield stream
                self._contacts.answered(peer_id, time.time())
                return
            raise StreamTimeout(f"{peer_id} did not answer within {timeout:g} s", peer_id)
        except PeerError:
            if not opened:
                self._contacts.failed(peer_id, begun)
            raise

    async def pull(
        self,
        peer_id: str,
        *,
        model_version: bytes = b"",
        publish: bool = False,
        sample: bool = False,
        everything: bool = False,
        timeout: float,
    ) -> int:
        """Merges all that a peer knows, or a sample of it; with `publish`, sends it the own announcement first. Returns
        the bytes of the answer.

        A node that listens asks for a sample, too, unless it wants `everything`: in a small swarm that is all.

        Raises:
            PeerError: it cannot be reached, did not answer within `timeout` seconds, or not what was asked.
        """
        query = wire.DirectoryQuery(model_version=model_version)
        if sample or (self._listens and not everything):
            query.sample, query.limit = True, SAMPLING.servers if sample else PACE.whole
            query.max_bytes = PACE.answer_bytes if sample else self.refresh_rate().max_bytes
        async with self._stream(peer_id, timeout) as stream:
            if publish and self.own is not None:
                await stream.send(wire.DirectoryFrame(publish=self.own.to_wire()), timeout=timeout)
            received = await self._pull_pages(stream, query, timeout)
        await self._dht.add_peer(peer_id, self.addrs_of(peer_id))
        return received

    async def meet(self, peer_id: str, addrs: Sequence[str], *, timeout: float) -> None:
        """Gets to know a peer that was found otherwise, at these addresses: each learns what the other knows of itself.

        Raises:
            PeerError: as `pull`.
        """
        self._host.remember(peer_id, addrs)
        await self.pull(peer_id, timeout=timeout)
        self._met.pop(peer_id, None)
        self._met[peer_id] = tuple(addrs)
        await self._dht.add_peer(peer_id, self.addrs_of(peer_id))
        while len(self._met) > ASKING.met_kept:
            del self._met[next(iter(self._met))]
        if self.own is not None:
            await self.push(peer_id, self.own)

    async def push(self, peer_id: str, record: SignedAnnouncement) -> None:
        """Sends an announcement of this node to a peer, if it can be reached within some seconds."""
        try:
            async with self._stream(peer_id, ASKING.push_deadline) as stream:
                await stream.send(wire.DirectoryFrame(publish=record.to_wire()), timeout=ASKING.push_deadline)
        except PeerError as error:
            log.debug("could not announce to %s: %s", peer_id, error)

    async def _pull_pages(self, stream: protocol.DirectoryStream, query: wire.DirectoryQuery, timeout: float) -> int:
        received = 0
        for _ in range(1 if query.sample else protocol.DIRECTORY_LIMITS.max_pages):
            page = await protocol.ask_page(stream, query, timeout=timeout)
            received += page.ByteSize()
            await self._merge_page(page, stream.peer_id)
            last = protocol.last_peer_id(page)
            if not page.truncated or last <= query.after:
                break
            query.after = last
        return received

    async def _merge_page(self, page: wire.DirectoryRecords, peer_id: str) -> list[SignedAnnouncement]:
        """A page may hold thousands of signatures to check: between some of them others have their turn."""
        records: list[SignedAnnouncement] = []
        for number, record in enumerate(protocol.checked_records(page, self.view.records, now=time.time())):
            if record is not None:
                records.append(record)
            if number % ASKING.checked_at_once == ASKING.checked_at_once - 1:
                await trio.lowlevel.checkpoint()
        self._estimate(records)
        self.merge(records, source=self.address_of(peer_id))
        return records

    def _estimate(self, told: Sequence[SignedAnnouncement]) -> None:
        """What share of the servers of its model a server knows, by what another peer has told."""
        if self.own is None:
            return
        self._share.told((one.content for one in told), self.view.records, self.own.content.model_version)
        share = 1.0 if self.refresh_rate().quick else self._share.share
        if share != self.view.share:
            self.view = replace(self.view, share=share)

    async def refresh(
        self,
        nursery: trio.Nursery,
        *,
        model_version: bytes,
        sample: bool = False,
        everything: bool = False,
        timeout: float,
    ) -> None:
        """As `Swarm.refresh`: pulls from several peers, and from some that they name, until nothing is new. With
        `sample` until there are several servers for each block."""
        asked: set[str] = set()
        failures: list[str] = []
        self._sampled = model_version if sample else None
        pull = functools.partial(
            self._pull_of, model_version=model_version, sample=sample, everything=everything, timeout=timeout
        )
        for wave in range(ASKING.waves):
            known = len(self.view.records)
            peers = [
                peer
                for peer in self.peers_to_ask(ASKING.sampled_peers if sample else ASKING.asked_at_start)
                if peer not in asked
            ]
            asked.update(peers)
            answers = Wave(failures)
            for peer_id in peers:
                nursery.start_soon(pull, answers, peer_id)
            await answers.wait(len(peers), math.inf if wave == 0 else ASKING.patience_with_named)
            if wave == 0 and asked and len(failures) == len(asked):
                reasons = "; ".join(sorted(set(failures))[:5])
                raise SwarmError(f"no peer has answered ({len(asked)} asked): {reasons}")
            if len(self.view.records) == known or self._suffices(model_version, known, sample, everything):
                return

    def _suffices(self, model_version: bytes, before: int, sample: bool, everything: bool) -> bool:
        """Whether nobody else need be asked in this look; `before` announcements were known before the last ones."""
        if sample:
            return known_well(self.view, model_version, now=time.time())
        return self._listens and not everything and before > PACE.whole  # where there is always something new

    async def _pull_of(self, wave: Wave, peer_id: str, **asked: Any) -> None:
        with wave.asking():
            await self.pull(peer_id, **asked)

    def peers_to_ask(self, count: int) -> list[str]:
        """Whom to ask: the named peers, and `count` others: first some that we have a connection to. Of these, too, one
        of each address before a second one of any."""
        known = [peer for peer in self._host.connected() if self.addrs_of(peer)]
        some = random.sample(known, min(ASKING.connected_looked_at, len(known)))
        connected = list(round_robin(((self.address_of(peer), peer) for peer in some), random.Random()))
        servers = (content.peer_id for content in in_turn(self.view, 2 * count + ASKING.looked_at, time.time()))
        wanted = dict.fromkeys([*self._bootstrap, *connected, *itertools.islice(servers, count + len(connected) + 1)])
        wanted.pop(self._identity.peer_id, None)
        return list(wanted)[: count + len(self._bootstrap)]

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        """As `Swarm.measure_rtt`."""
        async with self._stream(peer_id, timeout) as stream:
            best = await protocol.measure_round_trip(stream, timeout=timeout)
            held = self.view.records.get(peer_id)
            if held is not None and time.time() - held.content.sequence / 1e9 > self._ttl:
                with contextlib.suppress(ProtocolError):  # it may have become something else
                    record = await protocol.ask_own(stream, now=time.time(), timeout=timeout)
                    self.merge([record], source=self.address_of(peer_id), met=True)
        return best

    async def ask_node(self, peer_id: str, *, timeout: float) -> NodeInfo:
        """As `Swarm.ask_node`."""
        async with self._stream(peer_id, timeout) as stream:
            await stream.send(wire.DirectoryFrame(node_query=wire.NodeQuery()), timeout=timeout)
            reply, _ = await stream.receive(timeout=timeout)
            if reply.WhichOneof("body") != "node":
                raise ProtocolError(f"{peer_id} does not say what it is", peer_id)
        return NodeInfo.of(reply.node)

    # --- the background

    @property
    def parts(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """What goes on: asks other directories, and looks for unknown servers."""
        return self._pull_forever, self._meet_forever

    async def _pull_forever(self) -> None:
        pause, turn, received = ASKING.first_pull, 0, 0
        while True:
            await trio.sleep(min(pause, self.refresh_rate().pause(received)) * random.uniform(0.7, 1.0))
            pause, turn, before = pause * 2, turn + 1, self._received
            count = self.refresh_rate().asked if self._sampled is None else 1
            # Some are known and out of reach: the next one is asked in their place.
            waiting = iter(self._asked_now(count, version := self._asked_for(turn)))
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(self._pull_from_one, waiting, version)
            received = self._received - before

    def _asked_for(self, turn: int) -> bytes:
        """The model version to ask for in this round. A server in a large swarm asks for its own, at times for all."""
        if self._listens and self.own is not None and not self.refresh_rate().quick and turn % ASKING.own_model_rounds:
            return self.own.content.model_version
        return self._sampled or b""

    def _asked_now(self, count: int, version: bytes) -> list[str]:
        """Whom to ask in this round of the background for `count` answers, and others in their place."""
        most = count * ASKING.tries
        if self.refresh_rate().quick:
            peers = self.peers_to_ask(1000)
            return random.sample(peers, min(most, len(peers)))
        # Of as many sources as possible, however many keys each of them has. Servers of a model know most of it.
        others = (one.peer_id for one in in_turn(self.view, ASKING.looked_at, time.time(), model_version=version))
        others = (peer for peer in others if peer != self._identity.peer_id and not self.is_unreached(peer))
        return list(dict.fromkeys([*itertools.islice(others, most - count), *self.peers_to_ask(count)]))[:most]

    async def _pull_from_one(self, peers: Iterator[str], version: bytes) -> None:
        for peer_id in peers:
            if await self._try_pull(peer_id, version):
                return

    async def _try_pull(self, peer_id: str, version: bytes) -> bool:
        """Asks a peer for a model version. Returns whether it has answered."""
        try:
            # Who is asked gets to know who asks, from the address at which that is.
            large, sample = self._listens and not self.refresh_rate().quick, self._sampled is not None
            self._received += await self.pull(
                peer_id, model_version=version, publish=large, sample=sample, timeout=ASKING.pull_deadline
            )
        except PeerError as error:
            log.debug("could not ask %s: %s", peer_id, error)
            return False
        return True

    async def _meet_forever(self) -> None:
        """Finds servers that no known peer has named, through Kademlia."""
        provided = -ASKING.provide_round
        if self.view.records or not self._bootstrap:  # only who knows nobody looks there at once
            await trio.sleep(self._ttl * random.uniform(0.5, 1.5))
        while True:
            listed = await self._dht.get_models(timeout=ASKING.table_deadline)
            self.merge((one for one in listed if one.content.state is not ServerState.OFFLINE), source=_KADEMLIA)
            known = set(self.peers_to_ask(1000))
            found = await self._dht.find_providers(random.randrange(SHARDS), timeout=ASKING.table_deadline)
            unknown = [(peer, addrs) for peer, addrs in found if peer not in known | {self._identity.peer_id}]
            for peer_id, addrs in random.sample(unknown, min(ASKING.unknown_met, len(unknown))):
                self._host.learn(peer_id, addrs)
                await self._try_pull(peer_id, self._sampled or b"")
            if self.own is not None and trio.current_time() - provided >= ASKING.provide_round:
                provided = trio.current_time()
                await self._dht.provide(random.randrange(SHARDS), timeout=ASKING.table_deadline)
            await trio.sleep(ASKING.table_round * random.uniform(0.5, 1.0))
