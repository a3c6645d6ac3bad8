"""Wait for the same server or take others: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.deadlines import (
    DEADLINES,
    PATIENCE,
    WAIT_BOUNDS,
    Waits,
    open_patience,
    patience,
    patience_once_more,
    push_patience,
    rtt_patience,
)
from petalnode.node.client.session.recovery import RECOVERY, Loss, LossPlan, after_loss, attempt_timeout


def test_kept_session_is_awaited_and_others_prepared() -> None:
    assert after_loss(Loss(kept=15.0)) == LossPlan(rejoin=True, replace_after=RECOVERY.least_head_start)
    assert after_loss(Loss(kept=15.0, round_trip=0.1)) == LossPlan(rejoin=True, replace_after=0.8)
    assert after_loss(Loss(kept=15.0, round_trip=float("inf"))) == LossPlan(
        rejoin=True, replace_after=RECOVERY.most_head_start
    )


def test_after_failed_attempt_others_are_prepared_at_once() -> None:
    assert after_loss(Loss(kept=15.0, attempts=1, round_trip=0.2)) == LossPlan(rejoin=True, replace_after=0.0)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(Loss(kept=0.0), id="a server that keeps nothing"),
        pytest.param(Loss(kept=15.0, gone=True), id="a session that is over"),
        pytest.param(Loss(kept=15.0, standby_ready=True), id="others are ready"),
        pytest.param(Loss(kept=15.0, losses=RECOVERY.most_losses + 1), id="one loss after another"),
    ],
)
def test_the_same_server_is_not_waited_for(loss: Loss) -> None:
    assert after_loss(loss) == LossPlan(rejoin=False, replace_after=0.0)


@given(st.builds(Loss, kept=st.floats(0, 200), round_trip=st.floats(0, 1e9), attempts=st.integers(0, 50)))
def test_nobody_waits_for_long_before_others_are_asked(loss: Loss) -> None:
    assert 0 <= after_loss(loss).replace_after <= RECOVERY.most_head_start


@given(st.integers(0, 10_000), st.floats(0, 1e9))
def test_attempts_may_take_longer_within_bounds(attempts: int, round_trip: float) -> None:
    assert (
        attempt_timeout(attempts, round_trip) <= attempt_timeout(attempts + 1, round_trip) <= RECOVERY.longest_timeout
    )


@pytest.mark.parametrize("round_trip", [0.2, 0.4, 0.8])
def test_distant_relay_is_not_taken_for_slow_server(round_trip: float) -> None:
    """Also right after a long prompt, whose tokens took next to nothing each."""
    assert patience(0.001, 1, 2048, round_trip) >= 4 * round_trip
    assert push_patience(round_trip, 2048) >= 2 + 3 * round_trip


def test_a_slow_server_is_noticed_soon() -> None:
    assert patience(0.01, 1, 2048, 0.001) == PATIENCE.least <= 0.5
    assert patience(0.2, 1, 2048, 0.1) == pytest.approx(3.0)


def test_first_answers_time_follows_its_prompts_bytes() -> None:
    assert patience(None, 512, 0, 0.001) == 15.0
    assert patience(None, 512, 16 << 20, 0.1) > 60.0
    assert push_patience(0.1, 16 << 20) > 30.0


def test_first_answer_is_due_by_what_server_announced() -> None:
    assert patience(None, 1, 0, 0.01, announced=0.02) == 2.0
    assert patience(None, 500, 0, 0.1, announced=0.5) == pytest.approx(6.0)
    assert patience(None, 500, 0, 0.1, announced=1e6) == PATIENCE.first_most


@given(st.floats(0, 1000), st.integers(1, 4096), st.floats(0, 10))
def test_no_server_has_much_beyond_a_slow_step(usual: float, tokens: int, round_trip: float) -> None:
    expected = round_trip + usual * tokens
    given_time = patience(usual, tokens, 0, round_trip)
    assert max(PATIENCE.least, expected) <= given_time <= max(PATIENCE.least, 2 * expected + 4)


@given(st.floats(0, 10), st.integers(1, 4096), st.floats(0, 10))
def test_lost_push_is_late_sooner_once_sent(usual: float, tokens: int, round_trip: float) -> None:
    again = patience_once_more(usual, tokens, round_trip)
    assert again >= max(0.1, 4 * (round_trip + usual * tokens) * 0.999)
    assert patience_once_more(0.01, 1, 0.001) + patience(0.01, 1, 2048, 0.001) <= 0.6


@given(st.floats(0, 1e9) | st.none())
def test_opening_and_measuring_are_bounded(round_trip: float | None) -> None:
    assert 0 < rtt_patience(round_trip) <= DEADLINES.rtt
    assert DEADLINES.open_at_least <= open_patience(round_trip or 0.0) <= DEADLINES.open_at_most


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 100)))
def test_waits_of_two_sessions_add_up(first: list[float], second: list[float]) -> None:
    parts = [Waits(), Waits()]
    for part, seconds in zip(parts, (first, second), strict=True):
        for one in seconds:
            part.add("answer", one)
    told = Waits.of(*parts).fields().get("answer", {"count": 0, "total_ms": 0, "max_ms": 0, "buckets": {}})
    both = [*first, *second]
    assert told["count"] == len(both) == sum(told["buckets"].values())
    assert told["total_ms"] == pytest.approx(1000 * sum(both), abs=0.1)
    assert told["max_ms"] == pytest.approx(1000 * max(both, default=0), abs=0.1)
    if both:
        assert len(told["buckets"]) == len(WAIT_BOUNDS) + 1
        assert told["buckets"]["more"] == sum(one > WAIT_BOUNDS[-1] for one in both)
        assert told["buckets"]["10"] == sum(one <= WAIT_BOUNDS[0] for one in both)
