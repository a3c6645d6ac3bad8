from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.load_balancing_greedy import moves_to
from petalnode.node.placement.joining import joining_span, span_for_newcomer
from petalnode.node.placement.observed import PlacedServer, coverage, gaps, swarm_throughput, upper_bound
from petalnode.node.placement.plan import Move, Policy, make_plan, may_leave
from petalnode.protocols.ids import Span

SPEEDS = [0.5, 1.0, 2.0, 7.0, 30.0]


@st.composite
def swarms(draw, most=9, fixed=True):
    blocks = draw(st.integers(1, 12))
    found = []
    for number in range(draw(st.integers(1, most))):
        length = draw(st.integers(1, blocks))
        start = draw(st.integers(0, blocks - length))
        movable = draw(st.booleans()) if fixed else True
        found.append(
            PlacedServer(f"peer {number}", Span(start, start + length), draw(st.sampled_from(SPEEDS)), movable)
        )
    return found, blocks


def places(holders, blocks):
    """Every placement of the movable ones."""
    choices = [
        [Span(at, at + len(holder.span)) for at in range(blocks - len(holder.span) + 1)]
        if holder.movable
        else [holder.span]
        for holder in holders
    ]
    for spans in itertools.product(*choices):
        yield [replace(holder, span=span) for holder, span in zip(holders, spans, strict=True)]


def carried_out(holders, plan):
    targets = {move.peer_id: move.target for move in plan.moves}
    return [replace(holder, span=targets.get(holder.peer_id, holder.span)) for holder in holders]


def uncovered(holders, blocks):
    return sum(map(len, gaps(holders, blocks)))


@given(swarms())
def test_a_plan_is_never_worse_than_before(swarm):
    holders, blocks = swarm
    plan = make_plan(holders, blocks)
    after = carried_out(holders, plan)
    assert uncovered(after, blocks) == uncovered(holders, blocks) - plan.closes <= uncovered(holders, blocks)
    assert swarm_throughput(after, blocks) >= swarm_throughput(holders, blocks) * (1 - 1e-9)
    assert plan.after == pytest.approx(swarm_throughput(after, blocks))
    assert plan.before == pytest.approx(swarm_throughput(holders, blocks))
    assert plan.after <= upper_bound(holders, blocks) * (1 + 1e-9)


@given(swarms(fixed=False))
def test_no_gap_is_left_with_enough_blocks(swarm):
    holders, blocks = swarm
    after = carried_out(holders, make_plan(holders, blocks))
    assert uncovered(after, blocks) == max(0, blocks - sum(len(holder.span) for holder in holders))


@settings(max_examples=40)
@given(swarms(most=4))
def test_no_closable_gap_is_left(swarm):
    holders, blocks = swarm
    after = carried_out(holders, make_plan(holders, blocks))
    assert uncovered(after, blocks) == min(uncovered(place, blocks) for place in places(holders, blocks))


@given(swarms(), st.randoms(use_true_random=False))
def test_everybody_makes_the_same_plan(swarm, chance):
    holders, blocks = swarm
    plan = make_plan(holders, blocks)
    shuffled = list(holders)
    chance.shuffle(shuffled)
    assert make_plan(shuffled, blocks) == plan == make_plan(holders, blocks)


@given(swarms())
def test_fixed_stay_and_movers_keep_their_length(swarm):
    holders, blocks = swarm
    by_id = {holder.peer_id: holder for holder in holders}
    for move in make_plan(holders, blocks).moves:
        holder = by_id[move.peer_id]
        assert holder.movable and move.source == holder.span != move.target
        assert len(move.target) == len(holder.span) and Span(0, blocks).covers(move.target)


@given(swarms())
def test_plans_come_to_an_end(swarm):
    holders, blocks = swarm
    for _ in range(12):
        plan = make_plan(holders, blocks)
        if not plan.moves:
            return
        holders = carried_out(holders, plan)
    pytest.fail("the plans go on for ever")


@given(swarms())
def test_plans_moves_open_no_gap(swarm):
    holders, blocks = swarm
    plan = make_plan(holders, blocks)
    for number, move in enumerate(plan.moves):
        rest = plan.rest(holders)
        assert rest is not None and rest.moves == plan.moves[number:]
        assert may_leave(move, holders, blocks)
        before = uncovered(holders, blocks)
        holders = carried_out(holders, replace(plan, moves=(move,)))
        assert uncovered(holders, blocks) == 0 or before > 0
    if plan.moves:
        assert plan.rest(holders) is None


@given(swarms(), st.randoms(use_true_random=False))
def test_any_order_of_a_plan_comes_to_rest(swarm, chance):
    holders, blocks = swarm
    plan = None
    for _ in range(60):
        plan = (plan.rest(holders) if plan is not None else None) or make_plan(holders, blocks)
        able = [move for move in plan.moves if may_leave(move, holders, blocks)]
        assert able or not plan.moves
        if not able:
            return
        move = chance.choice(able)
        holders = carried_out(holders, replace(plan, moves=(move,)))
    pytest.fail("the servers move for ever")


