"""A connection by WebRTC: its data channels, as the streams of the multiplexer that all other transports have.

The specification gives each stream a channel, with messages in place of Yamux's frames
(https://github.com/libp2p/specs/blob/master/webrtc/README.md). They are translated here, so that the limits on streams,
windows and unread bytes are those of `yamux.py`. A channel has no window: what comes beyond the stream's lies here, and
counts against SCTP's, which all channels share. Channel 0 carries the Noise handshake, and then nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio
from libp2p.abc import ConnectionType
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.id import ID
from libp2p.transport.webrtc.noise_handshake import perform_noise_handshake
from libp2p.transport.webrtc.pb.webrtc_pb2 import Message
from libp2p.transport.webrtc.stream import MAX_PAYLOAD_SIZE, _decode_frames, _frame
from multiaddr import Multiaddr
from OpenSSL import SSL

from ...shares import origin_of_ip
from ..bandwidth import Bandwidth
from ..limits import LIMITS, WORK, NodeLimits, PeerUse
from ..muxed_stream import ACK, DATA, FIN, HEADER, INITIAL_WINDOW, PING, RST, SYN, WINDOW_UPDATE
from ..raw_connection import ByteSink, Path
from ..yamux import Muxer, MuxerOwner
from .association import WEBRTC, Association, Violation

_OUT_LIMIT: Final = 256 * 1024  # bytes that may wait for SCTP before writers have to
_MANY: Final = 64 * 1024  # bytes of frames that nobody has taken, from which on datagrams wait


Source = tuple[str, int]


class Socket(Protocol):
    """What datagrams come by and go. `fingerprint` is SHA-256 of our certificate."""

    limits: NodeLimits
    bandwidth: Bandwidth
    fingerprint: bytes

    def send(self, data: bytes, source: Source) -> None: ...

    def answer(self, data: bytes, source: Source) -> bool:
        """Whether it was something of STUN, which is answered if it asks."""

    def forget(self, source: Source, connection: WebRtcConnection) -> None:
        """The connection has ended."""


@dataclass
class _Flow:
    """A channel, and the stream that it is. What has come beyond the stream's window is `waiting`."""

    channel: int
    stream_id: int
    credit: int = INITIAL_WINDOW  # bytes that the stream still takes
    partial: bytearray = field(default_factory=bytearray)  # of a message
    waiting: bytearray = field(default_factory=bytearray)
    sent: int = 0  # bytes since the stream was last given a window for more
    is_unwanted: bool = False  # the peer reads no more
    has_ended: bool = False  # the peer sends no more
    told_ended: bool = False  # and the stream knows
    is_finished: bool = False  # we have said that we send no more, and the peer knows


