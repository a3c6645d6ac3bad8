"""A framed message with tensors on a stream: the only module that reads and writes the bytes of a stream.

On the wire a message is one varint length and one protobuf header of that length. Directly behind it are the raw bytes
of the tensors that the header lists in its `tensors`, in that order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, Generic, Protocol, TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from . import wire_pb2 as wire
from .ids import StreamProtocol

MAX_TENSORS: Final = 64  # of one message
CODECS: Final = ("none", "float16", "bfloat16", "int8-block64")
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}  # the dtypes that travel, and the bytes of a value
INT8_BLOCK: Final = 64
MAX_DIMENSIONS: Final = 8  # of a tensor; those that are sent have 2 to 4
_MAX_VARINT: Final = 4  # bytes; a header never comes near 2**28 bytes
# A piece fills one Yamux frame and Noise message, which is (30 bytes of headers and tag more) the 65507 bytes that,
# if a relay carries them, fill one Yamux frame (12 bytes of header) and Noise message (65519) once more.
_PIECE: Final = 65477
_READ_SIZE: Final = 256 * 1024
PATIENCE: Final = 30.0  # seconds in which a message that has begun has to come, beside the time that its bytes take
LEAST_RATE: Final = 1 << 20
"""Bytes of tensors per second that a peer has to send at least. Whoever sends gives up before that."""
_UNCOUNTED: Final = 16 * 1024  # bytes of a message; the number of streams bounds what a peer may hold of these


class PeerError(Exception):
    """What went wrong while talking to the peer `peer_id`."""

    def __init__(self, message: str, peer_id: str) -> None:
        super().__init__(message)
        self.peer_id = peer_id


class ProtocolError(PeerError):
    """The peer sent what the protocol does not allow; the stream was reset."""


class StreamClosed(PeerError):
    """The stream has ended: closed or reset by the peer, by us, or with its connection."""


class StreamTimeout(PeerError):
    """The peer did not read or answer in time."""


F = TypeVar("F", bound=Message)


class RawStream(Protocol):
    """The bytes under a `MessageStream`; `node/network/transport/stream_bytes.py` has the real one."""

    @property
    def direct(self) -> bool: ...  # whether no relay is on the way to the peer
    @property
    def origin(self) -> str: ...  # the address that the peer's connection comes from, as shares count addresses
    @property
    def is_lost(self) -> bool: ...  # whether it was reset or its connection is gone; what came before may still be read
    async def read(self, n: int) -> bytes:
        """1 to `n` bytes, or none at the end. May be cancelled without loss. Raises OSError when reset."""

    async def write(self, data: bytes | memoryview) -> None:
        """Writes all. Cancelled, it may have written a part. Raises OSError when closed or reset."""

    def write_nowait(self, data: bytes) -> bool:
        """Writes all if that needs no waiting, else nothing; which, it returns. Raises OSError as `write`."""

    async def close(self) -> None: ...  # ends our direction; never waits for the peer
    async def reset(self) -> None: ...  # ends both at once, dropping what was not sent or read; never waits either
    async def wait_lost(self) -> None: ...  # returns once the stream was reset or its connection is gone
    def grant(self) -> None: ...  # lets the peer send megabytes that were not read yet, where it could send 256 KiB
    def widen(self, window: int) -> None: ...  # lets it send so much, though it was granted nothing


class PayloadRoom(Protocol):
    """The memory that all streams of a node share for what they receive. `take` waits where `take_nowait` says no."""

    @property
    def granted(self) -> PayloadRoom: ...  # that of streams on which something was granted
    def take_nowait(self, origin: str, peer_id: str, nbytes: int) -> bool: ...
    async def take(self, origin: str, peer_id: str, nbytes: int) -> None: ...
    def give_back(self, origin: str, peer_id: str, nbytes: int) -> None: ...


class MessageStream(Generic[F]):
    """Messages of one protocol with one peer, both ways.

    One task may send while another one receives; several may send. Flow control is the stream's. A peer that does not
    read makes `send` wait. We hold at most one message and one stream window of what it sent.

    Nothing large is read before there is `room` for it. Who serves a stream `keeps_room` until it asks for more.
    """

    def __init__(
        self,
        raw: RawStream,
        protocol: StreamProtocol[F],
        peer_id: str,
        *,
        room: PayloadRoom | None = None,
        keeps_room: bool = False,
    ) -> None:
        self.peer_id = peer_id
        self._raw = raw
        self._protocol = protocol
        self.max_header = protocol.max_header  # of a message that is received: who knows that it is short says less
        self._send_lock = trio.Lock()
        self._buffer = bytearray()
        self._header: F | None = None  # parsed, its payload not all here yet
        self._broken: PeerError | None = None
        self._admit: Callable[[F], None] | None = None  # of the caller of `receive`
        self._room = room
        self._keeps_room = keeps_room
        self._room_taken: tuple[PayloadRoom, str, int] | None = None  # of which room, for which address, bytes
        self._due = 0  # bytes that have to be in the buffer for the header to be read
        self._patience = PATIENCE  # seconds that may still be waited for the message that has begun

    @property
    def direct(self) -> bool:
        """Whether no relay is on the way to the peer."""
        return self._raw.direct

    async def send(self, frame: F, payloads: Sequence[bytes | bytearray | memoryview] = (), *, timeout: float) -> None:
        """Sends `frame` and the bytes of its tensors; `timeout` in seconds.

        `frame.tensors[i].nbytes` is filled in where it is 0. A message that was sent in part (deadline, cancellation)
        resets the stream. Returning says that the system has the bytes, not that the peer has them.

        Raises:
            StreamTimeout: the peer did not read in time.
            StreamClosed: the stream has ended.
            ValueError: the payloads do not fit `frame.tensors`, or the message is over the stream's limits.
        """
        views, size = self._encode(frame, payloads)
        small = b"".join(views) if size <= _PIECE else None
        await trio.lowlevel.checkpoint_if_cancelled()
        if small is not None and not self._send_lock.locked() and self._write_nowait(small):
            return  # the usual case, without the cost of a cancel scope
        with trio.move_on_after(timeout):
            async with self._send_lock:
                await self._send_pieces((small,) if small is not None else _pieces(views))
            return
        raise StreamTimeout(f"{self.peer_id} did not read a message within {timeout:g} s", self.peer_id)

    def _write_nowait(self, data: bytes) -> bool:
        if self._broken is not None:
            raise self._broken
        try:
            return self._raw.write_nowait(data)
        except OSError as error:
            raise self._closed(f"the stream to {self.peer_id} is closed: {error}") from error

    async def _send_pieces(self, pieces: Iterable[bytes | memoryview]) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            for piece in pieces:
                await self._raw.write(piece)
        except OSError as error:
            raise self._closed(f"the stream to {self.peer_id} is closed: {error}") from error
        except BaseException:
            # It is unknown where in the message it stopped: what follows would be misread.
            self._closed(f"the stream to {self.peer_id} was given up in the middle of a message")
            await self._raw.reset()
            raise

    def _encode(self, frame: F, payloads: Sequence[bytes | bytearray | memoryview]) -> tuple[list[memoryview], int]:
        """The bytes of a message in parts, and their number."""
        tensors = _tensors(frame)
        if len(tensors) != len(payloads):
            raise ValueError(f"{len(payloads)} payloads for {len(tensors)} tensors in the header")
        views = [memoryview(payload).cast("B") for payload in payloads]
        for tensor, view in zip(tensors, views, strict=True):
            if tensor.nbytes == 0:
                tensor.nbytes = view.nbytes
            elif tensor.nbytes != view.nbytes:
                raise ValueError(f"a payload of {view.nbytes} bytes for a tensor of {tensor.nbytes} bytes")
        header, total = frame.SerializeToString(), sum(view.nbytes for view in views)
        bounds = self._protocol
        if len(header) > bounds.max_header or total > bounds.max_payload or len(tensors) > MAX_TENSORS:
            sizes = f"a header of {len(header)} bytes and {len(tensors)} tensors of {total} bytes"
            most = f"{bounds.max_header}, {MAX_TENSORS} and {bounds.max_payload}"
            raise ValueError(f"{sizes}; this stream takes {most}")
        head = varint(len(header)) + header
        return [memoryview(head), *views], len(head) + total

    async def receive(
        self, *, timeout: float | None, admit: Callable[[F], None] | None = None
    ) -> tuple[F, list[bytes]]:
        """The next message: its header, and the bytes of each of its tensors.

        `timeout` in seconds; None: as long as the connection lives. Cancelled or timed out, it has lost nothing.
        `admit(header)` is called before the tensors are waited for. What it raises is raised here, and nothing more
        can be received: the stream is to be closed. After a cancellation it may be called again for the same header.
        A message that has begun has to come within `PATIENCE` and at `LEAST_RATE`, or the stream is reset.

        Raises:
            StreamTimeout: no message came in time.
            StreamClosed: the stream has ended, or the message came too slowly.
            ProtocolError: not a message, over the stream's limits, or cut short; the stream was reset.
        """
        self._admit = admit
        if timeout is None:
            return await self._receive()
        with trio.move_on_after(timeout):
            return await self._receive()
        raise StreamTimeout(f"nothing came from {self.peer_id} within {timeout:g} s", self.peer_id)

    async def wait_begun(self, *, timeout: float) -> None:
        """Returns when something of the next message has come. Raises as `receive` does."""
        with trio.move_on_after(timeout):
            while not self._buffer and self._header is None:
                await self._fill()
            return
        raise StreamTimeout(f"nothing came from {self.peer_id} within {timeout:g} s", self.peer_id)

    async def _receive(self) -> tuple[F, list[bytes]]:
        try:
            return await self._receive_message()
        except ProtocolError:
            await self.reset()
            raise

    async def _receive_message(self) -> tuple[F, list[bytes]]:
        if isinstance(self._broken, ProtocolError):
            raise self._broken
        if self._header is None:
            self._leave_room()  # the message before is done with
        while self._header is None:
            self._header = self._take_header()
            if self._header is None:
                await (self._fill_to(self._due) if self._buffer else self._fill())
        if self._admit is not None:
            self._admit(self._header)
        sizes = [tensor.nbytes for tensor in _tensors(self._header)]
        total = sum(sizes)
        if total > _UNCOUNTED or len(self._buffer) < total:
            await self._fill_to(total)
        header, self._header = self._header, None
        self._patience = PATIENCE
        with memoryview(self._buffer) as view:
            payloads = [bytes(view[start:end]) for start, end in pairwise(accumulate(sizes, initial=0))]
        del self._buffer[:total]
        if not self._keeps_room:
            self._leave_room()
        return header, payloads

    async def _fill_to(self, total: int) -> None:
        """Reads until `total` bytes are in the buffer, for which there is room. Only the time that is waited here
        counts: a peer does not answer for what its own reader leaves lying."""
        room, taken = self._room, self._room_taken[2] if self._room_taken else 0
        if room is not None and total > max(taken, _UNCOUNTED):
            self._leave_room()
            origin = self._raw.origin
            if not room.take_nowait(origin, self.peer_id, total):
                await room.take(origin, self.peer_id, total)
            self._room_taken = room, origin, total
            if self._broken is not None:  # by another task, while this one waited: nobody would give it back
                self._leave_room()
                raise self._broken
        begun = trio.current_time()
        try:
            with trio.move_on_after(max(0.0, self._patience)):
                while len(self._buffer) < total:
                    await self._fill()
                return
        finally:
            self._patience -= trio.current_time() - begun
        with contextlib.suppress(OSError):
            await self._raw.reset()
        raise self._closed(f"{self.peer_id} sent a message more slowly than is allowed")

    def _leave_room(self) -> None:
        if self._room_taken is not None:
            (room, origin, nbytes), self._room_taken = self._room_taken, None
            room.give_back(origin, self.peer_id, nbytes)

    def _take_header(self) -> F | None:
        """Parses the header at the start of the buffer, or returns None if it is not all there."""
        size = shift = start = 0
        for byte in self._buffer[:_MAX_VARINT]:
            size |= (byte & 0x7F) << shift
            shift += 7
            start += 1
            if byte < 0x80:
                break
        else:
            if start == _MAX_VARINT:
                raise self._violation("a message length that is no length")
            self._due = start + 1
            return None
        if size > self.max_header:
            raise self._violation(f"a header of {size} bytes; {self.max_header} are allowed")
        if len(self._buffer) < start + size:
            self._due = start + size
            return None
        header = self._protocol.frame()
        try:
            header.ParseFromString(bytes(self._buffer[start : start + size]))
        except DecodeError as error:
            raise self._violation("a header that is no message") from error
        tensors = _tensors(header)
        total = sum(tensor.nbytes for tensor in tensors[:MAX_TENSORS])  # millions may be in it
        most = self._protocol.max_payload
        if len(tensors) > MAX_TENSORS or total > most:
            raise self._violation(f"{len(tensors)} tensors of {total} bytes; {MAX_TENSORS} of {most} bytes are allowed")
        del self._buffer[: start + size]
        self._patience += total / LEAST_RATE
        return header

    async def _fill(self) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            data = await self._raw.read(_READ_SIZE)
        except OSError as error:
            raise self._closed(f"the stream to {self.peer_id} is closed: {error}") from error
        if not data:
            if self._buffer or self._header is not None:
                raise self._violation("a message that is cut short")
            raise StreamClosed(f"{self.peer_id} closed the stream", self.peer_id)
        self._buffer += data

    def grant(self) -> None:
        """Lets the peer send at the speed of a long line. For who serves a stream, once it has agreed to take much."""
        self._raw.grant()
        if self._room is not None:
            self._room = self._room.granted

    def widen(self, window: int) -> None:
        """Lets the peer send `window` bytes that were not read yet. It has a stranger's share of all else as before."""
        self._raw.widen(window)

    def _violation(self, what: str) -> ProtocolError:
        self._broken = error = ProtocolError(f"{self.peer_id} sent {what}", self.peer_id)
        return error

    def _closed(self, why: str) -> StreamClosed:
        self._leave_room()  # what came of a message is of no use any more
        self._broken = error = StreamClosed(why, self.peer_id)
        return error

    async def close(self) -> None:
        """Says that we send nothing more. Never waits for the peer."""
        if self._broken is None:
            self._closed(f"the stream to {self.peer_id} was closed on this side")
        with contextlib.suppress(OSError):  # also of a stream that is lost: what came and was not read counts
            await self._raw.close()

    async def reset(self) -> None:
        """Ends the stream at once in both directions. Never waits for the peer."""
        self._leave_room()
        if self._broken is None:
            self._closed(f"the stream to {self.peer_id} was reset on this side")
        with contextlib.suppress(OSError):
            await self._raw.reset()

    @property
    def is_lost(self) -> bool:
        """Whether the stream was reset or its connection is gone; messages that came before that can be received."""
        return self._raw.is_lost

    async def wait_lost(self) -> None:  # returns once `is_lost`, for who waits for something else
        await self._raw.wait_lost()


