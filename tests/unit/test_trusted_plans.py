"""Plans with trusted machines for the first and the last blocks, or blocks that go together: against all placements,
and as the router has it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from petalnode.node.errors import NoChainError, SwarmError
from petalnode.node.placement.planning.cycle import PlacedMachine
from petalnode.node.placement.planning.machines_file import Fleet, Machine, fleet_of, read_machines
from petalnode.node.placement.planning.plans import FleetPlan, busiest_plan, expected, fastest_plan
from petalnode.node.swarm.cost import COST
from petalnode.protocols.ids import Boundaries, Span

BLOCKS = 4


def some_fleet(seed: int, *, client: bool, trusted_blocks: int, parting: set[int]) -> Fleet:
    """Three machines, two or three of them trusted."""
    chance = np.random.default_rng(seed)
    rtts = chance.random((3, 3))
    rtts = (rtts + rtts.T) / 2
    np.fill_diagonal(rtts, 0)
    own = chance.permutation([True, True, bool(chance.integers(4) == 0)])
    room, seconds = chance.integers(1, BLOCKS + 1, 3), chance.uniform(0.01, 0.5, 3)
    machines = tuple(
        Machine(f"m{number}", int(blocks), float(block_seconds), trusted=bool(trusted))
        for number, (blocks, block_seconds, trusted) in enumerate(zip(room, seconds, own, strict=True))
    )
    spans = [Span(*ends) for ends in itertools.pairwise([0, *sorted(parting), BLOCKS]) if ends[1] - ends[0] > 1]
    boundaries = Boundaries(8, BLOCKS, undivided=tuple(spans))
    clients = chance.random(3) if client else None
    return Fleet(machines, rtts, clients, 0.01, trusted_blocks, boundaries=boundaries)


def placements(fleet: Fleet) -> Iterator[list[PlacedMachine]]:
    """All of them; machines that are not trusted are never better off with blocks that they may not compute."""
    ends = fleet.trusted_blocks
    choices: list[list[Span | None]] = []
    for machine in fleet.machines:
        low, high = (0, BLOCKS) if machine.trusted else (ends, BLOCKS - ends)
        places = (at for at in range(low, high + 1) if fleet.boundaries is None or fleet.boundaries.may_part(at))
        spans = itertools.combinations(places, 2)
        choices.append([None, *(Span(start, end) for start, end in spans if end - start <= machine.blocks)])
    for spans in itertools.product(*choices):
        yield [PlacedMachine(number, span) for number, span in enumerate(spans) if span is not None]


def expectations(fleet: Fleet) -> Iterator[FleetPlan]:
    for placed in placements(fleet):
        with suppress(NoChainError):
            yield expected(fleet, placed, BLOCKS)


def kept(fleet: Fleet, plan: FleetPlan) -> bool:
    """Whether the ends are on trusted machines only, and what goes together is on one."""
    cuts = {at for entry in (*plan.placed, *plan.route) for at in (entry.span.start, entry.span.end)}
    if fleet.boundaries is not None and not all(map(fleet.boundaries.may_part, cuts)):
        return False
    ends = {*range(fleet.trusted_blocks), *range(BLOCKS - fleet.trusted_blocks, BLOCKS)}
    return all(
        fleet.machines[entry.machine].trusted or not ends & set(range(entry.span.start, entry.span.end))
        for entry in (*plan.placed, *plan.route)
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.integers(0, 2), st.sets(st.integers(1, BLOCKS - 1)))
def test_no_allowed_placement_is_faster_or_busier(
    seed: int, client: bool, trusted_blocks: int, parting: set[int]
) -> None:
    assume(trusted_blocks or len(parting) < BLOCKS - 1)
    fleet = some_fleet(seed, client=client, trusted_blocks=trusted_blocks, parting=parting)
    plans = list(expectations(fleet))
    if not plans:
        with pytest.raises(SwarmError, match=r"trusted|one machine"):
            fastest_plan(fleet, BLOCKS, seconds=600)
        return
    fastest, busiest = fastest_plan(fleet, BLOCKS, seconds=600), busiest_plan(fleet, BLOCKS)
    assert fastest.proved and fastest.seconds == pytest.approx(min(plan.seconds for plan in plans))
    assert kept(fleet, fastest) and kept(fleet, busiest)
    most = max(plan.tokens_per_second for plan in plans)
    assert busiest.most_tokens_per_second is not None
    assert busiest.tokens_per_second <= most * (1 + 1e-9) <= busiest.most_tokens_per_second * (1 + 2e-9)


def own(*blocks: int) -> tuple[Machine, ...]:
    return tuple(Machine(f"own{number}", count, 0.1, trusted=True) for number, count in enumerate(blocks))


def near(*machines: Machine, trusted_blocks: int = 2, client: float = 0.05) -> Fleet:
    """Machines 10 ms from each other."""
    size = len(machines)
    rtts = np.full((size, size), 0.01)
    np.fill_diagonal(rtts, 0)
    return Fleet(machines, rtts, np.full(size, client), 0.0, trusted_blocks)


def test_prediction_goes_through_the_client_from_trusted_machines() -> None:
    fleet = near(*own(2, 2), Machine("stranger", 26, 0.01))
    plan = fastest_plan(fleet, 30, seconds=600)
    assert [(entry.machine, entry.span) for entry in plan.route] == [
        (0, Span(0, 2)),
        (2, Span(2, 28)),
        (1, Span(28, 30)),
    ]
    ways = 0.025 + (0.025 + 0.025) + 0.005 + 0.025  # in, through the client, pushed, out
    assert plan.proved and plan.seconds == pytest.approx(4 * 0.1 + 26 * 0.01 + ways + 3 * COST.handling_seconds)


def test_one_machine_with_all_blocks_serves_both_ends() -> None:
    fleet = near(*own(30), Machine("stranger", 26, 0.001))
    plan = fastest_plan(fleet, 30, seconds=600)
    assert [(entry.machine, entry.span) for entry in plan.placed] == [(0, Span(0, 30)), (1, Span(2, 28))]
    assert [entry.machine for entry in plan.route] == [0, 1, 0]


def test_ends_that_take_several_trusted_machines() -> None:
    fleet = near(*own(3, 3, 3, 3), Machine("stranger", 30, 0.01), trusted_blocks=6)
    plan = fastest_plan(fleet, 30, seconds=600)
    assert [len(entry.span) for entry in plan.route] == [3, 3, 18, 3, 3] and plan.proved


@pytest.mark.parametrize(
    ("machines", "blocks", "says"),
    [
        (own(1, 2), 2, "together hold 3 of the 4 blocks"),
        (own(20), 2, "the only trusted machine holds 20 of 30 blocks"),
        (own(2, 2), 3, "together hold 4 of the 6 blocks"),
        (own(5, 1), 3, "no placement has trusted machines for the first and the last 3 blocks"),
    ],
    ids=["too few blocks", "one machine", "too many blocks at the ends", "badly shared"],
)
def test_what_cannot_be_pinned_is_said(machines: tuple[Machine, ...], blocks: int, says: str) -> None:
    fleet = near(*machines, Machine("stranger", 30, 0.01), trusted_blocks=blocks)
    for plan in (fastest_plan, busiest_plan):
        with pytest.raises(SwarmError, match=says):
            plan(fleet, 30)


def test_example_of_page_is_planned_as_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "machines.json").write_text(example)
    file = read_machines(tmp_path / "machines.json")
    rows = re.findall(r"\| `--trusted-blocks (\d+)` \| (.*?) \| ([\d.]+) \|", page)
    assert len(rows) == 3
    for blocks, chain, milliseconds in rows:
        fleet = fleet_of(file, 30, None, int(blocks))
        plan = fastest_plan(fleet, 30, seconds=600)
        told = ", ".join(f"{fleet.machines[entry.machine].name} {entry.span}" for entry in plan.route)
        assert (told, f"{1000 * plan.seconds:.1f}") == (chain, milliseconds)


def test_untimely_plan_says_how_far_from_best() -> None:
    chance = np.random.default_rng(5)
    machines = [
        Machine(f"m{number}", int(chance.integers(2, 6)), float(chance.uniform(0.001, 0.1)), trusted=number % 3 == 0)
        for number in range(30)
    ]
    rtts = chance.uniform(0.001, 0.2, (30, 30))
    np.fill_diagonal(rtts, 0)
    fleet = Fleet(tuple(machines), rtts, chance.uniform(0.001, 0.2, 30), 0.0, 2)
    hurried = fastest_plan(fleet, 40, seconds=0.0)
    assert 0 < hurried.least_seconds <= hurried.seconds < math.inf