class WebRtcConnection:
    """What comes from one address, from DTLS's cookie on. To Noise's handshake it is channel 0, to `Muxer` what is
    secured already."""

    is_initiator = keeps_window = False
    local_host: str | None = None  # the socket may be one of all addresses

    def __init__(self, ssl: SSL.Connection, source: Source, listener: Socket) -> None:
        host, port = source
        at = f"/ip{6 if ':' in host else 4}/{host}/udp/{port}/webrtc-direct"
        bandwidth, limits = listener.bandwidth, listener.limits
        self.path = Path(direct=True, relay=None, remote_addr=at, inbound=True)
        self.upload = bandwidth.upload
        self.origin = origin_of_ip(host)
        self._source, self._listener = source, listener
        self._download, self._count = bandwidth.download, bandwidth.sockets
        self._limits, self._address = limits, limits.of_address(self.origin)
        self._inbox: deque[bytes] = deque(maxlen=WEBRTC.inbox)  # of more, the oldest are lost, as in a socket
        self._wake = trio.lowlevel.ParkingLot()  # of `pump`
        self._news = trio.lowlevel.ParkingLot()  # of who reads
        self._room = trio.lowlevel.ParkingLot()
        self._words, self._partial = bytearray(), bytearray()  # of channel 0
        self._frames = bytearray()
        self._flows: dict[int, _Flow] = {}  # by channel
        self._streams: dict[int, _Flow] = {}
        self._next_stream = 1
        self._out = 0  # bytes that wait for SCTP
        self._unacknowledged: int | None = None
        self._progress, self._shut_at = trio.current_time(), math.inf
        self._use: PeerUse | None = None
        self._association = Association(ssl, self)

    # --- becoming one of the host's connections

    async def own_muxer(self, keys: KeyPair, owner: MuxerOwner) -> Muxer:
        """DTLS, SCTP, and Noise, in which the peer proves who it is, and that it is who speaks DTLS here."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pump)
            while not self._association.is_open:
                await self._news.park()
            peer_id = await perform_noise_handshake(
                self,
                ID.from_pubkey(keys.public_key),
                keys.private_key,
                create_noise_key_pair().private_key,
                self._association.fingerprint,
                self._listener.fingerprint,
                is_initiator=True,
            )
            nursery.cancel_scope.cancel()
        self._use = self._limits.of(str(peer_id))
        return Muxer(self, peer_id, owner)

    async def write(self, data: bytes) -> None:
        self._say(0, Message(message=data))

    async def read(self, n: int | None = None) -> bytes:
        while not self._words:
            await self._news.park()
        data = bytes(self._words[:n])
        del self._words[:n]
        return data

    async def drain(self) -> None:
        """Nothing is said to who is refused."""

    # --- datagrams

    def deliver(self, data: bytes) -> None:
        """There is one from the peer."""
        self._inbox.append(data)
        self._wake.unpark_all()

    def send_datagram(self, data: bytes) -> None:
        self._count.sent += len(data)
        self._listener.send(data, self._source)

    async def pump(self) -> None:
        """Handles what comes and what is due, until the connection ends.

        Raises:
            OSError: it has ended.
        """
        while True:
            if not self._inbox or len(self._frames) > _MANY:
                with trio.move_on_at(min(self._association.deadline, self._shut_at + WEBRTC.shut)):
                    await self._wake.park()
            if self._inbox and len(self._frames) <= _MANY:
                await self._take_datagrams()
            if self._association.deadline <= trio.current_time():
                self._association.on_time()
            self._judge()
            self._news.unpark_all()
            self._check()

    async def _take_datagrams(self) -> None:
        is_granted = self._use is not None and self._use.windows > 0  # what it brings then, others do not wait for
        if not is_granted:
            await self._limits.work_turn(self._address)
        if self._download is not None:
            await self._download.turn(self, urgent=len(self._inbox) < WEBRTC.at_once)
        begun, size = time.thread_time(), 0
        for _ in range(min(len(self._inbox), WEBRTC.at_once)):
            data = self._inbox.popleft()
            size += len(data)
            if not self._listener.answer(data, self._source):
                self._association.take(data)
        self._count.received += size
        if self._download is not None:
            self._download.spend(size)
        if not is_granted:
            self._limits.worked(self._address, WORK.step + (time.thread_time() - begun) * WORK.units_of_second)
        await trio.lowlevel.checkpoint()

    def _judge(self) -> None:
        """Gives up a peer that takes nothing, and a stream that keeps all others from theirs."""
        now, waits_for = trio.current_time(), self._association.unacknowledged
        if waits_for is None or waits_for != self._unacknowledged:
            self._unacknowledged, self._progress = waits_for, now
        elif now - self._progress > LIMITS.stall:
            raise ConnectionAbortedError(f"the peer took nothing for {LIMITS.stall:g} s")
        if not self._association.is_shut:
            self._shut_at = math.inf
        elif self._shut_at == math.inf:
            self._shut_at = now
        elif now - self._shut_at > WEBRTC.shut:
            self._shut_at = now
            fullest = max(self._flows.values(), key=lambda flow: len(flow.waiting), default=None)
            if fullest is None or not fullest.waiting:
                raise ConnectionAbortedError("the peer does not end its messages")
            self._drop(fullest)

    def _check(self) -> None:
        if self._association.lost is not None:
            raise ConnectionResetError(self._association.lost)

    # --- what the peer does with channels

    def on_open(self, channel: int) -> None:
        flow = self._flows[channel] = self._streams[self._next_stream] = _Flow(channel, self._next_stream)
        self._next_stream += 2
        self._frame(WINDOW_UPDATE, SYN, flow, 0)

    def on_message(self, channel: int, data: bytes) -> None:
        flow = self._flows.get(channel)
        if flow is None and channel:
            return  # what comes for a stream that was reset
        partial = self._partial if flow is None else flow.partial
        partial += data
        try:
            for message in _decode_frames(partial):
                if flow is None:
                    self._hear(message.message)
                else:
                    self._take(flow, message)
        except ValueError:
            if flow is not None:
                self._drop(flow)

    def _hear(self, words: bytes) -> None:
        if self._use is None:
            self._words += words
            if len(self._words) > _MANY:
                raise Violation("the peer says more than belongs to a handshake")

    def _take(self, flow: _Flow, message: Message) -> None:
        if message.HasField("flag"):
            if message.flag == Message.RESET:
                self._end(flow)
                return
            flow.is_unwanted |= message.flag == Message.STOP_SENDING
            flow.is_finished |= message.flag == Message.FIN_ACK
            if message.flag == Message.FIN and not flow.has_ended:
                flow.has_ended = True
                self._say(flow.channel, Message(flag=Message.FIN_ACK))
        self._hand_on(flow, message.message)

    def _hand_on(self, flow: _Flow, data: bytes = b"") -> None:
        """What has come before, `data` and the end, as far as the stream takes it now."""
        before = len(flow.waiting)
        if not flow.told_ended:
            flow.waiting += data
        size = min(flow.credit, len(flow.waiting))
        if size:
            flow.credit -= size
            self._frame(DATA, 0, flow, size)
            self._frames += flow.waiting[:size]
            del flow.waiting[:size]
        if len(flow.waiting) != before:
            self._association.hold(len(flow.waiting) - before)
        if flow.has_ended and not flow.waiting and not flow.told_ended:
            flow.told_ended = True
            self._frame(WINDOW_UPDATE, FIN, flow, 0)
        if flow.told_ended and flow.is_finished:
            self._forget(flow)

    def on_closed(self, channel: int) -> None:
        if (flow := self._flows.get(channel)) is not None:
            self._end(flow)

    def on_alive(self, token: int) -> None:
        self._frames += HEADER.pack(0, PING, ACK, 0, token)

    def on_sent(self, size: int) -> None:
        self._out -= size
        if self.has_room:
            self._room.unpark_all()

    def _frame(self, kind: int, flags: int, flow: _Flow, length: int) -> None:
        self._frames += HEADER.pack(0, kind, flags, flow.stream_id, length)

    def _drop(self, flow: _Flow) -> None:
        self._say(flow.channel, Message(flag=Message.RESET))
        self._end(flow)

    def _end(self, flow: _Flow) -> None:
        self._frame(WINDOW_UPDATE, RST, flow, 0)
        self._forget(flow)

    def _forget(self, flow: _Flow) -> None:
        self._flows.pop(flow.channel, None)
        self._streams.pop(flow.stream_id, None)
        if flow.waiting:
            self._association.hold(-len(flow.waiting))
        self._association.close(flow.channel)

    def _say(self, channel: int, message: Message) -> None:
        data = _frame(message)
        self._out += len(data)
        if not self._association.send(channel, data):
            self._out -= len(data)
        self._wake.unpark_all()

    # --- what the multiplexer sees: a connection that carries Yamux

    def put(self, data: bytes) -> None:
        """Does what these frames say.

        Raises:
            OSError: the connection has ended.
        """
        self._check()
        if self._out > LIMITS.most_unsent:
            raise ConnectionAbortedError("the peer asks for more than it reads")
        if self.upload is not None:
            self.upload.spend(len(data))
        start = 0
        while start < len(data):
            _, kind, flags, stream_id, length = HEADER.unpack_from(data, start)
            start += HEADER.size
            body = data[start : start + length] if kind == DATA else b""
            start += len(body)
            if kind == PING:
                self._association.ask_for_life(length)
            else:
                self._do(flags, stream_id, body, length if kind == WINDOW_UPDATE else 0)
        self._wake.unpark_all()
        self._news.unpark_all()

    def _do(self, flags: int, stream_id: int, body: bytes, more: int) -> None:
        if flags & SYN:
            channel = self._association.open()
            self._flows[channel] = self._streams[stream_id] = _Flow(channel, stream_id)
        flow = self._streams.get(stream_id)
        if flow is None:
            return
        if flags & RST:
            self._say(flow.channel, Message(flag=Message.RESET))
            self._forget(flow)
            return
        flow.credit += more
        self._hand_on(flow)
        if body:
            self._send_body(flow, body)
        if flags & FIN:
            self._say(flow.channel, Message(flag=Message.FIN))

    def _send_body(self, flow: _Flow, body: bytes) -> None:
        """The stream has its window back as soon as SCTP has the bytes: `has_room` says how many it takes."""
        if not flow.is_unwanted:
            for start in range(0, len(body), MAX_PAYLOAD_SIZE):
                self._say(flow.channel, Message(message=body[start : start + MAX_PAYLOAD_SIZE]))
        flow.sent += len(body)
        if flow.sent >= INITIAL_WINDOW // 2:
            self._frame(WINDOW_UPDATE, 0, flow, flow.sent)
            flow.sent = 0

    async def receive(self) -> list[bytes]:
        """Frames that say what the peer does.

        Raises:
            OSError: the connection has ended.
        """
        while not self._frames:
            self._check()
            await self._news.park()
        frames, self._frames = bytes(self._frames), bytearray()
        self._wake.unpark_all()
        return [frames]

    def take_plaintext(self) -> bytes:
        return b""

    def divert(self, sink: ByteSink) -> None:
        """All frames are read."""

    @property
    def has_room(self) -> bool:
        return self._out < _OUT_LIMIT

    async def wait_room(self) -> None:
        while not self.has_room and self._association.lost is None:
            await self._room.park()

    @property
    def is_overfull(self) -> bool:
        return self._out > 4 * _OUT_LIMIT

    @property
    def is_stuffed(self) -> bool:
        return bool(self._out or self._inbox) or self._association.unacknowledged is not None

    async def flush(self, limit: float) -> None:
        with trio.move_on_after(limit):
            while self._out and self._association.lost is None:
                await self._room.park()

    async def close(self) -> None:
        self._association.abort()
        self._listener.forget(self._source, self)
        for lot in (self._wake, self._news, self._room):
            lot.unpark_all()

    def get_remote_address(self) -> Source | None:
        return None  # libp2p would take it for one of TCP

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [Multiaddr(self.path.remote_addr)]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT
