"""The machines, and the split of the blocks over them, that take the least time per token.

The problem is that of Ren, "Task Scheduling for Decentralized LLM Serving in Heterogeneous Networks" (UC Berkeley,
EECS-2024-111, section 3). The answer here is an optimum where there is time to prove it, and it seldom takes much.

Every machine is the root of the cycles of which it is the fastest. A first cycle and a first bound (heuristics.py)
leave few roots; a tighter bound (relaxation.py) leaves fewer, and guides a search for better cycles (label_search.py),
each of which is polished by local search. The bound is sharpened and the search widened by turns, until no root is left
or the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from ...errors import SwarmError
from ...swarm.cost import Bools, Ints
from .cycle import Problem, Schedule, cycle_seconds, split_blocks
from .heuristics import first_bound, first_cycle, improved, machines_of, roots_of
from .label_search import MAX_MACHINES, TOLERANCE, Cycle, search
from .relaxation import Bound, Machines, Roots, bound

_WIDTHS: Final = (400, 3_200, 25_600, 204_800)
_PAIRS_AT_ONCE: Final = 12_000
"""Roots times machines squared that are bounded side by side: below this, most of the time is not arithmetic."""
_MANY_ROOTS: Final = 4
"""With fewer than these, even a wide search takes less than sharpening the bound before."""
_CENTRES: Final = 3
_SHORTER: Final = 0.9
"""How much shorter every step is of the subgradient method than the one before."""
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


def _search(machines: Machines, home: int | None, is_over: Callable[[], bool]) -> tuple[Cycle, float]:
    """The best cycle that was found, and what none goes below."""

    def searched(group: Group, width: int) -> Cycle:
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
    promising: Ints = order[np.sort(np.array(list(wanted)[:MAX_MACHINES]))]
    return promising


def _home(problem: Problem, order: Ints) -> int | None:
    """Where the home stands in `order`."""
    return None if problem.home is None else int(np.flatnonzero(order == problem.home)[0])


class Group:
    """The roots of which it is not known yet that no better cycle goes through them, with the best bound of each."""

    def __init__(self, machines: Machines, roots: Roots) -> None:
        self._machines = machines
        self._best = self._latest = bound(machines, roots)
        self._step = 1.0
        self._done = False

    def __len__(self) -> int:
        return len(self._best.roots)

    @property
    def least(self) -> float:
        """Seconds; no cycle through these roots takes less."""
        return float(self._best.least.min())

    def is_open(self, found: Cycle) -> bool:
        """Whether there may be a better cycle than `found`. Forgets the roots where there is none."""
        kept = np.flatnonzero(self._best.least < found.seconds - TOLERANCE)
        if len(kept) < len(self._best.roots):
            self._best, self._latest = _chosen(self._best, kept), _chosen(self._latest, kept)
        return len(self) > 0 and not self._done

    def search(self, found: Cycle, width: int, is_over: Callable[[], bool]) -> Cycle:
        """The best cycle through one of these roots, or `found`; see `labels.search`."""
        found, self._done = search(self._machines, self._best, found, width, is_over)
        return found

    def sharpen(self, found: Cycle) -> None:
        """Changes the prices (a step of the subgradient method, of Polyak's length) and keeps what bounds better."""
        roots = self._latest.roots
        excess = np.where(roots.allowed, self._latest.visits - 1.0, 0.0)
        excess[(roots.prices <= 0) & (excess < 0)] = 0.0
        gap = np.maximum(found.seconds - self._latest.least, 0.0)
        length = self._step * gap / np.maximum((excess**2).sum(1), 1.0)
        prices = np.maximum(roots.prices + length[:, None] * excess, 0.0)
        self._step *= _SHORTER
        self._latest = bound(self._machines, replace(roots, prices=prices))
        self._best = _merged(self._best, self._latest, self._latest.least > self._best.least)


def _chosen(bound: Bound, which: Ints) -> Bound:
    return Bound(
        bound.roots.chosen(which),
        bound.least[which],
        bound.visits[which],
        bound.on[:, :, which],
        bound.following[:, :, which],
        bound.otherwise[:, :, which],
    )


def _merged(old: Bound, new: Bound, better: Bools) -> Bound:
    """The bounds of the roots from `new` where it is `better`, bool [R]."""
    if better.all():
        return new
    row = table = better[:, None]
    return Bound(
        replace(old.roots, prices=np.where(row, new.roots.prices, old.roots.prices)),
        np.where(better, new.least, old.least),
        np.where(row, new.visits, old.visits),
        np.where(table, new.on, old.on),
        np.where(table, new.following, old.following),
        np.where(table, new.otherwise, old.otherwise),
    )
