"""One peer's DTLS and SCTP over datagrams: pyOpenSSL's DTLS, and aiortc's SCTP without asyncio.

Nothing here waits: whoever has a datagram, or knows that it is time, calls, and what is to be sent goes at once.
aiortc keeps a peer neither to the window that it was granted, nor itself to the peer's. Both are done here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import struct
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Protocol

import trio
from aiortc.rtcdatachannel import RTCDataChannel, RTCDataChannelParameters
from cryptography.hazmat.primitives.hashes import SHA256
from OpenSSL import SSL

from ..limits import LIMITS


@dataclass(frozen=True)
class WebRtcLimits:
    """What peers may hold of a node by WebRTC, besides what all transports allow."""

    connections: int = 256  # each may hold a megabyte here, where TCP's lie in the kernel
    window: int = 512 * 1024  # bytes that may come and lie unread, of all channels of a connection
    overdraft: int = 128 * 1024
    """Bytes beyond the window that are taken where what came out of sequence waits for them: else it would stay."""
    shut: float = 3.0
    """Seconds without any window, after which the fullest stream is reset. libp2p's others give up a peer after 5 s."""
    chunks: int = 2048  # that are out of sequence, or parts of messages
    inbox: int = 256  # datagrams of a connection that wait for its turn
    at_once: int = 16  # of them, between two turns of all others
    strangers: int = 100
    """Datagrams of addresses without a connection that are looked at in a period, shared by network."""
    strangers_period: float = 0.2  # seconds; it is a tenth of a core
    datagram: int = 2048  # bytes that one may have
    packet: int = 1200  # bytes that one of ours has at most


WEBRTC: Final = WebRtcLimits()


