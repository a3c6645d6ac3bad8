"""Plans for a fleet: for the least time per token, and for the most tokens a second; and what to expect of them.

A token needs every block once, so the swarm is as quick as its slowest block. A block's throughput is the sum over the
machines that hold it. What counts is the least of these (Petals, NeurIPS 2023, appendix D). A machine that holds b
blocks and computes one in s seconds passes 1 / (b s) tokens a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ....protocols.announcement import Announcement
from ....protocols.ids import Boundaries, Span
from ...errors import SwarmError
from ...swarm import cost
from ...swarm.cost import Bools, Floats, Ints, throughput_bound
from ...swarm.routing import Demand, RouteCandidate, chain_seconds, cheapest_chain
from ...swarm.trusted_servers import TrustedServers
from ..plan import Policy
from ..search import CostTerms, ServerRows, SpanSearch, State
from .cycle import PlacedMachine, spans_of
from .fastest import fastest_cycle
from .label_search import MAX_MACHINES, TOLERANCE
from .machines_file import Fleet, Machine
from .trusted import fastest_pinned, together_in, windows


@dataclass(frozen=True)
class PlanningEffort:
    """How long a plan for machines is improved, in work that is counted."""

    cycle_share: float = 0.4
    """Part of the time for machine of the two searches for cycles; the rest is for walks."""
    kicks_each: int = 25
    """Times that some machines are placed anew in search of something better, for each of them. A fixed number, so
    equal inputs have equal plans."""
    rounds: int = 4
    seed: int = 7
    max_sizes: int = 64
    """Lengths of span that are tried for one machine."""
    returns: float = 0.7
    """How often the search goes back to the best one after it found none that is better."""
    evenness: float = 30.0
    """Weight of what blocks lack to the bound. Where nothing runs yet, closing that leads to a higher least: of 20
    machines with up to 11 of 32 blocks the slowest block reaches .971 of the bound, with a weight of 1 .960."""
    max_work: int = 120_000_000
    """Spans looked at in all of these together: about a second."""
    least_work: int = 4_000
    """Spans that could be looked at in the time that placing a machine takes in any case."""


PLAN_EFFORT: Final = PlanningEffort()


@dataclass(frozen=True)
class BlockSpread:
    """A span per machine, None where it can hold no block; `tokens_per_second` of the slowest block, and `bound`, which
    no placement exceeds."""

    spans: tuple[Span | None, ...]
    tokens_per_second: float
    bound: float


@dataclass(frozen=True)
class Pinned:
    """Where machines may be: `windows` int [N, 2], the first block and the one behind the last. The machines `own`
    bool [N] alone hold `closed` of the blocks; `spans` is a placement without a gap to begin with, by machine.
    `boundaries` of the blocks; None: machines may part anywhere."""

    windows: Ints
    own: Bools
    closed: int
    spans: Mapping[int, Span]
    boundaries: Boundaries | None = None

    @property
    def together(self) -> int:
        """How many blocks at most one machine holds all or none of."""
        return len((self.boundaries and self.boundaries.longest) or ())


def most_throughput(
    capacity: Ints, block_seconds: Floats, num_blocks: int, pinned: Pinned | None = None
) -> BlockSpread:
    """Places machines by the search for running servers (search.py). Each may hold as many blocks as it likes.
    `capacity` int [N] in blocks, `block_seconds` float [N], above 0.

    Raises:
        SwarmError: all machines together cannot hold the model.
    """
    room = np.minimum(capacity, num_blocks)
    if room.sum() < num_blocks:
        raise SwarmError(f"the machines together hold {room.sum()} of {num_blocks} blocks")
    bound = throughput_bound(room, block_seconds, num_blocks)
    if pinned is not None:
        for able, count in ((pinned.own, pinned.closed), (room >= pinned.together, pinned.together)):
            bound = min(bound, throughput_bound(room * able, block_seconds, count)) if count else bound
    # One behind the other: bad, but without a gap, and all that there is where there is just room enough.
    ends = np.minimum(np.cumsum(room), num_blocks)
    first = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    if pinned is not None:
        first = np.zeros_like(first)
        for machine, span in pinned.spans.items():
            first[machine] = span.start, span.end
    rows = _rows(room, block_seconds, num_blocks, first[:, 1] - first[:, 0], pinned)
    terms = CostTerms(bound, bound, PLAN_EFFORT.evenness, 0.0, 2.0 + PLAN_EFFORT.evenness * num_blocks)
    movable, out = np.flatnonzero(room > 0), np.zeros(len(room), np.intp)
    search = SpanSearch(rows, out, out.astype(float), movable, num_blocks, terms)
    nowhere = search.state(out)
    best = search.state(first[:, 0], nowhere.rows + (first[:, 1] > first[:, 0]))
    quickest = np.argsort(room / np.maximum(block_seconds, 1e-12), kind="stable")[::-1]
    best = max(best, search.settle(nowhere, quickest, PLAN_EFFORT.rounds), key=_score)
    work = PLAN_EFFORT.rounds * max(len(rows.server) * num_blocks, len(movable) * PLAN_EFFORT.least_work)
    chance, last = np.random.default_rng(PLAN_EFFORT.seed), best
    for _ in range(min(PLAN_EFFORT.kicks_each * len(movable), PLAN_EFFORT.max_work // work)):
        if best.throughput >= bound * (1 - 1e-9):
            break
        some = chance.choice(movable, size=min(len(movable), int(chance.integers(2, 6))), replace=False)
        starts, held = last.starts.copy(), last.rows.copy()
        starts[some], held[some] = 0, nowhere.rows[some]
        last = search.settle(replace(last, starts=starts, rows=held), some, PLAN_EFFORT.rounds)
        if _score(last) > _score(best):
            best = last
        elif chance.random() < PLAN_EFFORT.returns:
            last = best
    spans = zip(best.starts.tolist(), (best.starts + rows.length[best.rows]).tolist(), strict=True)
    return BlockSpread(tuple(Span(*span) if span[0] < span[1] else None for span in spans), best.throughput, bound)


def _score(found: State) -> tuple[float, float]:
    return found.throughput, -found.cost


def _rows(room: Ints, block_seconds: Floats, num_blocks: int, first: Ints, pinned: Pinned | None) -> ServerRows:
    """What machines may hold: nothing, as many blocks as at the `first` (int [N], if any), or others that are tried."""
    lengths: list[tuple[int, int]] = []
    for machine, most in enumerate(room.tolist()):
        tried = np.linspace(1, most, min(most, PLAN_EFFORT.max_sizes)).round().astype(int).tolist()
        shared = [pinned.together] if pinned is not None and 0 < pinned.together <= most else []
        lengths += [(machine, length) for length in dict.fromkeys([0, int(first[machine]), *shared, *tried])]
    server, length = np.array(lengths, np.intp).T
    speed = 1 / (np.maximum(block_seconds, 1e-12)[server] * np.maximum(length, 1))
    if pinned is None:
        return ServerRows(server, length, speed)
    low, high = pinned.windows[server].T[:, :, None]
    starts = np.arange(num_blocks)
    allowed = (starts >= low) & (starts + length[:, None] <= high)
    whole = Policy(boundaries=pinned.boundaries).starts(length, num_blocks)
    return ServerRows(server, length, speed, allowed if whole is None else allowed & whole)


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

    The best cycle is looked for. Where the ways are no metric, also what is quicker as it comes back to a machine.
    `known` are other plans for the same machines: if the router finds a quicker route in one of them, that counts.

    Raises:
        SwarmError: the machines cannot hold the model.
    """
    deadline = time.monotonic() + seconds
    if fleet.trusted_blocks or together_in(fleet):
        pinned = fastest_pinned(fleet, num_blocks, deadline)
        found = _walked(fleet, pinned.walk, num_blocks)
        for other in known:
            if other.seconds < found.seconds - TOLERANCE:
                found = _trimmed(fleet, other, num_blocks)
        # The router reckons in another order: it may differ in the last bits.
        proved = found.seconds <= pinned.bound + fleet.client_seconds + TOLERANCE
        return replace(found, least_seconds=found.seconds if proved else pinned.bound + fleet.client_seconds)
    problem = fleet.problem(num_blocks)
    schedule = fastest_cycle(problem, seconds=PLAN_EFFORT.cycle_share * seconds)
    placed, at = [], 0
    for machine, count in zip(schedule.machines, schedule.blocks, strict=True):
        if count:
            placed.append(PlacedMachine(machine, Span(at, at + count)))
            at += count
    found = expected(fleet, placed, num_blocks)
    least = found.seconds if schedule.proved else schedule.bound + fleet.client_seconds
    ways = fleet.detours(problem)
    if not np.array_equal(ways, problem.way):
        bound = (
            fastest_cycle(replace(problem, way=ways), seconds=PLAN_EFFORT.cycle_share * seconds).bound
            + fleet.client_seconds
        )
        for other in known:
            if other.seconds < found.seconds:
                found = _trimmed(fleet, other, num_blocks)
        if problem.home is not None and bound < found.seconds - TOLERANCE and len(problem) <= MAX_MACHINES:
            pinned = fastest_pinned(fleet, num_blocks, deadline)
            found = min(found, _walked(fleet, pinned.walk, num_blocks), key=lambda plan: plan.seconds)
            bound = max(bound, pinned.bound + fleet.client_seconds)
        least = found.seconds if bound >= found.seconds - TOLERANCE else bound
    return replace(found, least_seconds=least)


