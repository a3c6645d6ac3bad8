from __future__ import annotations

from functools import partial

import pytest

from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import MAX_BATCH, MAX_LENGTH, Refusal, bad_request, hash_of_step, terms_of
from tests import messages

opening = partial(messages.opening, max_length=100, batch=3)


def test_terms_are_what_was_asked_for() -> None:
    terms = terms_of(opening(left_padding=[1, 0, 2]))
    assert terms.span == Span(2, 5) and terms.batch == 3 and terms.cache_tokens == 300
    assert terms.left_padding == (1, 0, 2) and terms.model_version == b"m" * 32
    assert terms.codec == "none" and terms.dtype == "float32" and terms.nonce == b"n" * 16


def test_padding_of_nothing_is_no_padding() -> None:
    assert terms_of(opening(left_padding=[0, 0, 0])).left_padding == ()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"protocol_version": 0}, wire.ERROR_UNSUPPORTED),
        ({"protocol_version": 2}, wire.ERROR_UNSUPPORTED),
        ({"model_version": b""}, wire.ERROR_BAD_REQUEST),
        ({"model_version": b"m" * 33}, wire.ERROR_BAD_REQUEST),
        ({"nonce": b"n" * 15}, wire.ERROR_BAD_REQUEST),
        ({"span": wire.Span(start=5, end=5)}, wire.ERROR_BAD_REQUEST),
        ({"span": wire.Span(start=6, end=5)}, wire.ERROR_BAD_REQUEST),
        ({"span": wire.Span()}, wire.ERROR_BAD_REQUEST),
        ({"batch": 0}, wire.ERROR_BAD_REQUEST),
        ({"batch": MAX_BATCH + 1}, wire.ERROR_BAD_REQUEST),
        ({"max_length": 0}, wire.ERROR_BAD_REQUEST),
        ({"max_length": MAX_LENGTH + 1}, wire.ERROR_BAD_REQUEST),
        ({"left_padding": [1]}, wire.ERROR_BAD_REQUEST),
        ({"left_padding": [1, 2, 3, 4]}, wire.ERROR_BAD_REQUEST),
        ({"left_padding": [1, 2, 100]}, wire.ERROR_BAD_REQUEST),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_name(fields: dict[str, object], code: int) -> None:
    with pytest.raises(Refusal) as caught:
        terms_of(opening(**fields))
    assert caught.value.code == code
    assert next(iter(fields)).split("_")[0] in caught.value.message or "span" in caught.value.message


def test_a_person_writes_a_span_as_its_ends() -> None:
    assert Span.parse(" 0:15 ") == Span(0, 15) and str(Span.parse("3:4")) == "3:4"
    for text in ("", "3", "3-4", "a:4", "3:b", ":4", "3:", "-1:4", "4:3", "3:3"):
        with pytest.raises(ValueError, match=r"blocks|span"):
            Span.parse(text)


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(Refusal):
        terms_of(wire.Open())


def test_refusal_survives_wire_and_cannot_be_endless() -> None:
    back = Refusal.from_wire(bad_request("x" * 100_000).to_wire())
    assert back.code == wire.ERROR_BAD_REQUEST and len(back.message) == 500
    assert len(Refusal.from_wire(wire.Error(code=wire.ERROR_BUSY, message="y" * 100_000)).message) == 500


TENSOR = messages.tensor(1, 2, 8)
STEP = wire.Step(sequence=1, position=5, reorder=[0], route_epoch=2)


@pytest.mark.parametrize(
    ("step", "tensor", "payload"),
    [
        (wire.Step(sequence=2, position=5, reorder=[0], route_epoch=2), TENSOR, b"h" * 32),
        (wire.Step(sequence=1, position=4, reorder=[0], route_epoch=2), TENSOR, b"h" * 32),
        (wire.Step(sequence=1, position=5, route_epoch=2), TENSOR, b"h" * 32),
        (wire.Step(sequence=1, position=5, reorder=[0], route_epoch=3), TENSOR, b"h" * 32),
        (wire.Step(sequence=1, position=5, reorder=[0], route_epoch=2, previous_receipt=b"u" * 32), TENSOR, b"h" * 32),
        (wire.Step(sequence=1, position=5, reorder=[0], route_epoch=2, positions=[5] * 6), TENSOR, b"h" * 32),
        (wire.Step(sequence=1, position=5, reorder=[0], route_epoch=2, groups=[2, 1]), TENSOR, b"h" * 32),
        (STEP, wire.Tensor(shape=[2, 1, 8], dtype="float32", codec="none"), b"h" * 32),
        (STEP, wire.Tensor(shape=[1, 2, 8], dtype="float16", codec="none"), b"h" * 32),
        (STEP, wire.Tensor(shape=[1, 2, 8], dtype="float32", codec="float16"), b"h" * 32),
        (STEP, TENSOR, b"i" * 32),
    ],
)
def test_hash_of_step_covers_header_and_payload(step: wire.Step, tensor: wire.Tensor, payload: bytes) -> None:
    assert hash_of_step(step, tensor, payload) != hash_of_step(STEP, TENSOR, b"h" * 32)
