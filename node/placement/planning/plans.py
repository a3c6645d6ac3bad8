"""Plans for a fleet: for the least time per token, and for the most tokens a second; and what to expect of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ....protocols.ids import Span
from ...swarm.routing import Candidate, chain_seconds, cheapest_chain
from .cycle import Floats
from .fastest import fastest_cycle
from .fleet import Fleet
from .labels import MAX_MACHINES, TOLERANCE
from .throughput import most_throughput
from .walk import Visit, fastest_walk, spans_of

_CYCLE_SHARE: Final = 0.4
"""Part of the time for each of the two searches for cycles; the rest is for walks."""


@dataclass(frozen=True)
class Placed:
    """A machine of the fleet by its number, and the blocks that it should serve."""

    machine: int
    span: Span


@dataclass(frozen=True)
class Plan:
    """`placed` in order of the blocks. `seconds` is the time per token of one client alone over `route`, its own part
    included; `tokens_per_second` what many clients get together, one step of each at a time.

    No placement takes less than `least_seconds` (0: not known), and none gives more than `most_tokens_per_second`
    (None: not asked).
    """

    placed: tuple[Placed, ...]
    route: tuple[Placed, ...]
    seconds: float
    tokens_per_second: float
    least_seconds: float = 0.0
    most_tokens_per_second: float | None = None

    @property
    def proved(self) -> bool:
        """Whether it is known that no placement takes less time."""
        return self.seconds == self.least_seconds


def fastest_plan(fleet: Fleet, num_blocks: int, *, seconds: float = 1.0, known: Sequence[Plan] = ()) -> Plan:
    """The placement with the route of least time per token; machines that make it no faster are left out.

    The best cycle is looked for, and, where the ways are no metric, what is quicker because it comes back to a machine.
    `known` are other plans for the same machines: if the router finds a quicker route in one of them, that counts.

    Raises:
        SwarmError: the machines cannot hold the model.
    """
    deadline = time.monotonic() + seconds
    problem = fleet.problem(num_blocks)
    schedule = fastest_cycle(problem, seconds=_CYCLE_SHARE * seconds)
    placed, at = [], 0
    for machine, count in zip(schedule.machines, schedule.blocks, strict=True):
        if count:
            placed.append(Placed(machine, Span(at, at + count)))
            at += count
    found = expected(fleet, placed, num_blocks)
    least = found.seconds if schedule.proved else schedule.bound + fleet.client_seconds
    ways = fleet.detours(problem)
    if not np.array_equal(ways, problem.way):
        bound = fastest_cycle(replace(problem, way=ways), seconds=_CYCLE_SHARE * seconds).bound + fleet.client_seconds
        least = min(least, bound)
        for other in known:
            if other.seconds < found.seconds:
                found = _trimmed(fleet, other, num_blocks)
        if problem.home is not None and bound < found.seconds - TOLERANCE and len(problem) <= MAX_MACHINES:
            below = found.seconds - fleet.client_seconds
            walk, ended = fastest_walk(problem, below, lambda: time.monotonic() > deadline)
            if walk is not None:
                spans = spans_of(walk)
                placed = sorted((Placed(*each) for each in spans.items()), key=lambda each: (each.span, each.machine))
                found = expected(fleet, placed, num_blocks)
            least = found.seconds if ended else least
        elif bound >= found.seconds - TOLERANCE:
            least = found.seconds
    return Plan(found.placed, found.route, found.seconds, found.tokens_per_second, least_seconds=least)


def _trimmed(fleet: Fleet, plan: Plan, num_blocks: int) -> Plan:
    """What a plan's route needs of it."""
    spans = spans_of(tuple(Visit(each.machine, each.span) for each in plan.route))
    placed = [replace(each, span=spans[each.machine]) for each in plan.placed if each.machine in spans]
    return expected(fleet, placed, num_blocks)


def busiest_plan(fleet: Fleet, num_blocks: int) -> Plan:
    """The placement of all machines with the most tokens a second.

    Raises:
        SwarmError: the machines cannot hold the model.
    """
    capacity = np.array([machine.blocks for machine in fleet.machines], np.intp)
    coverage = most_throughput(capacity, fleet.block_seconds(), num_blocks)
    placed = [Placed(machine, span) for machine, span in enumerate(coverage.spans) if span is not None]
    placed.sort(key=lambda each: (each.span, each.machine))
    found = expected(fleet, placed, num_blocks)
    return Plan(
        tuple(placed),
        found.route,
        found.seconds,
        found.tokens_per_second,
        most_tokens_per_second=coverage.bound,
    )


def present_plan(fleet: Fleet, num_blocks: int) -> Plan:
    """What the fleet serves now.

    Raises:
        NoChainError: it does not serve all blocks.
    """
    spans = ((number, machine.span) for number, machine in enumerate(fleet.machines))
    placed = [Placed(number, span) for number, span in spans if span is not None]
    placed.sort(key=lambda each: (each.span, each.machine))
    return expected(fleet, placed, num_blocks)


def expected(fleet: Fleet, placed: Sequence[Placed], num_blocks: int) -> Plan:
    """What to expect of machines placed so: the route that the client's own router takes, and its time per token.

    Raises:
        NoChainError: a block that nobody holds.
    """
    times = fleet.block_seconds()
    load = np.zeros(num_blocks)
    for each in placed:
        load[each.span.start : each.span.end] += 1 / (times[each.machine] * len(each.span))
    if fleet.client_rtts is not None:
        seconds, route = _routed(fleet, placed, num_blocks, fleet.client_rtts)
    else:
        # The client sits beside the machine with the first block where that is best.
        firsts = [each.machine for each in placed if each.span.start == 0]
        own = [np.where(np.arange(len(times)) == first, 0.0, fleet.rtts[first]) for first in firsts]
        own = own or [np.zeros(len(times))]  # there is no route
        seconds, route = min((_routed(fleet, placed, num_blocks, rtts) for rtts in own), key=lambda found: found[0])
    return Plan(tuple(placed), route, seconds + fleet.client_seconds, float(load.min()))


def _routed(
    fleet: Fleet, placed: Sequence[Placed], num_blocks: int, client_rtts: Floats
) -> tuple[float, tuple[Placed, ...]]:
    """The cheapest route over what was placed, with pushes between machines, and its seconds per token."""
    times = fleet.block_seconds()
    names = {str(each.machine): each.machine for each in placed}
    candidates = [
        Candidate(
            str(each.machine),
            each.span,
            rtt=float(client_rtts[each.machine]),
            step_seconds=float(times[each.machine] * len(each.span)),
            cache_tokens_free=0,
            rtts={name: float(fleet.rtts[each.machine, other]) for name, other in names.items()},
        )
        for each in placed
    ]
    chain = cheapest_chain(candidates, Span(0, num_blocks), pushed=True)
    return chain_seconds(chain, candidates, pushed=True), tuple(Placed(names[hop.peer_id], hop.span) for hop in chain)
