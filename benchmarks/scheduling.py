"""Milliseconds per token of the schedules that several algorithms find, on the Berkeley report's four testbeds.

    python benchmarks/scheduling.py [--json] [--testbeds 1 2 3 4] [--seeds 16] [--no-ilp] [--ilp-limits 4 16]
                                    [--ours 0.1 1] [--plot FOLDER]

The instances are in data/scheduling, with their source. `random-n` tries n orders of the machines and fills them one
after the other; `greedy` is algorithm 2 of the report and `augmented` its quicker variant (section 4.3.1), both in
plain Python; `ilp-s` is the integer programme of its table 1 in HiGHS for s seconds at most (`pip install
'petalnode[benchmarks]'`); `petalnode` is what `petalnode plan` uses, for 1 s at most, and `petalnode-0.1` for 0.1 s.
`worst` is the seed that is farthest above the best schedule known of it, which `petalnode` proves on most; `<= greedy`
counts the seeds where an answer is at or below greedy's. Seconds, and the limits of `petalnode`, are of processor
time, which other processes on the machine disturb less than the clock; `wall` is by the clock, and so is HiGHS' limit.
HiGHS gets 8 GiB; where that is too little it has no answer.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from petalnode.node.placement.planning.cycle import Problem
from petalnode.node.placement.planning.fastest import fastest_cycle

DATA = Path(__file__).parent / "data" / "scheduling"
ROUNDING = 1e-6  # milliseconds
ILP_BYTES = 8 << 30  # of address space


@dataclass(frozen=True)
class Answer:
    """`ms` is infinite where nothing was found; `least` is what no schedule goes below, as far as was proved."""

    ms: float
    seconds: float
    wall: float
    least: float = 0.0


def read_instance(path: Path) -> Problem:
    """As README.md beside the data says; times in seconds."""
    head, *lines = path.read_text().splitlines()
    size, blocks = map(int, head.split())
    machines = [line.split() for line in lines[:size]]
    way = np.array([line.split() for line in lines[size : 2 * size]], float) / 1000
    capacity = np.array([int(machine[2]) for machine in machines], np.intp)
    return Problem(capacity, np.array([float(machine[3]) for machine in machines]) / 1000, way, blocks)


def ours(problem: Problem, seconds: float) -> tuple[float, float]:
    schedule = fastest_cycle(problem, seconds=seconds)
    return schedule.seconds, schedule.bound


def random_orders(problem: Problem, count: int) -> tuple[float, float]:
    """The best of some orders of all machines, each filled as far as it goes."""
    chance = np.random.default_rng(0)
    best = math.inf
    for _ in range(count):
        order = chance.permutation(len(problem))
        filled = np.minimum(np.cumsum(problem.capacity[order]), problem.num_blocks)
        blocks = np.diff(filled, prepend=0)
        used = order[blocks > 0]
        ways = problem.way[used, np.roll(used, -1)].sum() if len(used) > 1 else 0.0
        best = min(best, float(blocks[blocks > 0] @ problem.block_seconds[used] + ways))
    return best, 0.0


def greedy(problem: Problem, augmented: bool = False) -> tuple[float, float]:
    """Algorithm 2: shortest paths over (block, machine) from every machine, each filled before the next; `augmented`
    from all at once, with ways that count the distance to the first machine."""
    capacity, seconds = problem.capacity.tolist(), problem.block_seconds.tolist()
    way, blocks, size = problem.way.tolist(), problem.num_blocks, len(problem)
    best = math.inf
    reached: dict[tuple[int, int], float] = {}
    queue: list[tuple[float, float, int, int, int, int]] = []
    for start in range(size):
        done = min(blocks, capacity[start])
        spent = done * seconds[start]
        if done == blocks:
            best = min(best, spent)
        elif done:
            heapq.heappush(queue, (spent, spent, done, start, start, 1 << start))
            reached[done, start] = min(spent, reached.get((done, start), math.inf))
        if augmented and start < size - 1:
            continue
        while queue:
            _, spent, done, last, first, used = heapq.heappop(queue)
            for machine in range(size):
                taken = min(capacity[machine], blocks - done)
                if used >> machine & 1 or not taken:
                    continue
                now = spent + way[last][machine] + taken * seconds[machine]
                if done + taken == blocks:
                    best = min(best, now + way[machine][first])
                    continue
                rank = now + (way[first][machine] if augmented else 0.0)
                if rank < reached.get((done + taken, machine), math.inf):
                    reached[done + taken, machine] = rank
                    heapq.heappush(queue, (rank, now, done + taken, machine, first, used | 1 << machine))
        reached.clear()
    return best, 0.0


def integer_programme(problem: Problem, limit: float) -> tuple[float, float]:
    """The report's table 1, solved in a process of its own: without a limit HiGHS may take all memory there is."""
    with ProcessPoolExecutor(1, get_context("fork"), _limit_memory) as pool:
        try:
            return pool.submit(_solve, problem, limit).result()
        except (BrokenProcessPool, MemoryError):
            return math.inf, 0.0


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ILP_BYTES, ILP_BYTES))


