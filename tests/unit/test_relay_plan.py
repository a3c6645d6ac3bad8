from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.network.nat.reservations import (
    RELAYS,
    RelayCandidate,
    RelayPlan,
    RelayRecord,
    ReservationState,
    plan_relays,
    retry_pause,
)

NOW = 500.0
HELD = RelayRecord(ReservationState.HELD)


def relays(*names: str) -> list[RelayCandidate]:
    """The first two are those to join by, the others offer themselves."""
    return [RelayCandidate(name, 0 if index < 2 else 1) for index, name in enumerate(names)]


def lost(ago: float, *, retry_in: float = 0.0, held: bool = True, failures: int = 1) -> RelayRecord:
    return RelayRecord(ReservationState.LOST, failures, held, NOW - ago, NOW + retry_in)


def plan(names: str, states: dict[str, RelayRecord], wanted: int = 2) -> RelayPlan:
    return plan_relays(relays(*names), states, wanted=wanted, now=NOW)


def test_named_two_are_tried_side_by_side_first() -> None:
    assert plan("abcd", {}).start == ("a", "b")


def test_who_holds_enough_does_nothing() -> None:
    assert plan("abcd", {"a": HELD, "c": HELD}) == RelayPlan()


def test_lost_relay_is_retried_before_another() -> None:
    due = plan("abcd", {"a": lost(0.3), "b": HELD})
    assert due.start == ("a",)
    waiting = plan("abcd", {"a": lost(0.3, retry_in=0.2), "b": HELD})
    assert waiting.start == () and waiting.wake == NOW + 0.2


def test_another_relay_replaces_one_that_stays_away() -> None:
    assert plan("abcd", {"a": lost(RELAYS.grace_period, retry_in=0.5), "b": HELD}).start == ("c",)


def test_relay_being_tried_is_no_reason_to_wait() -> None:
    trying = RelayRecord(ReservationState.RESERVING, 1, True, NOW - 0.5)
    waiting = plan("abcd", {"a": trying, "b": HELD})
    assert waiting.start == () and waiting.wake == NOW - 0.5 + RELAYS.grace_period
    assert plan(
        "abcd", {"a": RelayRecord(ReservationState.RESERVING, 1, True, NOW - RELAYS.grace_period), "b": HELD}
    ).start == ("c",)
    assert plan("abcd", {"a": RelayRecord(ReservationState.RESERVING), "b": HELD}).start == ()  # a first try


def test_who_has_no_place_left_waits_for_nobody() -> None:
    assert plan("abcd", {"a": lost(0.1, retry_in=0.2), "b": lost(0.1, retry_in=0.2)}).start == ("c", "d")


def test_relay_with_a_place_is_always_tried() -> None:
    assert plan("abcd", {"a": lost(60), "b": HELD, "c": HELD}).start == ("a",)


def test_one_place_too_many_stays_and_two_not() -> None:
    assert plan("abcd", {"a": HELD, "b": HELD, "c": HELD}).stop == ()
    assert plan("abcd", {"d": HELD, "c": HELD, "a": HELD, "b": HELD}).stop == ("c",)


def test_who_refused_is_left_alone_for_a_while() -> None:
    refused = RelayRecord(ReservationState.REFUSED, 1, False, 0.0, NOW + 30)
    made = plan("ab", {"a": refused, "b": HELD})
    assert made.start == () and made.wake == NOW + 30


def test_pauses_grow_and_are_short_for_holders() -> None:
    quick = [retry_pause(ReservationState.LOST, n, True) for n in range(1, 6)]
    assert quick == [0.25, 0.5, 1.0, 1.0, 1.0]
    slow = [retry_pause(ReservationState.LOST, n, False) for n in range(1, 9)]
    assert slow[0] == 1.0 and slow[-1] == 60.0 and slow == sorted(slow)
    assert retry_pause(ReservationState.LOST, 500, True) == 60.0
    assert retry_pause(ReservationState.REFUSED, 1, True) == 30.0


STATES = st.builds(
    RelayRecord,
    state=st.sampled_from(ReservationState),
    failures=st.integers(0, 20),
    held_before=st.booleans(),
    lost_at=st.floats(NOW - 100, NOW),
    retry_at=st.floats(NOW - 10, NOW + 100),
)


@given(st.dictionaries(st.sampled_from("abcdefgh"), STATES), st.integers(1, 3))
def test_any_plan_can_be_carried_out(states: dict[str, RelayRecord], wanted: int) -> None:
    made = plan("abcdef", states, wanted)
    assert len(set(made.start)) == len(made.start)
    for relay in made.start:
        assert relay not in states or states[relay].state in (ReservationState.LOST, ReservationState.REFUSED)
        assert relay not in states or states[relay].retry_at <= NOW
    assert all(states[relay].state is ReservationState.HELD for relay in made.stop)
    held = sum(record.state is ReservationState.HELD for record in states.values())
    assert held - len(made.stop) >= min(held, wanted)
    assert made.wake is None or made.wake > NOW
