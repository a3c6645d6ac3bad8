"""Which servers should move where: the same answer from the same view, whoever asks. Pure.

Petals (appendix D) lets each server guess where all others would go after it; here one plan is made for all. It weighs
what the swarm gains against what is reloaded: see docs/placement.md for what this reaches in Petals' own simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...protocols.ids import Span
from .holder import Holder, swarm_throughput, upper_bound
from .search import Search, State, Terms
from .tiling import tiled


@dataclass(frozen=True)
class Policy:
    """When a move pays. All shares are of the throughput that no placement exceeds.

    `gain`: what a plan has to gain that reloads as many blocks as the model has, in a swarm of usual turnover; one
    that reloads fewer needs less in proportion, and one in a swarm that changes half as quickly half of that, since the
    gain lasts twice as long. `least_gain` is needed for anything at all, so that noise moves nobody. `evenness` weighs
    how far blocks are below `level`: those are the next to be the slowest.
    """

    gain: float = 0.2
    least_gain: float = 0.005
    evenness: float = 0.4
    level: float = 1.04


DEFAULT: Final = Policy()


@dataclass(frozen=True, order=True)
class Move:
    """A server goes from one span to another of the same length."""

    peer_id: str
    source: Span
    target: Span


@dataclass(frozen=True)
class Plan:
    """`moves` by peer id; throughputs in decode steps a second before and after them; `closes` how many blocks that
    nobody holds have a server afterwards."""

    moves: tuple[Move, ...]
    before: float
    after: float
    closes: int = 0

    def of(self, peer_id: str) -> Move | None:
        return next((move for move in self.moves if move.peer_id == peer_id), None)


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
    less throughput, than there was. `newcomers` have loaded nothing yet: where they go costs nothing, and they are
    given a place even if nobody else moves. `turnover` is 1 in a swarm that changes as usual. Servers of a high `toll`
    are moved last.
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
    charge = policy.gain * turnover / num_blocks
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
    chosen = best if _pays(rest, best, policy) else rest
    moves = tuple(
        Move(holder.peer_id, holder.span, Span(int(at), int(at) + len(holder.span)))
        for holder, at in zip(ordered, chosen.starts, strict=True)
        if at != holder.span.start
    )
    return Plan(moves, start.throughput, chosen.throughput, start.empty - chosen.empty)


def _pays(before: State, after: State, policy: Policy) -> bool:
    if after.empty != before.empty:
        return after.empty < before.empty
    return after.cost < before.cost - policy.least_gain


def carried_out(holders: Sequence[Holder], plan: Plan) -> list[Holder]:
    """The holders after all moves of a plan."""
    targets = {move.peer_id: move.target for move in plan.moves}
    return [replace(holder, span=targets.get(holder.peer_id, holder.span)) for holder in holders]
