"""Yamux, the multiplexer under all our streams (https://github.com/hashicorp/yamux/blob/master/spec.md).

One task reads each connection and hands bytes to the streams. Writing goes straight to the socket. A peer from which
nothing comes is asked for a sign of life and dropped within 4 s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

import trio
from libp2p.abc import ConnectionType, IMuxedConn, ISecureConn
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from ..shares import TokenBucket
from .bandwidth import Throttle
from .limits import LIMITS, WORK, NodeLimits
from .muxed_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW,
    LARGE_DATA,
    MAX_DATA,
    PING,
    RST,
    SYN,
    WINDOW,
    WINDOW_UPDATE,
    MuxedStream,
    wake_in_portions,
)
from .tcp_window import WindowKeeper

if TYPE_CHECKING:
    from .noise import NoiseSession
log = logging.getLogger(__name__)

_PROTOCOL_ERROR: Final = 1  # why we go away, by the specification
_MOST_HELD: Final = 1024  # bytes of frames; who only opens streams and resets them would have us hold any number
_SEALING: Final = HEADER.size + 18  # bytes that Yamux and Noise add: sealed, it shall fill a frame of the circuit


class _Violation(ConnectionAbortedError):
    """The peer does what Yamux or our limits do not allow."""


class MuxerOwner(Protocol):
    """Who has the connection: its limits; `muxer_lost` is called once, synchronously, when the connection ends."""

    limits: NodeLimits

    def muxer_lost(self, muxer: Muxer) -> None: ...


class Muxer(IMuxedConn):
    """All streams of one connection. `answer` is what the peer sends before anything else if it speaks Yamux."""

    def __init__(self, conn: ISecureConn, peer_id: ID, owner: MuxerOwner, *, answer: bytes = b"") -> None:
        self.peer_id = peer_id
        self.secured_conn: NoiseSession = conn  # or a connection of WebRTC, which has what is called here
        self.path = self.secured_conn.path
        self.max_data = LARGE_DATA if self.secured_conn.keeps_window else MAX_DATA - _SEALING * (not self.path.direct)
        self.event_started = trio.Event()
        self.lost: str | None = None
        self._unread = [0, 0]  # bytes, on streams that were granted nothing, and on others
        self._owner = owner
        self.limits = limits = owner.limits
        self.traffic, self._use = limits.traffic, limits.of(str(peer_id))
        self.address = limits.of_address(conn.origin or str(peer_id))
        self._work, self._granted_work = 0.0, 0  # units since others had their turn; on streams granted something
        self._waits = False  # for its turn: what it said lies unread
        self._answer = answer  # the part of it that has not come yet
        self._rest = self._held = b""  # the beginning of a frame's header; frames that go with the next one
        self._body, self._body_flags = 0, 0  # bytes that the current frame still brings
        self._body_of: MuxedStream | None = None
        self._scope, self._window = trio.CancelScope(), WindowKeeper(limits)
        self._next_id = 1 if conn.is_initiator else 2
        self._streams: dict[int, MuxedStream] = {}
        self._ended: list[MuxedStream] = []  # with the connection; their tasks are to be woken
        self._accept_send, self._accept_receive = trio.open_memory_channel[MuxedStream](LIMITS.streams_of_connection)
        self._heard, self._suspected = trio.current_time(), False

    # --- streams

    async def open_stream(self, window: int = WINDOW) -> MuxedStream:
        """A new stream, on which the peer may send `window` bytes that we have not read. It may still refuse it.

        Raises:
            MuxedConnUnavailable: the connection is gone, or too many streams are open on it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.lost is not None:
            raise MuxedConnUnavailable(self.lost)
        if len(self._streams) >= LIMITS.streams_of_connection:
            raise MuxedConnUnavailable(f"{len(self._streams)} streams are open on this connection")
        more = max(0, window - INITIAL_WINDOW)
        if not self.may_widen(more):
            more, window = 0, INITIAL_WINDOW
        stream = MuxedStream(self, self._next_id, window)
        stream.widened, stream.granted = more, True
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        self.put(WINDOW_UPDATE, SYN, stream.stream_id, window - INITIAL_WINDOW)
        return stream

    async def accept_stream(self) -> MuxedStream:
        """The next stream that the peer opened.

        Raises:
            MuxedConnUnavailable: the connection is gone.
        """
        try:
            while (stream := await self._accept_receive.receive()).lost is not None:
                pass  # a task for a stream that was reset already would have nothing to do
        except trio.EndOfChannel:
            raise MuxedConnUnavailable(self.lost) from None
        return stream

    def forget_if_done(self, stream: MuxedStream) -> None:
        if stream.read_closed and stream.write_closed and self._streams.pop(stream.stream_id, None) is not None:
            self._forget(stream)

    def _forget(self, stream: MuxedStream) -> None:
        self._use.windows -= stream.widened
        self.address.negotiated(stream)
        if stream.opened_by_peer:
            self.limits.close_stream(self._use)

    def hold(self, size: int, granted: bool) -> None:
        if self.lost is None:
            self._unread[granted] += size
            self.limits.hold(self._use, self.address, size, granted)

    def held(self, granted: bool | None = None) -> int:
        """Bytes that came and were not read yet: all, or on streams that were granted something or were not."""
        return sum(self._unread) if granted is None else self._unread[granted]

    def may_widen(self, more: int) -> bool:
        if self._use.windows + more > LIMITS.windows_of_peer:
            return False
        self._use.windows += more
        return True

    def drop_fullest(self, granted: bool | None = None) -> None:
        unread = [stream for stream in self._streams.values() if stream.unread and granted in (None, stream.granted)]
        if unread:
            max(unread, key=lambda stream: stream.unread).drop("too much came that nobody has read")

    # --- writing

    def put(self, kind: int, flags: int, stream_id: int, length: int, data: bytes | memoryview = b"") -> None:
        """Sends a frame without waiting. On a dead connection it goes nowhere.

        A frame that opens a stream goes with the next one, which is its negotiation and comes at once. The first ten
        packets of a connection go without waiting, whatever their size: many are small then.
        """
        frame = HEADER.pack(0, kind, flags, stream_id, length) + data
        if flags & (SYN | ACK) and kind == WINDOW_UPDATE and len(self._held) < _MOST_HELD:
            self._held += frame
            return
        frame, self._held = self._held + frame, b""
        self._window.sent(len(data))
        if self.lost is None:
            try:
                self.secured_conn.put(frame)
            except OSError as error:
                self._lose(str(error))

    @property
    def has_room(self) -> bool:
        return bool(self.secured_conn.has_room)

    async def wait_room(self) -> None:
        await self.secured_conn.wait_room()

    @property
    def upload(self) -> Throttle | None:
        """Where large data have to wait for their turn."""
        return self.secured_conn.upload

    # --- reading

    async def start(self) -> None:
        """Serves the connection until it ends. libp2p runs this as a task of the host."""
        if self.lost is None:  # else nobody would count it as ended
            self.limits.connected(self._use, self.address, self)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for part in (self.secured_conn.pump, self._watch, self._keep_window, self._receive_frames):
                        nursery.start_soon(self._run_part, part)
                    self.event_started.set()
        finally:
            self._lose("the connection was closed on this side")
            await self.secured_conn.close()
            await wake_in_portions(self._ended, self.limits, self.address)

    async def _run_part(self, part: Callable[[], Awaitable[None]]) -> None:
        with self._guard():
            await part()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """When a part of the connection ends, all of it ends."""
        try:
            yield
        except OSError as error:
            if isinstance(error, _Violation) and self.lost is None:
                log.info("the connection to %s is closed: %s", self.peer_id, error)
                self.put(GO_AWAY, 0, 0, _PROTOCOL_ERROR)
            self._lose(str(error))
        except Exception:
            log.exception("the connection to %s failed", self.peer_id)
            self._lose("internal error")

    async def _receive_frames(self) -> None:
        if early := self.secured_conn.take_plaintext():
            self._feed(early)
        self.secured_conn.divert(self)
        while self.lost is None:
            for data in await self.secured_conn.receive():
                if not self._work:  # else its turn goes on
                    await self._turn()
                self._feed(data)
                while self._work >= WORK.at_once:
                    self._end_turn()
                    await trio.lowlevel.checkpoint()
                    await self._turn()
                    self._feed(b"")
            self._end_turn()

    async def _turn(self) -> None:
        self._waits = True
        await self.limits.work_turn(self.address)
        self._waits = False

    def _end_turn(self) -> None:
        self.limits.worked(self.address, self._work, self._granted_work)
        self._work, self._granted_work = 0.0, 0

    def take(self, data: bytes) -> bool:
        """What comes through a circuit, sealed, in the task that reads the connection below, which takes turns."""
        if self.lost is None:
            with self._guard():
                if len(data) < LIMITS.large_frame:
                    self._spend(self._use.frames, "small frames")
                for plaintext in self.secured_conn.unseal(data):
                    self._feed(plaintext)
                    while self._work >= WORK.at_once:  # all of it is handled at once, whoever else waits
                        self._end_turn()
                        self._feed(b"")
                self._end_turn()
        return True

    def _feed(self, data: bytes) -> None:
        """Handles the frames in what came. Keeps the beginning of one that is cut off, and what is too much for one
        turn."""
        self._heard = trio.current_time()
        self._work += len(data) < HEADER.size  # a message takes its time, also if no frame is in it
        if self._answer:
            data = self._without_answer(data)
        data, self._rest = self._rest + data, b""
        position = 0
        while self.lost is None:
            if self._body:
                part = data[position : position + self._body]
                position, self._body = position + len(part), self._body - len(part)
                if self._body_of is not None and part:
                    self._body_of.on_data(part)
                if self._body_of is None or not self._body_of.granted:
                    self._work += len(part) / WORK.bytes_of_unit
                if self._body:
                    return
                self._end_frame(self._body_of, self._body_flags)
            if len(data) - position < HEADER.size or self._work >= WORK.at_once:
                self._rest = data[position:]
                return
            self._take_header(*HEADER.unpack_from(data, position))
            position += HEADER.size

    def _take_header(self, version: int, kind: int, flags: int, stream_id: int, length: int) -> None:
        self._work += 1 + WORK.stream * (kind != PING and flags & SYN)
        if version != 0 or kind > GO_AWAY:
            raise _Violation("the peer sent a frame that is no Yamux frame")
        if kind == GO_AWAY:
            raise ConnectionResetError("the peer closed the connection")
        self._count(kind, flags, stream_id, length)
        if kind == PING:
            if flags & SYN and not self.secured_conn.is_overfull:
                self.put(PING, ACK, 0, length)
            return
        stream = self._stream_of(kind, flags, stream_id)
        if stream is not None:
            self._work += 0 if stream.granted else WORK.waking
            self._granted_work += stream.granted
            if stream.granted and stream.opened_by_peer and not stream.is_diverted:  # in a circuit, its own streams say
                self.limits.served_at = self._heard
        if kind == DATA and length:
            if stream is not None and not stream.on_size(length):
                raise _Violation("the peer sent more than it was granted")
            self._body, self._body_of, self._body_flags = length, stream, flags
            return
        if kind == WINDOW_UPDATE and stream is not None:
            stream.on_window(length)
        self._end_frame(stream, flags)

    def _count(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Counts a frame that is not paid for by its bytes.

        What comes through a circuit counts at its other end: a relay does not answer for what it carries."""
        if flags & SYN and kind != PING:
            self._spend(self._use.opened, "streams")
        elif kind != DATA or length < LIMITS.large_frame:
            stream = self._streams.get(stream_id)
            if stream is None or not stream.is_diverted:
                self._spend(self._use.frames, "small frames")

    def _spend(self, tokens: TokenBucket, what: str) -> None:
        if not tokens.take():
            raise _Violation(f"the peer sent more {what} than any session needs")

    def _without_answer(self, data: bytes) -> bytes:
        """What follows the peer's consent to speak Yamux, or the part of that which has come."""
        part = data[: len(self._answer)]
        if not self._answer.startswith(part):
            raise _Violation("the peer does not speak Yamux")
        self._answer = self._answer[len(part) :]
        return data[len(part) :]

    def _end_frame(self, stream: MuxedStream | None, flags: int) -> None:
        if stream is not None and flags & (FIN | RST):
            stream.on_lost("reset by the peer") if flags & RST else stream.on_fin()
            self.forget_if_done(stream)

    def _stream_of(self, kind: int, flags: int, stream_id: int) -> MuxedStream | None:
        """The stream that a frame belongs to, opened if the frame opens it; None if it has gone already."""
        if not flags & SYN:
            return self._streams.get(stream_id)
        if stream_id % 2 == self._next_id % 2 or stream_id in self._streams:
            raise _Violation("the peer opened a stream under a number that is not its")
        stream = MuxedStream(self, stream_id)
        if len(self._streams) < LIMITS.streams_of_connection and self.limits.open_stream(self._use):
            stream.opened_by_peer = True
            try:
                self._accept_send.send_nowait(stream)
            except trio.WouldBlock:
                self.limits.close_stream(self._use)
            else:
                self._streams[stream_id] = stream
                self.put(WINDOW_UPDATE, ACK, stream_id, 0)
                return stream
        self.put(WINDOW_UPDATE, RST, stream_id, 0)
        return None

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    # --- the end

    async def _watch(self) -> None:
        """Drops a peer that gives no sign of life (TCP says nothing of a frozen one), and half closed streams."""
        while self.lost is None:
            now = trio.current_time()
            for stream in list(self._streams.values()):
                if stream.discarding and now - stream.closed_at > LIMITS.half_closed:
                    await stream.reset()
            silent_until = self._heard + (LIMITS.silence_in_use if self._streams else self.limits.silence)
            if now < silent_until and not self._suspected:
                # In short sleeps, since a stream may be opened meanwhile.
                await trio.sleep(min(silent_until - now, LIMITS.silence_in_use))
                continue
            self._suspected = False
            self.put(PING, SYN, 0, 0)
            asked = trio.current_time()
            while self._heard < asked:
                before = trio.current_time()
                await trio.sleep(LIMITS.sign_of_life / 12)
                now = trio.current_time()
                if self._waits or now - before > LIMITS.sign_of_life / 3:
                    break  # it was us who stood still: the answer may lie unread; ask again
                if now - asked > (LIMITS.sign_behind_data if self.secured_conn.is_stuffed else LIMITS.sign_of_life):
                    raise ConnectionAbortedError(f"the peer gave no sign of life for {now - self._heard:.1f} s")

    async def _keep_window(self) -> None:
        if self.secured_conn.keeps_window:
            while True:
                await self._window.wait_due()
                self.put(PING, SYN, 0, 0)

    def suspect(self) -> None:
        """Asks the peer for a sign of life soon, however short it has been silent."""
        self._suspected = True

    def _lose(self, why: str) -> None:
        """Ends the connection at once; `start` closes the socket."""
        if self.lost is None:
            self.lost = why
            for granted, held in enumerate(self._unread):
                self.limits.hold(self._use, self.address, -held, bool(granted))
            self._unread = [0, 0]
            self.limits.lost(self._use, self.address, self)
            self._accept_send.close()
            for stream in self._streams.values():
                stream.end(why)
                self._forget(stream)
            self._ended, self._streams = list(self._streams.values()), {}
            self._owner.muxer_lost(self)
            self._scope.cancel()

    async def close(self) -> None:
        """Sends GO_AWAY and closes the connection."""
        if self.lost is None:
            self.put(GO_AWAY, 0, 0, 0)
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
