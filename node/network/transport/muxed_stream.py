"""One Yamux stream: its window, its buffer, its ends. `yamux.py` has the connection."""

from __future__ import annotations

import math
import struct
from collections import deque
from typing import Final, Protocol

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from .bandwidth import NEGOTIATION, Throttle, Traffic
from .limits import AddressUse, NodeLimits
from .noise import MAX_PLAINTEXT
from .raw_connection import ByteSink, Path

HEADER: Final = struct.Struct("!BBHII")  # version, type, flags, stream id, length
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
INITIAL_WINDOW: Final = 256 * 1024  # by the specification
WINDOW: Final = 4 * 1024 * 1024  # what we grant to most: 40 MB/s at a round trip of 100 ms
_SMALL: Final = 32 * 1024  # bytes: a token's hidden state, which does not wait behind large data
MAX_DATA: Final = MAX_PLAINTEXT - HEADER.size  # a frame fills one Noise message
LARGE_DATA: Final = 4 * MAX_PLAINTEXT - HEADER.size
"""Of a frame straight over TCP, which fills four: a frame takes a tenth of a ms beside its bytes."""
# Data of small frames are put together: a chunk of two bytes takes 56, and only two would be counted.
_SMALL_CHUNK: Final = 4096
_FULL_CHUNK: Final = 64 * 1024
WOKEN_AT_ONCE: Final = 16
"""Streams of lost connections whose tasks end in one pass of the loop: each takes 0.3 ms."""


class StreamConnection(Protocol):
    """What a stream needs of its connection; `yamux.Muxer` is one."""

    path: Path
    max_data: int  # bytes of one frame
    traffic: Traffic
    address: AddressUse  # of the peer

    def hold(self, size: int, granted: bool) -> None:
        """Counts bytes that came and were not read yet, fewer if `size` is negative. The stream was granted something,
        or was not."""

    def may_widen(self, more: int) -> bool:
        """Whether the peer may be given so much more window; counted until `forget_if_done`."""

    def put(self, kind: int, flags: int, stream_id: int, length: int, data: bytes | memoryview = b"") -> None: ...

    @property
    def has_room(self) -> bool: ...

    @property
    def upload(self) -> Throttle | None: ...

    def __hash__(self) -> int: ...

    async def wait_room(self) -> None: ...

    def forget_if_done(self, stream: MuxedStream) -> None: ...

    def get_remote_address(self) -> tuple[str, int] | None: ...


