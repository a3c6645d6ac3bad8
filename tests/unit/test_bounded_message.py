"""Long messages of strangers: read as protobuf reads them, unless they have too many fields."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.delimited import parse_message


def evidence(steps: int, size: int = 32) -> wire.Evidence:
    found = wire.Evidence(version=1, kind="answer", accused=b"accused", error=0.5, time_ms=1 << 40)
    found.opening.left_padding.extend(range(300))
    found.work.work.tensors.add(shape=[1, 2, 3])
    for number in range(steps):
        step = found.steps.add(payload_hash=bytes([number % 256]) * size)
        step.step.sequence = number
        step.step.targets.add()
        step.receipt.span.SetInParent()
    return found


@pytest.mark.parametrize("size", [32, 300_000, 1 << 19])
def test_a_message_is_read_as_protobuf_reads_it(size: int) -> None:
    """In slices as well: those of the longer ones have 256 KiB."""
    data = evidence(5, size).SerializeToString()
    assert parse_message(wire.Evidence, data, most=100) == evidence(5, size)


def test_fields_that_are_not_known_are_kept() -> None:
    data = b"\xf8\x3f\x01\xf9\x3f12345678\xfd\x3f1234\xfa\x3f\x03abc"
    assert parse_message(wire.Evidence, data, most=4).SerializeToString() == data
    with pytest.raises(DecodeError, match="more than 3 fields"):
        parse_message(wire.Evidence, data, most=3)


def test_number_instead_of_a_message_is_unknown() -> None:
    data = b"\x40\x80\x01"  # the number of `steps`, but no bytes
    assert parse_message(wire.Evidence, data, most=1) == wire.Evidence.FromString(data)
    assert parse_message(wire.PushFrame, data, most=1) == wire.PushFrame.FromString(data)


def test_field_that_comes_twice_counts_once() -> None:
    data = wire.Evidence(kind="pledge", session_epoch=b"one").SerializeToString() + evidence(1).SerializeToString()
    assert parse_message(wire.Evidence, data, most=100) == wire.Evidence.FromString(data)


def test_fields_are_counted_where_messages_can_be_repeated() -> None:
    """Those of messages that hold no others count as one."""
    counted = 0
    while True:
        try:
            parse_message(wire.Evidence, evidence(2).SerializeToString(), most=counted)
            break
        except DecodeError:
            counted += 1
    more = evidence(2)
    more.steps[1].step.targets.add()
    more.receipts.add(signature=b"s")
    more.work.work.tensors.add()
    with pytest.raises(DecodeError, match=f"more than {counted + 2} fields"):
        parse_message(wire.Evidence, more.SerializeToString(), most=counted + 2)
    assert parse_message(wire.Evidence, more.SerializeToString(), most=counted + 3)


@pytest.mark.parametrize("name", ["receipts", "steps", "prefix", "work", "opening"])
def test_a_message_within_has_at_most_a_mebibyte(name: str) -> None:
    number = wire.Evidence.DESCRIPTOR.fields_by_name[name].number
    for size, taken in ((1 << 20, True), ((1 << 20) + 1, False)):
        inner = size - 5
        unknown = b"\xfa\x7f" + bytes([inner & 127 | 128, inner >> 7 & 127 | 128, inner >> 14]) + bytes(inner)
        data = bytes([number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + unknown
        if taken:
            assert parse_message(wire.Evidence, data, most=10) == wire.Evidence.FromString(data)
        else:
            with pytest.raises(DecodeError, match="too long"):
                parse_message(wire.Evidence, data, most=10)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80",
        b"\x80" * 20,
        b"\x0a",
        b"\x0a\x02a",
        b"\x09123",
        b"\x0b\x0c",
        b"\x0b\x12\x02ab\x0c\x12\x02ab",
        b"\x07",
        b"\x42\x01\x12",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_message(wire.Evidence, data, most=100)
