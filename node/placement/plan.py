"""Which servers should move where: equal views give equal plans, whichever server computes them. Pure.

In Petals (appendix D) each server simulates the moves of all others after its own. Here one plan is made for all. It
weighs the swarm's gain against what is reloaded: docs/placement.md has the result in Petals' own simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ...protocols.ids import Boundaries, Span
from ..swarm.cost import Bools, Ints
from .observed import PlacedServer, describe_spans, gaps, swarm_throughput, upper_bound
from .search import CostTerms, ServerRows, SpanSearch, State


@dataclass(frozen=True)
class Policy:
    """What a server may hold, and when a move pays. All shares are of the throughput that no placement exceeds.

    `gain`: what a plan has to gain if it reloads two thirds as many blocks as the model has, at usual turnover. Fewer
    blocks need less in proportion; at half the turnover half is enough, since the gain lasts twice as long. Below
    `least_gain` nothing moves, so that noise has no effect. `evenness` weighs how far blocks are below `level`: those
    are the next to be the slowest. `boundaries` of the model's blocks, None: servers may part anywhere.
    """

    gain: float = 0.2
    least_gain: float = 0.005
    evenness: float = 0.6
    level: float = 1.04
    boundaries: Boundaries | None = None

    def starts(self, lengths: Ints, num_blocks: int) -> Bools | None:
        """Where spans of `lengths` int [R] may begin, bool [R, blocks]; None: everywhere."""
        if self.boundaries is None or not self.boundaries.undivided:
            return None
        parts = np.array([self.boundaries.may_part(block) for block in range(num_blocks + 1)])
        ends = np.minimum(np.arange(num_blocks) + lengths[:, None], num_blocks)
        return np.asarray(parts[:-1] & parts[ends])


DEFAULT: Final = Policy()


@dataclass(frozen=True)
class PlanConstants:
    """Which gains count, and which speeds are the same."""

    gain_for: float = 2 / 3
    same: float = 1.25
    """A plan stays valid while no server is faster or slower than it was by this factor: measurements vary."""
    many: int = 100
    """More moves are not compared one by one, which would take too long."""
    equal: float = 1e-9
    rounds: int = 4
    """Of placing every server anew where blocks are open and servers may not part anywhere."""
    notable: float = 1.005
    """Throughputs that differ by less than this factor are not told of."""


PLANNING: Final = PlanConstants()


@dataclass(frozen=True, order=True)
class Move:
    """A server goes from one span to another of the same length."""

    peer_id: str
    source: Span
    target: Span


@dataclass(frozen=True)
class PlacementPlan:
    """`moves` in the order in which they can be carried out; throughputs in decode steps a second before and after
    them; `closes` how many blocks that nobody holds have a server afterwards. `made_for` are all servers that the plan
    was made for, with the spans and throughputs that they had."""

    moves: tuple[Move, ...]
    before: float
    after: float
    closes: int = 0
    made_for: tuple[tuple[str, Span, float], ...] = field(default=(), repr=False)

    def of(self, peer_id: str) -> Move | None:
        return next((move for move in self.moves if move.peer_id == peer_id), None)

    def rest(self, servers: Sequence[PlacedServer]) -> PlacementPlan | None:
        """What is left of the plan now that the servers are these; None if a new plan is due.

        The plan stays valid while the servers are those that it was made for, about as fast as then. Each may be at its
        old span or at the plan's target. So every server that made the plan completes it, and half of a swap causes no
        new plan. A completed plan is None.
        """
        now = {server.peer_id: server for server in servers}
        if len(now) != len(self.made_for):
            return None
        targets = {move.peer_id: move.target for move in self.moves}
        left = set()
        for peer_id, span, throughput in self.made_for:
            server = now.get(peer_id)
            if server is None or not throughput / PLANNING.same < server.throughput < throughput * PLANNING.same:
                return None
            if server.span == span and peer_id in targets:
                if not server.movable:
                    return None
                left.add(peer_id)
            elif server.span != targets.get(peer_id, span):
                return None
        if self.moves and not left:
            return None
        return replace(self, moves=tuple(move for move in self.moves if move.peer_id in left))


def make_plan(
    servers: Sequence[PlacedServer],
    num_blocks: int,
    *,
    turnover: float = 1.0,
    newcomers: Collection[str] = (),
    policy: Policy = DEFAULT,
) -> PlacementPlan:
    """The moves that pay, together; none if none do.

    Gaps (blocks that nobody holds) come first, then what the policy weighs. A plan never leaves more gaps nor less
    throughput than before. Its moves, one after the other, open no gap. `newcomers` have loaded nothing yet: their
    moves cost nothing, and they get a span even if no other server moves. `turnover` is 1 in a swarm that changes as
    usual. Servers of a high `reload_weight` are moved last.
    """
    ordered = sorted(servers, key=lambda server: server.peer_id)
    if not any(server.movable for server in ordered):
        throughput = swarm_throughput(ordered, num_blocks)
        return PlacementPlan((), throughput, throughput)
    speeds = np.array([server.throughput for server in ordered], float)
    lengths = np.array([len(server.span) for server in ordered], np.intp)
    origin = np.array([server.span.start for server in ordered], np.intp)
    new = np.array([server.peer_id in newcomers for server in ordered])
    movable = np.flatnonzero([server.movable for server in ordered])
    scale = upper_bound(ordered, num_blocks) or float(speeds @ lengths) / num_blocks
    charge = policy.gain * turnover / (PLANNING.gain_for * num_blocks)
    reloads = np.where(new, 0.0, lengths * np.array([server.reload_weight for server in ordered], float))
    most = charge * float(reloads.sum()) + 1.0 + policy.evenness * policy.level**2 * num_blocks
    terms = CostTerms(scale, policy.level * scale, policy.evenness, charge, 1.0 + most)
    rows = ServerRows(np.arange(len(ordered)), lengths, speeds, policy.starts(lengths, num_blocks))
    everyone = SpanSearch(rows, origin, reloads, movable, num_blocks, terms)
    start = everyone.state(origin)
    rest = start
    if new.any():
        rest = SpanSearch(rows, origin, reloads, np.flatnonzero(new), num_blocks, terms).run(start)
    best = everyone.run(rest, rest.throughput)
    if best.empty:
        if rows.allowed is None:
            filled = everyone.run(everyone.state(tiled(origin, lengths, movable, num_blocks)))
        else:
            filled = everyone.settle(best, movable, PLANNING.rounds)
        best = min(best, filled, key=lambda state: state.cost)
    order, after = in_order(everyone, everyone.state(np.where(new, best.starts, origin)), best.starts)
    less = after.empty == rest.empty and after.throughput < rest.throughput * (1 - 1e-9)
    if less or not better(after, rest, by=policy.least_gain):
        order, after = [], rest
    moves = tuple(
        Move(ordered[index].peer_id, ordered[index].span, Span(int(at), int(at) + int(lengths[index])))
        for index in [*np.flatnonzero(new & (after.starts != origin)), *order]
        for at in [after.starts[index]]
    )
    made_for = tuple((server.peer_id, server.span, server.throughput) for server in ordered)
    return PlacementPlan(moves, start.throughput, after.throughput, start.empty - after.empty, made_for)


def in_order(search: SpanSearch, start: State, target: Ints) -> tuple[list[int], State]:
    """The servers that go from `start` to `target` (int [N]) one by one, and the state when they have.

    Each time the move is taken that leaves the least cost. It is one of a server that holds no block alone (of any,
    while a gap is open). Moves at the end that raise the cost are dropped, as are servers that cannot leave. The order
    can be carried out as it is. Its throughput is not below that of `start` unless it closes gaps.
    """
    starts = start.starts.copy()
    waiting = np.flatnonzero(starts != target)
    weighed = len(waiting) <= PLANNING.many
    order: list[int] = []
    best, length = start, 0
    while len(able := waiting[search.may_leave(starts, waiting)]):
        chosen = able[search.costs_after(starts, able, target[able]).argmin()] if weighed else able[0]
        starts[chosen] = target[chosen]
        order.append(int(chosen))
        waiting = waiting[waiting != chosen]
        found = search.state(starts.copy())
        worse = found.empty == start.empty and found.throughput < start.throughput * (1 - PLANNING.equal)
        if not worse and better(found, best):
            best, length = found, len(order)
    return order[:length], best


def better(one: State, other: State, by: float = 0.0) -> bool:
    """Whether one placement leaves fewer gaps than another, or as many and costs less, by more than `by`."""
    if one.empty != other.empty:
        return one.empty < other.empty
    return one.cost < other.cost - by


def tiled(starts: Ints, lengths: Ints, movable: Ints, num_blocks: int) -> Ints:
    """Starts int [N] with few gaps: the movable servers, from the left, fill what the others leave open.

    If nobody is fixed and there are enough blocks in all, no gap is left.
    """
    held = np.zeros(num_blocks, bool)
    fixed = np.setdiff1d(np.arange(len(starts)), movable)
    for index in fixed:
        held[starts[index] : starts[index] + lengths[index]] = True
    found = starts.copy()
    waiting = sorted(movable.tolist(), key=lambda index: (starts[index], index))
    while waiting and not held.all():
        first = int(np.argmin(held))
        open_run = int(np.argmax(held[first:])) if held[first:].any() else num_blocks - first
        # Of those that fit into the opening whole the first, else the smallest that closes it.
        fitting = [index for index in waiting if lengths[index] <= open_run]
        chosen = fitting[0] if fitting else min(waiting, key=lambda index: lengths[index])
        waiting.remove(chosen)
        found[chosen] = min(first, num_blocks - int(lengths[chosen]))
        held[found[chosen] : found[chosen] + lengths[chosen]] = True
    return found


def may_leave(move: Move, serving: Sequence[PlacedServer], num_blocks: int) -> bool:
    """Whether the model still has a server for every block while this one moves, or has a gap already.

    `serving` are the servers that take sessions now, with their spans. The moving one is among them or not. A server
    that has announced its next span does not count.
    """
    others = [server for server in serving if server.peer_id != move.peer_id]
    # With a gap no chain works, and the gap closes soonest if all servers of the plan move at once.
    open_now = gaps([*others, PlacedServer(move.peer_id, move.source, 1.0)], num_blocks)
    return bool(open_now) or not gaps(others, num_blocks)


def why_move(plan: PlacementPlan, servers: Sequence[PlacedServer], num_blocks: int) -> str:
    """What `plan`, made for `servers`, is for."""
    missing = gaps(servers, num_blocks)
    if plan.closes > 0 and missing:  # else others of the plan have closed it already
        return f"nobody holds {describe_spans(missing)}"
    if plan.after > plan.before * PLANNING.notable:
        most = upper_bound(servers, num_blocks)
        return f"the swarm then does {plan.after:.3g} steps/s instead of {plan.before:.3g}, of {most:.3g} at most"
    return f"fewer blocks are then near the least, {plan.after:.3g} steps/s"
