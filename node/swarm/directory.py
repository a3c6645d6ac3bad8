"""The node's directory of servers: what it knows of them, the protocol that shares it, and the search for peers.

Owns the view, the answers to `/petalnode/directory/1`, the questions asked of other directories, and the two loops
that keep the view fresh. `announcer.py` owns what this node says of itself.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final

import trio

from ...crypto.identity import Identity
from ...protocols import directory as protocol
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import BadAnnouncement, ServerState, SignedAnnouncement, open_signed
from ...protocols.directory import NodeInfo
from ...protocols.framing import MessageStream, PeerError, ProtocolError, StreamTimeout
from ..errors import SwarmError
from ..network.dht import SHARDS, Dht
from ..network.host import Host, keep_up
from .allowances import PageAllowances
from .sample import SAMPLE, around, in_turn, known_well, sampled
from .view import SwarmView, nobody

log = logging.getLogger(__name__)

ASK_AT_START: Final = 8  # peers asked side by side by `refresh`
_WAVES: Final = 4  # of asking those whom the last wave named
_ENOUGH_ANSWERS: Final = 3  # after which the slow ones go on in the background
_GRACE: Final = 0.15  # seconds for them before that
_NAMED: Final = 2.0  # seconds for the first answer of those whom others have named: they may be gone, or silent
# Of a swarm of hundreds, a node that 16 peers push to and that asks 5 in every third of a lifetime knows nearly all
# of every round's announcements one round later: spreading by asking multiplies the knowing by e^5 per round.
_PULL_PEERS: Final = 5  # of which answers are wanted in every round of the background
_TRIES: Final = 4  # peers asked for each of these answers at most
_FIRST_PULL: Final = 0.5  # seconds; then longer and longer, up to a round
_UNKNOWN: Final = 3  # whom the table led to, met in one look
_SAMPLED_PEERS: Final = 4  # asked side by side for a sample
_PUSH_DEADLINE: Final = 4.0
_PULL_DEADLINE: Final = 6.0
TABLE_DEADLINE: Final = 10.0
_FIND_DEADLINE: Final = 3.0
_TABLE_ROUND: Final = 60.0  # seconds between two look-ups of unknown peers
_PROVIDE_ROUND: Final = 300.0
_IDLE_STREAM: Final = 60.0  # seconds
_MAX_MET: Final = 256  # peers found otherwise whose addresses we keep
_MAX_LOGGED: Final = 1000
_PINGS: Final = 4  # of a measurement of a round trip
_FAR: Final = 0.02  # seconds of a round trip in which the few milliseconds that opening a stream takes are lost
_AGREE: Final = 1.5  # times one round trip that another one of the same way takes at most, if nothing held it up
_BURST: Final = 300  # frames at once on one stream, and
_FRAMES_PER_SECOND: Final = 20.0
_PAGE_COST: Final = 10  # frames: a page of records costs far more than a ping to make and to send
_CHECKED_AT_ONCE: Final = 16  # announcements of a page
_LOOKED_AT: Final = 512  # records beside twice as many as are wanted, to find some of many sources
_CONNECTED_LOOKED_AT: Final = 128  # peers, whose addresses take 0.05 ms each
_KADEMLIA: Final = "Kademlia"  # the source of what stands there: anybody may have put it

OpenStream = Callable[[str, float], Awaitable[MessageStream[wire.DirectoryFrame]]]


class Directory:
    """What this node knows of the servers, and the traffic that keeps it so."""

    max_header: Final = protocol.MAX_HEADER

    def __init__(
        self,
        *,
        identity: Identity,
        ttl: float,
        host: Host,
        dht: Dht,
        open_stream: OpenStream,
        bootstrap: Sequence[tuple[str, str]],
        address_of: Callable[[str], str] = str,
        is_proven: Callable[[str], bool] = nobody,
    ) -> None:
        """
        Args:
            address_of: the address at which a connected peer is, as `Host.origin_of` has it; of a peer id itself if
                there are no addresses.
            is_proven: whether a server has computed for this node before.
        """
        self.view = SwarmView()
        self._address_of = address_of
        self._is_proven = is_proven
        self._identity = identity
        self._ttl = ttl
        self._host = host
        self._dht = dht
        self._open_stream = open_stream
        self._bootstrap: dict[str, list[str]] = {}
        for peer_id, addr in bootstrap:
            if peer_id != identity.peer_id:
                self._bootstrap.setdefault(peer_id, []).append(addr)
                host.remember(peer_id, [addr])
        self._sampled: bytes | None = None  # the model version that is sampled; empty: all; None: it wants everything
        self._met: dict[str, tuple[str, ...]] = {}
        self._allowances = PageAllowances()
        self._logged: set[str] = set()  # whose bad announcements were logged
        self._changed = trio.Event()
        self.about: Callable[[], NodeInfo] = lambda: NodeInfo("client")  # what this node answers about itself
        self.own: SignedAnnouncement | None = None  # this node's announcement, if it is a server

    # --- the view

    def addrs_of(self, peer_id: str) -> list[str]:
        """Where a peer may be dialed, as far as announcements, our configuration and meetings say."""
        record = self.view.records.get(peer_id)
        announced = list(record.content.addrs) if record is not None else []
        return [*announced, *self._bootstrap.get(peer_id, ()), *self._met.get(peer_id, ())]

    async def find(self, peer_id: str) -> None:
        """Merges the announcement that Kademlia holds of a server, if it has any and gives it within some seconds."""
        record = await self._dht.get_announcement(peer_id, timeout=_FIND_DEADLINE)
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

    def merge(self, records: Iterable[SignedAnnouncement], *, source: str = "", met: bool = False) -> None:
        """As `SwarmView.merge`."""
        merged = self.view.merge(records, time.time(), source=source, met=met, keep=self._stays)
        news = merged.records is not self.view.records
        self.view = merged
        if news:
            self._changed.set()
            self._changed = trio.Event()

    def _stays(self, peer_id: str) -> bool:
        return peer_id == self._identity.peer_id or self._is_proven(peer_id)

    async def wait_changed(self) -> None:
        await self._changed.wait()

    # --- serving

    async def serve(self, stream: MessageStream[wire.DirectoryFrame]) -> None:
        """Answers one peer's stream until it ends (raises PeerError then)."""
        allowance, counted = float(_BURST), trio.current_time()
        while True:
            frame, _ = await stream.receive(timeout=_IDLE_STREAM)
            page, now = frame.HasField("query"), trio.current_time()
            allowance = min(allowance + (now - counted) * _FRAMES_PER_SECOND, _BURST) - (_PAGE_COST if page else 1)
            counted = now
            if allowance < 0 or (page and not self._allowances.take(stream.peer_id)):
                error = wire.Error(code=wire.ERROR_BUSY, message="too many questions; ask more slowly")
                await stream.send(wire.DirectoryFrame(error=error), timeout=_PUSH_DEADLINE)
                return
            reply = self._answer(frame, stream.peer_id)
            if reply is not None:
                await stream.send(reply, timeout=_PUSH_DEADLINE)

    def _answer(self, frame: wire.DirectoryFrame, peer_id: str) -> wire.DirectoryFrame | None:
        kind = frame.WhichOneof("body")
        if kind == "ping" and len(frame.ping.payload) <= protocol.MAX_PING:
            return wire.DirectoryFrame(ping=frame.ping)
        if kind == "query":
            self.merge(())  # drops the expired ones
            query = frame.query
            records = self.view.page(query.model_version, query.after)
            if query.sample and query.limit:
                records = sampled(records, self.view.origins, query.limit, time.time())
            return protocol.records_page(records, after=query.after, limit=query.limit)
        if kind == "publish":
            try:
                record = open_signed(frame.publish, now=time.time())
            except BadAnnouncement as error:
                if peer_id not in self._logged and len(self._logged) < _MAX_LOGGED:
                    self._logged.add(peer_id)
                    log.warning("%s announces what cannot be, which is ignored: %s", peer_id, error)
                raise ProtocolError(f"{peer_id} published a bad announcement: {error}", peer_id) from error
            # Anyone may hand records on when asked, but only a server itself may push its own to us.
            if record.content.peer_id != peer_id:
                raise ProtocolError(f"{peer_id} published the announcement of another peer", peer_id)
            self.merge([record], source=self._address_of(peer_id), met=True)
            return None
        if kind == "node_query":
            return self.about().to_frame()
        refusal = wire.Error(
            code=wire.ERROR_BAD_REQUEST, message="a directory answers query, ping, publish, node_query"
        )
        return wire.DirectoryFrame(error=refusal)

    # --- asking

    async def pull(
        self, peer_id: str, *, model_version: bytes = b"", publish: bool = False, sample: bool = False, timeout: float
    ) -> None:
        """Merges all that a peer knows, or a sample of it; with `publish`, sends it the own announcement first.

        Raises:
            PeerError: it cannot be reached, did not answer within `timeout` seconds, or not what was asked.
        """
        with trio.move_on_after(timeout):
            stream = await self._open_stream(peer_id, timeout)
            try:
                if publish and self.own is not None:
                    await stream.send(wire.DirectoryFrame(publish=self.own.to_wire()), timeout=timeout)
                await self._pull_pages(stream, model_version, sample, timeout)
            except BaseException:
                await stream.reset()
                raise
            await stream.close()
            await self._dht.add_peer(peer_id, self.addrs_of(peer_id))
            return
        raise StreamTimeout(f"{peer_id} did not answer within {timeout:g} s", peer_id)

    async def meet(self, peer_id: str, addrs: Sequence[str], *, timeout: float) -> None:
        """Gets to know a peer that was found otherwise, at these addresses: each learns what the other knows of itself.

        Raises:
            PeerError: as `pull`.
        """
        self._host.remember(peer_id, addrs)
        held = self._met.pop(peer_id, ())
        self._met[peer_id] = tuple(addrs)
        try:
            await self.pull(peer_id, timeout=timeout)
        except BaseException:
            self._met.pop(peer_id, None)
            if held:
                self._met[peer_id] = held
            raise
        while len(self._met) > _MAX_MET:
            del self._met[next(iter(self._met))]
        if self.own is not None:
            await self.push(peer_id, self.own)

    async def push(self, peer_id: str, record: SignedAnnouncement) -> None:
        """Sends an announcement of this node to a peer, if it can be reached within some seconds."""
        try:
            with trio.fail_after(_PUSH_DEADLINE):
                stream = await self._open_stream(peer_id, _PUSH_DEADLINE)
                await stream.send(wire.DirectoryFrame(publish=record.to_wire()), timeout=_PUSH_DEADLINE)
                await stream.close()
        except (PeerError, trio.TooSlowError) as error:
            log.debug("could not announce to %s: %s", peer_id, error)

    async def _pull_pages(
        self, stream: MessageStream[wire.DirectoryFrame], model_version: bytes, sample: bool, timeout: float
    ) -> None:
        after = b""
        for _ in range(1 if sample else protocol.MAX_PAGES):
            query = wire.DirectoryQuery(
                model_version=model_version, after=after, limit=SAMPLE if sample else 0, sample=sample
            )
            await stream.send(wire.DirectoryFrame(query=query), timeout=timeout)
            reply, _payloads = await stream.receive(timeout=timeout)
            if reply.WhichOneof("body") != "records":
                raise ProtocolError(f"{stream.peer_id} answered no records", stream.peer_id)
            await self._merge_page(reply.records, stream.peer_id)
            last = protocol.last_peer_id(reply.records)
            if not reply.records.truncated or last <= after:
                return
            after = last

    async def _merge_page(self, page: wire.DirectoryRecords, peer_id: str) -> None:
        """A page may hold thousands of signatures to check: between some of them others have their turn."""
        records: list[SignedAnnouncement] = []
        for number, record in enumerate(protocol.checked_records(page, self.view.records, now=time.time())):
            if record is not None:
                records.append(record)
            if number % _CHECKED_AT_ONCE == _CHECKED_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
        self.merge(records, source=self._address_of(peer_id))

    async def refresh(
        self, nursery: trio.Nursery, *, model_version: bytes, sample: bool = False, timeout: float
    ) -> None:
        """As `Swarm.refresh`: pulls from several peers, and from some that they name, until there is nothing new, or
        with `sample` until there are several servers for each block."""
        asked: set[str] = set()
        failures: list[str] = []
        self._sampled = model_version if sample else None
        for wave in range(_WAVES):
            known = len(self.view.records)
            peers = [
                peer for peer in self.peers_to_ask(_SAMPLED_PEERS if sample else ASK_AT_START) if peer not in asked
            ]
            asked.update(peers)
            pull = functools.partial(self.pull, model_version=model_version, sample=sample, timeout=timeout)
            await self._ask(nursery, peers, pull, failures, math.inf if wave == 0 else _NAMED)
            if wave == 0 and asked and len(failures) == len(asked):
                reasons = "; ".join(sorted(set(failures))[:5])
                raise SwarmError(f"no peer has answered ({len(asked)} asked): {reasons}")
            if len(self.view.records) == known or (sample and known_well(self.view, model_version, now=time.time())):
                return

    async def _ask(
        self,
        nursery: trio.Nursery,
        peers: Sequence[str],
        pull: Callable[[str], Awaitable[None]],
        failures: list[str],
        patience: float,
    ) -> None:
        """Starts pulling from all; returns soon after a few have answered, or when all have failed, or if nobody has
        answered for `patience` seconds."""
        answers = failed = 0
        progress = trio.Event()

        async def ask(peer_id: str) -> None:
            nonlocal answers, failed, progress
            try:
                await pull(peer_id)
                answers += 1
            except PeerError as error:
                failures.append(str(error))
                failed += 1
            progress.set()
            progress = trio.Event()

        for peer_id in peers:
            nursery.start_soon(ask, peer_id)
        with trio.move_on_after(patience):
            while answers == 0 and failed < len(peers):
                await progress.wait()
        with trio.move_on_after(_GRACE):
            while answers < _ENOUGH_ANSWERS and answers + failed < len(peers):
                await progress.wait()

    def peers_to_ask(self, count: int) -> list[str]:
        """Whom to ask: the named peers, and `count` others: first some that we have a connection to. Of these, too, one
        of each address before a second one of any."""
        known = [peer for peer in self._host.connected() if self.addrs_of(peer)]
        some = random.sample(known, min(_CONNECTED_LOOKED_AT, len(known)))
        connected = list(around(some, self._address_of, random.Random()))
        servers = (content.peer_id for content in in_turn(self.view, 2 * count + _LOOKED_AT, time.time()))
        wanted = dict.fromkeys([*self._bootstrap, *connected, *itertools.islice(servers, count + len(connected) + 1)])
        wanted.pop(self._identity.peer_id, None)
        return list(wanted)[: count + len(self._bootstrap)]

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        with trio.move_on_after(timeout):
            stream = await self._open_stream(peer_id, timeout)
            try:
                best = await self._ping(stream, timeout)
            except BaseException:
                await stream.reset()
                raise
            await stream.close()
            return best
        raise StreamTimeout(f"{peer_id} did not answer a ping within {timeout:g} s", peer_id)

    async def _ping(self, stream: MessageStream[wire.DirectoryFrame], timeout: float) -> float:
        """The least round trip of several pings, in seconds; of two if the peer is far away and they agree."""
        best = float("inf")
        for turn in range(_PINGS):
            frame = wire.DirectoryFrame(ping=wire.Ping(payload=turn.to_bytes(1, "big")))
            start = time.perf_counter()
            await stream.send(frame, timeout=timeout)
            reply, _ = await stream.receive(timeout=timeout)
            elapsed = time.perf_counter() - start
            if reply != frame:
                raise ProtocolError(f"{stream.peer_id} answered another ping", stream.peer_id)
            before = best
            if turn > 0 or elapsed > _FAR:  # the first one waits for the stream to be opened, too
                best = min(best, elapsed)
            if best > _FAR and before < _AGREE * elapsed and elapsed < _AGREE * before:
                break  # a machine that was busy for a moment looks far away, but not as far again
        return best

    async def ask_node(self, peer_id: str, *, timeout: float) -> NodeInfo:
        """As `Swarm.ask_node`."""
        with trio.move_on_after(timeout):
            stream = await self._open_stream(peer_id, timeout)
            try:
                await stream.send(wire.DirectoryFrame(node_query=wire.NodeQuery()), timeout=timeout)
                reply, _ = await stream.receive(timeout=timeout)
                if reply.WhichOneof("body") != "node":
                    raise ProtocolError(f"{peer_id} does not say what it is", peer_id)
            except BaseException:
                await stream.reset()
                raise
            await stream.close()
            return NodeInfo.of(reply.node)
        raise StreamTimeout(f"{peer_id} did not answer within {timeout:g} s", peer_id)

    # --- the background

    async def run(self) -> None:
        """Asks other directories and looks for unknown servers until it is cancelled."""
        async with trio.open_nursery() as nursery:
            for part in (self._pull_forever, self._meet_forever):
                nursery.start_soon(keep_up, part)

    async def _pull_forever(self) -> None:
        pause = _FIRST_PULL
        while True:
            await trio.sleep(min(pause, self._ttl / 3) * random.uniform(0.7, 1.0))
            pause *= 2
            peers = self.peers_to_ask(1000)
            count = _PULL_PEERS if self._sampled is None else 1
            # Some are known and out of reach: the next one is asked in their place.
            waiting = iter(random.sample(peers, min(count * _TRIES, len(peers))))
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(self._pull_from_one, waiting)

    async def _pull_from_one(self, peers: Iterator[str]) -> None:
        for peer_id in peers:
            if await self._try_pull(peer_id):
                return

    async def _try_pull(self, peer_id: str) -> bool:
        """Whether it has answered."""
        try:
            sample = self._sampled is not None
            await self.pull(peer_id, model_version=self._sampled or b"", sample=sample, timeout=_PULL_DEADLINE)
        except PeerError as error:
            log.debug("could not ask %s: %s", peer_id, error)
            return False
        return True

    async def _meet_forever(self) -> None:
        """Finds servers that no known peer has named, through Kademlia."""
        provided = -_PROVIDE_ROUND
        if self.view.records or not self._bootstrap:  # only who knows nobody looks there at once
            await trio.sleep(self._ttl * random.uniform(0.5, 1.5))
        while True:
            listed = await self._dht.get_models(timeout=TABLE_DEADLINE)
            self.merge((one for one in listed if one.content.state is not ServerState.OFFLINE), source=_KADEMLIA)
            known = set(self.peers_to_ask(1000))
            found = await self._dht.find_providers(random.randrange(SHARDS), timeout=TABLE_DEADLINE)
            unknown = [(peer, addrs) for peer, addrs in found if peer not in known | {self._identity.peer_id}]
            for peer_id, addrs in random.sample(unknown, min(_UNKNOWN, len(unknown))):
                self._host.learn(peer_id, addrs)
                await self._try_pull(peer_id)
            if self.own is not None and trio.current_time() - provided >= _PROVIDE_ROUND:
                provided = trio.current_time()
                await self._dht.provide(random.randrange(SHARDS), timeout=TABLE_DEADLINE)
            await trio.sleep(_TABLE_ROUND * random.uniform(0.5, 1.0))
