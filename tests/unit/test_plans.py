"""Plans, and that they reckon as the client's router does."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from petalnode.node.errors import NoChainError
from petalnode.node.placement.planning.cycle import PlacedMachine
from petalnode.node.placement.planning.fastest import fastest_cycle
from petalnode.node.placement.planning.label_search import MAX_MACHINES
from petalnode.node.placement.planning.machines_file import Fleet, Machine
from petalnode.node.placement.planning.plans import busiest_plan, expected, fastest_plan, fleet_of_servers, present_plan
from petalnode.node.swarm.cost import COST
from petalnode.protocols.announcement import Announcement
from petalnode.protocols.ids import Span
from tests.announcements import plain

BLOCKS = 8


def fleet_of(seed: int, *, client: bool, known: float = 1.0) -> Fleet:
    """Machines with room for all blocks; some of the pairs are `known`."""
    chance = np.random.default_rng(seed)
    size = int(chance.integers(2, 8))
    room = chance.integers(1, 6, size)
    room[0] = BLOCKS
    rtts = chance.random((size, size))
    rtts = (rtts + rtts.T) / 2
    np.fill_diagonal(rtts, 0)
    if not client:
        # Without a client's ways a plan knows no detours; with them the router would take some.
        for via in range(size):
            rtts = np.minimum(rtts, rtts[:, via, None] + rtts[None, via])
    missing = chance.random((size, size)) > known
    rtts[(missing | missing.T) & ~np.eye(size, dtype=bool)] = math.nan
    machines = (
        Machine(f"m{number}", int(blocks), float(chance.uniform(0.01, 0.2))) for number, blocks in enumerate(room)
    )
    return Fleet(tuple(machines), rtts, chance.random(size) if client else None, 0.01)


def some_placement(fleet: Fleet, seed: int) -> list[PlacedMachine]:
    """All machines, each with as many blocks as it can hold or fewer, anywhere."""
    chance = np.random.default_rng(seed)
    placed = []
    for number, machine in enumerate(fleet.machines):
        count = int(chance.integers(1, min(machine.blocks, BLOCKS) + 1))
        start = int(chance.integers(0, BLOCKS - count + 1))
        placed.append(PlacedMachine(number, Span(start, start + count)))
    return placed


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@example(1315, True, True)  # the best route comes back to a machine
@example(67, True, False)
def test_no_placement_has_faster_route_than_fastest_plan(seed: int, client: bool, all_known: bool) -> None:
    fleet = fleet_of(seed, client=client, known=1.0 if all_known or not client else 0.5)
    plan = fastest_plan(fleet, BLOCKS, seconds=600)
    assert [entry.span.start for entry in plan.route] == [0, *(entry.span.end for entry in plan.route)][:-1]
    assert plan.route[-1].span.end == BLOCKS
    assert {entry.machine for entry in plan.placed} == {entry.machine for entry in plan.route}
    assert all(len(entry.span) <= fleet.machines[entry.machine].blocks for entry in plan.placed)
    assert plan.proved and plan.seconds == plan.least_seconds
    # It is the best cycle, unless coming back to a machine is quicker: where the way between two others is longer than
    # by this one.
    schedule = fastest_cycle(fleet.problem(BLOCKS), seconds=600)
    handled = COST.handling_seconds * (len(plan.placed) == 1 and not client)  # no way leads to one that is alone
    cycle = schedule.seconds + handled + fleet.client_seconds
    if len(plan.placed) == len(plan.route):
        assert plan.seconds == pytest.approx(cycle, rel=1e-9)
    else:
        assert client and plan.seconds < cycle
    # Nothing that the router could do with any placement of these machines is faster.
    busiest = busiest_plan(fleet, BLOCKS)
    assert plan.seconds <= busiest.seconds * (1 + 1e-9)
    for other in range(10):
        with suppress(NoChainError):
            assert plan.seconds <= expected(fleet, some_placement(fleet, other), BLOCKS).seconds * (1 + 1e-9)
    assert busiest.tokens_per_second <= busiest.most_tokens_per_second * (1 + 1e-9)
    assert plan.tokens_per_second <= busiest.most_tokens_per_second * (1 + 1e-9)


def fleet_with_a_fast_machine_behind_a_slow_one(others: int) -> Fleet:
    """Only the slow machine is near the client, and only the fast one near that."""
    size = 2 + others
    rtts = np.full((size, size), 9.0)
    rtts[0, 1] = rtts[1, 0] = 0.1
    np.fill_diagonal(rtts, 0.0)
    client = np.full(size, 8.0)
    client[0] = 0.1
    far = [Machine(f"far {number}", 1, 0.5) for number in range(others)]
    return Fleet((Machine("slow", 6, 0.5), Machine("fast", 4, 0.01), *far), rtts, client)


def test_route_returns_to_a_machine_where_faster() -> None:
    plan = fastest_plan(fleet_with_a_fast_machine_behind_a_slow_one(others=3), 6, seconds=600)
    assert plan.placed == (PlacedMachine(0, Span(0, 6)), PlacedMachine(1, Span(1, 5)))
    assert plan.route == (PlacedMachine(0, Span(0, 1)), PlacedMachine(1, Span(1, 5)), PlacedMachine(0, Span(5, 6)))
    assert plan.proved and plan.seconds == pytest.approx(1.04 + 0.2 + 3 * COST.handling_seconds)


def test_known_plan_is_taken_if_faster() -> None:
    fleet = fleet_with_a_fast_machine_behind_a_slow_one(others=MAX_MACHINES)  # too many for the search of walks
    whole = expected(
        fleet, [PlacedMachine(0, Span(0, 6)), PlacedMachine(2, Span(0, 1)), PlacedMachine(1, Span(1, 5))], 6
    )
    assert whole.seconds < fastest_plan(fleet, 6, seconds=600).seconds
    plan = fastest_plan(fleet, 6, seconds=600, known=[whole])
    assert plan.seconds == whole.seconds and plan.placed == (PlacedMachine(0, Span(0, 6)), PlacedMachine(1, Span(1, 5)))
    assert not plan.proved


def test_what_is_expected_counts_computing_ways_and_client() -> None:
    fleet = Fleet(
        (Machine("a", 4, 0.1), Machine("b", 4, 0.2)),
        np.array([[0.0, 0.06], [0.06, 0.0]]),
        np.array([0.02, 0.08]),
        0.5,
    )
    found = expected(fleet, [PlacedMachine(0, Span(0, 3)), PlacedMachine(1, Span(3, 4))], 4)
    assert found.seconds == pytest.approx(0.01 + 0.3 + 0.03 + 0.2 + 0.04 + 0.5 + 2 * COST.handling_seconds)
    assert found.tokens_per_second == pytest.approx(1 / 0.3)
    with pytest.raises(NoChainError, match="3 of"):
        expected(fleet, [PlacedMachine(0, Span(0, 3))], 4)
    with pytest.raises(NoChainError, match="0 of"):
        expected(replace(fleet, client_rtts=None), [PlacedMachine(0, Span(1, 4))], 4)


def announcement(name: str, start: int, end: int, step: float, rtts: dict[str, float]) -> Announcement:
    return plain(name, Span(start, end), num_blocks=BLOCKS, step_seconds=step, rtts=rtts)


def test_a_swarm_is_planned_as_it_is_announced() -> None:
    servers = [
        announcement("peer-of-the-first", 0, 4, 0.4, {"peer-of-the-second": 0.02}),
        announcement("peer-of-the-second", 4, 8, 0.8, {}),
    ]
    fleet = fleet_of_servers(servers, {"peer-of-the-first": 0.1, "peer-of-the-second": 0.3})
    assert [machine.block_seconds for machine in fleet.machines] == pytest.approx([0.1, 0.2])
    now = present_plan(fleet, BLOCKS)
    assert now.seconds == pytest.approx(0.05 + 0.4 + 0.01 + 0.8 + 0.15 + 2 * COST.handling_seconds)
    assert fastest_plan(fleet, BLOCKS, seconds=600).seconds == pytest.approx(now.seconds)
    with pytest.raises(NoChainError):
        present_plan(fleet_of_servers(servers[:1], {"peer-of-the-first": 0.1}), BLOCKS)


def test_absurd_announcements_make_no_absurd_plan() -> None:
    servers = [
        announcement("liar", 0, 8, 0.0, {"slow": -5.0}),
        announcement("slow", 0, 8, 1e30, {"liar": math.inf}),
    ]
    fleet = fleet_of_servers(servers, {"liar": math.nan, "slow": 0.1})
    for plan in (fastest_plan(fleet, BLOCKS, seconds=600), busiest_plan(fleet, BLOCKS), present_plan(fleet, BLOCKS)):
        assert math.isfinite(plan.seconds) and 0 < plan.tokens_per_second <= 1e5