def _own_copy(name: str) -> Any:
    """A module once more, for what is changed in it: the program around this node may use aiortc, too."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_soon: list[Coroutine[Any, Any, None]] = []
sctp: Any = _own_copy("aiortc.rtcsctptransport")
# aiortc starts tasks here, and asks for the loop. Its coroutines wait for nothing but `_send_data`, which never does.
sctp.asyncio = SimpleNamespace(ensure_future=_soon.append, get_event_loop=lambda: None, TimerHandle=object)


class Violation(ConnectionAbortedError):
    """The peer does what SCTP or our limits do not allow."""


class Channels(Protocol):
    """Who has an association and its channels. What the first four do may be a `Violation`."""

    def send_datagram(self, data: bytes) -> None: ...

    def on_open(self, channel: int) -> None:
        """The peer has opened one."""

    def on_message(self, channel: int, data: bytes) -> None: ...

    def on_closed(self, channel: int) -> None:
        """Both sides have closed it."""

    def on_alive(self, token: int) -> None:
        """The peer has answered the heartbeat with this number."""

    def on_sent(self, size: int) -> None:
        """So many bytes of messages have left the queue."""


class _Timer:
    def __init__(self, timers: set[_Timer], at: float, callback: Any) -> None:
        self.at, self.callback, self._timers = at, callback, timers
        timers.add(self)

    def cancel(self) -> None:
        self._timers.discard(self)


class _Sctp(sctp.RTCSctpTransport):
    """aiortc's, with bounds on what a peer has it hold. It is the loop that it asks to be called by."""

    _heartbeat = struct.Struct("!I")
    _cwnd: float  # bytes

    def __init__(self, association: Association, channels: Channels) -> None:
        super().__init__(association)
        self._loop, self._channels = self, channels
        self._local_partial_reliability = False
        self._advertised_rwnd = WEBRTC.window
        self._peer_window = math.inf
        self._chunks = 0  # out of sequence, or of messages that are not complete
        self.timers: set[_Timer] = set()

    def call_later(self, delay: float, callback: Any) -> _Timer:
        return _Timer(self.timers, trio.current_time() + delay, callback)

    async def _receive_chunk(self, chunk: Any) -> None:
        if isinstance(chunk, sctp.HeartbeatAckChunk):
            value = dict(chunk.params).get(1, b"")
            if len(value) == self._heartbeat.size:
                self._channels.on_alive(*self._heartbeat.unpack(value))
            return
        if isinstance(chunk, sctp.ForwardTsnChunk):
            raise Violation("the peer leaves out data")
        if isinstance(chunk, sctp.SackChunk):
            self._peer_window = chunk.advertised_rwnd
        await super()._receive_chunk(chunk)

    async def _receive_data_chunk(self, chunk: Any) -> None:
        self._sack_needed = True
        fills_gap = bool(self._sack_misordered) and chunk.tsn == sctp.tsn_plus_one(self._last_received_tsn)
        room = self._advertised_rwnd + fills_gap * WEBRTC.overdraft
        if len(chunk.user_data) > room or self._chunks >= (1 + fills_gap) * WEBRTC.chunks:
            return  # it will be sent again
        if self._mark_received(chunk.tsn):
            return
        stream = self._get_inbound_stream(chunk.stream_id)
        if len(self._inbound_streams) > 2 * LIMITS.streams_of_connection:
            raise Violation("the peer has opened too many channels")
        before = len(stream.reassembly)
        stream.add_chunk(chunk)
        self._advertised_rwnd -= len(chunk.user_data)
        for channel, kind, data in stream.pop_messages():
            self._advertised_rwnd += len(data)
            await self._receive(channel, kind, data)
        self._chunks += len(stream.reassembly) - before
        await self._reset_deferred_streams()

    async def _receive(self, stream_id: int, pp_id: int, data: bytes) -> None:
        is_known = stream_id in self._data_channels
        if pp_id == sctp.WEBRTC_DCEP:
            opens = data[:1] == bytes([sctp.DATA_CHANNEL_OPEN])
            most = 2 * LIMITS.streams_of_connection
            if opens == is_known or (opens and (stream_id % 2 or len(self._data_channels) > most)):
                raise Violation("the peer opened a channel under a number that is not its, or too many")
            await super()._receive(stream_id, pp_id, data)
            if opens and stream_id in self._data_channels:
                self._channels.on_open(stream_id)
        elif is_known and pp_id == sctp.WEBRTC_BINARY:
            self._channels.on_message(stream_id, data)

    async def _send(self, stream_id: int, pp_id: int, user_data: bytes, **options: Any) -> None:
        await super()._send(stream_id, pp_id, user_data, **options)
        if pp_id == sctp.WEBRTC_BINARY:
            self._channels.on_sent(len(user_data))

    async def _transmit(self) -> None:
        window = self._cwnd
        self._cwnd = max(min(window, self._peer_window), 1)
        try:
            await super()._transmit()
        finally:
            self._cwnd = window

    def _data_channel_closed(self, stream_id: int) -> None:
        super()._data_channel_closed(stream_id)
        self._channels.on_closed(stream_id)

    @property
    def is_open(self) -> bool:
        return bool(self._association_state == self.State.ESTABLISHED)

    @property
    def is_shut(self) -> bool:
        """Whether the peer may send nothing more now."""
        return bool(self._advertised_rwnd < WEBRTC.packet)

    @property
    def unacknowledged(self) -> int | None:
        """The number of the first chunk that the peer has not; None if it has all."""
        return int(self._sent_queue[0].tsn) if self._sent_queue else None

    async def open(self) -> None:
        await self.start(None, 5000)

    async def hold(self, size: int) -> None:
        """`size` more bytes lie unread, or fewer; says so if the peer may send again."""
        was_shut = self.is_shut
        self._advertised_rwnd -= size
        if was_shut and not self.is_shut and self.is_open:
            await self._send_sack()

    async def ask_for_life(self, token: int) -> None:
        chunk = sctp.HeartbeatChunk()
        chunk.params = [(1, self._heartbeat.pack(token))]
        await self._send_chunk(chunk)


