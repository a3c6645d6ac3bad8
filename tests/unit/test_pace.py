"""What steps of batches have taken, and what it does to the number of groups."""

from __future__ import annotations

import pytest

from petalnode.node.client.api import row_groups
from petalnode.node.client.api.row_groups import Measured, Pace, Paces, Route, groups
from petalnode.node.client.session.answers import HopTiming

ROUTE = (("a", 0, 4), ("b", 4, 8), ("c", 8, 12))


def hops(computed: list[float], total: float = 60.0) -> list[HopTiming]:
    return [HopTiming("peer", total, 0.0, seconds) for seconds in computed]


def pace(seconds: float, computed: list[float], steps: int = 8, route: Route = ROUTE) -> Pace:
    made = Pace()
    for index in range(steps + 1):
        made.note(5 + seconds * index, route, hops(computed))
    return made


def test_few_steps_say_nothing() -> None:
    assert Pace().seconds is None
    assert pace(0.1, [0.03], steps=5).seconds is None
    assert pace(0.1, [0.03], steps=6).seconds == pytest.approx(0.1)


def test_the_first_step_is_not_counted() -> None:
    measured = Pace()
    measured.note(1.0, ROUTE[:1], hops([7.0]))
    for index in range(7):
        measured.note(4.0 + index / 10, ROUTE[:1], hops([0.02]))
    assert measured.computed == [0.02]
    assert measured.seconds == pytest.approx(3.6 / 7)


def test_servers_that_took_places_are_measured_anew() -> None:
    measured = pace(9.0, [0.5, 0.5, 0.5], route=(("d", 0, 4), *ROUTE[1:]))
    for index in range(7):
        measured.note(100 + index / 10, ROUTE, hops([0.02, 0.03, 0.04]))
    assert measured.seconds == pytest.approx(0.1)
    assert measured.computed == [0.02, 0.03, 0.04]


def test_lone_batch_shows_overhead_and_groups_rounds() -> None:
    paces = Paces()
    paces.note([(3, pace(0.1, [0.02, 0.03, 0.02]))])
    known = paces.measured(ROUTE)
    assert known.computed == ((0.02, 3), (0.03, 3), (0.02, 3))
    assert known.overhead == pytest.approx(0.03)
    assert known.rounds == {(3, 1): pytest.approx(0.1)}

    paces.note([(2, pace(0.2, [0.04, 0.04, 0.04])), (1, pace(0.1, [0.02, 0.02, 0.02]))])
    known = paces.measured(ROUTE)
    assert known.computed == tuple([(pytest.approx(0.03), 1.5)] * 3)
    assert known.overhead == pytest.approx(0.03)  # of what was alone
    assert known.rounds == {(3, 1): pytest.approx(0.1), (3, 2): pytest.approx(0.15)}  # 20 tokens/s together


def test_no_computing_takes_longer_than_its_answer() -> None:
    measured = Pace()
    for index in range(8):
        measured.note(index / 10, ROUTE, hops([4000.0, 0.02, 0.02], total=0.03))
    assert measured.computed == [0.03, 0.02, 0.02]


def test_what_says_nothing_is_left_out() -> None:
    paces = Paces()
    paces.note([(1, pace(0.1, [0.02] * 3)), (1, pace(0.1, [0.02] * 3, steps=2))])
    elsewhere = pace(0.1, [0.02] * 2, route=ROUTE[:2])
    paces.note([(1, pace(0.1, [0.02] * 3)), (1, elsewhere)])
    assert paces.measured(ROUTE) == Measured()


def test_what_was_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(row_groups.time, "monotonic", lambda: now)
    paces = Paces()
    paces.note([(1, pace(0.1, [0.02] * 3))])
    now = 299.0
    assert paces.measured(ROUTE).rounds
    now = 301.0
    assert paces.measured(ROUTE) == Measured()


def test_not_all_chains_are_kept() -> None:
    paces = Paces()
    for peer in range(30):
        paces.note([(1, pace(0.1, [0.02], route=((str(peer), 0, 12),)))])
    assert sum(bool(paces.measured(((str(peer), 0, 12),)).rounds) for peer in range(30)) == 16


QUICK, SLOW = [0.001] * 3, [0.05] * 3


def test_measurements_count_more_than_servers_words() -> None:
    assert groups(3, SLOW, 0.0) == 3
    assert groups(3, QUICK, 0.0) == 1
    assert groups(3, SLOW, 0.0, Measured(((0.001, 1),) * 3)) == 1
    assert groups(3, QUICK, 0.0, Measured(((0.05, 1),) * 3)) == 3
    # Each group would cost every server its handling of a step.
    assert groups(3, QUICK, 0.0, Measured(((0.02, 1),) * 3, overhead=0.2)) == 1


def test_of_what_was_tried_the_quickest_is_taken() -> None:
    computed = ((0.05, 1),) * 3
    assert groups(3, SLOW, 0.0, Measured(computed, 0.01, {(3, 3): 0.20, (3, 1): 0.19, (3, 2): 0.21})) == 1
    assert groups(3, SLOW, 0.0, Measured(computed, 0.01, {(3, 3): 0.19, (3, 1): 0.20, (3, 2): 0.21})) == 3
    assert groups(3, QUICK, 0.0, Measured(computed, 0.01, {(3, 3): 0.19, (6, 1): 0.01})) == 3  # not of other batches


def test_untried_must_be_clearly_quicker() -> None:
    """With 0.05 s of each server a batch of three rows should take 0.221 s, in two groups 0.191, in three 0.161."""
    computed = ((0.05, 1),) * 3
    assert groups(3, SLOW, 0.0, Measured(computed, None, {(3, 3): 0.20})) == 3
    assert groups(3, SLOW, 0.0, Measured(computed, None, {(3, 3): 0.4})) != 3  # they did not do as foreseen
    assert groups(3, SLOW, 0.0, Measured(computed, None, {(3, 1): 0.22})) == 3
    assert groups(3, SLOW, 0.0, Measured(computed, None, {(3, 1): 0.17})) == 1


def test_one_server_has_its_batches() -> None:
    assert groups(6, [0.05], 0.0, Measured(((0.05, 1),), 0.01, {(6, 2): 0.01})) == 1
