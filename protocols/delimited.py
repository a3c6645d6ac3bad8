"""Messages of libp2p's standard protocols on a stream: one varint length, one protobuf message.

Our own protocols use `framing.py`, which reads ahead. Here not a byte is taken that does not belong to the message:
behind the last one, a relayed connection's own bytes may follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final, Self, TypeVar, cast

import trio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from .framing import ProtocolError, RawStream, StreamClosed, StreamTimeout, varint

MAX_MESSAGE: Final = 4096  # bytes, as the standards say; those of identify are longer


@dataclass(frozen=True)
class DelimitedLimits:
    """What a message of libp2p may have, looked at before it is parsed."""

    max_varint: int = 3  # bytes
    max_fields: int = 2048
    """Of a message, and of those within it."""
    slice: int = 256 << 10
    """Bytes that protobuf reads in one go."""
    max_field: int = 1 << 20
    """Bytes of a field that is a message."""
    longest_varint: int = 10


DELIMITED: Final = DelimitedLimits()
M = TypeVar("M", bound=Message)


class DelimitedStream:
    """Messages with one peer, both ways. One task may send while another one receives.

    As a context manager it is closed behind the block, or reset if that fails.
    """

    def __init__(self, stream: RawStream, peer_id: str, *, max_message: int = MAX_MESSAGE) -> None:
        self.peer_id = peer_id
        self._stream = stream
        self._max_message = max_message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await (self.close() if error is None else self.reset())

    async def send(self, message: Message, *, timeout: float) -> None:
        """Sends one message; `timeout` in seconds.

        Raises:
            StreamTimeout: the peer did not read in time; the stream was reset.
            StreamClosed: the stream has ended.
        """
        data = message.SerializeToString()
        with trio.move_on_after(timeout):
            try:
                await self._stream.write(varint(len(data)) + data)
            except OSError as error:
                raise StreamClosed(f"the stream to {self.peer_id} is closed: {error}", self.peer_id) from error
            except BaseException:
                await self.reset()  # nobody can tell where in the message it stopped
                raise
            return
        raise StreamTimeout(f"{self.peer_id} did not read a message within {timeout:g} s", self.peer_id)

    async def receive(self, kind: type[M], *, timeout: float) -> M:
        """The next message. After an error, the stream is of no use any more.

        Raises:
            StreamTimeout: it did not come in time.
            StreamClosed: the stream has ended.
            ProtocolError: too long, of too many fields, cut short, or no message of this kind; the stream was reset.
        """
        data = await self.receive_bytes(timeout=timeout)
        try:
            return parse_message(kind, data, most=DELIMITED.max_fields)
        except DecodeError as error:
            raise await self._violation(f"what is no {kind.DESCRIPTOR.name}") from error

    async def receive_bytes(self, *, timeout: float) -> bytes:
        """As `receive`, of a message that the caller parses."""
        with trio.move_on_after(timeout):
            return await self.receive_body(await self.receive_size(), timeout=timeout)
        raise StreamTimeout(f"nothing came from {self.peer_id} within {timeout:g} s", self.peer_id)

    async def receive_body(self, size: int, *, timeout: float) -> bytes:
        """The rest of a message, after `receive_size`. Raises as `receive` does."""
        with trio.move_on_after(timeout):
            return await self._read_exactly(size)
        raise StreamTimeout(f"no whole message came from {self.peer_id} within {timeout:g} s", self.peer_id)

    async def receive_size(self) -> int:
        """The bytes of the next message, however long it takes to begin. Raises as `receive` does."""
        size = 0
        for turn in range(DELIMITED.max_varint):
            (byte,) = await self._read_exactly(1, may_end=turn == 0)
            size |= (byte & 0x7F) << (7 * turn)
            if byte < 0x80:
                break
        else:
            raise await self._violation("a message length that is no length")
        if size > self._max_message:
            raise await self._violation(f"a message of {size} bytes; {self._max_message} are allowed")
        return size

    async def _read_exactly(self, n: int, *, may_end: bool = False) -> bytes:
        data = bytearray()
        while len(data) < n:
            try:
                part = await self._stream.read(n - len(data))
            except OSError as error:
                raise StreamClosed(f"the stream to {self.peer_id} is closed: {error}", self.peer_id) from error
            if not part and may_end:
                raise StreamClosed(f"{self.peer_id} closed the stream", self.peer_id)
            if not part:
                raise await self._violation("a message that is cut short")
            data += part
        return bytes(data)

    async def _violation(self, what: str) -> ProtocolError:
        await self.reset()
        return ProtocolError(f"{self.peer_id} sent {what}", self.peer_id)

    async def close(self) -> None:
        """Says that we send nothing more. Never waits for the peer."""
        with contextlib.suppress(OSError):
            await self._stream.close()

    async def reset(self) -> None:
        """Ends the stream at once in both directions. Never waits for the peer."""
        with contextlib.suppress(OSError):
            await self._stream.reset()


# --- messages within bounds
# A repeated message that is empty takes two bytes on the wire and 90 in memory, and protobuf keeps the interpreter for
# all of a message: 8 MiB of empty receipts took 0.6 s and 700 MiB.

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GROWING: Final = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


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
        if number in within and end - start > DELIMITED.max_field:
            raise DecodeError(f"a field of {end - start:,} bytes is too long")
        if end - cuts[-1] >= DELIMITED.slice:
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
    """Whether a message of this type can hold any number of messages, texts or byte strings."""
    return any(
        (field.is_repeated and field.type in _GROWING)
        or (field.message_type is not None and _may_grow(field.message_type))
        for field in kind.fields
    )


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(number, beginning and end of the value) of each field. The number is 0 for values that cannot be messages."""
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
    for place in range(start, min(stop, start + DELIMITED.longest_varint)):
        found |= (data[place] & 0x7F) << 7 * (place - start)
        if data[place] < 0x80:
            return found, place + 1
    raise DecodeError("a number is cut off")
