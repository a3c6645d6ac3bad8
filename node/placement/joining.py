"""Where a newcomer goes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from ...protocols.ids import Span
from .holder import Holder, gaps
from .petals import joining_span
from .plan import DEFAULT, Policy, make_plan

_MOST_FIRST: Final = 32
"""Newcomers that are waited for; each costs as much time as a plan."""


def span_for_newcomer(
    holders: Sequence[Holder],
    newcomer: str,
    throughput: float | None,
    count: int,
    num_blocks: int,
    *,
    turnover: float = 1.0,
    policy: Policy = DEFAULT,
    choosing: Collection[str] = (),
) -> Span:
    """The `count` blocks that `newcomer` (a peer id) takes: those that nobody holds, then where it raises the swarm's
    throughput most, by the plan that moves others along with it. `throughput` in steps a second, None: average.

    `choosing` are newcomers among the holders that have not begun to load. Those with smaller peer ids choose first:
    where they go is worked out here, whatever they have said, so that all who see the same newcomers agree at once.
    """
    others = [holder for holder in holders if holder.peer_id not in choosing and holder.peer_id != newcomer]
    waiting = sorted((each for each in holders if each.peer_id in choosing), key=lambda each: each.peer_id)
    for first in [each for each in waiting if each.peer_id < newcomer][:_MOST_FIRST]:
        span = _place(others, first.peer_id, first.throughput, len(first.span), num_blocks, turnover, policy)
        others.append(replace(first, span=span, movable=False))
    return _place(others, newcomer, throughput, count, num_blocks, turnover, policy)


def _place(
    others: Sequence[Holder],
    newcomer: str,
    throughput: float | None,
    count: int,
    num_blocks: int,
    turnover: float,
    policy: Policy,
) -> Span:
    first = joining_span(others, num_blocks, count)
    if not others:
        return first
    speeds = sorted(holder.throughput for holder in others)
    own = Holder(newcomer, first, throughput or speeds[(len(speeds) - 1) // 2])
    # Where blocks have no server, nobody waits for the others to move along.
    around = [replace(holder, movable=False) for holder in others] if gaps(others, num_blocks) else others
    plan = make_plan([*around, own], num_blocks, turnover=turnover, newcomers={newcomer}, policy=policy)
    move = plan.of(newcomer)
    return first if move is None else move.target
