from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.placement.joining import span_for_newcomer, why_join
from petalnode.node.placement.observed import PlacedServer
from petalnode.node.placement.plan import make_plan, why_move
from petalnode.protocols.ids import Span


def test_why_a_newcomer_goes_where_it_goes() -> None:
    first = PlacedServer("a", Span(0, 4), 4.0)
    assert why_join([], Span(0, 4), 8) == "nobody else is there"
    assert why_join([first], Span(3, 7), 8) == "nobody holds blocks 4:8"
    both = [first, PlacedServer("b", Span(4, 8), 2.0)]
    assert why_join(both, Span(4, 8), 8) == "that is where the swarm is slowest, 2 steps/s"
    assert why_join(both, Span(0, 4), 8).startswith("the swarm has 4 steps/s there")


def test_why_a_server_moves() -> None:
    gap = [PlacedServer("a", Span(0, 4), 4.0), PlacedServer("b", Span(0, 4), 4.0)]
    assert why_move(make_plan(gap, 8), gap, 8) == "nobody holds blocks 4:8"
    slow = [PlacedServer("a", Span(0, 8), 4.0), PlacedServer("b", Span(0, 4), 4.0), PlacedServer("c", Span(0, 4), 4.0)]
    plan = make_plan(slow, 8)
    assert plan.moves
    assert why_move(plan, slow, 8) == "the swarm then does 8 steps/s instead of 4, of 8 at most"


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 3), st.floats(0.1, 100))
def test_there_is_always_a_reason(starts, count, speed) -> None:
    holders = [PlacedServer(f"peer {number}", Span(start, start + 3), 2.0) for number, start in enumerate(starts)]
    span = span_for_newcomer(holders, "newcomer", speed, count, 8)
    assert why_join(holders, span, 8)
    if holders:
        assert why_move(make_plan(holders, 8), holders, 8)
