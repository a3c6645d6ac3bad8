"""The world of `load_balancing.py`, and the placements that it compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from load_balancing_greedy import best_span, descent, moves_to

from petalnode.node.placement.joining import joining_span, span_for_newcomer
from petalnode.node.placement.observed import (
    OBSERVED,
    MembershipChange,
    PlacedServer,
    swarm_throughput,
    turnover,
    upper_bound,
)
from petalnode.node.placement.plan import PlacementPlan, Policy, make_plan, may_leave
from petalnode.node.placement.search import CostTerms, ServerRows, SpanSearch
from petalnode.protocols.ids import Span

SERVERS, BLOCKS, DAY = 206, 70, 1440
QUIET_MINUTES = 30
SLOWEST = 1e-3
ORACLE_EVENNESS = 0.4


@dataclass(frozen=True)
class Machine:
    name: str
    throughput: float
    blocks: int


@dataclass(frozen=True)
class Event:
    """In this minute of the simulation a machine joins or leaves."""

    minute: int
    machine: Machine
    joins: bool


@dataclass
class World:
    """The servers that are there; `ready_at` the minute in which each has loaded."""

    chance: np.random.Generator
    seconds_per_block: float
    holders: dict[str, PlacedServer] = field(default_factory=dict)
    ready_at: dict[str, int] = field(default_factory=dict)
    changes: tuple[MembershipChange, ...] = ()
    minute: int = 0
    moves: int = 0
    blocks: int = 0
    new_blocks: int = 0

    def place(self, name: str, span: Span, throughput: float) -> None:
        self.holders[name] = PlacedServer(name, span, throughput)
        self.ready_at[name] = self.minute + math.ceil(len(span) * self.seconds_per_block / 60)

    def move(self, name: str, target: Span) -> None:
        holder = self.holders[name]
        self.moves += 1
        self.blocks += len(target)
        self.new_blocks += min(len(target), abs(target.start - holder.span.start))
        self.place(name, target, holder.throughput)

    def go(self, steps: Iterable[tuple[str, Span, float]]) -> None:
        """Each server goes at once where the last of these steps puts it."""
        for name, span in {name: span for name, span, _ in steps}.items():
            if span != self.holders[name].span:
                self.move(name, span)

    def loaded(self) -> bool:
        """Whether some server has just loaded."""
        return any(ready == self.minute for ready in self.ready_at.values())

    def serving(self) -> list[PlacedServer]:
        return [holder for name, holder in self.holders.items() if self.ready_at[name] <= self.minute]

    def view(self) -> list[PlacedServer]:
        """As servers announce themselves: those that load are where they will be, and stay there till then."""
        reload_weight = 1 + self.seconds_per_block / OBSERVED.usual_load
        return [
            replace(holder, movable=self.ready_at[name] <= self.minute, reload_weight=reload_weight)
            for name, holder in self.holders.items()
        ]

    def turnover(self) -> float:
        return turnover(self.changes, len(self.holders), self.minute * 60.0)

    def in_random_order(self, names: Iterable[str]) -> list[str]:
        ordered = sorted(names)
        return [ordered[index] for index in self.chance.permutation(len(ordered))]


class Nothing:
    """`none`."""

    def joining(self, world: World, machine: Machine) -> Span:
        start = int(world.chance.integers(0, BLOCKS - machine.blocks + 1))
        return Span(start, start + machine.blocks)

    def minute(self, world: World, changed: bool) -> None:
        """Nobody moves."""


class NewOnly(Nothing):
    """`new_only`."""

    def joining(self, world: World, machine: Machine) -> Span:
        return joining_span(world.view(), BLOCKS, machine.blocks)


class Petals(NewOnly):
    """`petals_P`."""

    def __init__(self, p: float) -> None:
        self._p = p
        self._settled = False

    def minute(self, world: World, changed: bool) -> None:
        if self._settled and not changed and not world.loaded():
            return
        self._settled = True
        for name in world.in_random_order(world.holders):
            holders = world.view()
            present = swarm_throughput(holders, BLOCKS)
            if upper_bound(holders, BLOCKS) <= present * (1 + self._p):
                return  # there is nothing to be gained, whatever the others would do
            index = next(index for index, holder in enumerate(holders) if holder.peer_id == name)
            order = world.chance.permutation(len(holders)).tolist()
            target = moves_to(holders, index, BLOCKS, self._p, order) if holders[index].movable else None
            if target is not None:
                world.move(name, target)
                self._settled = False


class Repair(NewOnly):
    """`repair_P`: the steepest moves, up to where the throughput is highest, if it is higher by P % there."""

    def __init__(self, p: float) -> None:
        self._p = p

    def minute(self, world: World, changed: bool) -> None:
        holders = world.view()
        if changed or world.loaded():
            present = swarm_throughput(holders, BLOCKS)
            steps = list(descent(holders, BLOCKS, upper_bound(holders, BLOCKS)))
            most = max((throughput for _, _, throughput in steps), default=0.0)
            if most > present * (1 + self._p):
                last = next(index for index, step in enumerate(steps) if step[2] == most)
                world.go(steps[: last + 1])


class Band(Nothing):
    """`band_P`: when P % are missing to the bound, the steepest moves until half of that is, if that gains 2 %."""

    def __init__(self, p: float) -> None:
        self._p = p

    def joining(self, world: World, machine: Machine) -> Span:
        holders = world.view()
        own = PlacedServer(machine.name, Span(0, machine.blocks), machine.throughput)
        wanted = upper_bound([*holders, own], BLOCKS)
        return best_span(holders, BLOCKS, machine.throughput, machine.blocks, wanted)

    def minute(self, world: World, changed: bool) -> None:
        if not changed and not world.loaded():
            return
        holders = world.view()
        present, bound = swarm_throughput(holders, BLOCKS), upper_bound(holders, BLOCKS)
        if present >= (1 - self._p) * bound:
            return
        steps = []
        for step in descent(holders, BLOCKS, bound):
            steps.append(step)
            if step[2] >= (1 - self._p / 2) * bound:
                break
        if steps and steps[-1][2] > present * 1.02:
            world.go(steps)


class Full:
    """`full`: a plan is carried out to its end, unless the swarm changes meanwhile; then there is a new one."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._plan: PlacementPlan | None = None

    def joining(self, world: World, machine: Machine) -> Span:
        return span_for_newcomer(
            world.view(),
            machine.name,
            machine.throughput,
            machine.blocks,
            BLOCKS,
            turnover=world.turnover(),
            policy=self._policy,
        )

    def minute(self, world: World, changed: bool) -> None:
        while True:
            plan = self._plan.rest(world.view()) if self._plan is not None else None
            if plan is None or (not plan.moves and world.minute % QUIET_MINUTES == 0):
                plan = make_plan(world.view(), BLOCKS, turnover=world.turnover(), policy=self._policy)
            self._plan = plan
            moved = False
            for move in plan.moves:
                if may_leave(move, world.serving(), BLOCKS):
                    world.move(move.peer_id, move.target)
                    moved = True
            if not moved:
                return


