"""An answer is due as often as a step was asked, whatever the ways; one more is never due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.session.stream import OutstandingReplies
from tests.node_inspection import held


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_step_may_be_answered_as_often_as_asked(asked: list[int]) -> None:
    due = OutstandingReplies()
    for sequence, times in enumerate(asked, 1):
        for _ in range(times):
            due.ask(sequence)
        assert [due.answer(sequence) for _ in range(times + 1)] == [True] * times + [False]


def test_pushed_steps_late_copy_is_due_once() -> None:
    due = OutstandingReplies()
    due.ask(1)  # by the server before
    due.ask(1)
    assert due.answer(1)
    due.ask(2)
    assert due.answer(2)
    assert due.answer(1)
    assert not due.answer(1)


def test_old_streams_message_may_come_again() -> None:
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


def test_unawaited_steps_are_remembered_until_answered() -> None:
    due = OutstandingReplies()
    for sequence in range(1, 101):
        due.ask(sequence)
    assert all(due.answer(sequence) for sequence in range(1, 101))
    assert held(due) <= 16
