"""Where a newcomer goes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...protocols.ids import Span
from .holder import Holder, gaps
from .petals import joining_span
from .plan import DEFAULT, Policy, make_plan


def span_for_newcomer(
    holders: Sequence[Holder],
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
    others = [holder for holder in holders if holder.peer_id != newcomer]
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
