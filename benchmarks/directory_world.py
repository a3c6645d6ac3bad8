"""The simulated world of `directory.py`: servers, an attacker, clients, and what they tell one another."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from petalnode.crypto.identity import peer_id_from_bytes
from petalnode.node.network.transport.limits import LIMITS, NodeLimits
from petalnode.node.placement.observed import pinged_at_once
from petalnode.node.server.lifecycle import other_servers, rebalancing
from petalnode.node.swarm import announcer, directory
from petalnode.node.swarm.config import DEFAULT_TTL
from petalnode.node.swarm.sample import PACE, SAMPLING, RefreshRate, in_turn, known_well, refresh_rate, sampled
from petalnode.node.swarm.view import MAX_RECORDS, ModelRecords, SwarmView
from petalnode.protocols import directory as protocol
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import ANNOUNCEMENT, Announcement, ServerState, SignedAnnouncement
from petalnode.protocols.ids import Span

BLOCKS: Final = 30
CHURN: Final = 0.10 / 3600  # of the servers in a second
ROUND_TRIP: Final = 0.1  # seconds
LINK: Final = 10e6 / 8  # bytes a second, of a client
FRAME: Final = 40  # bytes around a message: length, Yamux, Noise
PUSHES_OF_ADDRESS: Final = 20  # a second, as one stream allows
START: Final = 1_800_000_000.0  # seconds since 1970
CONNECTION: Final = 2000  # bytes each way: TCP, Noise, negotiation, identify
PING: Final = 400  # bytes each way of a stream and its pings
FEW: Final = 512  # servers of a model that stay connected
SIGN: Final = 30  # bytes each way of a sign of life
NEWCOMER: Final = 9  # peers that a newcomer has asked
MOST_TOLD: Final = 2 * MAX_RECORDS  # hostile keys that a node is told: twice what a view holds
NOTHING: Final = ModelRecords({})
_HEAD: Final = bytes.fromhex("002408011220")
_PEERS_TOLD: Final = 64  # hostile keys whose page is made anew; the pages of all others are these


@dataclass(frozen=True)
class Setting:
    servers: int
    models: int
    hostile: int
    addresses: int


@dataclass(frozen=True)
class Look:
    """What a client has after its look."""

    seconds: float
    kib: float
    blocks: float
    honest: float


@dataclass(frozen=True)
class Outcome:
    up: float
    down: float
    bootstrap: float
    lifetime_s: float
    stale_s: float
    gone: float
    known: float
    honest: float
    blocks: float
    least: float
    sample: Look
    all: Look | None


@dataclass
class Server:
    """A server, or (`address` below 0) a key of the attacker."""

    number: int
    version: bytes
    span: Span
    address: int
    left: float = math.inf
    phase: float = 0.0  # of its renewals, as a part of the time between two
    last: SignedAnnouncement | None = None

    def current(self, now: float, pace: RefreshRate) -> SignedAnnouncement:
        """The announcement that it has made last."""
        made = now - (now / pace.renewal + self.phase) % 1 * pace.renewal
        if self.last is None or self.last.content.sequence < int(made * 1e9):
            self.last = self.record(made, pace.lifetime)
        return self.last

    def earlier(self, age: float, now: float, pace: RefreshRate) -> SignedAnnouncement:
        """One that it has made some seconds ago."""
        return self.record(now - age, pace.lifetime)

    def record(self, now: float, lifetime: float = ANNOUNCEMENT.max_lifetime) -> SignedAnnouncement:
        key = _HEAD + self.number.to_bytes(32, "big")
        content = Announcement(
            _peer_id(self.number),
            self.version,
            "org/model",
            BLOCKS,
            self.span,
            ServerState.ONLINE,
            sequence=int(now * 1e9),
            expires=now + lifetime,
            addrs=("/ip4/192.0.2.1/tcp/31330",),
        )
        made = SignedAnnouncement(content, _SIZE, self.number.to_bytes(64, "big"))
        made.__dict__["key"] = key  # worked out from the peer id otherwise, which takes longer than all else here
        return made


@cache
def _peer_id(number: int) -> str:
    return peer_id_from_bytes(_HEAD + number.to_bytes(32, "big"))


def _typical() -> bytes:
    """An announcement as a server makes it: two addresses, round trips to eight servers."""
    peers = [_peer_id(number) for number in range(1, 10)]
    content = Announcement(
        peers[0],
        bytes(32),
        "org/model-7b-instruct",
        BLOCKS,
        Span(0, 10),
        ServerState.ONLINE,
        sequence=int(START * 1e9),
        expires=START,
        step_seconds=0.01,
        forward_tokens_per_second=1000.0,
        dtype="bfloat16",
        cache_tokens_free=10_000,
        cache_tokens=16_000,
        addrs=("/ip4/192.0.2.1/tcp/31330", "/ip6/2001:db8::1/tcp/31330"),
        rtts=dict.fromkeys(peers[1:], 0.05),
        software_version="0.1.0",
        network_seconds=0.001,
        load_seconds=1.0,
        device="cuda",
    )
    return content.to_wire().SerializeToString()


_SIZE: Final = _typical()


def size_of(frame: wire.DirectoryFrame) -> int:
    return int(frame.ByteSize()) + FRAME


@dataclass
class Traffic:
    up: int = 0
    down: int = 0


class World:
    """All servers, and those that are simulated: `views[0]` is the bootstrap node's, the others are servers'."""

    def __init__(self, setting: Setting, nodes: int, seed: int) -> None:
        self.setting = setting
        self.random = random.Random(seed)
        self.now = START
        self._numbers = iter(range(1, 1 << 62))
        self._by_peer: dict[str, Server] = {}  # honest ones, those that have left too
        self.models = [number.to_bytes(32, "big") for number in range(1, setting.models + 1)]
        # Those that are simulated serve the same model, as whom they ask does.
        versions = [self.models[0]] * (nodes - 1) + self.random.choices(self.models, k=setting.servers - nodes + 1)
        self.servers = [self._server(version) for version in versions]
        self._of_model: dict[bytes, list[int]] = {}
        for at, server in enumerate(self.servers):
            self._of_model.setdefault(server.version, []).append(at)
        self.nodes: list[Server | None] = [None, *self.servers[: nodes - 1]]
        self.views = [SwarmView() for _ in self.nodes]
        self.traffic = [Traffic() for _ in self.nodes]
        self.hostile = setting.hostile * setting.servers
        self._hostile_pages: dict[int, list[Answer]] = {}
        self._due = [self.random.uniform(0, 15) for _ in self.nodes]
        self._turns = [0 for _ in self.nodes]

    def _server(self, version: bytes) -> Server:
        length = self.random.randint(BLOCKS // 10, BLOCKS // 3)
        start = self.random.randint(0, BLOCKS - length)
        number = next(self._numbers)
        made = Server(number, version, Span(start, start + length), number)
        made.phase = self.random.random()
        self._by_peer[_peer_id(number)] = made
        return made

    def attacker(self, number: int, address: int | None = None) -> Server:
        """The key of this number, from 0, at one of the attacker's addresses, from 0."""
        version = self.models[number % len(self.models)]
        if number % 2:
            version = (1 << 200 | number % 1000).to_bytes(32, "big")
        address = number % self.setting.addresses if address is None else address
        start = number % (BLOCKS - 9)
        return Server((1 << 100) + number, version, Span(start, start + 10), -1 - address)

    # --- what nodes say to each other

    def pace(self, at: int) -> RefreshRate:
        return refresh_rate(len(self.views[at].records), DEFAULT_TTL)

    def _servers_pace(self) -> RefreshRate:
        """That of a server which is not simulated: of the middle one of those that are."""
        paces = sorted((self.pace(at) for at in range(1, len(self.nodes))), key=lambda pace: pace.lifetime)
        return paces[len(paces) // 2]

    def push_all(self, seconds: float) -> None:
        """What the simulated nodes are sent in a number of seconds by servers that announce themselves."""
        pace = self._servers_pace()
        pushes = announcer.PUSHING.peers + 1  # and the bootstrap node
        size = size_of(wire.DirectoryFrame(publish=self.servers[0].current(self.now, pace).to_wire()))
        renewals = seconds / (pace.renewal * 0.95)
        # Who is asked in a large swarm is told the announcement of who asks.
        asked = 0.0 if pace.quick else pace.asked * seconds / (pace.round * 0.85)
        for at, node in enumerate(self.nodes):
            # All servers tell the bootstrap node; 16 of the N servers tell any other in each round.
            mean = renewals * (len(self.servers) if node is None else pushes - 1) + (0 if node is None else asked)
            senders = self.random.sample(self.servers, min(self._about(mean), len(self.servers)))
            for server in senders:
                self._heard(at, [server.current(self.now, pace)], server.address, met=True)
            self.traffic[at].down += size * len(senders)
            if node is not None:
                self.traffic[at].up += round(size * (pushes * renewals + asked))
                self._count_connections(at, seconds, (2 * pushes - 1) * renewals + 2 * asked)
            self._flood(at, seconds)

    def _count_connections(self, at: int, seconds: float, opened: float) -> None:
        """Those of announcements and questions, and of pings: others open as many to the simulated node."""
        known = len(self.views[at].by_version.get(self.servers[at - 1].version, NOTHING).records)
        connected = min(len(self.servers), LIMITS.connections)
        # A model's few servers have met within minutes; who is connected is not pinged to see whether it is there.
        strangers = 0.0 if known <= FEW else 1 - connected / len(self.servers)
        probed = strangers * min(known, pinged_at_once(known)) * seconds / rebalancing.REBALANCING.check_interval
        measured = min(known, other_servers.ROUND_TRIPS.most) * seconds / other_servers.RTT_INTERVAL
        met_anew = (
            2 * probed + 2 * strangers * measured * other_servers.ROUND_TRIPS.new_ones / other_servers.ROUND_TRIPS.most
        )
        new = opened * (1 - connected / len(self.servers)) + met_anew
        signs = SIGN * seconds * connected / self.limits_of(connected).silence
        transferred = (
            min(known, other_servers.TRANSFERS.peers)
            * protocol.DIRECTORY_LIMITS.transfer_bytes
            * seconds
            / other_servers.TRANSFERS.longest_interval
        )
        each_way = round(2 * PING * (probed + measured) + 2 * transferred + CONNECTION * new + signs)
        self.traffic[at].up += each_way
        self.traffic[at].down += each_way

    @staticmethod
    def limits_of(connections: int) -> NodeLimits:
        limits = NodeLimits()
        limits.connections = connections
        return limits

    def _flood(self, at: int, seconds: float) -> None:
        """As often as an address may, until it has told all of its keys; then as often as keeps them known."""
        if not self.hostile:
            return
        addresses, first = self.setting.addresses, at * MOST_TOLD % self.hostile
        keys = min(self.hostile, MOST_TOLD) // addresses
        told = PUSHES_OF_ADDRESS * (self.now - START)
        count = PUSHES_OF_ADDRESS * seconds if told < keys else keys * seconds / (ANNOUNCEMENT.max_lifetime / 2)
        for address in range(addresses):
            some = self.random.sample(range(keys), min(self._about(count), keys))
            chosen = [self.attacker((first + key * addresses) % self.hostile, address) for key in some]
            self._heard(at, [one.record(self.now) for one in chosen], -1 - address, met=True)

    def _about(self, mean: float) -> int:
        return int(mean) + (self.random.random() < mean % 1)

    def pull(self, at: int, turn: int) -> int:
        """One question in the background of a simulated node, to somebody that it knows; bytes of the answer."""
        traffic, node, pace = self.traffic[at], self.nodes[at], self.pace(at)
        own = node is not None and not pace.quick and turn % directory.ASKING.own_model_rounds
        version = node.version if own and node is not None else b""
        asked = self.asked_by(self.views[at], version)
        answer = self.sample(asked, version, PACE.whole, pace.max_bytes)
        traffic.down += answer.reply
        traffic.up += answer.query
        if at and not isinstance(asked, Server):  # each is asked as often as it asks, on the average
            traffic.up += answer.reply
            traffic.down += answer.query
        self._heard(at, answer.records, self.address_of(asked))
        return answer.reply

    def asked_by(self, view: SwarmView, version: bytes = b"") -> int | Server:
        """A simulated node (its number) that stands for an honest peer, or a key of the attacker."""
        some = next(in_turn(view, directory.ASKING.looked_at, self.now, self.random, model_version=version), None)
        if some is not None and some.peer_id not in self._by_peer:
            return self.attacker(self.random.randrange(self.hostile))
        of_model = [at for at, node in enumerate(self.nodes) if node is not None and node.version == version]
        if some is not None and of_model:
            return self.random.choice(of_model)
        return self.random.randrange(0 if refresh_rate(len(view.records), DEFAULT_TTL).quick else 1, len(self.nodes))

    def address_of(self, asked: int | Server) -> int:
        """Another honest peer each time: those that are simulated stand for all."""
        return asked.address if isinstance(asked, Server) else next(self._numbers)

    def answers(self, asked: int | Server, version: bytes) -> Iterator[Answer]:
        """What one peer answers to who wants all that it knows, page by page."""
        if isinstance(asked, Server):
            yield from self._answers_of_attacker(asked.number % _PEERS_TOLD)
        else:
            yield from in_pages(list(self.views[asked].page(version, b"")), version)

    def _answers_of_attacker(self, asked: int) -> list[Answer]:
        if asked not in self._hostile_pages:
            first = self.random.randrange(self.hostile)
            keys = (self.attacker((first + key) % self.hostile) for key in range(min(self.hostile, 2 * MAX_RECORDS)))
            records = sorted((key.record(self.now) for key in keys), key=lambda record: record.key)
            self._hostile_pages[asked] = list(in_pages(records, b""))
        return self._hostile_pages[asked]

    def _heard(self, at: int, records: Iterable[SignedAnnouncement], address: int, *, met: bool = False) -> None:
        self.views[at] = self.views[at].merge(records, self.now, source=str(address), met=met)

    # --- time

    def settle(self) -> None:
        """What newcomers are given: samples of all servers, at peers that know them."""
        pace = refresh_rate(len(self.servers), DEFAULT_TTL)
        for at in range(len(self.nodes)):
            for _ in range(NEWCOMER):
                known = self.random.sample(self.servers, min(PACE.whole, len(self.servers)))
                self._heard(at, [one.current(self.now, pace) for one in known], next(self._numbers))

    def run(self, seconds: float, step: float) -> None:
        """In every step some servers change and announce themselves; each node asks when its round is over."""
        for _ in range(round(seconds / step)):
            self.now += step
            self._churn(step)
            self.push_all(step)
            for at in range(len(self.nodes)):
                self._due[at] -= step
                if self._due[at] <= 0:
                    pace = self.pace(at)
                    self._turns[at] += 1
                    received = sum(self.pull(at, self._turns[at]) for _ in range(pace.asked))
                    self._due[at] = max(self._due[at] + pace.pause(received) * self.random.uniform(0.7, 1.0), 0.0)

    def _churn(self, seconds: float) -> None:
        for _ in range(self._about(len(self.servers) * CHURN * seconds)):
            at = self.random.randrange(len(self.nodes), len(self.servers))  # who is simulated stays
            self._by_peer[_peer_id(self.servers[at].number)].left = self.now
            self.servers[at] = self._server(self.servers[at].version)

    def join(self, *, sample: bool) -> Look:
        """A client that joins and looks for its model, as `Directory.refresh` does it both times."""
        view, seconds, received = SwarmView(), 0.0, 0
        for version in (b"", self.models[0]):
            for wave in range(directory.ASKING.waves):
                known = len(view.records)
                asked: list[int | Server] = [0] if wave == 0 else []  # whom it joins by, once in each look
                if view.records:
                    count = directory.ASKING.sampled_peers if sample else directory.ASKING.asked_at_start
                    asked += [self.asked_by(view) for _ in range(count)]
                slowest, of_wave = 0.0, 0
                for peer in asked:
                    one = self.sample(peer, version, SAMPLING.servers, PACE.answer_bytes) if sample else None
                    answers = [one] if one is not None else list(self.answers(peer, version))
                    for answer in answers:
                        view = view.merge(answer.records, self.now, source=str(self.address_of(peer)))
                        of_wave += answer.reply
                    slowest = max(slowest, (4 + len(answers)) * ROUND_TRIP)
                seconds += max(slowest, of_wave / LINK + 5 * ROUND_TRIP)
                received += of_wave
                if len(view.records) == known or (sample and known_well(view, version, now=self.now)):
                    break
        servers = view.servers(self.models[0], now=self.now)
        right = [content for content in servers if self.is_there(content.peer_id)]
        covered = sum(any(block in content.span for content in right) for block in range(BLOCKS))
        return Look(seconds, received / 1024, covered / BLOCKS, len(right) / len(servers) if servers else 0.0)

    def sample(self, asked: int | Server, version: bytes, limit: int, most: int) -> Answer:
        """What one peer answers to who wants a sample."""
        query = wire.DirectoryFrame(
            query=wire.DirectoryQuery(model_version=version, limit=limit, sample=True, max_bytes=most)
        )
        if isinstance(asked, Server):
            keys = (self.attacker(self.random.randrange(self.hostile)) for _ in range(10 * limit))
            records = [key.record(self.now) for key in keys if not version or key.version == version][:limit]
            # As long as the asking node takes it.
            return Answer(
                size_of(query),
                most + limit * protocol.DIRECTORY_LIMITS.large if most else protocol.DIRECTORY_LIMITS.max_page,
                records,
            )
        view = self.views[asked]
        records = sampled(
            view.page(version, b""),
            view.origins,
            limit,
            self.now,
            self.random,
            max_bytes=most or protocol.DIRECTORY_LIMITS.max_page,
        )
        if asked and not self.pace(asked).quick:
            records = [self._of_others(record) for record in records]
        return Answer(size_of(query), size_of(protocol.records_page(records)), records)

    def _of_others(self, record: SignedAnnouncement) -> SignedAnnouncement:
        """The announcement of another server of the same model, as old as this one; itself if nobody is there."""
        content = record.content
        if not self.is_there(content.peer_id):
            return record
        other = self.servers[self.random.choice(self._of_model[content.model_version])]
        return other.earlier(self.now - content.sequence / 1e9, self.now, self._servers_pace())

    # --- what came of it

    def is_there(self, peer_id: str) -> bool:
        server = self._by_peer.get(peer_id)
        return server is not None and self.now < server.left

    def outcome(self, seconds: float, *, everything: bool) -> Outcome:
        idle = self.traffic[1:]
        ages, gone, known, honest, blocks, least = [], [], [], [], [], []
        for server, view in zip(self.servers, self.views[1:], strict=False):
            held = [record.content for peer, record in view.records.items() if peer in self._by_peer]
            ages += [self.now - content.sequence / 1e9 for content in held]
            gone += [not self.is_there(content.peer_id) for content in held]
            there = {
                peer for peer, one in self._by_peer.items() if one.version == server.version and self.is_there(peer)
            }
            of_model = view.servers(server.version, now=self.now)
            right = [content for content in of_model if self.is_there(content.peer_id)]
            holders = [sum(block in content.span for content in right) for block in range(BLOCKS)]
            known.append(len(right) / len(there))
            honest.append(len(right) / max(len(of_model), 1))
            blocks.append(sum(map(bool, holders)) / BLOCKS)
            least.append(min(holders))
        return Outcome(
            up=_mean(one.up for one in idle) / seconds / 1000,
            down=_mean(one.down for one in idle) / seconds / 1000,
            bootstrap=self.traffic[0].down / seconds / 1000,
            lifetime_s=self._servers_pace().lifetime,
            stale_s=_mean(ages),
            gone=_mean(gone),
            known=_mean(known),
            honest=_mean(honest),
            blocks=_mean(blocks),
            least=min(least),
            sample=self.join(sample=True),
            all=self.join(sample=False) if everything else None,
        )


@dataclass(frozen=True)
class Answer:
    """One page: the bytes of the query and of the reply, and what is in it."""

    query: int
    reply: int
    records: list[SignedAnnouncement]


def in_pages(records: list[SignedAnnouncement], version: bytes) -> Iterator[Answer]:
    """Records, in their order, as a directory gives them to who asks for all."""
    for _ in range(protocol.DIRECTORY_LIMITS.max_pages):
        query = wire.DirectoryFrame(
            query=wire.DirectoryQuery(model_version=version, after=records[0].key if records else b"")
        )
        reply = protocol.records_page(records)
        yield Answer(size_of(query), size_of(reply), records[: len(reply.records.records)])
        records = records[len(reply.records.records) :]
        if not reply.records.truncated:
            return


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / len(held) if held else 0.0
