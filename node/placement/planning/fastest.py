"""The machines, and the split of the blocks over them, that take the least time per token.

The problem is that of Ren, "Task Scheduling for Decentralized LLM Serving in Heterogeneous Networks" (UC Berkeley,
EECS-2024-111, section 3). The answer here is an optimum where there is time to prove it, and it seldom takes much.

Every machine is the root of the cycles of which it is the fastest. A first cycle and a first bound (opening.py) leave
few roots; a tighter bound (relaxation.py) leaves fewer, and guides a search for better cycles (labels.py), each of
which is polished (local.py). The bound is sharpened and the search widened by turns, until no root is left or the time
is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from ...errors import SwarmError
from .cycle import Ints, Problem, Schedule, cycle_seconds, split_blocks
from .group import Group
from .labels import MAX_MACHINES, TOLERANCE, Found
from .local import improved
from .opening import first_bound, first_cycle, machines_of, roots_of
from .relaxation import Machines

_WIDTHS: Final = (400, 3_200, 25_600, 204_800)
_PAIRS_AT_ONCE: Final = 12_000
"""Roots times machines squared that are bounded side by side: below this, most of the time is not arithmetic."""
_MANY_ROOTS: Final = 4
"""With fewer than these, even a wide search takes less than sharpening the bound before."""
_CENTRES: Final = 3
_SHARE: Final = 0.9
"""Part of the time after which no further step begins: the last one takes some, too."""


def fastest_cycle(problem: Problem, *, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> Schedule:
    """The schedule of least time per token that is found within about `seconds` of `clock`.

    Equal problems have equal schedules if they are proved; else it depends on how far the time went. Of more than 64
    machines only the most promising 64 are looked at, and nothing is proved.

    Raises:
        SwarmError: all machines together cannot hold the model.
    """
    deadline = clock() + _SHARE * seconds
    room = int(problem.capacity.sum())
    if room < problem.num_blocks:
        raise SwarmError(
            f"the machines together hold {room} of {problem.num_blocks} blocks: add machines or memory, or take a "
            "smaller model"
        )
    order = np.lexsort((-problem.capacity, problem.block_seconds))
    if len(order) > MAX_MACHINES:
        order = _promising(problem, order)
    best, least = _search(machines_of(problem, order), _home(problem, order), lambda: clock() > deadline)
    chosen = tuple(int(order[machine]) for machine in best.machines)
    blocks = split_blocks(problem, chosen)
    spent = cycle_seconds(problem, chosen, blocks)
    if len(order) < len(problem):
        least = 0.0
    return Schedule(chosen, blocks, spent, spent if least >= best.seconds - TOLERANCE else least)


def _search(machines: Machines, home: int | None, is_over: Callable[[], bool]) -> tuple[Found, float]:
    """The best cycle that was found, and what none goes below."""

    def searched(group: Group, width: int) -> Found:
        found = group.search(best, width, is_over)
        return found if found is best else improved(machines, found, home)

    roots = roots_of(machines, home)
    best = improved(machines, first_cycle(machines, roots)[0], home)
    least = first_bound(machines, roots)
    promising = np.argsort(least, kind="stable")
    at_once = max(1, _PAIRS_AT_ONCE // len(machines.capacity) ** 2)
    groups: list[Group] = []
    skipped = np.inf
    for first in range(0, len(promising), at_once):
        chosen = promising[first : first + at_once]
        chosen = chosen[least[chosen] < best.seconds - TOLERANCE]
        if not chosen.size:
            break
        if groups and is_over():
            skipped = float(least[chosen].min())
            break
        group = Group(machines, roots.chosen(chosen))
        groups.append(group)
        if group.is_open(best) and len(group) >= _MANY_ROOTS:
            group.sharpen(best)
        if group.is_open(best):
            best = searched(group, _WIDTHS[0])
    for width in _WIDTHS[1:]:
        for group in groups:
            if group.is_open(best) and not is_over():
                group.sharpen(best)
                if group.is_open(best):
                    best = searched(group, width)
    return best, min([best.seconds, skipped, *(group.least for group in groups if group.is_open(best))])


def _promising(problem: Problem, order: Ints) -> Ints:
    """`MAX_MACHINES` of the machines in `order`: the nearest, for their speed, to where the first cycles are best."""
    machines = machines_of(problem, order)
    roots = roots_of(machines, _home(problem, order))
    best, ranking = first_cycle(machines, roots)
    centres = roots.root[ranking[:_CENTRES]]
    there_and_back = machines.way[centres] + machines.way.T[centres]
    score = there_and_back / (2 * np.maximum(machines.capacity, 1)) + machines.seconds
    score[:, machines.capacity == 0] = np.inf
    nearest = np.argsort(score, axis=1, kind="stable").T.ravel()  # by turns around each centre
    wanted = dict.fromkeys([*best.machines, *centres.tolist(), *nearest.tolist()])
    return order[np.sort(np.array(list(wanted)[:MAX_MACHINES]))]


def _home(problem: Problem, order: Ints) -> int | None:
    """Where the home stands in `order`."""
    return None if problem.home is None else int(np.flatnonzero(order == problem.home)[0])
