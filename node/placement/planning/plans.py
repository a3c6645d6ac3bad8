"""Plans for a fleet: for the least time per token, and for the most tokens a second; and what to expect of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ....protocols.ids import Span
from ...swarm.cost import Floats
from ...swarm.routing import RouteCandidate, chain_seconds, cheapest_chain
from .cycle import PlacedMachine, fastest_walk, spans_of
from .fastest import fastest_cycle
from .fleet import Fleet
from .label_search import MAX_MACHINES, TOLERANCE
from .throughput import most_throughput

_CYCLE_SHARE: Final = 0.4
"""Part of the time for machine of the two searches for cycles; the rest is for walks."""


@dataclass(frozen=True)
class FleetPlan:
    """`placed` in order of the blocks. `seconds` is the time per token of one client alone over `route`, its own part
    included; `tokens_per_second` what many clients get together, one step of machine at a time.

    No placement takes less than `least_seconds` (0: not known), and none gives more than `most_tokens_per_second`
    (None: not asked).
    """

    placed: tuple[PlacedMachine, ...]
    route: tuple[PlacedMachine, ...]
    seconds: float
    tokens_per_second: float
    least_seconds: float = 0.0
    most_tokens_per_second: float | None = None

    @property
    def proved(self) -> bool:
        """Whether it is known that no placement takes less time."""
        return self.seconds == self.least_seconds


def fastest_plan(fleet: Fleet, num_blocks: int, *, seconds: float = 1.0, known: Sequence[FleetPlan] = ()) -> FleetPlan:
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
            placed.append(PlacedMachine(machine, Span(at, at + count)))
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
                found = expected(fleet, [PlacedMachine(*entry) for entry in spans.items()], num_blocks)
            least = found.seconds if ended else least
        elif bound >= found.seconds - TOLERANCE:
            least = found.seconds
    return replace(found, least_seconds=least)


def _trimmed(fleet: Fleet, plan: FleetPlan, num_blocks: int) -> FleetPlan:
    """What a plan's route needs of it."""
    spans = spans_of(plan.route)
    placed = [replace(entry, span=spans[entry.machine]) for entry in plan.placed if entry.machine in spans]
    return expected(fleet, placed, num_blocks)


def busiest_plan(fleet: Fleet, num_blocks: int) -> FleetPlan:
    """The placement of all machines with the most tokens a second.

    Raises:
        SwarmError: the machines cannot hold the model.
    """
    capacity = np.array([machine.blocks for machine in fleet.machines], np.intp)
    spread = most_throughput(capacity, fleet.block_seconds(), num_blocks)
    placed = [PlacedMachine(machine, span) for machine, span in enumerate(spread.spans) if span is not None]
    found = expected(fleet, placed, num_blocks)
    return replace(found, most_tokens_per_second=spread.bound)


def present_plan(fleet: Fleet, num_blocks: int) -> FleetPlan:
    """What the fleet serves now.

    Raises:
        NoChainError: it does not serve all blocks.
    """
    spans = ((number, machine.span) for number, machine in enumerate(fleet.machines))
    placed = [PlacedMachine(number, span) for number, span in spans if span is not None]
    return expected(fleet, placed, num_blocks)


def expected(fleet: Fleet, placed: Sequence[PlacedMachine], num_blocks: int) -> FleetPlan:
    """What to expect of machines placed so: the route that the client's own router takes, and its time per token.

    Raises:
        NoChainError: a block that nobody holds.
    """
    placed = sorted(placed, key=lambda entry: (entry.span, entry.machine))
    times = fleet.block_seconds()
    load = np.zeros(num_blocks)
    for entry in placed:
        load[entry.span.start : entry.span.end] += 1 / (times[entry.machine] * len(entry.span))
    if fleet.client_rtts is not None:
        seconds, route = _routed(fleet, placed, num_blocks, fleet.client_rtts)
    else:
        # The client sits beside the machine with the first block where that is best.
        firsts = [entry.machine for entry in placed if entry.span.start == 0]
        own = [np.where(np.arange(len(times)) == first, 0.0, fleet.rtts[first]) for first in firsts]
        own = own or [np.zeros(len(times))]  # there is no route
        seconds, route = min((_routed(fleet, placed, num_blocks, rtts) for rtts in own), key=lambda found: found[0])
    return FleetPlan(tuple(placed), route, seconds + fleet.client_seconds, float(load.min()))


def _routed(
    fleet: Fleet, placed: Sequence[PlacedMachine], num_blocks: int, client_rtts: Floats
) -> tuple[float, tuple[PlacedMachine, ...]]:
    """The cheapest route over what was placed, with pushes between machines, and its seconds per token."""
    times = fleet.block_seconds()
    names = {str(entry.machine): entry.machine for entry in placed}
    candidates = [
        RouteCandidate(
            str(entry.machine),
            entry.span,
            rtt=float(client_rtts[entry.machine]),
            step_seconds=float(times[entry.machine] * len(entry.span)),
            cache_tokens_free=0,
            rtts={name: float(fleet.rtts[entry.machine, other]) for name, other in names.items()},
        )
        for entry in placed
    ]
    chain = cheapest_chain(candidates, Span(0, num_blocks), pushed=True)
    route = tuple(PlacedMachine(names[hop.peer_id], hop.span) for hop in chain)
    return chain_seconds(chain, candidates, pushed=True), route
