"""Yamux, the multiplexer under all our streams (https://github.com/hashicorp/yamux/blob/master/spec.md).

libp2p's own speaks the same bytes, but takes about thirteen turns of trio's loop per message, waits for a window
by polling, resets a stream whose reader pauses for 5 s, corrupts the connection when a write is cancelled, and
never notices a frozen peer. Here one task reads each connection and hands bytes to the streams; writing goes
straight to the socket; a peer from which nothing comes is asked for a sign of life and dropped within 4 s.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio
from libp2p.abc import ConnectionType, IMuxedConn, IMuxedStream, ISecureConn
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

from .noise import MAX_PLAINTEXT, NoiseSession

log = logging.getLogger(__name__)

_HEADER: Final = struct.Struct("!BBHII")  # version, type, flags, stream id, length
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8

_INITIAL_WINDOW: Final = 256 * 1024  # by the specification
_WINDOW: Final = 4 * 1024 * 1024  # what we grant: 40 MB/s at a round trip of 100 ms
_MAX_DATA: Final = MAX_PLAINTEXT - _HEADER.size  # a frame fills one Noise message
_MAX_STREAMS: Final = 2048  # open at once on one connection, both ways together
_ACCEPT_QUEUE: Final = 256
_MAX_BUFFERED: Final = 256 * 1024 * 1024  # bytes unread in all streams of a connection

_IDLE: Final = 1.0  # seconds of silence after which we ask for a sign of life while streams are open
_IDLE_WITHOUT_STREAMS: Final = 8.0  # keeps the mappings of NATs alive, too
_PATIENCE: Final = 3.0  # seconds for the answer
_PATIENCE_STUFFED: Final = 10.0  # our question may be stuck behind much data on a slow line
_LINGER: Final = 30.0  # seconds that a stream closed by us waits for the peer's close


class MuxedStream(IMuxedStream):
    """One stream. One task may read and one may write at a time."""

    def __init__(self, muxed_conn: Muxer, stream_id: int) -> None:
        self.muxed_conn = muxed_conn
        self.stream_id = stream_id
        self.read_closed = False  # the peer sends nothing more
        self.write_closed = False
        self.lost: str | None = None  # why it was reset, if it was
        self.discarding = False  # nobody will read any more
        self.closed_at = 0.0
        self.send_window = _INITIAL_WINDOW
        self._granted = _WINDOW  # what the peer may still send
        self._consumed = 0  # read since the last grant
        self._chunks: deque[bytes] = deque()
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        self._lost_event: trio.Event | None = None

    async def read(self, n: int | None = None) -> bytes:
        """1 to `n` bytes as soon as there are any. Cancelled, nothing is lost.

        Raises:
            MuxedStreamEOF: the peer closed the stream, and all was read.
            MuxedStreamReset: the stream was reset, or the connection is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._chunks:
            if self.lost is not None:
                raise MuxedStreamReset(self.lost)
            if self.read_closed:
                raise MuxedStreamEOF("the peer closed the stream")
            await self._readers.park()
        chunk = self._chunks.popleft()
        if n is not None and 0 <= n < len(chunk):
            self._chunks.appendleft(chunk[n:])
            chunk = chunk[:n]
        self._grant(len(chunk))
        return chunk

    def _grant(self, consumed: int) -> None:
        self._consumed += consumed
        self.muxed_conn.buffered -= consumed
        if self._consumed >= _WINDOW // 2 and not self.read_closed and self.lost is None:
            self._granted += self._consumed
            self.muxed_conn.put(_WINDOW_UPDATE, 0, self.stream_id, self._consumed)
            self._consumed = 0

    async def write(self, data: bytes) -> None:
        """Writes all of `data`; waits for the peer's window and for the socket.

        Cancelled, a part may have been written, and the connection is as good as before.

        Raises:
            MuxedStreamClosed: closed for writing by us.
            MuxedStreamReset: the stream was reset, or the connection is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        start = 0
        while start < len(data):
            await self.muxed_conn.wait_room()
            while self.send_window == 0 and self.lost is None and not self.write_closed:
                await self._writers.park()
            if self.lost is not None:
                raise MuxedStreamReset(self.lost)
            if self.write_closed:
                raise MuxedStreamClosed("the stream is closed for writing")
            size = min(self.send_window, _MAX_DATA, len(data) - start)
            self.send_window -= size
            self.muxed_conn.put(_DATA, 0, self.stream_id, size, data[start : start + size])
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
        if size > min(self.send_window, _MAX_DATA) or not self.muxed_conn.has_room:
            return False
        self.send_window -= size
        self.muxed_conn.put(_DATA, 0, self.stream_id, size, data)
        return True

    async def close(self) -> None:
        """Ends our direction; reading stays possible. Never waits."""
        if not self.write_closed:
            self.write_closed = True
            self.closed_at = trio.current_time()
            self.muxed_conn.put(_WINDOW_UPDATE, _FIN, self.stream_id, 0)
            self._writers.unpark_all()
            self.muxed_conn.forget_if_done(self)

    async def reset(self) -> None:
        """Ends both directions at once. Never waits."""
        if self.lost is None:
            self.muxed_conn.put(_WINDOW_UPDATE, _RST, self.stream_id, 0)
            self.on_lost("reset on this side")
            self.muxed_conn.forget_if_done(self)

    def discard(self) -> None:
        """Says that nobody will read any more: what comes is dropped."""
        self.discarding = True
        for chunk in self._chunks:
            self._grant(len(chunk))
        self._chunks.clear()

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
        self.muxed_conn.buffered += len(data)
        if self.discarding or self.lost is not None:
            self._grant(len(data))
        else:
            self._chunks.append(data)
            self._readers.unpark_all()

    def on_window(self, size: int) -> None:
        self.send_window += size
        if size:
            self._writers.unpark_all()

    def on_fin(self) -> None:
        self.read_closed = True
        self._readers.unpark_all()

    def on_lost(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self.read_closed = self.write_closed = True
            self.discard()
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


class Muxer(IMuxedConn):
    """All streams of one connection. `on_lost` is called once, synchronously, when the connection ends."""

    def __init__(self, conn: ISecureConn, peer_id: ID, on_lost: Callable[[Muxer], None]) -> None:
        assert isinstance(conn, NoiseSession)
        self.peer_id = peer_id
        self.secured_conn = conn
        self.event_started = trio.Event()
        self.lost: str | None = None
        self.buffered = 0  # bytes that came and were not read yet
        self._on_lost = on_lost
        self._scope = trio.CancelScope()
        self._next_id = 1 if conn.is_initiator else 2
        self._streams: dict[int, MuxedStream] = {}
        self._accept_send, self._accept_receive = trio.open_memory_channel[MuxedStream](_ACCEPT_QUEUE)
        self._heard = trio.current_time()

    # --- streams

    async def open_stream(self) -> MuxedStream:
        """A new stream. The peer may still refuse it.

        Raises:
            MuxedConnUnavailable: the connection is gone, or too many streams are open on it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.lost is not None:
            raise MuxedConnUnavailable(self.lost)
        if len(self._streams) >= _MAX_STREAMS:
            raise MuxedConnUnavailable(f"{len(self._streams)} streams are open on this connection")
        stream = MuxedStream(self, self._next_id)
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        self.put(_WINDOW_UPDATE, _SYN, stream.stream_id, _WINDOW - _INITIAL_WINDOW)
        return stream

    async def accept_stream(self) -> MuxedStream:
        """The next stream that the peer opened.

        Raises:
            MuxedConnUnavailable: the connection is gone.
        """
        try:
            return await self._accept_receive.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable(self.lost) from None

    def forget_if_done(self, stream: MuxedStream) -> None:
        if stream.read_closed and stream.write_closed:
            self._streams.pop(stream.stream_id, None)

    # --- writing

    def put(self, kind: int, flags: int, stream_id: int, length: int, data: bytes = b"") -> None:
        """Sends a frame without waiting. On a dead connection it goes nowhere."""
        if self.lost is None:
            try:
                self.secured_conn.put(_HEADER.pack(0, kind, flags, stream_id, length) + data)
            except OSError as error:
                self._lose(str(error))

    @property
    def has_room(self) -> bool:
        return bool(self.secured_conn.has_room)

    async def wait_room(self) -> None:
        await self.secured_conn.wait_room()

    # --- reading

    async def start(self) -> None:
        """Serves the connection until it ends. libp2p runs this as a task of the host."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for part in (self.secured_conn.pump, self._watch, self._receive_frames):
                        nursery.start_soon(self._run_part, part)
                    self.event_started.set()
        finally:
            self._lose("the connection was closed on this side")
            await self.secured_conn.close()

    async def _run_part(self, part: Callable[[], Awaitable[None]]) -> None:
        """When a part of the connection ends, all of it ends."""
        try:
            await part()
        except OSError as error:
            self._lose(str(error))
        except Exception:
            log.exception("the connection to %s failed", self.peer_id)
            self._lose("internal error")

    async def _receive_frames(self) -> None:
        data = self.secured_conn.take_plaintext()
        while self.lost is None:
            self._heard = trio.current_time()
            position = 0
            while len(data) - position >= _HEADER.size:
                version, kind, flags, stream_id, length = _HEADER.unpack_from(data, position)
                position += _HEADER.size
                if version != 0 or kind > _GO_AWAY:
                    raise ConnectionAbortedError("the peer sent a frame that is no Yamux frame")
                if kind == _PING:
                    if flags & _SYN:
                        self.put(_PING, _ACK, 0, length)
                elif kind == _GO_AWAY:
                    raise ConnectionAbortedError("the peer closed the connection")
                else:
                    stream = self._stream_of(kind, flags, stream_id)
                    if kind == _WINDOW_UPDATE:
                        if stream is not None:
                            stream.on_window(length)
                    else:
                        data, position = await self._receive_body(stream, data, position, length)
                    if stream is not None and flags & (_FIN | _RST):
                        stream.on_lost("reset by the peer") if flags & _RST else stream.on_fin()
                        self.forget_if_done(stream)
            data = data[position:] + await self.secured_conn.receive()

    async def _receive_body(
        self, stream: MuxedStream | None, data: bytes, position: int, length: int
    ) -> tuple[bytes, int]:
        """Hands `length` bytes to the stream as they come; returns where the next frame starts."""
        if stream is not None and not stream.on_size(length):
            raise ConnectionAbortedError("the peer sent more than it was granted")
        if self.buffered + length > _MAX_BUFFERED:
            raise ConnectionAbortedError("the peer sent too much that nobody reads")
        while length > 0:
            if position == len(data):
                data, position = await self.secured_conn.receive(), 0
                self._heard = trio.current_time()
            part = data[position : position + length]
            position += len(part)
            length -= len(part)
            if stream is not None and part:
                stream.on_data(part)
        return data, position

    def _stream_of(self, kind: int, flags: int, stream_id: int) -> MuxedStream | None:
        """The stream that a frame belongs to, opened if the frame opens it; None if it has gone already."""
        if not flags & _SYN:
            return self._streams.get(stream_id)
        if stream_id % 2 == self._next_id % 2 or stream_id in self._streams:
            raise ConnectionAbortedError("the peer opened a stream under a number that is not its")
        stream = MuxedStream(self, stream_id)
        if len(self._streams) < _MAX_STREAMS:
            try:
                self._accept_send.send_nowait(stream)
            except trio.WouldBlock:
                pass
            else:
                self._streams[stream_id] = stream
                self.put(_WINDOW_UPDATE, _ACK, stream_id, _WINDOW - _INITIAL_WINDOW)
                return stream
        self.put(_WINDOW_UPDATE, _RST, stream_id, 0)
        return None

    # --- the end

    async def _watch(self) -> None:
        """Drops a peer that gives no sign of life, and streams that linger half closed.

        A frozen process keeps its socket open, and TCP says nothing about it for many minutes.
        """
        while self.lost is None:
            now = trio.current_time()
            for stream in list(self._streams.values()):
                if stream.discarding and now - stream.closed_at > _LINGER:
                    await stream.reset()
            silent_until = self._heard + (_IDLE if self._streams else _IDLE_WITHOUT_STREAMS)
            if now < silent_until:
                # In short sleeps, since a stream may be opened meanwhile.
                await trio.sleep(min(silent_until - now, _IDLE))
                continue
            self.put(_PING, _SYN, 0, 0)
            asked = trio.current_time()
            while self._heard < asked:
                before = trio.current_time()
                await trio.sleep(_PATIENCE / 12)
                now = trio.current_time()
                if now - before > _PATIENCE / 3:
                    break  # it was us who stood still: the answer may lie unread; ask again
                if now - asked > (_PATIENCE_STUFFED if self.secured_conn.is_stuffed else _PATIENCE):
                    raise ConnectionAbortedError(f"the peer gave no sign of life for {now - self._heard:.1f} s")

    def _lose(self, why: str) -> None:
        """Ends the connection at once; `start` closes the socket."""
        if self.lost is None:
            self.lost = why
            self._accept_send.close()
            for stream in self._streams.values():
                stream.on_lost(why)
            self._streams.clear()
            self._on_lost(self)
            self._scope.cancel()

    async def close(self) -> None:
        """Says goodbye and closes the connection."""
        if self.lost is None:
            self.put(_GO_AWAY, 0, 0, 0)
            with trio.CancelScope(shield=True):
                await self.secured_conn.flush(0.5)
        self._lose("the connection was closed on this side")
        await self.secured_conn.close()

    # --- the rest of libp2p's interface

    @property
    def is_initiator(self) -> bool:
        return bool(self.secured_conn.is_initiator)

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and self.lost is None

    @property
    def is_closed(self) -> bool:
        return self.lost is not None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()
