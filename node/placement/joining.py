"""Where a newcomer goes, and whether those that join at the same time are agreed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...protocols.ids import Span
from ..swarm.cost import Floats
from .coverage import PlacedServer, coverage, describe_spans, gaps
from .plan import DEFAULT, NOTABLE, Policy, make_plan

_SETTLING_ROUNDS: Final = 10
_MOST_FIRST: Final = 32
"""Newcomers whose choice is worked out before one's own; each costs as much time as a plan."""
_MOST_RIVALS: Final = 64


@dataclass(frozen=True)
class Choice:
    """The blocks that a newcomer takes if it begins to load now.

    `others` are the servers that it reckons with, the newcomers before it where it reckons that they go. `rivals` are
    the peer ids of newcomers that have not begun to load, either, and with whom it has to agree; `disputed` those of
    them that go before it and have announced something else than it reckons.
    """

    span: Span
    others: tuple[PlacedServer, ...]
    rivals: frozenset[str] = frozenset()
    disputed: frozenset[str] = frozenset()

    def stands(self, announced: Span | None, told: Collection[str], silent: Collection[str] = ()) -> bool:
        """Whether the newcomer may begin to load: it has announced this, its rivals have been `told` of that and have
        answered, and those before it mean to do what it reckons with. It does not wait for those that are `silent`.

        If it is so for two newcomers, they have reckoned with each other. Say A goes before B, and B begins to load.
        Then B had told A, and knew of A what A had announced. If A has changed its mind since, A tells B before it
        loads, and has in B's answer that B loads.
        """
        return announced == self.span and self.rivals <= {*told, *silent} and self.disputed <= set(silent)


def choice_of_newcomer(
    servers: Sequence[PlacedServer],
    newcomers: Sequence[PlacedServer],
    newcomer: str,
    throughput: float | None,
    count: int,
    num_blocks: int,
    *,
    turnover: float = 1.0,
    policy: Policy = DEFAULT,
) -> Choice:
    """The `count` blocks that `newcomer` (a peer id) takes, while `newcomers`, it may be one of them, choose theirs.

    The newcomers choose in the order of their peer ids: all who see the same servers reckon the same. So what depends
    on who looks does not count as long as there are several: nobody else is moved along, and throughputs are those
    that are announced. `throughput` is for the time before that.
    """
    known = {rival.peer_id: rival for rival in newcomers}
    others = [server for server in servers if server.peer_id not in known and server.peer_id != newcomer]
    if newcomer in known:
        throughput = known.pop(newcomer).throughput
    if not known:
        span = span_for_newcomer(others, newcomer, throughput, count, num_blocks, turnover=turnover, policy=policy)
        return Choice(span, tuple(others))
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
    return Choice(span, tuple(others), rivals, frozenset(disputed))


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
    """The `count` blocks that `newcomer` (a peer id) takes: those that nobody holds, then where it raises the swarm's
    throughput most, by the plan that moves others along with it. `throughput` in steps a second, None: average.
    """
    others = [server for server in servers if server.peer_id != newcomer]
    first = joining_span(others, num_blocks, count)
    if not others:
        return first
    speeds = sorted(server.throughput for server in others)
    own = PlacedServer(newcomer, first, throughput or speeds[(len(speeds) - 1) // 2])
    # Where blocks have no server, nobody waits for the others to move along.
    around = [replace(server, movable=False) for server in others] if gaps(others, num_blocks) else others
    plan = make_plan([*around, own], num_blocks, turnover=turnover, newcomers={newcomer}, policy=policy)
    move = plan.of(newcomer)
    return first if move is None else move.target


def weakest_window(throughput: Floats, count: int) -> Span:
    """The span of `count` blocks whose sorted throughputs come first in lexicographic order: equation 1.

    `throughput` is float [blocks]. So gaps come first and the weakest blocks next; ties go to the lowest start.
    """
    count = min(count, len(throughput))
    values, last = throughput.tolist(), len(throughput) - count
    # The least of all comes first, so only windows with a block that has it are in question.
    lowest = np.flatnonzero(throughput == throughput.min()).tolist()
    starts = {start for low in lowest for start in range(max(low - count + 1, 0), min(low, last) + 1)}
    start = min(sorted(starts), key=lambda start: sorted(values[start : start + count]))
    return Span(start, start + count)


def joining_span(servers: Sequence[PlacedServer], num_blocks: int, count: int) -> Span:
    """Where equation 1 puts a newcomer that holds `count` blocks."""
    return weakest_window(coverage(servers, num_blocks), count)


def moves_to(
    servers: Sequence[PlacedServer], index: int, num_blocks: int, p: float, order: Sequence[int]
) -> Span | None:
    """Where the server at `index` moves, None if it stays.

    It moves if, after it and then all others (in `order`, round after round until nobody wants to move) went where
    equation 1 puts them, the swarm's throughput is higher by the share `p`.
    """
    spans = [server.span for server in servers]
    load = coverage(servers, num_blocks)
    before = float(load.min())

    def settle(number: int) -> bool:
        span, speed = spans[number], servers[number].throughput
        load[span.start : span.end] -= speed
        # What is left of a sum of floats whose parts have all gone again is no coverage.
        load[np.abs(load) < 1e-9] = 0.0
        spans[number] = weakest_window(load, len(span))
        load[spans[number].start : spans[number].end] += speed
        return spans[number] != span

    if not settle(index):
        return None
    target = spans[index]
    for _ in range(_SETTLING_ROUNDS):
        moved = [settle(other) for other in order if other != index]
        if not any(moved):
            break
    after = coverage(
        [replace(server, span=span) for server, span in zip(servers, spans, strict=True)], num_blocks
    ).min()
    return target if after > before * (1 + p) else None


def why_join(others: Sequence[PlacedServer], span: Span, num_blocks: int) -> str:
    """Why a newcomer takes `span` where `others` are there already."""
    if not others:
        return "nobody else is there"
    held = coverage(others, num_blocks)
    missing = [gap for gap in gaps(others, num_blocks) if gap.start < span.end and span.start < gap.end]
    if missing:
        return f"nobody holds {describe_spans(missing)}"
    weakest = float(held[span.start : span.end].min())
    if weakest <= held.min() * NOTABLE:
        return f"that is where the swarm is slowest, {weakest:.3g} steps/s"
    return f"the swarm has {weakest:.3g} steps/s there, and others will be moved to where it is slower"