def test_a_plan_stands_until_the_swarm_is_another():
    holders = [
        PlacedServer("a", Span(0, 8), 10.0),
        PlacedServer("b", Span(0, 4), 10.0),
        PlacedServer("c", Span(0, 4), 10.0),
        PlacedServer("d", Span(0, 4), 10.0),
        PlacedServer("e", Span(0, 4), 10.0),
    ]
    plan = make_plan(holders, 8)
    assert len(plan.moves) == 2
    assert plan.rest(holders) == plan
    assert plan.rest(holders[:-1]) is None
    assert plan.rest([*holders, PlacedServer("f", Span(0, 4), 1.0)]) is None
    assert plan.rest([replace(holders[0], throughput=11.0, reload_weight=2.0), *holders[1:]]) == plan
    assert plan.rest([replace(holders[0], throughput=20.0), *holders[1:]]) is None
    gone = carried_out(holders, replace(plan, moves=plan.moves[:1]))
    under_way = [replace(holder, movable=holder.peer_id != plan.moves[0].peer_id) for holder in gone]
    assert plan.rest(under_way).moves == plan.moves[1:]
    assert plan.rest([replace(holder, movable=False) for holder in holders]) is None
    assert plan.rest(carried_out(holders, replace(plan, moves=(Move("b", Span(0, 4), Span(2, 6)),)))) is None
    assert plan.rest(carried_out(holders, plan)) is None


@given(swarms(), st.integers(1, 12), st.sampled_from(SPEEDS))
def test_newcomer_closes_as_many_gaps_as_it_can(swarm, count, speed):
    holders, blocks = swarm
    count = min(count, blocks)
    span = span_for_newcomer(holders, "newcomer", speed, count, blocks)
    assert len(span) == count and Span(0, blocks).covers(span)

    def left(at):
        return uncovered([*holders, PlacedServer("newcomer", at, speed)], blocks)

    assert left(span) == min(left(Span(start, start + count)) for start in range(blocks - count + 1))


def test_a_gain_that_is_too_small_moves_nobody():
    even = [
        PlacedServer("a", Span(0, 4), 10.0),
        PlacedServer("b", Span(4, 8), 10.0),
        PlacedServer("c", Span(0, 4), 0.5),
    ]
    assert make_plan(even, 8).moves == ()
    assert make_plan(even, 8, policy=Policy(gain=0.0, least_gain=0.0, evenness=4.0)).moves == ()


def test_the_fewest_blocks_that_do_are_moved():
    # Block 7 is slow. Two servers could help it: the one with one block does.
    holders = [
        PlacedServer("a", Span(0, 8), 10.0),
        PlacedServer("big", Span(0, 6), 10.0),
        PlacedServer("small", Span(0, 1), 10.0),
        PlacedServer("c", Span(1, 7), 10.0),
    ]
    plan = make_plan(holders, 8)
    assert [move.peer_id for move in plan.moves] == ["small"]
    assert plan.moves[0].target == Span(7, 8)


def test_who_pays_a_high_toll_moves_last():
    holders = [
        PlacedServer("a", Span(0, 8), 10.0),
        PlacedServer("b", Span(0, 4), 10.0),
        PlacedServer("c", Span(0, 4), 10.0, reload_weight=3.0),
    ]
    assert [move.peer_id for move in make_plan(holders, 8).moves] == ["b"]
    holders = [replace(holder, reload_weight=4.0 - holder.reload_weight) for holder in holders]
    assert [move.peer_id for move in make_plan(holders, 8).moves] == ["c"]


def test_what_is_dear_has_to_gain_more():
    holders = [
        PlacedServer("a", Span(0, 8), 10.0),
        PlacedServer("b", Span(0, 4), 2.0),
        PlacedServer("c", Span(0, 4), 2.0),
    ]
    assert make_plan(holders, 8).moves
    assert not make_plan(holders, 8, turnover=10.0).moves


def test_the_only_holder_stays_until_another_has_come():
    holders = [
        PlacedServer("a", Span(0, 4), 1.0),
        PlacedServer("b", Span(4, 8), 1.0),
        PlacedServer("c", Span(4, 8), 1.0),
    ]
    to_b = Move("a", Span(0, 4), Span(4, 8))
    assert not may_leave(to_b, holders, 8)
    assert may_leave(Move("c", Span(4, 8), Span(0, 4)), holders, 8)
    assert may_leave(to_b, [*holders, PlacedServer("d", Span(0, 4), 1.0)], 8)
    # No chain works while nobody holds 0:4, so whoever closes that may leave anything.
    assert may_leave(Move("b", Span(4, 8), Span(0, 4)), holders[1:2], 8)


def test_petals_rule_moves_to_the_weakest_blocks():
    holders = [
        PlacedServer("a", Span(0, 2), 5.0),
        PlacedServer("b", Span(0, 2), 5.0),
        PlacedServer("c", Span(2, 4), 2.0),
    ]
    assert moves_to(holders, 1, 4, 0.2, [0, 1, 2]) == Span(2, 4)
    assert moves_to(holders, 1, 4, 5.0, [0, 1, 2]) is None
    assert joining_span(holders, 4, 2) == Span(2, 4)


def test_bound_holds_where_no_server_dominates():
    assert upper_bound([PlacedServer("a", Span(0, 4), 3.0), PlacedServer("b", Span(0, 2), 100.0)], 4) == pytest.approx(
        6.0
    )
    assert upper_bound([PlacedServer("a", Span(0, 3), 3.0)], 4) == 0.0
    assert coverage([PlacedServer("a", Span(1, 3), 3.0)], 4).tolist() == [0.0, 3.0, 3.0, 0.0]