def _walked(fleet: Fleet, walk: tuple[PlacedMachine, ...], num_blocks: int) -> FleetPlan:
    """What to expect of machines that hold what this walk needs."""
    return expected(fleet, [PlacedMachine(*entry) for entry in spans_of(walk).items()], num_blocks)


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
    pinned = _pinned(fleet, num_blocks) if fleet.trusted_blocks or together_in(fleet) else None
    spread = most_throughput(capacity, fleet.block_seconds(), num_blocks, pinned)
    placed = [PlacedMachine(machine, span) for machine, span in enumerate(spread.spans) if span is not None]
    found = expected(fleet, placed, num_blocks)
    return replace(found, most_tokens_per_second=spread.bound)


def _pinned(fleet: Fleet, num_blocks: int) -> Pinned:
    walk = fastest_pinned(fleet, num_blocks, -math.inf).walk
    own = np.array([machine.trusted for machine in fleet.machines])
    closed = min(2 * fleet.trusted_blocks, num_blocks)
    return Pinned(windows(fleet, num_blocks), own, closed, spans_of(walk), fleet.boundaries)


def fleet_of_servers(servers: Sequence[Announcement], client_rtts: Mapping[str, float]) -> Fleet:
    """Servers of one model as machines that could hold as many blocks as they do now, any of them.

    `client_rtts` are seconds from this client by peer id, of all `servers`. Between two servers counts what the one
    that sends announced.
    """
    spans = [len(server.span) for server in servers]
    seconds = cost.block_seconds(
        cost.span_seconds([server.step_seconds for server in servers], [0.0] * len(servers), [0.0] * len(servers)),
        spans,
    )
    machines = [
        Machine(server.public_name or "…" + server.peer_id[-8:], len(server.span), float(block_seconds), server.span)
        for server, block_seconds in zip(servers, seconds, strict=True)
    ]
    rtts = np.array([[one.rtts.get(other.peer_id, math.nan) for other in servers] for one in servers], float)
    np.fill_diagonal(rtts, 0.0)
    return Fleet(tuple(machines), rtts, np.array([client_rtts[server.peer_id] for server in servers]))


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
    own = frozenset(name for name, machine in names.items() if fleet.machines[machine].trusted)
    trusted = TrustedServers(own, fleet.trusted_blocks) if fleet.trusted_blocks else TrustedServers()
    candidates = trusted.restrict(
        (
            RouteCandidate(
                str(entry.machine),
                entry.span,
                rtt=float(client_rtts[entry.machine]),
                step_seconds=float(times[entry.machine] * len(entry.span)),
                cache_tokens_free=0,
                rtts={name: float(fleet.rtts[entry.machine, other]) for name, other in names.items()},
                undivided=() if fleet.boundaries is None else fleet.boundaries.undivided,
            )
            for entry in placed
        ),
        num_blocks,
    )
    chain = cheapest_chain(candidates, Span(0, num_blocks), Demand(pushed=True))
    route = tuple(PlacedMachine(names[hop.peer_id], hop.span) for hop in chain)
    return chain_seconds(chain, candidates, Demand(pushed=True)), route
