"""`/petalnode/receipts/1` and `/petalnode/evidence/1`: bundles of evidence, and receipts for auditors.

A bundle's bytes travel in pieces, so that nobody reads more than a piece of what turns out too large or comes too late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Final, TypeVar, cast

import trio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from . import wire_pb2 as wire
from .framing import MessageStream, ProtocolError, StreamTimeout
from .inference import Refusal, bad_request

PIECE_BYTES: Final = 1 << 20
MAX_OFFER: Final = 256
"""Receipts that a client offers at once."""
MAX_HEADER: Final = 256 * 1024
MAX_SHARED: Final = 64 << 20
"""Bytes of a bundle that is sent from node to node; larger ones have to be handed over as files."""

MIN_RATE: Final = 128 << 10
"""Bytes a second at which a bundle has to come, from its first piece on."""

EvidenceStream = MessageStream[wire.EvidenceFrame]


async def send_bundle(stream: EvidenceStream, data: bytes, *, timeout: float) -> None:
    """Sends a bundle; `timeout` is for each piece.

    Raises:
        PeerError: as `MessageStream.send`.
    """
    await stream.send(wire.EvidenceFrame(sending=wire.Sending(nbytes=len(data))), timeout=timeout)
    view = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        frame = wire.EvidenceFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=len(piece))])
        await stream.send(frame, [piece], timeout=timeout)


async def receive_bundle(stream: EvidenceStream, *, limit: int, timeout: float) -> bytes:
    """The bytes of a bundle that was asked for, of at most `limit` bytes.

    The sender may fall `timeout` seconds behind `MIN_RATE`, and no more at any time: so the whole takes at most
    `timeout` + `limit` / `MIN_RATE` seconds after the announcement of its size, which has `timeout` seconds.

    Raises:
        PeerError: as `MessageStream.receive`, it comes too slowly, or something else came.
        Refusal: the sender's own Error.
    """
    frame, _ = await stream.receive(timeout=timeout)
    if frame.WhichOneof("body") == "error":
        raise Refusal.from_wire(frame.error)
    size = frame.sending.nbytes
    if frame.WhichOneof("body") != "sending" or not 0 < size <= limit:
        raise ProtocolError(f"{stream.peer_id} sends no bundle of at most {limit} bytes", stream.peer_id)
    data = bytearray()
    begun = trio.current_time()
    while len(data) < size:
        with trio.move_on_at(begun + timeout + len(data) / MIN_RATE) as patience:
            frame, payloads = await stream.receive(timeout=None)
        if patience.cancelled_caught:
            raise StreamTimeout(
                f"{stream.peer_id} sends a bundle more slowly than {MIN_RATE >> 10} KiB a second", stream.peer_id
            )
        if frame.WhichOneof("body") != "piece" or len(payloads) != 1 or not payloads[0]:
            raise ProtocolError(f"{stream.peer_id} ended a bundle before its end", stream.peer_id)
        data += payloads[0]
    if len(data) != size:
        raise ProtocolError(f"{stream.peer_id} sent more than it said", stream.peer_id)
    return bytes(data)


def check_pick(frame: wire.EvidenceFrame, offered: int) -> int | None:
    """The number that an auditor picks; None if it wants no more.

    Raises:
        Refusal: something else, or a number that was not offered.
    """
    body = frame.WhichOneof("body")
    if body == "close":
        return None
    if body != "pick" or frame.pick.number >= offered:
        raise bad_request(f"an auditor picks one of {offered} receipts, or closes; not {body}")
    return frame.pick.number


# --- long messages within bounds
# A repeated message that is empty takes two bytes on the wire and 90 in memory, and protobuf keeps the interpreter for
# all of a message: 8 MiB of empty receipts took 0.6 s and 700 MiB.

M = TypeVar("M", bound=Message)

_SLICE: Final = 256 << 10
"""Bytes that protobuf reads in one go."""
_MAX_FIELD: Final = 1 << 20
"""Bytes of a field that is a message."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT: Final = 10


def parse_message(kind: type[M], data: bytes, *, most: int) -> M:
    """The message that `data` is. `most` fields may stand in it, those of messages within it included where these can
    hold repeated messages.

    Raises:
        DecodeError: it is none, or has more fields, or one of 1 MiB that is a message.
    """
    descriptor = cast(Descriptor, kind.DESCRIPTOR)
    _check_count(descriptor, data, most)
    within = _message_fields(descriptor)
    cuts = [0]
    for number, start, end in _fields(data, 0, len(data)):
        if number in within and end - start > _MAX_FIELD:
            raise DecodeError(f"a field of {end - start:,} bytes is too long")
        if end - cuts[-1] >= _SLICE:
            cuts.append(end)
    message = kind()
    for start, end in pairwise([*cuts, len(data)]):
        message.MergeFromString(data[start:end])
    return message


def _check_count(kind: Descriptor, data: bytes, most: int) -> None:
    waiting, count = [(kind, 0, len(data))], 0
    while waiting:
        message, begin, stop = waiting.pop()
        within = _message_fields(message)
        for number, start, end in _fields(data, begin, stop):
            count += 1
            if count > most:
                raise DecodeError(f"there are more than {most:,} fields")
            if within.get(number) is not None and _may_grow(within[number]):
                waiting.append((within[number], start, end))


@cache
def _message_fields(kind: Descriptor) -> Mapping[int, Descriptor]:
    """The fields that are messages."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


@cache
def _may_grow(kind: Descriptor) -> bool:
    """Whether a message of this type can hold any number of messages."""
    return any(
        field.message_type is not None and (field.is_repeated or _may_grow(field.message_type)) for field in kind.fields
    )


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(number, beginning and end of the value) of each field; the number is 0 for values that cannot be messages."""
    while start < stop:
        tag, start = _varint(data, start, stop)
        wire_type = tag & 7
        if wire_type == _VARINT:
            end = _varint(data, start, stop)[1]
        elif wire_type == _BYTES:
            size, start = _varint(data, start, stop)
            end = start + size
        elif wire_type in (_FIXED64, _FIXED32):
            end = start + (8 if wire_type == _FIXED64 else 4)
        else:
            raise DecodeError(f"a field of type {wire_type} is in no message of ours")
        if end > stop:
            raise DecodeError("a field is cut off")
        yield tag >> 3 if wire_type == _BYTES else 0, start, end
        start = end


def _varint(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """The number, and where it ends."""
    found = 0
    for place in range(start, min(stop, start + _LONGEST_VARINT)):
        found |= (data[place] & 0x7F) << 7 * (place - start)
        if data[place] < 0x80:
            return found, place + 1
    raise DecodeError("a number is cut off")
