from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduling import greedy, random_orders, read_instance
from petalnode.node.errors import BadInput, SwarmError
from petalnode.node.placement.planning.cycle import Problem, cycle_seconds, split_blocks
from petalnode.node.placement.planning.fastest import fastest_cycle

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "scheduling"
FOREVER = 600.0  # a schedule of these sizes is proved long before; nothing here depends on how fast that is
OPTIMA = {"tb1_s14": 181.9711, "tb2_s04": 115.7421, "tb3_s01": 316.5256, "tb4_s11": 410.2942}
"""Milliseconds; confirmed by Held-Karp where there are 21 machines."""


def problem_of(
    chance: np.random.Generator, size: int, blocks: int, *, home: int | None = None, scale: float = 1.0
) -> Problem:
    """Ways that know no triangle inequality, some machines alike, some without room."""
    capacity = chance.integers(0, 6, size)
    capacity[chance.integers(size)] += blocks // 2
    if home is not None:
        capacity[home] = 0
    speeds = chance.choice([1.0, 1.0, 2.0, 3.5], size) if chance.random() < 0.5 else chance.random(size)
    return Problem(capacity, speeds, chance.random((size, size)) * scale, blocks, home)


def best_of_all(problem: Problem) -> float:
    """By looking at every cycle and every split."""
    machines = [number for number in range(len(problem)) if problem.capacity[number]]
    least = math.inf
    for count in range(1, len(machines) + 1):
        for order in itertools.permutations(machines, count):
            cycle = order if problem.home is None else (problem.home, *order)
            room = [int(problem.capacity[machine]) for machine in order]
            for split in itertools.product(*(range(1, most + 1) for most in room)):
                if sum(split) == problem.num_blocks:
                    blocks = split if problem.home is None else (0, *split)
                    least = min(least, cycle_seconds(problem, cycle, blocks))
    return least


def held_karp(problem: Problem) -> float:
    """The best cycle by dynamic programming over sets of machines: [set, last] from each first machine."""
    size = len(problem)
    least = math.inf
    for first in range(size):
        shortest = {(1 << first, first): 0.0}
        for _ in range(size):
            for (passed, last), ways in shortest.items():
                chosen = [machine for machine in range(size) if passed >> machine & 1]
                if problem.capacity[chosen].sum() >= problem.num_blocks >= len(chosen):
                    back = problem.way[last, first] if len(chosen) > 1 else 0.0
                    split = split_blocks(problem, chosen)
                    least = min(least, ways + back + float(problem.block_seconds[chosen] @ np.array(split)))
            longer: dict[tuple[int, int], float] = {}
            for (passed, last), ways in shortest.items():
                for machine in range(first + 1, size):
                    if not passed >> machine & 1 and problem.capacity[machine]:
                        key = (passed | 1 << machine, machine)
                        longer[key] = min(longer.get(key, math.inf), ways + problem.way[last, machine])
            shortest = longer
    return least


def check_shape(problem: Problem, machines: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    assert len(set(machines)) == len(machines) == len(blocks) and sum(blocks) == problem.num_blocks
    assert (problem.home is None) or machines[0] == problem.home
    for machine, count in zip(machines, blocks, strict=True):
        assert count <= problem.capacity[machine]
        assert count > 0 or machine == problem.home


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.sampled_from([0.0, 0.1, 1.0, 20.0])
)
def test_no_cycle_and_no_split_is_faster(seed: int, size: int, blocks: int, from_home: bool, scale: float) -> None:
    chance = np.random.default_rng(seed)
    problem = problem_of(chance, size, blocks, home=int(chance.integers(size)) if from_home else None, scale=scale)
    least = best_of_all(problem)
    if math.isinf(least):
        with pytest.raises(SwarmError, match=f"of {blocks} blocks"):
            fastest_cycle(problem, seconds=FOREVER)
        return
    found = fastest_cycle(problem, seconds=FOREVER)
    check_shape(problem, found.machines, found.blocks)
    assert found.proved
    assert found.seconds == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert found.seconds == cycle_seconds(problem, found.machines, found.blocks)


def on_a_map(seed: int, size: int) -> Problem:
    """Machines in a square, and ways between them that are about as long as it looks."""
    chance = np.random.default_rng(seed)
    places = chance.random((size, 2))
    way = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1)) * chance.uniform(0.8, 1.2, (size, size))
    capacity = chance.integers(2, 6, size)
    return Problem(capacity, chance.choice([0.02, 0.05, 0.051], size), way, int(0.7 * capacity.sum()))