class MuxedStream(IMuxedStream):
    """One stream. One task may read and one may write at a time.

    Attributes:
        granted: whether the peer was granted something on it (session, batch, circuit), or was asked for what it sends.
            How wide the window is says nothing about that.
        widened: bytes of the window beyond what every stream has.
    """

    def __init__(self, muxed_conn: StreamConnection, stream_id: int, window: int = INITIAL_WINDOW) -> None:
        self.muxed_conn = muxed_conn
        self.stream_id = stream_id
        self.read_closed = False  # the peer sends nothing more
        self.write_closed = False
        self.lost: str | None = None  # why it was reset, if it was
        self.discarding = False  # nobody will read any more
        self.closed_at = math.inf
        self.send_window = INITIAL_WINDOW
        self._window = window  # what the peer may send beyond what was read
        self._granted = window  # what the peer may still send
        self._consumed = 0  # read since the last grant
        self.unread = 0  # bytes
        self.widened = 0
        self.granted = False
        self.opened_by_peer = False
        self.named = False  # whether a protocol was agreed on
        self.waits_turn = False  # what serves it, for the peer's turn
        self._chunks: deque[bytes | bytearray] = deque()
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        self._lost_event: trio.Event | None = None
        self._sink: ByteSink | None = None
        self._count = muxed_conn.traffic.of(NEGOTIATION)

    def agree(self, protocol: str) -> None:
        """From now on what the stream carries counts for this protocol."""
        self._count = self.muxed_conn.traffic.of(protocol)
        self.named = True
        self.muxed_conn.address.negotiated(self)

    async def read(self, n: int | None = None) -> bytes:
        """1 to `n` bytes as soon as there are any. Cancelled, nothing is lost.

        Raises:
            MuxedStreamEOF: the peer closed the stream, and all was read.
            MuxedStreamReset: the stream was reset, or the connection is gone; what came before that is read first.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._chunks:
            if self.opened_by_peer and not self.named and not self.read_closed:
                self.muxed_conn.address.negotiate(self)  # which may end it
            if self.lost is not None:
                raise MuxedStreamReset(self.lost)
            if self.read_closed:
                raise MuxedStreamEOF("the peer closed the stream")
            await self._readers.park()
        chunk = self._chunks[0]
        if n is None or not 0 <= n < len(chunk):
            self._chunks.popleft()
        else:
            rest = chunk if isinstance(chunk, bytearray) else bytearray(chunk)
            chunk, self._chunks[0] = rest[:n], rest
            del rest[:n]
        self._hold(-len(chunk))
        self._grant(len(chunk))
        return bytes(chunk)

    def divert(self, sink: ByteSink) -> None:
        """Offers what comes to `sink` first, as long as nothing waits for `read`."""
        self._sink = sink

    @property
    def is_diverted(self) -> bool:
        return self._sink is not None

    def _hold(self, size: int) -> None:
        self.unread += size
        self.muxed_conn.hold(size, self.granted)

    def _grant(self, consumed: int) -> None:
        self._consumed += consumed
        if self._consumed >= self._window // 2 and not self.read_closed and self.lost is None:
            self._granted += self._consumed
            self.muxed_conn.put(WINDOW_UPDATE, 0, self.stream_id, self._consumed)
            self._consumed = 0

    def grant(self, window: int = WINDOW) -> None:
        """Says that the peer has been granted something here, and lets it send as much as `widen` does."""
        if not self.granted:
            unread = self.unread
            self._hold(-unread)
            self.granted = True
            self._hold(unread)
        self.widen(window)

    def widen(self, window: int) -> None:
        """Lets the peer send as much beyond what was read, unless it may do so on many streams already.

        Until then it is little, for who knows what it wants."""
        more = window - self._window
        if more > 0 and not self.read_closed and self.lost is None and self.muxed_conn.may_widen(more):
            self._window = window
            self.widened += more
            self._granted += more
            self.muxed_conn.put(WINDOW_UPDATE, 0, self.stream_id, more)

    async def write(self, data: bytes | memoryview) -> None:
        """Writes all of `data`; waits for the peer's window and for the socket.

        Cancelled, a part may have been written, and the connection is as good as before.

        Raises:
            MuxedStreamClosed: closed for writing by us.
            MuxedStreamReset: the stream was reset, or the connection is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        upload = self.muxed_conn.upload
        largest = self.muxed_conn.max_data
        if upload is not None:
            largest = min(largest, MAX_DATA, upload.turn_size)
        start, view = 0, memoryview(data)
        while start < len(data):
            await self.muxed_conn.wait_room()
            while self.send_window == 0 and self.lost is None and not self.write_closed:
                await self._writers.park()
            if upload is not None:
                await upload.turn(self.muxed_conn, urgent=len(data) <= _SMALL)
            if self.lost is not None:
                raise MuxedStreamReset(self.lost)
            if self.write_closed:
                raise MuxedStreamClosed("the stream is closed for writing")
            size = min(self.send_window, largest, len(data) - start)
            self.send_window -= size
            self._count.sent += size
            self.muxed_conn.put(DATA, 0, self.stream_id, size, view[start : start + size])
            start += size

    def write_nowait(self, data: bytes) -> bool:
        """Writes all of `data` if neither the window nor the socket makes it wait, else nothing; says which.

        Raises as `write` does.
        """
        if self.lost is not None:
            raise MuxedStreamReset(self.lost)
        if self.write_closed:
            raise MuxedStreamClosed("the stream is closed for writing")
        size = len(data)
        if size > min(self.send_window, self.muxed_conn.max_data) or not self.muxed_conn.has_room:
            return False
        upload = self.muxed_conn.upload
        if upload is not None and not upload.is_free(urgent=size <= _SMALL):
            return False
        self.send_window -= size
        self._count.sent += size
        self.muxed_conn.put(DATA, 0, self.stream_id, size, data)
        return True

    async def close(self) -> None:
        """Ends our direction; reading stays possible. Never waits."""
        if not self.write_closed:
            self.write_closed = True
            self.closed_at = trio.current_time()
            self.muxed_conn.put(WINDOW_UPDATE, FIN, self.stream_id, 0)
            self._writers.unpark_all()
            self.muxed_conn.forget_if_done(self)

    async def reset(self) -> None:
        """Ends both directions at once. Never waits."""
        self.drop("reset on this side")
        self.discard()

    def drop(self, why: str) -> None:
        """As `reset`, and says why to who reads or writes."""
        if self.lost is None:
            self.muxed_conn.put(WINDOW_UPDATE, RST, self.stream_id, 0)
            self.on_lost(why)
            self.discard()
            self.muxed_conn.forget_if_done(self)

    def discard(self) -> None:
        """Says that nobody will read any more: what comes is dropped."""
        self.discarding = True
        self._chunks.clear()
        self._grant(self.unread)
        self._hold(-self.unread)

    @property
    def has_unread(self) -> bool:
        """Whether `read` would return at once."""
        return bool(self._chunks) or self.read_closed

    async def wait_lost(self) -> None:
        """Returns once the stream was reset or the connection is gone."""
        if self._lost_event is None:
            self._lost_event = trio.Event()
            if self.lost is not None:
                self._lost_event.set()
        await self._lost_event.wait()

    # --- called by the connection

    def on_size(self, size: int) -> bool:
        """Whether the peer may send `size` bytes now."""
        self._granted -= size
        return self._granted >= 0

    def on_data(self, data: bytes) -> None:
        self._count.received += len(data)
        if (
            self.discarding
            or self.lost is not None
            or (self._sink is not None and not self._chunks and self._sink.take(data))
        ):
            self._grant(len(data))
            return
        last = self._chunks[-1] if self._chunks else b""
        if last and len(data) < _SMALL_CHUNK and len(last) < _FULL_CHUNK:
            if not isinstance(last, bytearray):
                last = self._chunks[-1] = bytearray(last)
            last += data
        else:
            self._chunks.append(data)
        self._readers.unpark_all()
        self._hold(len(data))

    def on_window(self, size: int) -> None:
        self.send_window += size
        if size:
            self._writers.unpark_all()

    def on_fin(self) -> None:
        self.read_closed = True
        self._readers.unpark_all()

    def on_lost(self, why: str) -> None:
        if self.lost is None:
            self.end(why)
            self.wake()

    def end(self, why: str) -> None:
        """As `on_lost`; whoever waits is told later, by `wake`."""
        self.lost = self.lost or why
        self.read_closed = self.write_closed = True

    def wake(self) -> None:
        self._readers.unpark_all()
        self._writers.unpark_all()
        if self._lost_event is not None:
            self._lost_event.set()

    # --- the rest of libp2p's interface

    async def __aenter__(self) -> MuxedStream:
        return self

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("use trio's cancel scopes")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.muxed_conn.get_remote_address()


async def wake_in_portions(streams: list[MuxedStream], limits: NodeLimits, address: AddressUse) -> None:
    """Wakes who waits on the streams of a lost connection: in each pass of the loop a few for all connections.

    Takes them out of the list, our own first. What was granted nothing waits for the turn of its address. Cancelled,
    it wakes all at once.
    """
    streams.sort(key=lambda stream: (stream.granted, not stream.opened_by_peer))
    try:
        while streams:
            portion = [stream for stream in streams[-WOKEN_AT_ONCE:] if stream.granted == streams[-1].granted]
            if not portion[0].granted:
                await limits.work_turn(address)
            async with limits.waking:
                del streams[-len(portion) :]
                for stream in reversed(portion):
                    stream.wake()
                await trio.lowlevel.checkpoint()
    finally:
        for stream in streams:
            stream.wake()
