"""In how many groups the rows of a batch go through a chain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from petalnode.node.client.api.pace import DRAFTED, Measured, Paces
from petalnode.node.client.api.row_groups import FIRST_GAIN, are_independent, draft_apart, groups, lookup_gain


@pytest.mark.parametrize(
    ("rows", "step_seconds", "trip_seconds", "expected"),
    [
        (12, [0.03, 0.03, 0.03], 0.0, 3),  # as many as servers, all of which are busy then
        (16, [0.03, 0.03], 0.1, 4),  # more, as some are on their way
        (3, [0.03, 0.03, 0.03], 0.0, 3),
        (3, [0.005, 0.005, 0.005], 0.0, 1),  # so few rows take hardly longer than one
        (16, [0.1], 0.0, 1),  # one server has its batches
        (3, [], 0.0, 1),  # no chain
        (1, [0.03, 0.03], 0.0, 1),
        (16, [0.0005, 0.0005], 0.001, 1),  # so short that the client's part is the longest
        (16, [0.03, 0.001, 0.001], 0.0, 1),  # one of them does nearly all: its batches are worth more
        (16, [0.005, 0.005, 0.005], 0.4, 1),  # the way takes nearly all
    ],
)
def test_the_number_of_groups(rows: int, step_seconds: list[float], trip_seconds: float, expected: int) -> None:
    assert groups(rows, step_seconds, trip_seconds) == expected


def test_no_more_groups_than_rows_or_twice_the_servers() -> None:
    for rows in range(1, 40):
        for servers in range(1, 6):
            count = groups(rows, [0.05] * servers, 0.0)
            assert 1 <= count <= min(rows, 2 * servers, 8)
            assert servers > 1 or count == 1


def test_rows_that_depend_on_each_other_stay_together() -> None:
    config = SimpleNamespace(do_sample=False, num_beams=1)
    assert are_independent({"max_new_tokens": 3, "streamer": None}, config)
    for argument in ({"do_sample": True}, {"num_beams": 2}, {"streamer": object()}, {"num_return_sequences": 2}):
        assert not are_independent(argument, config)
    assert not are_independent({}, SimpleNamespace(do_sample=True))
    assert are_independent({"do_sample": False}, SimpleNamespace(do_sample=True))
    assert not are_independent({}, SimpleNamespace(return_dict_in_generate=True))


@pytest.mark.parametrize(
    ("rows", "step_seconds", "trip_seconds", "gain", "expected"),
    [
        (4, [0.02, 0.02, 0.02], 0.2, FIRST_GAIN, True),  # far away
        (4, [0.02, 0.02, 0.02], 0.2, 1.05, False),  # where drafts bring nothing
        (4, [0.005], 0.0001, FIRST_GAIN, False),  # a server at hand has its batches
        (4, [0.001, 0.001], 0.0001, 8.0, False),  # the client has the most to do
        (4, [0.2], 0.02, 8.0, False),  # each row takes nearly as long as all
        (4, [0.02], 0.2, FIRST_GAIN, True),
        (1, [0.02], 0.2, 8.0, False),
        (17, [0.001], 0.5, 8.0, False),  # as many threads and sessions
        (4, [], 0.2, 8.0, False),  # no chain
    ],
)
def test_whether_rows_take_drafts(
    rows: int, step_seconds: list[float], trip_seconds: float, gain: float, expected: bool
) -> None:
    assert draft_apart(rows, step_seconds, trip_seconds, gain) == expected


def test_what_drafts_would_have_brought_is_counted_in_the_text() -> None:
    said = list(range(40))
    assert lookup_gain([([*said, *said[:2]], said[2:32])]) == 30 / 2  # steps of 16 tokens
    assert lookup_gain([(said, list(range(100, 140)))]) == 1.0
    assert lookup_gain([([*said, *said[:2]], said[2:32]), (said, list(range(100, 130)))]) == 60 / 32
    assert lookup_gain([]) == lookup_gain([(said, [])]) == 1.0


def test_what_batches_took_counts_more_than_what_is_expected() -> None:
    def apart(gain: float, **rounds: float) -> bool:
        known = {(4, {"together": 1, "drafted": DRAFTED}[name]): seconds for name, seconds in rounds.items()}
        return draft_apart(4, [0.02] * 3, 0.2, gain, Measured(rounds=known))

    assert apart(2.0) and not apart(2.0, together=0.1)
    assert apart(2.0, drafted=0.3) and not apart(2.0, together=0.3, drafted=0.5)  # this machine has more to do by rows
    assert apart(4.0, together=0.3, drafted=0.5)
    assert not apart(2.6, together=0.3, drafted=0.6)


def test_the_time_of_drafted_rows_is_kept_for_a_chain() -> None:
    now = 0.0
    paces = Paces(lambda: now)
    route, other = (("a", 0, 2),), (("b", 0, 2),)
    paces.note_drafted(route, 4, 0.5)
    paces.note_drafted(route, 8, 0.7)
    assert paces.measured(route).rounds == {(4, DRAFTED): 0.5, (8, DRAFTED): 0.7}
    assert not paces.measured(other).rounds
    now = 1000.0
    assert not paces.measured(route).rounds