@pytest.mark.parametrize("seed", range(12))
def test_held_karp_finds_nothing_faster(seed: int) -> None:
    problem = on_a_map(seed, 9)
    found = fastest_cycle(problem, seconds=FOREVER)
    assert found.proved and found.seconds == pytest.approx(held_karp(problem), rel=1e-12)


@pytest.mark.parametrize("name", OPTIMA)
def test_the_optimum_of_the_reports_testbeds(name: str) -> None:
    problem = read_instance(DATA / f"{name}.txt")
    found = fastest_cycle(problem, seconds=FOREVER)
    assert found.proved and 1000 * found.seconds == pytest.approx(OPTIMA[name], abs=1e-3)
    assert found.seconds <= greedy(problem)[0] + 1e-9
    assert found.seconds <= random_orders(problem, 64)[0]


@pytest.mark.parametrize("seed", range(8))
def test_unproven_schedule_is_one_all_the_same(seed: int) -> None:
    problem = on_a_map(seed, 14)
    hurried = fastest_cycle(problem, seconds=0.0)
    check_shape(problem, hurried.machines, hurried.blocks)
    proved = fastest_cycle(problem, seconds=FOREVER)
    assert proved.proved and hurried.bound <= proved.seconds <= hurried.seconds


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 12))
def test_equal_problems_have_equal_schedules_in_any_order(seed: int, size: int) -> None:
    chance = np.random.default_rng(seed)
    problem = problem_of(chance, size, 9)
    if problem.capacity.sum() < 9:
        return
    found = fastest_cycle(problem, seconds=FOREVER)
    assert found == fastest_cycle(problem, seconds=FOREVER)
    order = chance.permutation(size)
    other = Problem(problem.capacity[order], problem.block_seconds[order], problem.way[np.ix_(order, order)], 9)
    assert fastest_cycle(other, seconds=FOREVER).seconds == pytest.approx(found.seconds, rel=1e-12)


def test_of_many_machines_a_good_cycle_is_found() -> None:
    """Where all are alike, but for four in one place: they alone make the fastest chain."""
    size = 150
    way = np.full((size, size), 1.0)
    near = np.arange(70, 74)
    way[np.ix_(near, near)] = 0.01
    problem = Problem(np.full(size, 5), np.full(size, 0.1), way, 20)
    found = fastest_cycle(problem, seconds=FOREVER)
    assert sorted(found.machines) == list(near) and not found.proved


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_no_split_is_faster(seed: int, count: int) -> None:
    chance = np.random.default_rng(seed)
    capacity = chance.integers(1, 5, count)
    blocks = int(chance.integers(count, capacity.sum() + 1))
    problem = Problem(capacity, chance.random(count), np.zeros((count, count)), blocks)
    machines = tuple(range(count))
    split = split_blocks(problem, machines)
    check_shape(problem, machines, split)
    splits = itertools.product(*(range(1, most + 1) for most in capacity))
    least = min(cycle_seconds(problem, machines, split) for split in splits if sum(split) == blocks)
    assert cycle_seconds(problem, machines, split) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize(("capacity", "blocks"), [([2, 2], 5), ([3, 3, 3], 2)])
def test_what_cannot_be_split_is_refused(capacity: list[int], blocks: int) -> None:
    count = len(capacity)
    problem = Problem(np.array(capacity), np.ones(count), np.zeros((count, count)), blocks)
    with pytest.raises(BadInput, match=f"cannot share {blocks}"):
        split_blocks(problem, tuple(range(count)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"way": np.zeros((2, 3))},
        {"way": np.array([[0.0, -1.0], [1.0, 0.0]])},
        {"block_seconds": np.array([1.0, math.nan])},
        {"block_seconds": np.array([1.0, math.inf])},
        {"capacity": np.array([1, -1])},
        {"num_blocks": 0},
        {"home": 2},
        {"home": 0},  # it holds blocks
    ],
)
def test_a_problem_that_is_none(wrong: dict[str, object]) -> None:
    right = {
        "capacity": np.array([2, 2]),
        "block_seconds": np.ones(2),
        "way": np.zeros((2, 2)),
        "num_blocks": 3,
        "home": None,
    }
    Problem(**right)
    with pytest.raises(BadInput):
        Problem(**(right | wrong))
