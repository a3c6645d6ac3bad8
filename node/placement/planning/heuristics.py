"""Heuristics of the search for the fastest cycle: a first cycle, a first bound, and local search.

Local search makes small changes of a cycle, the best of them each time, until none makes it cheaper.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...swarm.cost import Floats, Ints
from .cycle import Problem
from .label_search import TOLERANCE, Cycle, split
from .relaxation import MAX_RATES, Machines, Roots


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
    """The best of one cycle from each root, which always goes on to the machine that costs least per block, the way
    there and back included; and the roots [R] in order of their cycles."""
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
    by halves, whichever machines they are from and to."""
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
    """`found`, or a cheaper cycle by leaving out, adding, replacing, moving or swapping machines or by turning a part
    round. A home stays first."""
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
