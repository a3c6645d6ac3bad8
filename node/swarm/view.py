"""What a node knows of the swarm: the newest valid announcement of each server. Pure; no clock, no network.

A view is bounded, and keys cost nothing. So each record is held for the **sources** that it came from: the addresses of
the connections on which the server itself or somebody else sent it. When there are too many, all sources keep equally
many (max-min fairness, as in fair queueing: Demers, Keshav, Shenker 1989, section 2). Within a source those stay that
are known for longest, as in Kademlia (Maymounkov and Mazieres 2002, section 2.2). Who comes with ten thousand keys
takes room from itself.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final

from ...protocols.announcement import Announcement, ServerState, SignedAnnouncement, counts_until, is_ahead, is_expired
from ..network.transport.memory import own_budgets

MAX_RECORDS: Final = min(10_000, own_budgets().view >> 14)


@dataclass(frozen=True)
class ViewLimits:
    """How a view that is full shares its room among the sources of announcements."""

    max_sources: int = 8  # remembered of one record
    left_free: int = 16  # this part of the view is free after it was full, so that it is seldom gone through
    gone_through: float = 1.0  # seconds between two searches for expired records in a large view
    large: int = 512


VIEW: Final = ViewLimits()


@dataclass(frozen=True)
class Origin:
    """Where a record came from.

    Attributes:
        sources: that have sent it or an older one, the latest ones last.
        since: when its server came into the view, seconds since 1970.
        met: the source at which the server itself has sent one; None if only others have.
    """

    sources: tuple[str, ...]
    since: float
    met: str | None = None

    @property
    def chief(self) -> str:
        """The source that counts as the record's: at which its server announced itself, else that sent it last."""
        return self.met or self.sources[-1]

    def also(self, source: str, *, met: bool) -> Origin:
        """Sent by this source, too; `self` if that is known."""
        if source in self.sources and (not met or self.met == source):
            return self
        others = [known for known in self.sources if known != source]
        return Origin((*others, source)[-VIEW.max_sources :], self.since, source if met else self.met)


class ModelRecords:
    """The records of one model version, never changed once made; what is asked of them is worked out once."""

    def __init__(self, records: Mapping[str, SignedAnnouncement]) -> None:
        self.records = records

    @cached_property
    def _sorted(self) -> tuple[Announcement, ...]:
        there = [record.content for record in self.records.values() if record.content.state is not ServerState.OFFLINE]
        # Not by Span: comparing dataclasses takes ten times as long as comparing their numbers.
        return tuple(sorted(there, key=lambda one: (one.span.start, one.span.end, one.peer_id)))

    @cached_property
    def _first_to_go(self) -> float:
        return min(map(counts_until, self._sorted), default=float("inf"))

    def servers(self, now: float) -> tuple[Announcement, ...]:
        """Those that are neither retracted nor expired, by span."""
        if now <= self._first_to_go:
            return self._sorted
        return tuple(content for content in self._sorted if not is_expired(content, now))

    @cached_property
    def _by_key(self) -> list[SignedAnnouncement]:
        return sorted(self.records.values(), key=lambda record: record.key)

    def behind(self, key: bytes) -> Iterable[SignedAnnouncement]:
        """The records whose peer ids, in bytes, come after `key`, in this order."""
        first = bisect_right(self._by_key, key, key=lambda record: record.key)
        return (self._by_key[at] for at in range(first, len(self._by_key)))

    def named(self, now: float) -> tuple[str, int]:
        """(name, number of blocks) of the model, as most of its servers say."""
        counts = Counter((content.model_name, content.num_blocks) for content in self.servers(now))
        return min(counts, key=lambda choice: (-counts[choice], choice))


_NONE: Final = ModelRecords({})


