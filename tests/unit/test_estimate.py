"""What something takes, as the clients and servers learn it: how soon, and how little one accident says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.swarm.cost import Estimate, EstimateRule, LineEstimate

SECONDS = st.floats(0, 1e6)


def estimate(*seen: float, rule: EstimateRule | None = None) -> Estimate:
    made = Estimate(rule or EstimateRule())
    for one in seen:
        made.note(one)
    return made


@given(SECONDS)
def test_the_first_observation_is_all_that_is_known(seen: float) -> None:
    made = estimate(seen)
    assert (made.value, made.deviation, made.count) == (seen, seen / 2, 1)


@given(SECONDS, SECONDS)
def test_one_observation_that_took_long_is_no_habit(usual: float, taken: float) -> None:
    value = estimate(usual, taken).value
    assert min(usual, taken) * 0.79 <= value <= max(1.6 * usual, usual + 0.2 * 0.01) + 1e-9


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_an_estimate_lies_within_what_was_seen(seen: list[float]) -> None:
    made = estimate(*seen)
    assert min(seen) * (1 - 1e-9) <= made.value <= max(seen) * (1 + 1e-9)
    assert 0 <= made.deviation <= max(seen) * (1 + 1e-9)
    assert made.count == len(seen)


def test_slowdown_is_known_soon() -> None:
    assert estimate(0.02, *[0.1] * 10).value > 0.08
    assert estimate(0.1, *[0.02] * 10).value < 0.03


def test_deviation_says_how_far_observations_are_from_mean() -> None:
    assert estimate(*[0.05] * 30).deviation < 1e-4
    assert estimate(*[0.02, 0.08] * 30).deviation == pytest.approx(0.03, rel=0.3)


def test_rule_without_bound_is_timer_of_tcp() -> None:
    """RFC 6298, section 2: an eighth of the newest in the mean, a quarter of its distance in the deviation."""
    made = estimate(0.008, 4.0, rule=EstimateRule(newest=1 / 8, most=1e9))
    assert made.value == pytest.approx(0.008 * 7 / 8 + 0.5)
    assert made.deviation == pytest.approx(0.004 * 3 / 4 + 3.992 / 4)


def test_line_through_one_size_says_nothing_of_others() -> None:
    line = LineEstimate()
    line.note(4, 2.0)
    assert line.means == (4, 2.0) and line.of(9) == 2.0 and (line.slope(), line.slope(0.5)) == (0.0, 0.5)


@given(st.floats(0.1, 10), st.floats(0, 1e-3), st.lists(st.integers(1, 256), min_size=2, unique=True))
def test_a_line_is_found_again(base: float, slope: float, sizes: list[int]) -> None:
    line = LineEstimate(most=1e9)
    for size in sizes:
        line.note(size, base + slope * size)
    assert all(line.of(size) == pytest.approx(base + slope * size, rel=1e-3) for size in sizes)


def test_one_step_that_took_long_moves_line_little() -> None:
    line = LineEstimate()
    for size in (1, 2, 3) * 20:
        line.note(size, 0.1 * size)
    line.note(2, 1e6)
    assert line.of(2) < 0.25
    for size in (1, 2, 3) * 100:
        line.note(size, 0.3 * size)
    assert line.of(2) == pytest.approx(0.6, rel=0.05), "old observations are forgotten"