def _solve(problem: Problem, limit: float) -> tuple[float, float]:
    """x[l, i, j] is 1 where machine i computes block l and hands it on to j."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, vstack

    blocks, size = problem.num_blocks, len(problem)
    count = blocks * size * size
    block, sender, receiver = (axis.ravel() for axis in np.indices((blocks, size, size)))
    way = problem.way.copy()
    np.fill_diagonal(way, 0.0)
    cost = problem.block_seconds[sender] + way[sender, receiver]
    ones, variable = np.ones(count), np.arange(count)

    def rows(values: np.ndarray, row: np.ndarray, height: int) -> coo_array:
        return coo_array((values, (row, variable)), shape=(height, count))

    following = (block + 1) % blocks
    flow = rows(ones, block * size + receiver, blocks * size) - rows(ones, following * size + sender, blocks * size)
    once = rows(ones, block, blocks)
    room = rows(ones, sender, size)
    zero, one = np.zeros(blocks * size), np.ones(blocks)
    constraint = LinearConstraint(
        vstack([flow, once, room]).tocsr(),
        np.concatenate([zero, one, np.zeros(size)]),
        np.concatenate([zero, one, problem.capacity.astype(float)]),
    )
    found = milp(
        cost,
        constraints=constraint,
        integrality=ones,
        bounds=Bounds(0, 1),
        options={"time_limit": limit, "disp": False},
    )
    return math.inf if found.x is None else float(found.fun), float(found.mip_dual_bound or 0.0)


def timed(call: Callable[[], tuple[float, float]]) -> Answer:
    wall, begun = time.perf_counter(), _processor_time()
    seconds, least = call()
    return Answer(1000 * seconds, _processor_time() - begun, time.perf_counter() - wall, 1000 * least)


def _processor_time() -> float:
    """Of this process and those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def algorithms(options: argparse.Namespace) -> dict[str, Callable[[Problem], tuple[float, float]]]:
    found: dict[str, Callable[[Problem], tuple[float, float]]] = {
        f"random-{count}": lambda problem, count=count: random_orders(problem, count) for count in (1, 64, 4096)
    }
    found |= {"greedy": greedy, "augmented": lambda problem: greedy(problem, augmented=True)}
    if not options.no_ilp:
        for limit in options.ilp_limits:
            found[f"ilp-{limit:g}"] = lambda problem, limit=limit: integer_programme(problem, limit)
    for limit in options.ours:
        name = "petalnode" if limit == 1 else f"petalnode-{limit:g}"
        found[name] = lambda problem, limit=limit: ours(problem, limit)
    return found


