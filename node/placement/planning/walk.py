"""Routes that come back to a machine: where two machines are further apart than by way of a third one.

A schedule is a cycle, which visits each machine once; what a router takes need not be one. Where ways are a metric, the
best route is: the machine that is visited twice computes all its blocks at once, and the detour is saved. Real round
trips are no metric.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

import numpy as np

from ....protocols.ids import Span
from ...swarm.cost import Floats
from .cycle import PlacedMachine, Problem
from .label_search import TOLERANCE

_LOOK: Final = 1000
"""Walks that are looked at before it is asked again whether the time is over."""


def shortest_ways(way: Floats) -> Floats:
    """The shortest ways through any other machines; where they are shorter than `way`, routes may come back.

    A route costs no less than the cycle that visits each of its machines once, with these ways: so the best cycle with
    them bounds all routes.
    """
    shortest = way.copy()
    for via in range(len(way)):
        shortest = np.minimum(shortest, shortest[:, via, None] + shortest[None, via])
    np.fill_diagonal(shortest, 0.0)
    return np.where(shortest < way - TOLERANCE, shortest, way)


def fastest_walk(
    problem: Problem, below: float, is_over: Callable[[], bool]
) -> tuple[tuple[PlacedMachine, ...] | None, bool]:
    """The walk of least time from `home` through machines and back, if it takes less than `below` seconds.

    A machine may be visited several times; what it computes in all of them, and the blocks between, are one span of no
    more than its capacity. Also returned: whether the search came to its end (else the time was over).

    Best first (Hart, Nilsson and Raphael, 1968): the rest is bounded by walks without memory of their machines.
    """
    assert problem.home is not None
    home, blocks, way, seconds = problem.home, problem.num_blocks, problem.way, problem.block_seconds
    to_go = _left(problem)
    waiting: list[tuple[float, int, float, int, int, tuple[PlacedMachine, ...]]] = [(0.0, 0, 0.0, 0, home, ())]
    best: dict[tuple[int, int, frozenset[tuple[int, int]]], float] = {}
    made = looked = 0
    while waiting:
        _, _, spent, done, last, visits = heapq.heappop(waiting)
        if done == blocks:
            return visits, True
        looked += 1
        if looked % _LOOK == 0 and is_over():
            return None, False
        began: dict[int, int] = {}
        for visit in visits:
            began.setdefault(visit.machine, visit.span.start)
        for machine in range(len(problem)):
            room = int(problem.capacity[machine]) - (done - began.get(machine, done))
            for end in range(done + 1, min(done + room, blocks) + 1) if machine != last else ():
                cost = float(spent + way[last, machine] + (end - done) * seconds[machine])
                least = cost + float(to_go[end, machine])
                if least >= below - TOLERANCE:
                    continue
                key = (end, machine, frozenset((began | {machine: began.get(machine, done)}).items()))
                if cost >= best.get(key, np.inf):
                    continue
                best[key] = cost
                if end == blocks:
                    below = least
                made += 1
                heapq.heappush(
                    waiting, (least, made, cost, end, machine, (*visits, PlacedMachine(machine, Span(done, end))))
                )
    return None, True


def _left(problem: Problem) -> Floats:
    """What is left at least when so many blocks are done, the last of them by a machine: float [blocks + 1, N]."""
    assert problem.home is not None
    size, blocks = len(problem), problem.num_blocks
    left = np.empty((blocks + 1, size))
    left[blocks] = problem.way[:, problem.home]
    ways = problem.way + np.diag(np.full(size, np.inf))
    for done in range(blocks - 1, -1, -1):
        entering = np.full(size, np.inf)
        for machine in range(size):
            most = min(int(problem.capacity[machine]), blocks - done)
            if most:
                ends = left[done + 1 : done + most + 1, machine]
                entering[machine] = (ends + np.arange(1, most + 1) * problem.block_seconds[machine]).min()
        left[done] = (ways + entering).min(axis=1)
    return left


def spans_of(walk: tuple[PlacedMachine, ...]) -> dict[int, Span]:
    """What each machine of a walk has to hold."""
    spans: dict[int, Span] = {}
    for visit in walk:
        first = spans.get(visit.machine, visit.span)
        spans[visit.machine] = Span(first.start, visit.span.end)
    return spans
