"""Which blocks a newcomer takes, also while others join at the same time. Pure.

The search for a span begins where Petals' own rule puts a newcomer (NeurIPS 2023, appendix D): `joining_span`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...protocols.ids import Span
from ..swarm.cost import Bools, Floats
from .observed import PlacedServer, coverage, describe_spans, gaps
from .plan import DEFAULT, PLANNING, Policy, make_plan

_MOST_FIRST: Final = 32
"""Newcomers with smaller peer ids whose choice is computed before the own one; each takes as long as a plan."""
_MOST_RIVALS: Final = 64


@dataclass(frozen=True)
class SpanChoice:
    """The blocks that a newcomer takes if it begins to load now.

    `others` are the servers that the choice is based on. Newcomers with smaller peer ids stand where they are expected
    to go. `rivals` are the peer ids of other newcomers that have not begun to load either and must agree. `disputed`
    are those of them with smaller peer ids that have announced another span than expected.
    """

    span: Span
    others: tuple[PlacedServer, ...]
    rivals: frozenset[str] = frozenset()
    disputed: frozenset[str] = frozenset()

    def stands(self, announced: Span | None, told: Collection[str], silent: Collection[str] = ()) -> bool:
        """Whether the newcomer may begin to load: it has announced this span, its rivals were notified (`told`) and
        have answered, and no choice of a smaller peer id is disputed. It does not wait for those that are `silent`.

        Two newcomers that both may load have taken account of each other. Let A have the smaller peer id, and let B
        begin to load: B had then notified A, and knew what A had announced. If A has chosen anew since, it notifies B
        before it loads, and B's answer says that B loads.
        """
        return announced == self.span and self.rivals <= {*told, *silent} and self.disputed <= set(silent)


@dataclass(frozen=True)
class Newcomer:
    """A server that takes `count` blocks. `throughput` in steps a second, None: that of the average server."""

    peer_id: str
    throughput: float | None
    count: int


def choice_of_newcomer(
    servers: Sequence[PlacedServer],
    newcomers: Sequence[PlacedServer],
    own: Newcomer,
    num_blocks: int,
    *,
    turnover: float = 1.0,
    policy: Policy = DEFAULT,
) -> SpanChoice:
    """The blocks that a newcomer takes, while `newcomers`, it may be one of them, choose theirs.

    The newcomers choose in the order of their peer ids: all who see the same announcements compute the same. So with
    several newcomers no other server is moved, and throughputs are the announced ones. Its own is used before the
    newcomer has announced itself.
    """
    newcomer, throughput, count = own.peer_id, own.throughput, own.count
    known = {rival.peer_id: rival for rival in newcomers}
    others = [server for server in servers if server.peer_id not in known and server.peer_id != newcomer]
    if newcomer in known:
        throughput = known.pop(newcomer).throughput
    if not known:
        span = span_for_newcomer(others, newcomer, throughput, count, num_blocks, turnover=turnover, policy=policy)
        return SpanChoice(span, tuple(others))
    others = [replace(server, movable=False) for server in others]
    before = sorted(peer_id for peer_id in known if peer_id < newcomer)
    after = sorted(peer_id for peer_id in known if peer_id > newcomer)
    disputed = set()
    for rival in (known[peer_id] for peer_id in before[:_MOST_FIRST]):
        span = span_for_newcomer(others, rival.peer_id, rival.throughput, len(rival.span), num_blocks, policy=policy)
        others.append(replace(rival, span=span, movable=False))
        if span != rival.span:
            disputed.add(rival.peer_id)
    span = span_for_newcomer(others, newcomer, throughput, count, num_blocks, policy=policy)
    rivals = frozenset([*before[:_MOST_FIRST], *after][:_MOST_RIVALS])
    return SpanChoice(span, tuple(others), rivals, frozenset(disputed))


def span_for_newcomer(
    servers: Sequence[PlacedServer],
    newcomer: str,
    throughput: float | None,
    count: int,
    num_blocks: int,
    *,
    turnover: float = 1.0,
    policy: Policy = DEFAULT,
) -> Span:
    """The `count` blocks that `newcomer` (a peer id) takes: those that nobody holds, else where it raises the swarm's
    throughput most. The plan may move others too. `throughput` in steps a second, None: average.
    """
    others = [server for server in servers if server.peer_id != newcomer]
    starts = policy.starts(np.array([count]), num_blocks)
    first = joining_span(others, num_blocks, count, None if starts is None else starts[0])
    if not others:
        return first
    speeds = sorted(server.throughput for server in others)
    own = PlacedServer(newcomer, first, throughput or speeds[(len(speeds) - 1) // 2])
    # Where blocks have no server, the newcomer does not wait for the others to move.
    around = [replace(server, movable=False) for server in others] if gaps(others, num_blocks) else others
    plan = make_plan([*around, own], num_blocks, turnover=turnover, newcomers={newcomer}, policy=policy)
    move = plan.of(newcomer)
    return first if move is None else move.target


def weakest_window(throughput: Floats, count: int, allowed: Bools | None = None) -> Span:
    """The span of `count` blocks whose sorted throughputs come first in lexicographic order: equation 1.

    `throughput` is float [blocks]. So gaps come first and the weakest blocks next; ties go to the lowest start.
    `allowed` bool [blocks] are the starts in question, if not all. If none is, all are: strangers announce any number.
    """
    count = min(count, len(throughput))
    values, last = throughput.tolist(), len(throughput) - count
    # The least of all comes first, so only windows with a block that has it are in question.
    lowest = np.flatnonzero(throughput == throughput.min()).tolist()
    starts = {start for low in lowest for start in range(max(low - count + 1, 0), min(low, last) + 1)}
    if allowed is not None:
        possible = set(np.flatnonzero(allowed[: last + 1]).tolist())
        starts = starts & possible or possible or starts
    start = min(sorted(starts), key=lambda start: sorted(values[start : start + count]))
    return Span(start, start + count)


def joining_span(servers: Sequence[PlacedServer], num_blocks: int, count: int, allowed: Bools | None = None) -> Span:
    """Where equation 1 puts a newcomer that holds `count` blocks, at one of the `allowed` starts."""
    return weakest_window(coverage(servers, num_blocks), count, allowed)


def why_join(others: Sequence[PlacedServer], span: Span, num_blocks: int) -> str:
    """Why a newcomer takes `span` where `others` are there already."""
    if not others:
        return "nobody else is there"
    held = coverage(others, num_blocks)
    missing = [gap for gap in gaps(others, num_blocks) if gap.start < span.end and span.start < gap.end]
    if missing:
        return f"nobody holds {describe_spans(missing)}"
    weakest = float(held[span.start : span.end].min())
    if weakest <= held.min() * PLANNING.notable:
        return f"that is where the swarm is slowest, {weakest:.3g} steps/s"
    return f"the swarm has {weakest:.3g} steps/s there, and others will be moved to where it is slower"
