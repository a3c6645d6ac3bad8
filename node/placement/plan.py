"""Which servers should move where: the same answer from the same view, whoever asks. Pure.

Petals (appendix D) lets each server guess where all others would go after it; here one plan is made for all. It weighs
what the swarm gains against what is reloaded: see docs/placement.md for what this reaches in Petals' own simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ...protocols.ids import Span
from .holder import Holder, swarm_throughput, upper_bound
from .order import better, in_order
from .search import Search, Terms
from .tiling import tiled


@dataclass(frozen=True)
class Policy:
    """When a move pays. All shares are of the throughput that no placement exceeds.

    `gain`: what a plan has to gain that reloads two thirds as many blocks as the model has, in a swarm of usual
    turnover; one that reloads fewer needs less in proportion, and one in a swarm that changes half as quickly half of
    that, since the gain lasts twice as long. `least_gain` is needed for anything at all, so that noise moves nobody.
    `evenness` weighs how far blocks are below `level`: those are the next to be the slowest.
    """

    gain: float = 0.2
    least_gain: float = 0.005
    evenness: float = 0.6
    level: float = 1.04


DEFAULT: Final = Policy()
_GAIN_FOR: Final = 2 / 3
_SAME: Final = 1.25
"""A plan stands while no server is so many times as fast or slow as it was: no two measurements are alike."""


@dataclass(frozen=True, order=True)
class Move:
    """A server goes from one span to another of the same length."""

    peer_id: str
    source: Span
    target: Span


@dataclass(frozen=True)
class Plan:
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

    def rest(self, holders: Sequence[Holder]) -> Plan | None:
        """What is left of the plan now that the servers are these; None if a new plan is due.

        The plan stands as long as the servers are those that it was made for, at about the throughput that they had,
        each where it was or, if the plan moves it, where the plan sends it. So a plan is carried out to its end, by
        everybody who made it, and half of a swap is not taken for a new situation. One that is done is no plan.
        """
        now = {holder.peer_id: holder for holder in holders}
        if len(now) != len(self.made_for):
            return None
        targets = {move.peer_id: move.target for move in self.moves}
        left = set()
        for peer_id, span, throughput in self.made_for:
            holder = now.get(peer_id)
            if holder is None or not throughput / _SAME < holder.throughput < throughput * _SAME:
                return None
            if holder.span == span and peer_id in targets:
                if not holder.movable:
                    return None
                left.add(peer_id)
            elif holder.span != targets.get(peer_id, span):
                return None
        if self.moves and not left:
            return None
        return replace(self, moves=tuple(move for move in self.moves if move.peer_id in left))


def make_plan(
    holders: Sequence[Holder],
    num_blocks: int,
    *,
    turnover: float = 1.0,
    newcomers: Collection[str] = (),
    policy: Policy = DEFAULT,
) -> Plan:
    """The moves that pay, together; none if none do.

    Blocks that nobody holds come before everything, then what the policy weighs. A plan never leaves more of them, nor
    less throughput, than there was, and its moves, one after the other, open no gap. `newcomers` have loaded nothing
    yet: where they go costs nothing, and they are given a place even if nobody else moves. `turnover` is 1 in a swarm
    that changes as usual. Servers of a high `toll` are moved last.
    """
    ordered = sorted(holders, key=lambda holder: holder.peer_id)
    if not any(holder.movable for holder in ordered):
        throughput = swarm_throughput(ordered, num_blocks)
        return Plan((), throughput, throughput)
    speeds = np.array([holder.throughput for holder in ordered], float)
    lengths = np.array([len(holder.span) for holder in ordered], np.intp)
    origin = np.array([holder.span.start for holder in ordered], np.intp)
    new = np.array([holder.peer_id in newcomers for holder in ordered])
    movable = np.flatnonzero([holder.movable for holder in ordered])
    scale = upper_bound(ordered, num_blocks) or float(speeds @ lengths) / num_blocks
    charge = policy.gain * turnover / (_GAIN_FOR * num_blocks)
    reloads = np.where(new, 0.0, lengths * np.array([holder.toll for holder in ordered], float))
    most = charge * float(reloads.sum()) + 1.0 + policy.evenness * policy.level**2 * num_blocks
    terms = Terms(scale, policy.level * scale, policy.evenness, charge, 1.0 + most)

    def search(rows: np.ndarray) -> Search:
        return Search(speeds, lengths, origin, reloads, rows, num_blocks, terms)

    everyone = search(movable)
    start = everyone.state(origin)
    rest = search(np.flatnonzero(new)).run(origin) if new.any() else start
    best = everyone.run(rest.starts, rest.throughput)
    if best.empty:
        best = min(best, everyone.run(tiled(origin, lengths, movable, num_blocks)), key=lambda state: state.cost)
    order, after = in_order(everyone, everyone.state(np.where(new, best.starts, origin)), best.starts)
    less = after.empty == rest.empty and after.throughput < rest.throughput * (1 - 1e-9)
    if less or not better(after, rest, by=policy.least_gain):
        order, after = [], rest
    moves = tuple(
        Move(ordered[index].peer_id, ordered[index].span, Span(int(at), int(at) + int(lengths[index])))
        for index in [*np.flatnonzero(new & (after.starts != origin)), *order]
        for at in [after.starts[index]]
    )
    made_for = tuple((holder.peer_id, holder.span, holder.throughput) for holder in ordered)
    return Plan(moves, start.throughput, after.throughput, start.empty - after.empty, made_for)


def carried_out(holders: Sequence[Holder], plan: Plan) -> list[Holder]:
    """The holders after all moves of a plan."""
    targets = {move.peer_id: move.target for move in plan.moves}
    return [replace(holder, span=targets.get(holder.peer_id, holder.span)) for holder in holders]