class FullViews(Full):
    """`full_views`: every server has its own plan, because it knows the others' throughputs only 10 % up or down.

    They look one after the other, in random order, and each sees where those before it have gone.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._plans: dict[str, PlacementPlan] = {}
        self._errors: dict[tuple[str, str], float] = {}

    def minute(self, world: World, changed: bool) -> None:
        for name in world.in_random_order(world.holders):
            if world.ready_at[name] > world.minute:
                continue
            seen = [
                replace(holder, throughput=holder.throughput * self._error(world, name, holder.peer_id))
                for holder in world.view()
            ]
            plan = self._plans[name].rest(seen) if name in self._plans else None
            if plan is None:
                plan = make_plan(seen, BLOCKS, turnover=world.turnover(), policy=self._policy)
            self._plans[name] = plan
            move = plan.of(name)
            if move is not None and may_leave(move, world.serving(), BLOCKS):
                world.move(name, move.target)

    def _error(self, world: World, name: str, other: str) -> float:
        if name == other:
            return 1.0
        if (name, other) not in self._errors:
            self._errors[name, other] = float(world.chance.uniform(0.9, 1.1))
        return self._errors[name, other]


class Oracle(NewOnly):
    """Everything anew for nothing and at once: the node's search without its price, from two places."""

    def minute(self, world: World, changed: bool) -> None:
        if not changed:
            return
        holders = world.view()
        bound = upper_bound(holders, BLOCKS)
        lengths = np.array([len(holder.span) for holder in holders], np.intp)
        speeds = np.array([holder.throughput for holder in holders])
        starts = np.array([holder.span.start for holder in holders], np.intp)
        terms = CostTerms(bound, bound, ORACLE_EVENNESS, 0.0, 1.0 + BLOCKS)
        search = SpanSearch(
            ServerRows(np.arange(len(holders)), lengths, speeds),
            starts,
            np.zeros(len(holders)),
            np.arange(len(holders)),
            BLOCKS,
            terms,
        )
        best = search.run(search.state(starts))
        kicked = best.starts.copy()
        for index in world.chance.permutation(len(holders))[: len(holders) // 5]:
            kicked[index] = world.chance.integers(0, BLOCKS - lengths[index] + 1)
        best = min(search.state(starts), best, search.run(search.state(kicked)), key=lambda state: -state.throughput)
        for holder, start in zip(holders, best.starts.tolist(), strict=True):
            world.holders[holder.peer_id] = replace(holder, span=Span(start, start + len(holder.span)))


def policies(gain: Policy) -> dict[str, Callable[[], Nothing | Full]]:
    return {
        "none": Nothing,
        "new_only": NewOnly,
        "petals_20": lambda: Petals(0.2),
        "petals_10": lambda: Petals(0.1),
        "petals_1": lambda: Petals(0.01),
        "repair_5": lambda: Repair(0.05),
        "band_15": lambda: Band(0.15),
        "full": lambda: Full(gain),
        "full_views": lambda: FullViews(gain),
    }
