"""The machines, and the split of the blocks over them, that take the least time per token.

The problem is that of Ren, "Task Scheduling for Decentralized LLM Serving in Heterogeneous Networks" (UC Berkeley,
EECS-2024-111, section 3). The answer here is an optimum where there is time to prove it, and it seldom takes much.

Every machine is the root of the cycles of which it is the fastest. A first cycle and the bound of each root leave few
roots. Through those that are left, the search for cycles (label_search.py) is widened until none may be better. It ends
with its time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...errors import SwarmError
from ...swarm.cost import Ints
from .cycle import Problem, Schedule, cycle_seconds, split_blocks
from .label_search import MAX_MACHINES, MAX_RATES, TOLERANCE, Bound, Cycle, Machines, Roots, bound, search, split

_WIDTHS: Final = (25, 400, 6_400, 204_800)


@dataclass(frozen=True)
class CycleEffort:
    """How much of the search for the fastest chain is done at once."""

    pairs_at_once: int = 12_000
    """Roots times machines squared that are bounded side by side: below this, most of the time is not arithmetic."""
    centres: int = 3
    share: float = 0.9
    """Part of the time after which no further step begins: the last one takes some, too."""


CYCLES: Final = CycleEffort()


def machines_of(problem: Problem, order: Ints) -> Machines:
    """The machines `order` of a problem, which must be in order of speed."""
    seconds = problem.block_seconds[order]
    rates = np.unique(seconds)
    if len(rates) > MAX_RATES:
        rates = rates[np.linspace(0, len(rates) - 1, MAX_RATES + 1).round().astype(int)[1:]]
    way = problem.way[np.ix_(order, order)]
    np.fill_diagonal(way, 0.0)
    capacity = np.minimum(problem.capacity[order], problem.num_blocks)
    return Machines(capacity, seconds, way, problem.num_blocks, rates, np.searchsorted(rates, seconds))


def roots_of(machines: Machines, home: int | None) -> Roots:
    """Every machine as a root, with those behind it in the order: so each cycle has one root. Or the home alone."""
    names = np.arange(len(machines.capacity))
    holds = machines.capacity > 0
    root = names[holds] if home is None else np.array([home])
    allowed = holds & (names > root[:, None] if home is None else names[None, :] != home)
    return Roots(root, allowed)


def first_cycle(machines: Machines, roots: Roots) -> tuple[Cycle, Ints]:
    """The best of one cycle from each root. It always goes on to the machine that costs least per block, the way there
    and back included; and the roots [R] in order of their cycles."""
    seconds = np.full(len(roots), np.inf)
    best = Cycle((), np.inf)
    number, free = np.arange(len(roots)), roots.allowed
    path, ways, room = roots.root[:, None], np.zeros(len(roots)), machines.capacity[roots.root]
    while len(number):
        here, root = path[:, -1], path[:, 0]
        full = np.flatnonzero(room >= machines.blocks)
        if full.size:
            passed = np.zeros(free[full].shape, np.intp)
            np.put_along_axis(passed, path[full], 1, axis=1)
            blocks, left = split(machines, passed)
            whole = ways[full] + machines.way[here[full], root[full]] + blocks @ machines.seconds
            whole[left < 0] = np.inf
            seconds[number[full]] = whole
            at = int(whole.argmin())
            if whole[at] < best.seconds - TOLERANCE:
                best = Cycle(tuple(path[full[at]].tolist()), float(whole[at]))
        on = np.flatnonzero((room < machines.blocks) & free.any(1))
        number, free, path = number[on], free[on], path[on]
        ways, room, here, root = ways[on], room[on], here[on], root[on]
        taken = np.maximum(np.minimum(machines.capacity, (machines.blocks - room)[:, None]), 1)
        detour = machines.way[here] + machines.way.T[root] - machines.way[here, root][:, None]
        following = np.where(free, detour / taken + machines.seconds, np.inf).argmin(1)
        free[np.arange(len(on)), following] = False
        ways, room = ways + machines.way[here, following], room + machines.capacity[following]
        path = np.concatenate([path, following[:, None]], axis=1)
    return best, np.argsort(seconds, kind="stable")


def fastest_cycle(problem: Problem, *, seconds: float = 1.0) -> Schedule:
    """The schedule of least time per token that is found within about `seconds`.

    Equal problems have equal schedules if they are proved; else it depends on how far the time went. Of more than 64
    machines only the most promising 64 are looked at, and nothing is proved.

    Raises:
        SwarmError: all machines together cannot hold the model.
    """
    until = time.monotonic() + CYCLES.share * seconds
    room = int(problem.capacity.sum())
    if room < problem.num_blocks:
        raise SwarmError(
            f"the machines together hold {room} of {problem.num_blocks} blocks: add machines or memory, or take a "
            "smaller model"
        )
    order = np.lexsort((-problem.capacity, problem.block_seconds))
    if len(order) > MAX_MACHINES:
        order = _promising(problem, order)
    best, least = _search(machines_of(problem, order), _home(problem, order), until)
    chosen = tuple(int(order[machine]) for machine in best.machines)
    blocks = split_blocks(problem, chosen)
    spent = cycle_seconds(problem, chosen, blocks)
    if len(order) < len(problem):
        least = 0.0
    return Schedule(chosen, blocks, spent, spent if least >= best.seconds - TOLERANCE else least)


def _search(machines: Machines, home: int | None, until: float) -> tuple[Cycle, float]:
    """The best cycle that was found, and what none goes below."""
    roots = roots_of(machines, home)
    best, promising = first_cycle(machines, roots)
    at_once = max(1, CYCLES.pairs_at_once // len(machines.capacity) ** 2)
    open_bounds: list[Bound] = []
    least = np.inf
    for first in range(0, len(promising), at_once):
        if first and time.monotonic() > until:
            least = 0.0
            break
        of_roots = bound(machines, roots.chosen(promising[first : first + at_once]))
        best, whole = search(machines, of_roots, best, _WIDTHS[0], until)
        open_bounds += [] if whole else [of_roots]
    for width in _WIDTHS[1:]:
        narrow, open_bounds = open_bounds, []
        for of_roots in narrow:
            best, whole = search(machines, of_roots, best, width, until)
            open_bounds += [] if whole else [of_roots]
    return best, min([best.seconds, least, *(float(of_roots.least.min()) for of_roots in open_bounds)])


def _promising(problem: Problem, order: Ints) -> Ints:
    """`MAX_MACHINES` of the machines in `order`: the nearest, for their speed, to where the first cycles are best."""
    machines = machines_of(problem, order)
    roots = roots_of(machines, _home(problem, order))
    best, ranking = first_cycle(machines, roots)
    centres = roots.root[ranking[: CYCLES.centres]]
    there_and_back = machines.way[centres] + machines.way.T[centres]
    score = there_and_back / (2 * np.maximum(machines.capacity, 1)) + machines.seconds
    score[:, machines.capacity == 0] = np.inf
    nearest = np.argsort(score, axis=1, kind="stable").T.ravel()  # by turns around each centre
    wanted = dict.fromkeys([*best.machines, *centres.tolist(), *nearest.tolist()])
    promising: Ints = order[np.sort(np.array(list(wanted)[:MAX_MACHINES]))]
    return promising


def _home(problem: Problem, order: Ints) -> int | None:
    """Where the home stands in `order`."""
    return None if problem.home is None else int(np.flatnonzero(order == problem.home)[0])
