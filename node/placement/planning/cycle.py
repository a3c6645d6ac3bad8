"""Cycles of machines that together hold all blocks: what a token costs there, and how the blocks are best split.

A cycle visits each machine once; a route need not. Where ways are a metric the best route is a cycle. A machine that is
visited twice computes all its blocks at once, and the detour is saved. Real round trips are no metric, so the fastest
walk is looked for, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ....protocols.ids import Boundaries, Span
from ...errors import BadInput
from ...swarm.cost import Floats, Ints
from .label_search import TOLERANCE


@dataclass(frozen=True)
class Problem:
    """Machines that may serve a model of `num_blocks` blocks.

    `capacity` int [N] is how many blocks each could hold. `block_seconds` float [N] is what one block of a decode step
    takes there. `way` float [N, N] is the seconds that a token's hidden state needs from one to another. It need be
    neither symmetric nor a metric, and its diagonal is not used. With `home`, every cycle starts at that machine, which
    has no capacity: the client sits there. `boundaries` of the blocks; None: machines may part anywhere.

    Raises:
        BadInput: arrays that do not fit together; a time that is negative or no number.
    """

    capacity: Ints = field(repr=False)
    block_seconds: Floats = field(repr=False)
    way: Floats = field(repr=False)
    num_blocks: int
    home: int | None = None
    boundaries: Boundaries | None = None

    def __post_init__(self) -> None:
        size = len(self.capacity)
        if self.block_seconds.shape != (size,) or self.way.shape != (size, size):
            raise BadInput(f"{size} machines need {size} times per block, and {size} x {size} ways between them")
        for times in (self.block_seconds, self.way[~np.eye(size, dtype=bool)]):
            if not (np.isfinite(times).all() and (times >= 0).all()):
                raise BadInput("times per block and ways between machines must be numbers that are not negative")
        if self.num_blocks < 1 or (self.capacity < 0).any():
            raise BadInput("a model has at least one block, and a machine holds no less than none")
        if self.home is not None and not 0 <= self.home < size:
            raise BadInput(f"there is no machine number {self.home} to start at")
        if self.home is not None and self.capacity[self.home]:
            raise BadInput("the machine to start at holds no blocks; one that does stands beside it")

    def __len__(self) -> int:
        return len(self.capacity)


@dataclass(frozen=True)
class PlacedMachine:
    """A machine by its number, and the blocks that it serves, or computes on one visit of a route."""

    machine: int
    span: Span


@dataclass(frozen=True)
class Schedule:
    """Machines in the order in which a token passes them, each with the number of blocks that it computes.

    A `home` comes first and computes 0. `seconds` is the time per token. No cycle takes less than `bound` (one machine
    visited twice apart). So where they are equal the schedule is proved to be the best.
    """

    machines: tuple[int, ...]
    blocks: tuple[int, ...]
    seconds: float
    bound: float

    @property
    def proved(self) -> bool:
        return self.bound >= self.seconds


def split_blocks(problem: Problem, machines: Sequence[int]) -> tuple[int, ...]:
    """How many blocks each computes so that it takes the least time: at least one each, the rest to the fastest.

    Raises:
        BadInput: they cannot hold all blocks, or they are more than there are blocks.
    """
    taken = {machine: int(machine != problem.home) for machine in machines}
    left = problem.num_blocks - sum(taken.values())
    for machine in sorted(taken, key=lambda machine: (problem.block_seconds[machine], machine)):
        more = max(0, min(left, int(problem.capacity[machine]) - taken[machine]))
        taken[machine] += more
        left -= more
    if left or any(count > problem.capacity[machine] for machine, count in taken.items()):
        raise BadInput(
            f"{len(machines)} machines with room for {problem.capacity[list(machines)].sum()} blocks in all "
            f"cannot share {problem.num_blocks}"
        )
    return tuple(taken[machine] for machine in machines)


def cycle_seconds(problem: Problem, machines: Sequence[int], blocks: Sequence[int]) -> float:
    """Time per token: computing, and the ways from each machine to the next and from the last to the first."""
    computing = sum(problem.block_seconds[machine] * count for machine, count in zip(machines, blocks, strict=True))
    if len(machines) == 1:
        return float(computing)
    following = (*machines[1:], machines[0])
    return float(computing + sum(problem.way[one, other] for one, other in zip(machines, following, strict=True)))


def shortest_ways(way: Floats) -> Floats:
    """The shortest ways through any other machines; where they are shorter than `way`, routes may come back.

    A route costs no less than the cycle that visits each of its machines once, with these ways. So the best cycle with
    them bounds all routes.
    """
    shortest = way.copy()
    for via in range(len(way)):
        shortest = np.minimum(shortest, shortest[:, via, None] + shortest[None, via])
    np.fill_diagonal(shortest, 0.0)
    return np.where(shortest < way - TOLERANCE, shortest, way)


def spans_of(walk: tuple[PlacedMachine, ...]) -> dict[int, Span]:
    """What each machine of a walk has to hold."""
    spans: dict[int, Span] = {}
    for visit in walk:
        first = spans.get(visit.machine, visit.span)
        spans[visit.machine] = Span(first.start, visit.span.end)
    return spans