def _tensors(frame: Message) -> Sequence[wire.Tensor]:
    return frame.tensors  # type: ignore[attr-defined, no-any-return]


def varint(value: int) -> bytes:
    """Unsigned LEB128, as protobuf and libp2p write lengths."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _pieces(views: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """The concatenation of `views`, cut into full pieces; several of one view are not copied and come as one."""
    gathered: list[memoryview] = []
    room = _PIECE
    for rest in views:
        while rest:
            gathered.append(rest[:room])
            rest, room = rest[room:], room - len(gathered[-1])
            if room == 0:
                whole = len(rest) // _PIECE * _PIECE
                yield from filter(len, (b"".join(gathered), rest[:whole]))
                gathered, room, rest = [], _PIECE, rest[whole:]
    if gathered:
        yield b"".join(gathered)


# --- what a tensor's header says about its bytes; the codecs are in `tensors`, which needs torch


class TensorError(ValueError):
    """A tensor header or its bytes that cannot be read; the text says which part."""


def wire_nbytes(shape: Sequence[int], dtype: str, codec: str) -> int:
    """Bytes that a tensor takes on the wire.

    Raises:
        TensorError: for an unknown dtype or codec, or more dimensions than any tensor here has.
    """
    if len(shape) > MAX_DIMENSIONS:  # the product of thousands takes seconds, and fits no float
        raise TensorError(f"a shape of {len(shape)} dimensions; {MAX_DIMENSIONS} are the most")
    if dtype not in ITEM_BYTES:
        raise TensorError(f"unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    values = math.prod(shape)
    if codec in ("none", "float16", "bfloat16"):
        return values * ITEM_BYTES[dtype if codec == "none" else codec]
    if codec == "int8-block64":
        return values + 2 * -(-values // INT8_BLOCK)
    raise TensorError(f"unknown codec {codec!r}; known are {', '.join(CODECS)}")


def all_finite(header: wire.Tensor, payload: bytes | bytearray) -> bool:
    """Whether the values are finite, also as `header.dtype`. Quick enough for any thread (5 us for 2 KiB)."""
    import numpy as np  # a tenth of a second, which commands without tensors do not pay

    name = header.dtype if header.codec == "none" else header.codec
    if header.codec == "int8-block64":  # the scales; integers are finite
        name, payload = "float16", payload[: 2 * math.ceil(math.prod(header.shape) / INT8_BLOCK)]
    if name == "float32":
        return bool(np.isfinite(np.frombuffer(payload, np.float32)).all())
    # The bits of half precisions, without the sign, are in the order of the values; infinity and NaN come last.
    beyond = 0x7C00 if name == "float16" else 0x7F80
    if header.dtype == "float16":  # 512, of which 128 steps are too large, and 65536
        beyond = {"int8-block64": 0x6000, "bfloat16": 0x4780}.get(header.codec, beyond)
    return not bool(((np.frombuffer(payload, np.uint16) & np.uint16(0x7FFF)) >= beyond).any())
