from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.server.requests.admission import STEP_TOKENS, Hosted, check_step, check_terms, step_tokens
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Boundaries, Span
from petalnode.protocols.inference import MAX_LENGTH, Refusal, SessionTerms
from tests.messages import tensor

HOSTED = Hosted(b"m" * 32, "tiny", 8, Span(2, 6), 64, "float32", "none", 128)
TERMS = SessionTerms(b"m" * 32, Span(2, 6), 100, 2, (), "none", b"n" * 16, 3, "float32")
BAD = wire.ERROR_BAD_REQUEST


@pytest.mark.parametrize("span", [Span(2, 6), Span(2, 3), Span(5, 6), Span(3, 5)])
def test_a_part_of_the_span_is_taken(span: Span) -> None:
    check_terms(replace(TERMS, span=span), HOSTED)


@pytest.mark.parametrize(
    ("terms", "code", "says"),
    [
        (replace(TERMS, model_version=b"x" * 32), wire.ERROR_UNKNOWN_MODEL, "tiny"),
        (replace(TERMS, span=Span(1, 6)), wire.ERROR_SPAN_NOT_HOSTED, "1:6"),
        (replace(TERMS, span=Span(5, 7)), wire.ERROR_SPAN_NOT_HOSTED, "2:6"),
        (replace(TERMS, codec="zip"), wire.ERROR_UNSUPPORTED, "zip"),
        (replace(TERMS, dtype="int8"), wire.ERROR_UNSUPPORTED, "int8"),
        (replace(TERMS, max_length=129), wire.ERROR_TOO_LONG, "128"),
    ],
)
def test_what_this_server_cannot_hold(terms: SessionTerms, code: int, says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        check_terms(terms, HOSTED)
    assert caught.value.code == code


def check(step: wire.Step, tensors: list[wire.Tensor], terms: SessionTerms = TERMS, hosted: Hosted = HOSTED) -> None:
    check_step(step, tensors, terms, hosted, last=5, position=10, route_epoch=3)


RIGHT = wire.Step(sequence=6, position=10, route_epoch=3)


@pytest.mark.parametrize("position", [0, 3, 10])
@pytest.mark.parametrize("reorder", [[], [0, 1], [1, 1]])
def test_right_steps_pass(position: int, reorder: list[int]) -> None:
    check(wire.Step(sequence=6, position=position, route_epoch=3, reorder=reorder), [tensor(2, 4, 64)])


def test_sessions_end_may_be_reached_not_passed() -> None:
    check(RIGHT, [tensor(2, 90, 64)])
    with pytest.raises(Refusal, match="max_length of 100") as caught:
        check(RIGHT, [tensor(2, 91, 64)])
    assert caught.value.code == wire.ERROR_TOO_LONG


@pytest.mark.parametrize(
    ("step", "tensors"),
    [
        (wire.Step(sequence=5, position=10, route_epoch=3), [tensor(2, 1, 64)]),
        (wire.Step(sequence=6, position=11, route_epoch=3), [tensor(2, 1, 64)]),
        (wire.Step(sequence=6, position=10, route_epoch=2), [tensor(2, 1, 64)]),
        (wire.Step(sequence=6, position=10, route_epoch=3, reorder=[0]), [tensor(2, 1, 64)]),
        (wire.Step(sequence=6, position=10, route_epoch=3, reorder=[0, 2]), [tensor(2, 1, 64)]),
        (wire.Step(sequence=6, position=10, route_epoch=3, positions=[7] * 6), [tensor(2, 1, 64)]),
        (wire.Step(sequence=6, position=10, route_epoch=3, groups=[0, 1]), [tensor(2, 1, 64)]),
        (RIGHT, [tensor(2, 1, 128)]),
        (RIGHT, []),
        (RIGHT, [tensor(2, 1, 64)] * 2),
        (RIGHT, [tensor(1, 1, 64)]),
        (RIGHT, [tensor(2, 0, 64)]),
        (RIGHT, [tensor(2, 1, 63)]),
        (RIGHT, [tensor(2, 64)]),
        (RIGHT, [tensor(2, 1, 64, dtype="float16")]),
        (RIGHT, [tensor(2, 1, 64, codec="float16")]),
        (RIGHT, [tensor(2, 1, 64, nbytes=511)]),
        (RIGHT, [tensor(2, 1, 64, nbytes=2**40)]),
        (RIGHT, [tensor(2, step_tokens(2) + 1, 64)]),
    ],
)
def test_wrong_steps_are_refused(step: wire.Step, tensors: list[wire.Tensor]) -> None:
    with pytest.raises(Refusal) as caught:
        check(step, tensors, replace(TERMS, max_length=5000))
    assert caught.value.code == BAD and caught.value.message


@pytest.mark.parametrize("positions", [[7] * 5, [7] * 7, [*[7] * 5, MAX_LENGTH], [2**32 - 1] * 6])
def test_positions_are_one_number_per_token_and_axis(positions: list[int]) -> None:
    seeing, step = replace(HOSTED, takes_positions=True), wire.Step(sequence=6, position=10, route_epoch=3)
    step.positions[:] = [0, 1, 2, 3, 4, MAX_LENGTH - 1]
    check(step, [tensor(2, 1, 64)], hosted=seeing)
    step.positions[:] = positions
    with pytest.raises(Refusal, match="positions take one number") as caught:
        check(step, [tensor(2, 1, 64)], hosted=seeing)
    assert caught.value.code == BAD


@pytest.mark.parametrize("groups", [[2, 1], [2, 1, 0, 0, 0], [3, 2, 0, 0], [2, 1, 0, 2], [2**32 - 1] * 4])
def test_groups_are_never_cut(groups: list[int]) -> None:
    seeing, step = replace(HOSTED, takes_groups=True), wire.Step(sequence=6, position=10, route_epoch=3)
    step.groups[:] = [2, 1, 0, 1]
    check(step, [tensor(2, 2, 64)], hosted=seeing)
    step.groups[:] = groups
    with pytest.raises(Refusal, match="group") as caught:
        check(step, [tensor(2, 2, 64)], hosted=seeing)
    assert caught.value.code == BAD


def test_features_come_to_a_whole_server() -> None:
    seeing = replace(HOSTED, features=2)
    for blocks, taken in ((Span(0, 2), True), (Span(0, 1), False), (Span(1, 3), False)):
        terms = replace(TERMS, span=blocks)
        check(RIGHT, [tensor(2, 1, 64)], terms, hosted=seeing)
        if taken:
            check(RIGHT, [tensor(2, 1, 192)], terms, hosted=seeing)
        for width in (128, 256) if taken else (128, 192, 256):
            with pytest.raises(Refusal, match="shape"):
                check(RIGHT, [tensor(2, 1, width)], terms, hosted=seeing)


@given(st.integers(1, 1024))
def test_a_step_is_bounded_however_many_rows(batch: int) -> None:
    assert step_tokens(batch) >= 1 and batch * step_tokens(batch) <= max(STEP_TOKENS, batch)


headers = st.builds(
    lambda shape, dtype, codec, nbytes: wire.Tensor(shape=shape, dtype=dtype, codec=codec, nbytes=nbytes),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
    st.sampled_from(["float32", "float16", "int4", ""]),
    st.sampled_from(["none", "int8-block64", "zip", ""]),
    st.integers(0, 2**64 - 1),
)
steps = st.builds(
    lambda *fields: wire.Step(sequence=fields[0], position=fields[1], reorder=fields[2], route_epoch=fields[3]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
    st.integers(0, 2**64 - 1),
)


@given(steps, st.lists(headers, max_size=3))
def test_whatever_comes_is_a_refusal_or_right(step: wire.Step, tensors: list[wire.Tensor]) -> None:
    try:
        check(step, tensors)
    except Refusal:
        return
    (header,) = tensors
    assert header.nbytes == 2 * header.shape[1] * 64 * 4 and step.position + header.shape[1] <= 100


def test_step_is_as_wide_as_its_first_block() -> None:
    """Two streams, and five values for each block of 8 that is still to come."""
    wide = replace(HOSTED, boundaries=Boundaries(64, 8, 2, 5))
    for first, width in ((2, 158), (3, 153), (5, 143)):
        terms = replace(TERMS, span=Span(first, 6))
        check(RIGHT, [tensor(2, 1, width)], terms, hosted=wide)
        for other in (64, 128, width - 5, width + 1, width + 5, 2 * width):
            with pytest.raises(Refusal, match="shape"):
                check(RIGHT, [tensor(2, 1, other)], terms, hosted=wide)
