"""Kademlia's messages (https://github.com/libp2p/specs/tree/master/kad-dht), which are bounded before they are parsed.

A message of 40 KiB may have 20,000 empty peers in it, and one of 256 KiB 130,000 of them.
"""

from __future__ import annotations

import time
from typing import Final

from google.protobuf.message import DecodeError
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record

KAD: Final = str(PROTOCOL_ID)
MAX_REQUEST: Final = 40 * 1024
"""Bytes; the longest one carries a list of models."""
MAX_ANSWER: Final = 256 * 1024
"""Bytes: 20 peers on the way and hundreds of providers."""
MAX_REQUEST_FIELDS: Final = 256
MAX_ANSWER_FIELDS: Final = 8192
"""Of a message and of the messages in it, together."""
MAX_KEY: Final = 128  # bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}  # bytes
_MAX_VARINT: Final = 10  # bytes
_NESTED: Final = frozenset(field.number for field in Message.DESCRIPTOR.fields if field.message_type is not None)


class BadMessage(ValueError):
    """No message of Kademlia, or one that is out of bounds."""


def parse(data: bytes, *, max_fields: int) -> Message:
    """The message in `data`, which has at most so many fields.

    Raises:
        BadMessage: it has more, or it is malformed.
    """
    _count_fields(data, 0, len(data), max_fields, nested=True)
    try:
        return Message.FromString(data)
    except DecodeError as error:
        raise BadMessage("no message of Kademlia") from error


def _count_fields(data: bytes, at: int, end: int, left: int, *, nested: bool) -> int:
    """How many fields are left after those from `at` to `end`; looks at no more than there may be."""
    while at < end:
        left -= 1
        if left < 0:
            raise BadMessage("too many fields")
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == _BYTES:
            size, at = _varint(data, at, end)
            if nested and tag >> 3 in _NESTED and size <= end - at:
                left = _count_fields(data, at, at + size, left, nested=False)
            at += size
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise BadMessage("groups")
        if at > end:
            raise BadMessage("cut short")
    return left


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        if at >= end:
            raise BadMessage("cut short")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise BadMessage("a number without an end")


def record_of(key: bytes, value: bytes, received: float | None = None) -> Record:
    """A value as it is sent, with the time at which it came (seconds since 1970, if any), in the form of RFC 3339."""
    record = Record(key=key, value=value)
    if received is not None:
        record.timeReceived = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(received))
    return record
