"""An answer is due as often as a step was asked, whatever the ways; one more is never due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.session.stream import OutstandingReplies
from tests.node_inspection import held


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_each_step_may_be_answered_as_often_as_it_was_asked(asked: list[int]) -> None:
    due = OutstandingReplies()
    for sequence, times in enumerate(asked, 1):
        for _ in range(times):
            due.ask(sequence)
        assert [due.answer(sequence) for _ in range(times + 1)] == [True] * times + [False]


def test_a_late_copy_of_a_step_that_was_sent_and_pushed_is_due_once() -> None:
    due = OutstandingReplies()
    due.ask(1)  # by the server before
    due.ask(1)
    assert due.answer(1)
    due.ask(2)
    assert due.answer(2)
    assert due.answer(1)
    assert not due.answer(1)


def test_what_came_on_the_old_stream_may_come_on_the_new_one_too() -> None:
    due = OutstandingReplies()
    for sequence in (1, 2):
        due.ask(sequence)
        assert due.answer(sequence)
    due.ask_again(answered=1)  # step 2 was read while the stream was changed
    assert due.answer(2)
    assert not due.answer(1)
    due = OutstandingReplies()
    due.ask(1)
    due.ask_again(answered=0)
    assert due.answer(1)


def test_steps_that_nobody_waits_for_are_not_forgotten_before_they_are_answered() -> None:
    due = OutstandingReplies()
    for sequence in range(1, 101):
        due.ask(sequence)
    assert all(due.answer(sequence) for sequence in range(1, 101))
    assert held(due) <= 16
