"""Petals' simulation of a swarm that changes over the day (NeurIPS 2023, appendix E), with several placements.

    python benchmarks/load_balancing.py [--json] [--seeds 5] [--days 4] [--policies none new_only petals_20 full ..]
                                        [--seconds-per-block 0 20] [--no-oracle] [--large 10000 126] [--plot FOLDER]
                                        [--keep FOLDER]

206 servers of throughput U[0, 100] with room for U{1..10} of 70 blocks; the number of those that are there follows a
sine wave between 20 and 105 over a day, in steps of a minute; who comes and goes is drawn at random, alike for all
policies. The first day is left out.

- `none`: random spans. `new_only`: equation 1 of appendix D when joining. `petals_P`: and every minute the full
  algorithm of appendix D with p = P %. `repair_P`, `band_P`: steepest descent on the missing throughput
  (load_balancing_greedy.py), from its best point on if that gains P %, or when P % are missing to the bound.
- `full`: what `petalnode serve` does, by its own functions (node/placement): a newcomer takes its place in the common
  plan; a plan is carried out to its end, each server as soon as it may leave, unless anybody comes or goes meanwhile.
  A plan that moves nobody is made anew every half hour.
- `full_views` (not in the table unless named: it is slow): `full` where no two servers agree, each measures the others
  up to 10 % off and makes its own plan.

`share_of_upper_bound` is the sum of the throughput over all minutes by that of the bound, the largest z with sum over
servers of min(t, z) b >= 70 z; `mean_share` the mean of the minutes' own shares. `share_of_oracle` is by a search
that reassigns everything for nothing whenever anybody came or went; the best there is lies between oracle and bound.
`blocks_per_day` are all blocks of the servers that moved, `new_blocks_per_day` those of them that they did not hold
before; what newcomers load is not counted. `zero_time` is the share of minutes in which some block had no server. Under
`loading`, loading a block takes so many seconds, in which a server that joins or moves serves nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from load_balancing_greedy import best_span, descent
from rich.console import Console
from rich.table import Table

from petalnode.node.placement.joining import joining_span, moves_to, span_for_newcomer
from petalnode.node.placement.observed import (
    USUAL_LOAD,
    Change,
    PlacedServer,
    recent,
    swarm_throughput,
    turnover,
    upper_bound,
)
from petalnode.node.placement.plan import PlacementPlan, Policy, make_plan, may_leave
from petalnode.node.placement.search import Search, Terms
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
    changes: tuple[Change, ...] = ()
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
        reload_weight = 1 + self.seconds_per_block / USUAL_LOAD
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
        terms = Terms(bound, bound, ORACLE_EVENNESS, 0.0, 1.0 + BLOCKS)
        search = Search(speeds, lengths, starts, np.zeros(len(holders)), np.arange(len(holders)), BLOCKS, terms)
        best = search.run(starts)
        kicked = best.starts.copy()
        for index in world.chance.permutation(len(holders))[: len(holders) // 5]:
            kicked[index] = world.chance.integers(0, BLOCKS - lengths[index] + 1)
        best = min(search.state(starts), best, search.run(kicked), key=lambda state: -state.throughput)
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


def events_of(seed: int, days: int) -> list[Event]:
    """Who comes and goes when, which no policy changes."""
    chance = np.random.default_rng(seed)
    machines = [
        Machine(f"server {number:03}", max(SLOWEST, float(chance.uniform(0, 100))), int(chance.integers(1, 11)))
        for number in range(SERVERS)
    ]
    there: list[Machine] = []
    found = []
    for minute in range(days * DAY):
        wanted = round(62.5 - 42.5 * math.cos(2 * math.pi * minute / DAY))
        while len(there) != wanted:
            joins = len(there) < wanted
            pool = [machine for machine in machines if machine not in there] if joins else there
            machine = pool[int(chance.integers(0, len(pool)))]
            if joins:
                there.append(machine)
            else:
                there.remove(machine)
            found.append(Event(minute, machine, joins))
    return found


@dataclass
class Series:
    """A value per minute, and what was moved for it on the days that count."""

    throughput: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    moves: int = 0
    blocks: int = 0
    new_blocks: int = 0


def simulate(policy: Nothing | Full, events: Sequence[Event], days: int, seed: int, seconds_per_block: float) -> Series:
    world = World(np.random.default_rng(seed + 1000), seconds_per_block)
    series = Series()
    pending = list(reversed(events))
    bound = 0.0
    for minute in range(days * DAY):
        world.minute = minute
        if minute == DAY:
            world.moves = world.blocks = world.new_blocks = 0
        changed = False
        while pending and pending[-1].minute == minute:
            event = pending.pop()
            changed = True
            world.changes = (*recent(world.changes, minute * 60.0), Change(minute * 60.0, event.joins))
            if event.joins:
                span = policy.joining(world, event.machine)
                world.place(event.machine.name, span, event.machine.throughput)
            else:
                del world.holders[event.machine.name], world.ready_at[event.machine.name]
        policy.minute(world, changed)
        if changed:
            bound = upper_bound(list(world.holders.values()), BLOCKS)
        if minute >= DAY:
            serving = world.serving()
            series.throughput.append(swarm_throughput(serving, BLOCKS) if serving else 0.0)
            series.bound.append(bound)
    series.moves, series.blocks, series.new_blocks = world.moves, world.blocks, world.new_blocks
    return series


def summary(runs: Sequence[Series], oracles: Sequence[Series], days: int) -> dict[str, float | None]:
    throughput = np.concatenate([run.throughput for run in runs])
    bound = np.concatenate([run.bound for run in runs])
    counted = len(runs) * (days - 1)
    oracle = float(np.sum([sum(run.throughput) for run in oracles])) if oracles else None
    return {
        "share_of_upper_bound": round(float(throughput.sum() / bound.sum()), 4),
        "share_of_oracle": None if oracle is None else round(float(throughput.sum()) / oracle, 4),
        "mean_share": round(float(np.mean(throughput / bound)), 4),
        "zero_time": round(float((throughput <= 0).mean()), 5),
        "moves_per_day": round(sum(run.moves for run in runs) / counted, 1),
        "blocks_per_day": round(sum(run.blocks for run in runs) / counted, 1),
        "new_blocks_per_day": round(sum(run.new_blocks for run in runs) / counted, 1),
    }


def one_decision(servers: int, blocks: int) -> dict[str, float]:
    """Seconds of processor time for one plan of a large swarm: each server placed where least is, and at random."""
    chance = np.random.default_rng(0)
    times = {}
    for kind in ("placed", "random"):
        holders: list[PlacedServer] = []
        load = np.zeros(blocks)
        for number in range(servers):
            length, speed = int(chance.integers(1, 11)), max(SLOWEST, float(chance.uniform(0, 100)))
            start = int(chance.integers(0, blocks - length + 1))
            if kind == "placed":
                sums = np.convolve(load, np.ones(length), "valid")
                start = int(sums.argmin())
            load[start : start + length] += speed
            holders.append(PlacedServer(f"server {number:05}", Span(start, start + length), speed))
        begun = time.process_time()
        make_plan(holders, blocks)
        times[kind] = round(time.process_time() - begun, 3)
    return {"servers": servers, "blocks": blocks, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in policies(Policy()) if name != "full_views"]
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=int, default=4)
    parser.add_argument("--policies", nargs="+", choices=list(policies(Policy())), default=usual)
    parser.add_argument("--seconds-per-block", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--gain", type=float, default=Policy().gain)
    parser.add_argument("--no-oracle", action="store_true")
    parser.add_argument("--large", type=int, nargs=2, default=[10_000, 126], metavar=("SERVERS", "BLOCKS"))
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="save a picture there (needs matplotlib)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep runs there, and take those that are there")
    options = parser.parse_args()
    known = policies(Policy(gain=options.gain))
    swarms = [events_of(seed, options.days) for seed in range(options.seeds)]
    console = Console(stderr=True)

    def run(name: str, make: Callable[[], Nothing | Full], seconds: float) -> list[Series]:
        found = []
        for seed, events in enumerate(swarms):
            console.print(f"{name}, {seconds:g} s a block, seed {seed} ...", style="dim")
            kept = options.keep / f"{name}-{seconds:g}-{seed}-{options.days}.json" if options.keep else None
            if kept is not None and kept.exists():
                found.append(Series(**json.loads(kept.read_text())))
                continue
            found.append(simulate(make(), events, options.days, seed, seconds))
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(asdict(found[-1])))
        return found

    oracles = [] if options.no_oracle else run("oracle", Oracle, 0.0)
    result: dict[str, dict[str, object]] = {}
    shown: dict[str, list[Series]] = {"oracle": oracles} if oracles else {}
    for name in options.policies:
        found: dict[str, object] = {}
        for seconds in options.seconds_per_block:
            series = run(name, known[name], seconds)
            figures = summary(series, oracles, options.days)
            if seconds:
                found.setdefault("loading", {})[f"{seconds:g}"] = figures  # type: ignore[index]
            else:
                found |= figures
                shown[name] = series
        result[name] = found
    if oracles:
        result["oracle"] = dict(summary(oracles, oracles, options.days))
    decision = one_decision(*options.large)
    if options.plot:
        from load_balancing_plot import plot

        plot(options.plot, {name: (series[0].throughput, series[0].bound) for name, series in shown.items()}, result)
    if options.json:
        print(json.dumps({**result, "one_decision": decision}))
    else:
        show(result, decision)


def show(result: dict[str, dict[str, object]], decision: dict[str, float]) -> None:
    columns = ["share_of_upper_bound", "share_of_oracle", "mean_share", "zero_time"]
    columns += ["moves_per_day", "blocks_per_day", "new_blocks_per_day"]
    table = Table("policy", *columns)
    for name, figures in result.items():
        if "zero_time" in figures:
            table.add_row(name, *(str(figures[column]) for column in columns))
        for seconds, loading in figures.get("loading", {}).items():  # type: ignore[attr-defined]
            table.add_row(f"{name}, {seconds} s a block", *(str(loading[column]) for column in columns))
    console = Console()
    console.print(table)
    console.print(
        f"one plan of {decision['servers']} servers and {decision['blocks']} blocks: {decision['placed']} s, "
        f"{decision['random']} s where they stand at random (processor time)"
    )


if __name__ == "__main__":
    main()