class Association:
    """DTLS, of which we are the server, with SCTP on it. To aiortc it is the transport below SCTP.

    `lost` says why it has ended. No method raises.
    """

    _role = "server"
    state = "connected"

    def __init__(self, ssl: SSL.Connection, channels: Channels) -> None:
        self.lost: str | None = None
        self._ssl, self._channels = ssl, channels
        self._sctp: _Sctp | None = None
        self._receiver: Any = None
        self._is_driving = False
        with self._guard():
            self._shake_hands()

    # --- what aiortc's SCTP asks of DTLS

    def _register_data_receiver(self, receiver: Any) -> None:
        self._receiver = receiver

    def _unregister_data_receiver(self, receiver: Any) -> None:
        self._receiver = None

    async def _send_data(self, data: bytes) -> None:
        self._ssl.send(data)
        self._flush()

    # --- what comes

    def take(self, data: bytes) -> None:
        """Handles a datagram."""
        with self._guard():
            self._ssl.bio_write(data)
            if self._sctp is None:
                self._shake_hands()
            else:
                self._read()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
            if self._sctp is not None and self._sctp.state == "closed":
                raise ConnectionAbortedError("the peer closed the connection")
        except ConnectionAbortedError as error:
            self.lost = self.lost or str(error)
        except Exception as error:  # whatever a stranger may send to aiortc, which asserts much
            self.lost = self.lost or f"no SCTP: {error!r}"

    def _shake_hands(self) -> None:
        try:
            self._ssl.do_handshake()
        except SSL.WantReadError:
            self._flush()
            return
        except SSL.Error as error:
            raise ConnectionAbortedError(f"no DTLS: {error}") from error
        self._flush()
        self._sctp = _Sctp(self, self._channels)
        RTCDataChannel(self._sctp, RTCDataChannelParameters(negotiated=True, id=0))
        self._drive(self._sctp.open())

    def _read(self) -> None:
        while self._receiver is not None:
            try:
                self._drive(self._receiver._handle_data(self._ssl.recv(WEBRTC.datagram)))
            except SSL.ZeroReturnError:
                raise ConnectionAbortedError("the peer closed the connection") from None
            except SSL.Error:
                break
        self._flush()

    def _drive(self, *work: Coroutine[Any, Any, None]) -> None:
        """Does `work`, and what aiortc wants done after it."""
        _soon.extend(work)
        if self._is_driving:
            return
        self._is_driving = True
        try:
            while _soon:
                with contextlib.suppress(StopIteration):
                    _soon.pop(0).send(None)
                    raise AssertionError("aiortc's SCTP waits for something")
        finally:
            self._is_driving = False
            while _soon:
                _soon.pop().close()

    def _flush(self) -> None:
        """Sends what OpenSSL wants sent: whole records, as many as fit into a datagram."""
        try:
            data = self._ssl.bio_read(1 << 16)
        except SSL.WantReadError:
            return
        start = end = 0
        while end < len(data):
            after = end + 13 + int.from_bytes(data[end + 11 : end + 13], "big")  # the header, and the size in it
            if after - start > WEBRTC.packet and end > start:
                self._channels.send_datagram(data[start:end])
                start = end
            end = after
        self._channels.send_datagram(data[start:])

    # --- time

    @property
    def deadline(self) -> float:
        """When `on_time` has to be called."""
        if self._sctp is not None:
            return min((timer.at for timer in self._sctp.timers), default=math.inf)
        timeout = self._ssl.DTLSv1_get_timeout()
        return math.inf if timeout is None else trio.current_time() + timeout

    def on_time(self) -> None:
        with self._guard():
            if self._sctp is None:
                self._ssl.DTLSv1_handle_timeout()
                self._flush()
                return
            now = trio.current_time()
            for timer in [timer for timer in self._sctp.timers if timer.at <= now]:
                timer.cancel()
                timer.callback()
                self._drive()

    # --- what is done with it

    @property
    def is_open(self) -> bool:
        return self._sctp is not None and self._sctp.is_open

    @property
    def is_shut(self) -> bool:
        """Whether the peer may send nothing more until something is read."""
        return self._sctp is not None and self._sctp.is_shut

    @property
    def unacknowledged(self) -> int | None:
        """The number of the first chunk that the peer has not yet; None if it has all that was sent."""
        return None if self._sctp is None else self._sctp.unacknowledged

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the peer's certificate."""
        certificate = self._ssl.get_peer_certificate(as_cryptography=True)
        return b"" if certificate is None else certificate.fingerprint(SHA256())

    def open(self) -> int:
        """A new channel, under the first odd number that is free."""
        number = 1
        with self._guard():
            assert self._sctp is not None
            while number in self._sctp._data_channels:
                number += 2
            RTCDataChannel(self._sctp, RTCDataChannelParameters(id=number))
            self._drive()
        return number

    def send(self, channel: int, data: bytes) -> bool:
        """Whether it will be sent: there is such a channel."""
        with self._guard():
            if self._sctp is not None and (found := self._sctp._data_channels.get(channel)) is not None:
                self._sctp._data_channel_send(found, data)
                self._drive()
                return True
        return False

    def close(self, channel: int) -> None:
        with self._guard():
            if self._sctp is not None and (found := self._sctp._data_channels.get(channel)) is not None:
                found.close()
                self._drive()

    def hold(self, size: int) -> None:
        """`size` more bytes lie unread, or fewer: the peer may send less, or more."""
        with self._guard():
            if self._sctp is not None:
                self._drive(self._sctp.hold(size))

    def ask_for_life(self, token: int) -> None:
        with self._guard():
            if self._sctp is not None:
                self._drive(self._sctp.ask_for_life(token))

    def abort(self) -> None:
        """Ends it on both sides."""
        with self._guard():
            if self._sctp is not None:
                self._drive(self._sctp.stop())
            with contextlib.suppress(SSL.Error):
                self._ssl.shutdown()
            self._flush()
        self.lost = self.lost or "the connection was closed on this side"
