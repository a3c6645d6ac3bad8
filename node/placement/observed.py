"""Servers as placement sees them: spans, throughputs, coverage of the blocks, turnover, who may be gone. Pure.

They are read out of announcements, which are not trusted: throughputs are bounded, and what contradicts the model is
left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...protocols.announcement import Announcement, ServerState
from ...protocols.announcement import is_overdue as is_overdue
from ...protocols.ids import Span
from ..network.shares import middle
from ..swarm import cost
from ..swarm.cost import Floats, steps_per_second
from ..swarm.sample import PACE


@dataclass(frozen=True)
class ObservedPolicy:
    """What is believed of announced speeds, and how turnover is estimated."""

    most_of_median: float = 100.0
    """No server counts as faster than this factor times the median: a false announcement must not keep others from a
    block."""
    least: float = 1e-3
    usual_load: float = 20.0
    """Seconds to load a block after which a move counts twice as dear as one that loads at once."""
    digits: int = 2
    window: float = 45 * 60.0
    prior: float = 5 * 60.0
    """Seconds at the usual turnover that are added to the window: a window with nothing in it proves little."""
    usual_per_hour: float = 0.113
    """Changes per server and hour that count as usual: those of the swarm of Petals' appendix E over a day."""
    at_once: int = 16
    """Servers that are pinged together."""
    askers: int = 64
    """About this number of servers ping the only holder of a block at each check, however large the swarm is."""


OBSERVED: Final = ObservedPolicy()
LEAST, MOST = 0.5, 2.0
_LEFT, _JOINED = 4 / 3, 2 / 3
"""Weights of changes: what the throughput has gained is lost when servers leave, much less so when they join."""


@dataclass(frozen=True)
class PlacedServer:
    """A server as placement sees it.

    `span` is the one that it hosts, or the next one that it has announced. `throughput`, above 0, is the decode steps a
    second that it adds to each of its blocks. `movable` is false if its span was fixed by a person or is being loaded.
    `reload_weight` weighs the blocks that it would reload, 1 where that is quick and drops no caches.
    """

    peer_id: str
    span: Span
    throughput: float
    movable: bool = True
    reload_weight: float = 1.0


def coverage(servers: Sequence[PlacedServer], num_blocks: int) -> Floats:
    """The throughput of every block, float [num_blocks]: the sum over those that hold it; 0 in a gap."""
    throughput, holders = cost.block_throughput(
        np.array([server.span.start for server in servers], np.intp),
        np.array([server.span.end for server in servers], np.intp),
        np.array([server.throughput for server in servers], float),
        num_blocks,
    )
    return np.where(holders > 0, throughput, 0.0)


def swarm_throughput(servers: Sequence[PlacedServer], num_blocks: int) -> float:
    """Decode steps a second of the whole swarm: those of its slowest block (Petals, appendix D)."""
    return float(coverage(servers, num_blocks).min())


def upper_bound(servers: Sequence[PlacedServer], num_blocks: int) -> float:
    """Decode steps a second that no placement of these servers exceeds: the largest z with
    sum over servers of min(throughput, z) x blocks >= z x num_blocks.
    """
    blocks = np.array([len(server.span) for server in servers], np.intp)
    if blocks.sum() < num_blocks:
        return 0.0
    speeds = np.array([server.throughput for server in servers], float)
    return cost.throughput_bound(blocks, 1 / (speeds * blocks), num_blocks)


def sampling_noise(servers: Sequence[PlacedServer], num_blocks: int, share: float) -> float:
    """How far off a block's throughput seems, as a part of it, where this `share` of servers is known.

    Two standard deviations of a sample without replacement (Cochran, Sampling Techniques, 1977, section 2.6). For the
    block with the fewest servers. What gains no more than that may be no gain at all.
    """
    counts = np.zeros(num_blocks, np.intp)
    for server in servers:
        counts[server.span.start : server.span.end] += 1
    held = counts[counts > 0]
    return 2 * math.sqrt(max(1 - share, 0.0) / int(held.min())) if held.size else 0.0


