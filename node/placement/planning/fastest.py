"""The machines, and the split of the blocks over them, that take the least time per token.

The problem is that of Ren, "Task Scheduling for Decentralized LLM Serving in Heterogeneous Networks" (UC Berkeley,
EECS-2024-111, section 3). The answer here is an optimum where there is time to prove it, and it seldom takes much.

Every machine is the root of the cycles of which it is the fastest. A first cycle and a first bound leave few
roots. A tighter bound (relaxation.py) leaves fewer, and guides a search for better cycles (label_search.py),
each of which is polished by local search. The bound is sharpened and the search widened by turns, until no root is left
or the time is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...errors import SwarmError
from ...swarm.cost import Bools, Floats, Ints
from .cycle import Problem, Schedule, cycle_seconds, split_blocks
from .label_search import MAX_MACHINES, TOLERANCE, Cycle, search, split
from .relaxation import MAX_RATES, Bound, Machines, Roots, bound

_WIDTHS: Final = (400, 3_200, 25_600, 204_800)


@dataclass(frozen=True)
class CycleEffort:
    """How much of the search for the fastest chain is done at once."""

    pairs_at_once: int = 12_000
    """Roots times machines squared that are bounded side by side: below this, most of the time is not arithmetic."""
    many_roots: int = 4
    """With fewer than these, even a wide search takes less than sharpening the bound before."""
    centres: int = 3
    shorter: float = 0.9
    """How much shorter every step is of the subgradient method than the one before."""
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
    return Roots(root, allowed, np.zeros(allowed.shape))


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


def first_bound(machines: Machines, roots: Roots) -> Floats:
    """[R]: what no cycle of a root goes below. A knapsack: every machine at most once, and its shortest ways in and out
    by halves, to whichever machines."""
    blocks, size = machines.blocks, len(machines.capacity)
    number = np.arange(len(roots))
    member = roots.allowed.copy()
    member[number, roots.root] = True
    way = machines.way + np.diag(np.full(size, np.inf))
    into = np.where(member[:, :, None], way, np.inf).min(1)
    out_of = np.where(member[:, None, :], way, np.inf).min(2)
    ways = np.where(roots.allowed, into + out_of, np.inf) / 2

    most = int(machines.capacity.max())
    least = np.full((len(roots), most + blocks + 1), np.inf)  # `most` columns of nothing, then for 0, 1 .. blocks
    least[:, most] = 0.0
    for machine in np.flatnonzero(roots.allowed.any(0)):
        room = int(machines.capacity[machine])
        computing = np.arange(room, 0, -1) * machines.seconds[machine]
        before = sliding_window_view(least, room, axis=1)[:, most - room : most - room + blocks + 1]
        spent = (before + computing).min(2) + ways[:, machine, None]
        np.minimum(least[:, most:], spent, out=least[:, most:])

    found = np.empty(len(roots))
    for index, root in enumerate(roots.root):
        own = np.arange(machines.capacity[root] + 1)
        rest = least[index, most + blocks - own] + own * machines.seconds[root]
        rest[own < blocks] += (into[index, root] + out_of[index, root]) / 2
        found[index] = rest.min()
    return found


def improved(machines: Machines, found: Cycle, home: int | None) -> Cycle:
    """`found`, or a cheaper cycle: machines are left out, added, replaced, moved or swapped, or a part is turned. A
    home stays first."""
    fixed = 0 if home is None else 1
    holds = np.flatnonzero(machines.capacity > 0)
    while True:
        path = np.array(found.machines)
        others = np.setdiff1d(holds, path)
        better = found
        for template in _templates(len(path), fixed):
            # A template's -1 stands for each of the others.
            if (template < 0).any():
                paths = np.append(path, -1)[np.repeat(template, len(others), axis=0)]
                paths = np.where(paths < 0, np.tile(others, len(template))[:, None], paths)
            else:
                paths = path[template]
            if not len(paths):
                continue
            seconds = cycles_seconds(machines, paths)
            least = int(seconds.argmin())
            if seconds[least] < better.seconds - TOLERANCE:
                better = Cycle(tuple(paths[least].tolist()), float(seconds[least]))
        if better is found:
            return found
        found = better


def cycles_seconds(machines: Machines, paths: Ints) -> Floats:
    """Time per token of cycles [P, length] with their blocks split as well as can be; infinite if that cannot be."""
    passed = np.zeros((len(paths), len(machines.capacity)), np.intp)
    np.put_along_axis(passed, paths, 1, axis=1)
    blocks, left = split(machines, passed)
    ways = machines.way[paths, np.roll(paths, -1, axis=1)].sum(1)
    return np.where(left == 0, ways + blocks @ machines.seconds, np.inf)


@lru_cache(maxsize=256)
def _templates(length: int, fixed: int) -> tuple[Ints, ...]:
    """All changes of a cycle of `length` machines as the positions of which the new one consists, by length [.., new
    length]; -1 is a machine from elsewhere. The first `fixed` machines stay where they are."""
    path = list(range(length))
    free = path[fixed:]
    shorter = [path[:at] + path[at + 1 :] for at in free if length - fixed > 1]
    same = [path]
    for one in free:
        for other in free:
            if one < other:
                same.append([*path[:one], other, *path[one + 1 : other], one, *path[other + 1 :]])
                same.append(path[:one] + path[one : other + 1][::-1] + path[other + 1 :])
            if one != other:
                moved = path[:one] + path[one + 1 :]
                same.append([*moved[:other], one, *moved[other:]])
    replaced = [[*path[:at], -1, *path[at + 1 :]] for at in free]
    longer = [[*path[:at], -1, *path[at:]] for at in range(max(fixed, 1), length + 1)]
    return tuple(
        np.array(templates, np.intp).reshape(len(templates), -1)
        for templates in (shorter, same, replaced, longer)
        if templates
    )


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
    best = improved(machines, first_cycle(machines, roots)[0], home)
    least = first_bound(machines, roots)
    promising = np.argsort(least, kind="stable")
    at_once = max(1, CYCLES.pairs_at_once // len(machines.capacity) ** 2)
    groups: list[Group] = []
    skipped = np.inf
    for first in range(0, len(promising), at_once):
        chosen = promising[first : first + at_once]
        chosen = chosen[least[chosen] < best.seconds - TOLERANCE]
        if not chosen.size:
            break
        if groups and time.monotonic() > until:
            skipped = float(least[chosen].min())
            break
        group = Group(machines, roots.chosen(chosen))
        groups.append(group)
        if group.is_open(best) and len(group) >= CYCLES.many_roots:
            group.sharpen(best)
        if group.is_open(best):
            best = _searched(group, best, _WIDTHS[0], home, until)
    for width in _WIDTHS[1:]:
        for group in groups:
            if group.is_open(best) and time.monotonic() <= until:
                group.sharpen(best)
                if group.is_open(best):
                    best = _searched(group, best, width, home, until)
    return best, min([best.seconds, skipped, *(group.least for group in groups if group.is_open(best))])


def _searched(group: Group, best: Cycle, width: int, home: int | None, until: float) -> Cycle:
    """The best cycle that a group has, improved, where it is better than `best`."""
    found = group.search(best, width, until)
    return found if found is best else improved(group.machines, found, home)


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


class Group:
    """The roots through which a better cycle may still go, with the best bound of each."""

    def __init__(self, machines: Machines, roots: Roots) -> None:
        self.machines = machines
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

    def search(self, found: Cycle, width: int, until: float) -> Cycle:
        """The best cycle through one of these roots, or `found`; see `labels.search`."""
        found, self._done = search(self.machines, self._best, found, width, until)
        return found

    def sharpen(self, found: Cycle) -> None:
        """Changes the prices (a step of the subgradient method, of Polyak's length) and keeps what bounds better."""
        roots = self._latest.roots
        excess = np.where(roots.allowed, self._latest.visits - 1.0, 0.0)
        excess[(roots.prices <= 0) & (excess < 0)] = 0.0
        gap = np.maximum(found.seconds - self._latest.least, 0.0)
        length = self._step * gap / np.maximum((excess**2).sum(1), 1.0)
        prices = np.maximum(roots.prices + length[:, None] * excess, 0.0)
        self._step *= CYCLES.shorter
        self._latest = bound(self.machines, replace(roots, prices=prices))
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
