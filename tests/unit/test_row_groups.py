"""In how many groups the rows of a batch go through a chain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from petalnode.node.client.api.row_groups import are_independent, groups


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