@dataclass(frozen=True)
class SwarmView:
    """The newest announcement of each server, retractions included (they keep older ones from coming back).

    Attributes:
        records: by peer id.
        by_version: the same by model version.
        origins: of each record, by peer id.
        gone_through: when expired records were last looked for (seconds since 1970).
        share: of the servers of its model that the node seems to know, 0 .. 1 (`Directory` estimates it).
    """

    records: Mapping[str, SignedAnnouncement] = field(default_factory=dict)
    by_version: Mapping[bytes, ModelRecords] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    gone_through: float = 0.0
    share: float = 1.0

    def merge(
        self,
        signed: Iterable[SignedAnnouncement],
        now: float,
        *,
        source: str = "",
        met: bool = False,
        keep: Callable[[str], bool] = lambda peer_id: False,
    ) -> SwarmView:
        """The view with these announcements, already checked by `open_signed`, and without expired ones. They came from
        `source`; `met` says that it was the server itself that sent its own.

        A newer sequence number wins; an equal one changes nothing but where the record came from. Above `MAX_RECORDS`
        servers `chosen` says which stay. Returns `self` if no record changed and no origin; `records` stays the
        same object if only origins did. `now` in seconds since
        1970. Takes as long as copying the view does, unless it is full.
        """
        change = _ViewChange(self, now)
        for record in signed:
            change.put(record, source, met=met)
        if len(change.records) > MAX_RECORDS:
            change.only(chosen(change.records, change.origins, MAX_RECORDS - MAX_RECORDS // VIEW.left_free, keep))
        return change.made()

    def get(self, peer_id: str, now: float) -> Announcement | None:
        """What this server says of itself, if it is known, not expired and not retracted."""
        record = self.records.get(peer_id)
        return record.content if record is not None and _counts(record.content, now) else None

    def servers(self, model_version: bytes | None = None, *, now: float) -> tuple[Announcement, ...]:
        """The servers whose announcements have neither expired nor been retracted, of one model or of all, by span."""
        if model_version is not None:
            return self.by_version.get(model_version, _NONE).servers(now)
        return tuple(server for version in sorted(self.by_version) for server in self.by_version[version].servers(now))

    def models(self, *, now: float) -> dict[bytes, tuple[str, int]]:
        """model version -> (name, number of blocks), as most of its servers say."""
        return {version: held.named(now) for version, held in sorted(self.by_version.items()) if held.servers(now)}

    def records_of(self, model_version: bytes) -> Mapping[str, SignedAnnouncement]:
        """By peer id: those of one model version, or (empty) of all."""
        return self.by_version.get(model_version, _NONE).records if model_version else self.records

    def page(self, model_version: bytes, after: bytes) -> Iterable[SignedAnnouncement]:
        """The records of one model version, or (empty) of all, behind `after`, in the order of their peer ids."""
        if model_version:
            return self.by_version.get(model_version, _NONE).behind(after)
        return self._all.behind(after)

    @cached_property
    def _all(self) -> ModelRecords:
        return ModelRecords(self.records)

    def source_of(self, peer_id: str) -> str:
        """The source that counts as that of a server's record; "" if there is none."""
        origin = self.origins.get(peer_id)
        return "" if origin is None else origin.chief

    def backing(self, model_version: bytes, *, now: float) -> int:
        """From how many addresses servers of a version have sent their announcements here themselves. Keys alone do not
        raise it, and what others pass on does not count."""
        met = (self.origins[server.peer_id].met for server in self.servers(model_version, now=now))
        return len({source for source in met if source is not None})


def is_online(server: Announcement, num_blocks: int) -> bool:
    """Whether it serves now, and says of the model what most say."""
    return server.state is ServerState.ONLINE and server.num_blocks == num_blocks


def coverage_of(servers: Iterable[Announcement], num_blocks: int) -> list[int]:
    """For each block, how many online servers hold it. Takes as long as there are servers and blocks, not both."""
    steps = [0] * (num_blocks + 1)
    for server in servers:
        if server.state is ServerState.ONLINE:
            steps[min(server.span.start, num_blocks)] += 1
            steps[min(server.span.end, num_blocks)] -= 1
    return list(accumulate(steps))[:num_blocks]


class _ViewChange:
    """A view that is being changed: copies of what it holds, of a model version only if something of it changes."""

    def __init__(self, view: SwarmView, now: float) -> None:
        self._view = view
        self._now = now
        self.records = dict(view.records)
        self.origins = dict(view.origins)
        self._versions: dict[bytes, dict[str, SignedAnnouncement]] = {}  # that have changed
        self._moved = False
        self._gone_through = view.gone_through
        if len(self.records) <= VIEW.large or now - view.gone_through >= VIEW.gone_through:
            self._gone_through = now
            for peer_id in [peer for peer, record in self.records.items() if is_expired(record.content, now)]:
                self._drop(peer_id)

    def put(self, record: SignedAnnouncement, source: str, *, met: bool) -> None:
        content = record.content
        held, origin = self.records.get(content.peer_id), self.origins.get(content.peer_id)
        if is_expired(content, self._now):
            return
        if held is None or origin is None:
            self.origins[content.peer_id] = Origin((source,), self._now, source if met else None)
        else:
            ahead = is_ahead(held.content.sequence, self._now)  # made, or taken in, by a clock that was wrong
            if held.content.sequence <= content.sequence or ahead:
                self.origins[content.peer_id] = further = origin.also(source, met=met)
                self._moved |= further is not origin
            if held.content.sequence >= content.sequence and not ahead:
                return
            self._version(held.content.model_version).pop(content.peer_id)
        self._version(content.model_version)[content.peer_id] = record
        self.records[content.peer_id] = record

    def _version(self, version: bytes) -> dict[str, SignedAnnouncement]:
        if version not in self._versions:
            self._versions[version] = dict(self._view.by_version.get(version, _NONE).records)
        return self._versions[version]

    def _drop(self, peer_id: str) -> None:
        del self._version(self.records.pop(peer_id).content.model_version)[peer_id], self.origins[peer_id]

    def only(self, peers: Iterable[str]) -> None:
        for peer_id in self.records.keys() - peers:
            self._drop(peer_id)

    def made(self) -> SwarmView:
        if not self._versions and not self._moved:
            return self._view
        by_version = {**self._view.by_version, **{one: ModelRecords(held) for one, held in self._versions.items()}}
        for version, held in self._versions.items():
            if not held:
                del by_version[version]
        records = self.records if self._versions else self._view.records
        return SwarmView(records, by_version, self.origins, self._gone_through, self._view.share)


def chosen(
    records: Mapping[str, SignedAnnouncement],
    origins: Mapping[str, Origin],
    most: int,
    keep: Callable[[str], bool] = lambda peer_id: False,
) -> set[str]:
    """The peers of the records that stay where there is room for `most`.

    Those that `keep` names come first, up to half of the room. All sources get equally many of the rest; what one does
    not fill is shared by the others. A record that several have sent counts for the one of them for which fewest count.
    No source can take a record with it that others know. Within a source come first records of several sources, then
    those known for longest, then those that last longest.
    """
    kept = set(heapq.nsmallest(most // 2, filter(keep, records), key=lambda peer: origins[peer].since))
    of_source: dict[str, list[str]] = {source: [] for origin in origins.values() for source in origin.sources}
    for peer in sorted(records.keys() - kept, key=lambda peer: (len(origins[peer].sources), peer)):
        min((of_source[source] for source in origins[peer].sources), key=len).append(peer)
    left = most - len(kept)
    ascending = sorted(of_source.values(), key=len)
    for number, peers in enumerate(ascending):
        share = left // (len(ascending) - number)
        if len(peers) > share:
            peers = heapq.nsmallest(share, peers, key=lambda peer: _rank(records[peer], origins[peer]))
        left -= len(peers)
        kept.update(peers)
    return kept


def _rank(record: SignedAnnouncement, origin: Origin) -> tuple[int, float, float, str]:
    return -len(origin.sources), origin.since, -record.content.expires, record.content.peer_id


def _counts(content: Announcement, now: float) -> bool:
    return content.state is not ServerState.OFFLINE and not is_expired(content, now)