def gaps(servers: Sequence[PlacedServer], num_blocks: int) -> tuple[Span, ...]:
    """The stretches of blocks that nobody holds."""
    empty = np.concatenate([[False], coverage(servers, num_blocks) <= 0, [False]])
    edges = np.flatnonzero(empty[1:] != empty[:-1])
    return tuple(Span(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def describe_spans(spans: Sequence[Span]) -> str:
    """Spans of blocks for a person: "blocks 3:5, 7:9"."""
    return "blocks " + ", ".join(str(span) for span in spans)


@dataclass(frozen=True)
class ObservedServers:
    """The servers of one model.

    `servers` have the spans that they host, or the next ones that they have announced. `serving` are those that take
    sessions, with the spans that they host. `newcomers` have not begun to load, this one included, and have the spans
    that they have announced. The others of them are among `servers`, too. `doubts` are sentences about announcements
    that were corrected or left out, by peer id.
    """

    servers: tuple[PlacedServer, ...]
    serving: tuple[PlacedServer, ...]
    doubts: dict[str, str]
    newcomers: tuple[PlacedServer, ...] = ()

    def of(self, peer_id: str) -> PlacedServer | None:
        return next((server for server in self.servers if server.peer_id == peer_id), None)


def observe_servers(
    announcements: Sequence[Announcement], num_blocks: int, own: str = "", *, contested: bool = False
) -> ObservedServers:
    """The servers that count for placement, this one (`own`, a peer id) among them with the span that it hosts.

    `contested` decides between several that would move at once, without messages. The smaller peer id goes first, and
    ignores the next spans that larger ones have announced. A newcomer that has not begun to load announces its span as
    its next one, too.
    """
    doubts: dict[str, str] = {}
    believed = []
    for said in announcements:
        last = max(said.span.end, said.next_span.end if said.next_span is not None else 0)
        if said.num_blocks != num_blocks or last > num_blocks:
            doubts[said.peer_id] = (
                f"{said.peer_id} announces blocks {said.span} of {said.num_blocks} of a model that has {num_blocks}: "
                "left out"
            )
        else:
            believed.append(said)
    speeds = _believable(believed, doubts)
    servers, serving, newcomers = [], [], []
    for said in believed:
        speed, next_span = speeds[said.peer_id], said.next_span
        if said.state is ServerState.JOINING and next_span is not None:
            newcomers.append(PlacedServer(said.peer_id, next_span, speed, False))
        # A draining server leaves in any case.
        undecided = said.state is not ServerState.DRAINING
        if undecided and (said.peer_id == own or (contested and said.peer_id > own)):
            if said.state is ServerState.JOINING and next_span is not None:
                continue
            next_span = None
        if said.state is ServerState.ONLINE and next_span is None:
            servers.append(PlacedServer(said.peer_id, said.span, speed, not said.fixed, _reload_weight(said)))
            serving.append(servers[-1])
        elif said.state is ServerState.JOINING or next_span is not None:
            servers.append(PlacedServer(said.peer_id, next_span or said.span, speed, False))
    return ObservedServers(tuple(servers), tuple(serving), doubts, tuple(newcomers))


def _reload_weight(said: Announcement) -> float:
    """Loading takes time, and the caches of the sessions there are rebuilt elsewhere."""
    used = 1 - said.cache_tokens_free / said.cache_tokens if said.cache_tokens else 0.0
    return (1 + min(said.load_seconds / OBSERVED.usual_load, 9.0)) * (1 + used)


def _believable(announcements: Sequence[Announcement], doubts: dict[str, str]) -> dict[str, float]:
    """Throughputs by peer id: the lower one of computing and network, in two digits, bounded by
    `OBSERVED.most_of_median`."""
    said = {
        announcement.peer_id: min(
            steps_per_second(announcement.step_seconds), steps_per_second(announcement.network_seconds)
        )
        if announcement.network_seconds
        else steps_per_second(announcement.step_seconds)
        for announcement in announcements
    }
    measured = [said[announcement.peer_id] for announcement in announcements if announcement.step_seconds]
    usual = middle(measured, 1.0)
    believed = {}
    for announcement in announcements:
        # A server without a measurement counts as the median.
        speed = said[announcement.peer_id] if announcement.step_seconds else usual
        most = OBSERVED.most_of_median * usual
        if speed > most:
            doubts[announcement.peer_id] = (
                f"{announcement.peer_id} announces {speed:.0f} steps/s, {speed / usual:.0f} times the middle of the "
                f"swarm: taken for {most:.0f}"
            )
        believed[announcement.peer_id] = float(f"{max(OBSERVED.least, min(speed, most)):.{OBSERVED.digits}g}")
    return believed


@dataclass(frozen=True)
class MembershipChange:
    """A server joined, or left, at this time."""

    at: float
    joined: bool


def recent(changes: Sequence[MembershipChange], now: float) -> tuple[MembershipChange, ...]:
    """Those that still count."""
    return tuple(change for change in changes if now - OBSERVED.window < change.at <= now)


def turnover(changes: Sequence[MembershipChange], servers: int, now: float) -> float:
    """How fast `servers` servers come and go, from the changes of the last 45 minutes: 1 is usual, LEAST .. MOST."""
    usual = OBSERVED.usual_per_hour / 3600 * max(servers, 1)
    weighed = sum(_JOINED if change.joined else _LEFT for change in recent(changes, now))
    return min(max((weighed + OBSERVED.prior * usual) / ((OBSERVED.window + OBSERVED.prior) * usual), LEAST), MOST)


def pinged_at_once(servers: int) -> float:
    """How many of these servers are pinged together, on the average: in a large swarm nobody is connected to most of
    them. A connection costs far more than a ping."""
    return min(OBSERVED.at_once, OBSERVED.at_once * PACE.quick / max(servers, 1))


def worth_asking(
    servers: Sequence[PlacedServer], own: str, sure: Collection[str], num_blocks: int, chance: random.Random
) -> tuple[str, ...]:
    """The peer ids of servers to ping: one that was killed has sent no retraction. The only holders of a block first,
    then others at random. So each server is asked about as often as it asks.

    Those that are `sure` to be there are left out: there is a connection to them, or they have just been asked.
    """
    counts = np.zeros(num_blocks, np.intp)
    for server in servers:
        counts[server.span.start : server.span.end] += 1
    alone: list[str] = []
    others: list[str] = []
    for server in servers:
        if server.peer_id != own and server.peer_id not in sure:
            lonely = counts[server.span.start : server.span.end].min() <= 1
            (alone if lonely else others).append(server.peer_id)
    if chance.random() * len(servers) > OBSERVED.askers:
        alone = []
    first = chance.sample(alone, min(len(alone), OBSERVED.at_once))
    more = max(int(pinged_at_once(len(servers)) + chance.random()) - len(first), 0)
    return (*first, *chance.sample(others, min(len(others), more)))