def summary(answers: dict[str, list[Answer]], best: list[float]) -> dict[str, dict[str, float | int | None]]:
    """Of one testbed, by algorithm; means over the seeds for which there is an answer."""
    found = {}
    for name, plans in answers.items():
        known = [answer.ms for answer in plans if math.isfinite(answer.ms)]
        ratios = [answer.ms / least for answer, least in zip(plans, best, strict=True) if math.isfinite(answer.ms)]
        behind = zip(plans, answers["greedy"], strict=True)
        found[name] = {
            "tpot_ms": statistics.mean(known) if known else None,
            "seconds": statistics.mean(answer.seconds for answer in plans),
            "max_seconds": max(answer.seconds for answer in plans),
            "wall_seconds": statistics.mean(answer.wall for answer in plans),
            "worst_over_best": max(ratios) - 1 if ratios else None,
            "best_found": sum(ratio <= 1 + 1e-9 for ratio in ratios),
            "not_above_greedy": sum(answer.ms <= other.ms + ROUNDING for answer, other in behind),
            "proved": sum(answer.least >= answer.ms - ROUNDING for answer in plans),
            "answers": len(known),
            "seeds": len(plans),
        }
    return found


def plot(testbeds: dict[str, dict[str, dict[str, float | int | None]]], folder: Path) -> None:
    """scheduling.png: how far above the best known, and how long it takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(next(iter(testbeds.values())))
    figure, (above, took) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, name in enumerate(names):
        places = [index + 0.8 * (number / len(names) - 0.5) for index in range(len(testbeds))]
        colour = f"C{number}"
        least = [testbed["petalnode"]["tpot_ms"] or 1.0 for testbed in testbeds.values()]
        means = [testbed[name]["tpot_ms"] for testbed in testbeds.values()]
        percents = [
            math.nan if mean is None else max(100 * (mean / ours - 1), 0.001)
            for mean, ours in zip(means, least, strict=True)
        ]
        above.bar(places, percents, 0.8 / len(names), color=colour, label=name, bottom=0.0005)
        took.bar(places, [testbed[name]["seconds"] for testbed in testbeds.values()], 0.8 / len(names), color=colour)
    for axes, title in ((above, "time per token above the best, %"), (took, "seconds to find it")):
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xticks(range(len(testbeds)), [f"testbed {name[2:]}" for name in testbeds])
        axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(names), fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "scheduling.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--testbeds", type=int, nargs="+", default=[1, 2, 3, 4], choices=(1, 2, 3, 4))
    parser.add_argument("--seeds", type=int, default=16, help="how many of each testbed, from the first")
    parser.add_argument("--no-ilp", action="store_true", help="leave the integer programme out, which takes long")
    parser.add_argument("--ilp-limits", type=float, nargs="+", default=[4, 16], metavar="S")
    parser.add_argument("--ours", type=float, nargs="+", default=[0.1, 1], metavar="S", help="time limits of petalnode")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="save a picture there (needs matplotlib)")
    options = parser.parse_args()
    fastest_cycle(read_instance(DATA / "tb1_s00.txt"))  # what the first call alone takes is nobody's time
    testbeds = {}
    for testbed in options.testbeds:
        problems = [read_instance(path) for path in sorted(DATA.glob(f"tb{testbed}_s*.txt"))[: options.seeds]]
        answers = {
            name: [timed(lambda problem=problem, call=call: call(problem)) for problem in problems]
            for name, call in algorithms(options).items()
        }
        best = [min(answer[index].ms for answer in answers.values()) for index in range(len(problems))]
        testbeds[f"tb{testbed}"] = summary(answers, best)
    if options.plot:
        plot(testbeds, options.plot)
    if options.json:
        print(json.dumps({"testbeds": testbeds}))
        return
    table = Table(title="time per token, ms: mean over the seeds, and the worst seed above the best known")
    for column in ("testbed", "algorithm", "ms", "worst", "best found", "<= greedy", "proved", "s", "max s", "wall"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for testbed, rows in testbeds.items():
        for name, row in rows.items():
            mean, worst = row["tpot_ms"], row["worst_over_best"]
            table.add_row(
                testbed,
                name + ("" if row["answers"] == row["seeds"] else f" ({row['answers']} answers)"),
                "-" if mean is None else f"{mean:.2f}",
                "-" if worst is None else f"{100 * worst:.1f} %",
                *(f"{row[key]}" for key in ("best_found", "not_above_greedy", "proved")),
                f"{row['seconds']:.3f}",
                f"{row['max_seconds']:.3f}",
                f"{row['wall_seconds']:.3f}",
            )
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
