"""How often a node tells and asks others, which announcements a directory gives, and whom a node asks itself. But for
what was noted of peers (`Contacts`, `KnownShare`), pure.

Where everybody tells everybody, each node's traffic grows with the swarm. Up to `PACE.quick` announcements they are
spread as quickly as that. Beyond, they hold longer for each that is known, up to an hour, so that each is sent more
seldom. Who asks takes answers of `PACE.answer_bytes` only, in the end one a minute, which are samples of the swarm. So
a node's traffic is bounded, whatever is announced. Load and free cache do not hold that long: who measures the way to a
server asks it for them.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import trio

from ...protocols.announcement import (
    ANNOUNCEMENT,
    Announcement,
    ServerState,
    SignedAnnouncement,
    is_expired,
    is_overdue,
)
from ...protocols.directory import DIRECTORY_LIMITS, size_in_page
from ...protocols.framing import PeerError
from ..network.shares import middle
from .view import Origin, SwarmView, coverage_of


@dataclass(frozen=True)
class RefreshPolicy:
    """From what size of a swarm on its announcements last longer, and what is asked in a round."""

    quick: int = 32  # Announcements known up to which everything goes as quickly as it can
    whole: int = 128
    """Announcements in an answer to a server or a bootstrap node. Who knows no more than that gives all."""
    answer_bytes: int = 48 * 1024  # Of announcements in an answer, to clients and in swarms that are not small
    longest_round: float = 60.0
    most_asked: int = 5
    """In a small swarm, a node that 16 peers tell and that asks 5 in every third of a lifetime knows nearly all
    announcements of a round one round later. Spreading by asking multiplies the knowing by e^5 in a round."""


PACE: Final = RefreshPolicy()


@dataclass(frozen=True)
class RefreshRate:
    """Times in seconds.

    Attributes:
        lifetime: of the own announcement.
        round: between two times that others are asked for what they know.
        asked: how many of them.
        max_bytes: of announcements in an answer; 0: as many as there are.
    """

    lifetime: float
    round: float
    asked: int
    max_bytes: int

    @property
    def renewal(self) -> float:
        """Seconds after which an announcement is renewed: two may get lost before it expires."""
        return self.lifetime / 3

    def pause(self, received: int) -> float:
        """Seconds from a round of questions, of whose answers `received` bytes came, to the next. Who answers more than
        he was asked for gets more time, not more traffic."""
        most = self.asked * self.max_bytes
        return self.round * max(received / most, 1.0) if most else self.round

    @property
    def quick(self) -> bool:
        """Whether the swarm is so small that everybody is told everything, at once."""
        return not self.max_bytes


def refresh_rate(known: int, ttl: float) -> RefreshRate:
    """For a node that knows `known` announcements; `ttl` is how long they hold in a small swarm, in seconds.

    A flood of keys makes it slower, as a swarm of as many servers would. Less is sent, and a server that was killed is
    noticed by who tries it. What changes in an announcement is told at once in any case.
    """
    lifetime = max(ttl, min(ttl * (2 * known / PACE.quick - 1), ANNOUNCEMENT.max_lifetime))
    pause = max(ttl / 3, min(lifetime / 3, PACE.longest_round))
    asked = min(max(round(PACE.most_asked * PACE.quick / max(known, 1)), 1), PACE.most_asked)
    return RefreshRate(lifetime, pause, asked, 0 if known <= PACE.quick else PACE.answer_bytes)


@dataclass(frozen=True)
class SamplePolicy:
    """What a sample of the servers of a large swarm has of each block, and whom it believes."""

    servers: int = 64
    """Announcements that a client asks for: some 30 KiB, and six servers for each of 30 blocks if each has three."""
    several: int = 3  # servers of a block
    even: int = 16  # servers of a block, up to which each block gets as many as the others
    large: int = 16  # a record of more than this part of the bytes comes after smaller ones
    looked_at: int = 8  # times as many as are wanted, before those that fit best are taken
    network_works: float = 120.0  # seconds since anybody answered after which a failure says nothing of the peer
    max_failed: int = 1000
    enough_answers: int = 3  # of one wave, after which the slow ones go on in the background
    grace: float = 0.15  # seconds for them before that
    estimated_from: int = 9  # answers, each of
    least_estimated: int = 16  # announcements at least


SAMPLING: Final = SamplePolicy()
_ONE_MORE: Final = bytes((*range(1, 256), 255))
T = TypeVar("T")


def sampled(
    records: Iterable[SignedAnnouncement],
    origins: Mapping[str, Origin],
    limit: int,
    now: float,
    rng: random.Random | None = None,
    *,
    max_bytes: int = DIRECTORY_LIMITS.max_page,
    unreached: Container[str] = (),
) -> list[SignedAnnouncement]:
    """At most `limit` of `records`, of `max_bytes` together, in no order: all of them if they are not more.

    First one for each block of each model that anybody online has, then a second one, and so on. Whose turn it is goes
    around the sources (where a server announced itself, else who passed its announcement on). All keys of one address
    are chosen as often as one server with an address of its own. Some servers' next announcements are overdue, or they
    are among the `unreached` (peer ids). They come only for blocks that few others have. `now` in seconds since 1970.
    """
    records, rng = list(records), rng or random.Random()
    if len(records) <= limit:
        if sum(map(size_in_page, records)) <= max_bytes:
            return records
        return _within(_in_turn(records, origins, rng), max_bytes)
    sure: list[SignedAnnouncement] = []
    doubtful: list[SignedAnnouncement] = []
    for record in records:
        content = record.content
        if content.state is ServerState.ONLINE and not is_expired(content, now):
            late = is_overdue(content.sequence / 1e9, content.expires, now) or content.peer_id in unreached
            (doubtful if late else sure).append(record)
    coverage = _Coverage()
    chosen: list[_Sampled] = []
    blocks = {record.content.model_version: record.content.num_blocks for record in records}
    places = map(coverage.place, _in_turn(sure, origins, rng))
    others = _take(places, chosen, coverage, limit, range(1), sum(blocks.values()))
    spare = _take(map(coverage.place, _in_turn(doubtful, origins, rng)), chosen, coverage, limit, range(1))
    for count in range(1, SAMPLING.even):
        others = _take(others, chosen, coverage, limit, range(count, count + 1))
    for place in others[: limit - len(chosen)]:
        coverage.add(place)
        chosen.append(place)
    _take(spare, chosen, coverage, limit, range(SAMPLING.several))
    return _within((place.record for place in chosen), max_bytes)


class _Sampled(NamedTuple):
    """A record, and its blocks in `counts`: how many chosen servers have each block of its model."""

    record: SignedAnnouncement
    counts: bytearray
    start: int
    end: int


class _Coverage:
    """How many chosen servers have each block, up to 255. Announcements may claim thousands of blocks each, so it is
    counted and compared a span at a time."""

    def __init__(self) -> None:
        self._counts: dict[bytes, bytearray] = {}
        self.covered = 0  # blocks that somebody has

    def place(self, record: SignedAnnouncement) -> _Sampled:
        span = record.content.span
        counts = self._counts.setdefault(record.content.model_version, bytearray())
        if len(counts) < span.end:
            counts.extend(bytes(span.end - len(counts)))
        return _Sampled(record, counts, span.start, span.end)

    def add(self, place: _Sampled) -> None:
        counts, span = place.counts, slice(place.start, place.end)
        self.covered += counts[span].count(0)
        counts[span] = counts[span].translate(_ONE_MORE)


def _within(records: Iterable[SignedAnnouncement], most: int) -> list[SignedAnnouncement]:
    """Those that fit into `most` bytes; large ones, which anybody can make, after all others."""
    fitting = []
    for record in sorted(records, key=lambda record: size_in_page(record) > most // SAMPLING.large):
        if size_in_page(record) <= most:
            most -= size_in_page(record)
            fitting.append(record)
    return fitting


def known_well(view: SwarmView, model_version: bytes, *, now: float) -> bool:
    """Whether a client knows several servers for each block of a model version, or (empty) a whole sample of all."""
    if not model_version:
        return len(view.records) >= SAMPLING.servers
    servers = [one for one in view.servers(model_version, now=now) if one.state is ServerState.ONLINE]
    sizes = Counter(one.num_blocks for one in servers)
    return bool(servers) and min(coverage_of(servers, sizes.most_common(1)[0][0])) >= SAMPLING.several


def in_turn(
    view: SwarmView, looked_at: int, now: float, rng: random.Random | None = None, *, model_version: bytes = b""
) -> Iterator[Announcement]:
    """Servers (of a model) that can be dialed, in an order that goes around the sources. Whom to ask is not to be
    decided by who has most keys. Of a large view only `looked_at` records are looked at, at random."""
    rng = rng or random.Random()
    known = list(view.records_of(model_version))
    some = rng.sample(known, min(looked_at, len(known)))
    records = (view.records[peer_id] for peer_id in some)
    there = (record for record in records if record.content.addrs and view.get(record.content.peer_id, now) is not None)
    return (record.content for record in _in_turn(there, view.origins, rng))


def _take(
    order: Iterable[_Sampled],
    chosen: list[_Sampled],
    coverage: _Coverage,
    limit: int,
    counts: range,
    there: int = 0,
) -> list[_Sampled]:
    """Chooses those that have a block which one of `counts` chosen ones have; returns some of the others. Stops
    when somebody has each of the blocks that are `there` and there are enough others. Directories do this for every
    question, some thousand times each."""
    others: list[_Sampled] = []
    most = SAMPLING.looked_at * limit
    for place in order:
        if len(chosen) >= limit:
            break
        _, held, start, end = place
        for count in counts:
            if held.find(count, start, end) >= 0:
                chosen.append(place)
                coverage.add(place)
                break
        else:
            if len(others) < most:
                others.append(place)
            elif 0 < there <= coverage.covered:
                break
    return others


def _in_turn(
    records: Iterable[SignedAnnouncement], origins: Mapping[str, Origin], rng: random.Random
) -> Iterator[SignedAnnouncement]:
    return round_robin(((origins[record.content.peer_id].chief, record) for record in records), rng)


def round_robin(items: Iterable[tuple[str, T]], rng: random.Random) -> Iterator[T]:
    """In random order, one of each source, then a second one of each that has more, and so on.

    Args:
        items: each with its source.
    """
    of_source: dict[str, list[T]] = {}
    for source, item in items:
        of_source.setdefault(source, []).append(item)
    groups = list(of_source.values())
    for group in groups:
        if len(group) > 1:
            rng.shuffle(group)
    turn = 0
    while groups:
        rng.shuffle(groups)
        for group in groups:
            yield group[turn]
        turn += 1
        groups = [group for group in groups if len(group) > turn]


class Contacts:
    """Remembers the peers that could not be reached. Times in seconds since 1970.

    A mark is never sent to anybody, nor taken from anybody. Who has it does not ask the server, and does not hand it on
    while there are others. So nobody can be slandered. It ends with the next announcement that the server has made
    since, or when the server is reached. Failures count only while others answer, since otherwise it is this node that
    has no network.
    """

    def __init__(self) -> None:
        self._failed: dict[str, float] = {}
        self._answered: tuple[str, float] = ("", -math.inf)

    def answered(self, peer_id: str, now: float) -> None:
        self._failed.pop(peer_id, None)
        self._answered = peer_id, now

    def failed(self, peer_id: str, now: float) -> None:
        last, at = self._answered
        if last == peer_id or now - at > SAMPLING.network_works:
            return
        self._failed.pop(peer_id, None)
        self._failed[peer_id] = now
        if len(self._failed) > SAMPLING.max_failed:
            del self._failed[next(iter(self._failed))]

    def is_unreached(self, peer_id: str, made: float) -> bool:
        """Whether a peer could not be reached after the announcement that it `made` then."""
        return self._failed.get(peer_id, made) > made


class KnownShare:
    """Estimates how many of the servers of its model a node knows: as many as of those that others name (capture and
    recapture: Lincoln 1930). The middle of several answers, so that who makes servers up changes little."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=SAMPLING.estimated_from)

    def told(self, named: Iterable[Announcement], known: Container[str], model_version: bytes) -> None:
        """Another peer has named these servers."""
        peers = [content.peer_id for content in named if content.model_version == model_version]
        if len(peers) >= SAMPLING.least_estimated:
            self._shares.append(sum(peer in known for peer in peers) / len(peers))

    @property
    def share(self) -> float:
        """0 .. 1; 1 as long as nobody has named enough of them."""
        return middle(self._shares, 1.0)


class Wave:
    """Some peers that are asked side by side. Why one has not answered goes into `failures`."""

    def __init__(self, failures: list[str]) -> None:
        self._answers = self._failed = 0
        self._progress = trio.Event()
        self._failures = failures

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A peer is asked in the block."""
        try:
            yield
            self._answers += 1
        except PeerError as error:
            self._failures.append(str(error))
            self._failed += 1
        self._progress.set()
        self._progress = trio.Event()

    async def wait(self, count: int, patience: float) -> None:
        """Returns soon after a few of `count` peers have answered, or when all have failed. Also if nobody has answered
        for `patience` seconds."""
        with trio.move_on_after(patience):
            while self._answers == 0 and self._failed < count:
                await self._progress.wait()
        with trio.move_on_after(SAMPLING.grace):
            while self._answers < SAMPLING.enough_answers and self._answers + self._failed < count:
                await self._progress.wait()
