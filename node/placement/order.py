"""In which order the moves of a plan are carried out, so that none of them opens a gap. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from .holder import Ints
from .search import Search, State

_MANY: Final = 100
"""More moves are taken as they come, because weighing each against each takes too long."""
_EQUAL: Final = 1e-9


def in_order(search: Search, start: State, target: Ints) -> tuple[list[int], State]:
    """The servers that go from `start` to `target` (int [N]), one after the other, and the state when they have.

    Next is always the one after which the placement costs least, among those that are not the only holder of a block
    (with a gap open, among all). Those at the end that make it dearer stay, as do those that cannot leave: what is
    returned can be carried out as it is, and its throughput is not below that of `start` unless it closes gaps.
    """
    starts = start.starts.copy()
    waiting = np.flatnonzero(starts != target)
    weighed = len(waiting) <= _MANY
    order: list[int] = []
    best, length = start, 0
    while len(able := waiting[search.may_leave(starts, waiting)]):
        chosen = able[search.costs_after(starts, able, target[able]).argmin()] if weighed else able[0]
        starts[chosen] = target[chosen]
        order.append(int(chosen))
        waiting = waiting[waiting != chosen]
        found = search.state(starts.copy())
        worse = found.empty == start.empty and found.throughput < start.throughput * (1 - _EQUAL)
        if not worse and better(found, best):
            best, length = found, len(order)
    return order[:length], best


def better(one: State, other: State, by: float = 0.0) -> bool:
    """Whether one placement leaves fewer gaps than another, or as many and costs less, by more than `by`."""
    if one.empty != other.empty:
        return one.empty < other.empty
    return one.cost < other.cost - by
