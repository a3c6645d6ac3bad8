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
`loading`, loading a block takes these seconds, in which a server that joins or moves serves nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from load_balancing_policies import (
    BLOCKS,
    DAY,
    SERVERS,
    SLOWEST,
    Event,
    Full,
    Machine,
    Nothing,
    Oracle,
    World,
    policies,
)
from rich.console import Console
from rich.table import Table

from petalnode.node.placement.observed import (
    MembershipChange,
    PlacedServer,
    recent,
    swarm_throughput,
    upper_bound,
)
from petalnode.node.placement.plan import Policy, make_plan
from petalnode.protocols.ids import Span


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
            world.changes = (*recent(world.changes, minute * 60.0), MembershipChange(minute * 60.0, event.joins))
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
