"""The fastest chain where not every machine may hold all blocks: with trusted machines for the first and last ones, as
`chat --trusted` takes it, or with blocks that one machine holds together.

Also the fastest chain where it may come back to a machine because ways are no metric.

The rules of trusted machines are those of `swarm/trusted_servers.py`. Only they hold blocks at both ends, and none of
them pushes to another machine that is not trusted. So the ways are no metric, and a machine may be worth a second
visit: the first blocks, others' machines, the last blocks. It has to hold all blocks from its first to its last.

A bound is the shortest walk without memory of what a machine has computed before: a dynamic programme over the blocks.
Where it visits a machine twice, further apart than what that can hold, one of two blocks cannot be there. Each is left
out in turn (branch and bound, Land and Doig 1960). The first walk that needs no more than there is room for is the
best.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from ....protocols.ids import Span
from ...errors import SwarmError
from ...swarm.cost import Floats, Ints
from .cycle import PlacedMachine, Problem, spans_of
from .machines_file import Fleet

Walk = tuple[PlacedMachine, ...]
_LEAST_MACHINES: Final = 2


class Found(NamedTuple):
    """A walk and its seconds; none takes less than `bound`."""

    walk: Walk
    seconds: float
    bound: float


def windows(fleet: Fleet, num_blocks: int) -> Ints:
    """int [N, 2]: the first block that each machine may hold, and the one behind the last."""
    ends = fleet.trusted_blocks
    whole, middle = (0, num_blocks), (ends, max(ends, num_blocks - ends))
    return np.array([whole if machine.trusted or not ends else middle for machine in fleet.machines], np.intp)


def together_in(fleet: Fleet) -> Span | None:
    """The most blocks of which one machine holds all or none."""
    return None if fleet.boundaries is None else fleet.boundaries.longest


def check_room(fleet: Fleet, num_blocks: int) -> None:
    """
    Raises:
        SwarmError: the trusted machines cannot hold the first and the last blocks, or no machine those that go
            together; says what they hold.
    """
    most = max((machine.blocks for machine in fleet.machines), default=0)
    together = together_in(fleet)
    if together is not None and most < len(together):
        raise SwarmError(
            f"one machine holds all {len(together)} of the blocks {together}, which share keys and values, or a choice "
            f"of tokens; the largest has room for {most}: add memory, or take a smaller model or fewer bits a weight"
        )
    if not fleet.trusted_blocks:
        return
    room = [min(machine.blocks, num_blocks) for machine in fleet.machines if machine.trusted]
    needed = min(2 * fleet.trusted_blocks, num_blocks)
    if sum(room) < needed:
        raise SwarmError(
            f"the trusted machines together hold {sum(room)} of the {needed} blocks that only they may serve (the "
            f"first and the last {fleet.trusted_blocks}): mark more machines as trusted, or give fewer --trusted-blocks"
        )
    if len([blocks for blocks in room if blocks]) < _LEAST_MACHINES and max(room) < num_blocks:
        raise SwarmError(
            f"the only trusted machine holds {max(room)} of {num_blocks} blocks, and one machine's blocks are in a "
            "row: for the first and the last ones mark another machine as trusted"
        )


def fastest_pinned(fleet: Fleet, num_blocks: int, until: float) -> Found:
    """The walk of least time from the client and back; without a client, from the first machine.

    Raises:
        SwarmError: there is none, or none was found before the time was over.
    """
    check_room(fleet, num_blocks)
    if fleet.client_rtts is not None:
        return _best([fleet], num_blocks, until)
    whoever = not fleet.trusted_blocks
    firsts = [
        number for number, machine in enumerate(fleet.machines) if machine.blocks and (machine.trusted or whoever)
    ]
    own = [np.where(np.arange(len(fleet.machines)) == first, 0.0, fleet.rtts[first]) for first in firsts]
    return _best([replace(fleet, client_rtts=rtts) for rtts in own], num_blocks, until)


def _best(fleets: list[Fleet], num_blocks: int, until: float) -> Found:
    """Of the walks of all these fleets, which differ in where the client is."""
    waiting: list[tuple[float, int, Problem, Ints, Walk]] = []
    made = 0

    def put(problem: Problem, allowed: Ints) -> None:
        nonlocal made
        found = shortest_walk(problem, allowed)
        if found is not None:
            made += 1
            heapq.heappush(waiting, (found[0], -made, problem, allowed, found[1]))

    bound: float | None = None
    for fleet in fleets:
        if waiting and time.monotonic() > until:
            bound = 0.0  # of the others nothing is known
            break
        put(fleet.problem(num_blocks), windows(fleet, num_blocks))
    while waiting:
        if bound is None and time.monotonic() > until:
            bound = waiting[0][0]
        # Without time for more, the last branch is followed to its end: it soon has a walk.
        entry = heapq.heappop(waiting) if bound is None else waiting.pop(_newest(waiting))
        seconds, _, problem, allowed, walk = entry
        branches = _branches(problem, allowed, walk)
        if not branches:
            return Found(walk, seconds, seconds if bound is None else bound)
        for branch in branches:
            put(problem, branch)
    raise SwarmError(
        f"no placement has {_asked(fleets[0])} and room for all {num_blocks} blocks: add machines or memory"
        f"{', or mark more of them as trusted' if fleets[0].trusted_blocks else ''}"
    )


def _asked(fleet: Fleet) -> str:
    trusted = f"trusted machines for the first and the last {fleet.trusted_blocks} blocks"
    together = f"one machine for blocks {together_in(fleet)}"
    return " and ".join([trusted] * bool(fleet.trusted_blocks) + [together] * bool(together_in(fleet)))


def _newest(waiting: list[tuple[float, int, Problem, Ints, Walk]]) -> int:
    return min(range(len(waiting)), key=lambda number: waiting[number][1])


def _branches(problem: Problem, allowed: Ints, walk: Walk) -> tuple[Ints, ...]:
    """Windows without this walk, and with all that can be held; none if this one can."""
    spans = spans_of(walk)
    for machine, span in spans.items():
        room = int(problem.capacity[machine])
        if len(span) <= room:
            continue
        visits = [visit.span for visit in walk if visit.machine == machine]
        # Two blocks that it computes here and that are too far apart for it.
        before = visits[0].end - 1
        behind = max(visits[-1].start, before + room)
        if behind >= visits[-1].end:
            behind = visits[-1].end - 1
            before = behind - room
        later, earlier = allowed.copy(), allowed.copy()
        later[machine, 0] = before + 1
        earlier[machine, 1] = behind
        return later, earlier
    return ()


def shortest_walk(problem: Problem, allowed: Ints) -> tuple[float, Walk] | None:
    """The walk of least seconds from `home` and back. Each machine's visits are within `allowed`, as many as it likes
    but no longer than it has room for. They meet where machines may part. None if there is none."""
    assert problem.home is not None
    home, blocks, size = problem.home, problem.num_blocks, len(problem)
    seconds = problem.block_seconds
    room = problem.capacity.copy()
    parts = np.array([problem.boundaries is None or problem.boundaries.may_part(at) for at in range(blocks + 1)])
    first, behind = np.zeros(size, np.intp), np.zeros(size, np.intp)
    first[: len(allowed)], behind[: len(allowed)] = allowed[:, 0], allowed[:, 1]
    way: Floats = problem.way + np.diag(np.full(size, np.inf))
    spent = np.full((blocks + 1, size), np.inf)  # by the number of blocks done, the last of them there
    began = np.zeros((blocks + 1, size), np.intp)
    came_from = np.full((blocks + 1, size), home, np.intp)
    for done in range(blocks):
        if done == 0:
            entered = way[home]
        else:
            through = spent[done][:, None] + way
            came_from[done] = through.argmin(0)
            entered = through[came_from[done], np.arange(size)]
        ends = np.minimum(np.minimum(done + room, behind), blocks)
        can = np.flatnonzero((first <= done) & (ends > done) & np.isfinite(entered))
        for entering in can:
            to = done + 1 + np.flatnonzero(parts[done + 1 : ends[entering] + 1])
            costs = entered[entering] + (to - done) * seconds[entering]
            better = costs < spent[to, entering]
            spent[to[better], entering] = costs[better]
            began[to[better], entering] = done
    last = spent[blocks] + problem.way[:, home]
    machine, total = int(last.argmin()), float(last.min())
    if not np.isfinite(total):
        return None
    walk: list[PlacedMachine] = []
    done = blocks
    while done:
        start = int(began[done, machine])
        walk.append(PlacedMachine(machine, Span(start, done)))
        machine, done = int(came_from[start, machine]), start
    return total, tuple(reversed(walk))
