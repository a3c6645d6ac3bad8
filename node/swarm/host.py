"""The libp2p host: TCP, Noise, Yamux, with every trap of py-libp2p 0.8 that we know of cured here.

Two cures have a file of their own: `noise.py` (many system calls and turns of the loop per message) and
`yamux.py` (cancelled writes that kill a connection, readers reset after 5 s, frozen peers never noticed).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import trio
from libp2p.abc import INetConn, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm as Libp2pSwarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.exceptions import SecurityUpgradeFailure
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from ...crypto.identity import Identity
from ..errors import MachineError
from .addresses import concrete, is_dialable, without_peer
from .negotiation import OneAnswer, OneRoundTrip, question
from .noise import BufferedNoise
from .sockets import PromptSockets
from .yamux import Muxer

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
_DIAL_DEADLINE: Final = 5.0  # seconds for one address: TCP and about six round trips of handshakes
_NEXT_ADDRESS_AFTER: Final = 0.15  # seconds until the next address of a peer is tried beside the first
_MAX_ADDRESSES: Final = 16  # tried of one peer
_MAX_BOOK: Final = 10_000  # peers whose addresses we remember
_NEGOTIATION: Final = 10  # seconds
_CLOSING: Final = 2.0  # seconds for saying goodbye to all

ByteHandler = Callable[["StreamBytes", str], Awaitable[None]]


def quiet_logs(level: int = logging.CRITICAL) -> None:
    """Silences libp2p, which resets its logger at import and tells every lost stream as an error.

    Part of it logs to the root logger, which in passing installs a handler there.
    """
    logging.getLogger("libp2p").setLevel(level)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("libp2p.") and isinstance(logger, logging.Logger):
            logger.setLevel(level)  # some set their own
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    if not any(isinstance(entry, _NotFromLibp2p) for entry in root.filters):
        root.addFilter(_NotFromLibp2p())


class _NotFromLibp2p(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        # A logger's filters see only what was logged to that logger itself: here, to the root.
        return "libp2p" not in record.pathname


class StreamBytes:
    """The bytes of one stream, for `MessageStream`: a `RawStream`.

    `asked` is the protocol that the peer was asked for and has not agreed on yet.
    """

    def __init__(self, stream: NetStream, asked: str | None = None) -> None:
        self._stream = stream
        self._muxed: Any = stream.muxed_stream
        self._asked = asked
        self._answer = b"" if asked is None else question(asked)  # the part of it that has not come yet

    async def read(self, n: int) -> bytes:
        try:
            while self._answer:
                part = await self._muxed.read(len(self._answer))
                if not self._answer.startswith(part):
                    await self.reset()
                    raise ConnectionRefusedError(f"the peer does not speak {self._asked}")
                self._answer = self._answer[len(part) :]
            return bytes(await self._muxed.read(n))
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError as error:
            unsettled = f", which has not agreed on {self._asked}" if self._answer else ""
            raise ConnectionResetError(f"{error}{unsettled}") from error

    async def write(self, data: bytes) -> None:
        try:
            await self._muxed.write(data)
        except MuxedStreamError as error:
            raise ConnectionResetError(str(error)) from error

    def write_nowait(self, data: bytes) -> bool:
        try:
            return bool(self._muxed.write_nowait(data))
        except MuxedStreamError as error:
            raise ConnectionResetError(str(error)) from error

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            self._muxed.discard()
            await self._stream.close()

    async def reset(self) -> None:
        with trio.CancelScope(shield=True):
            await self._stream.reset()

    async def wait_lost(self) -> None:
        await self._muxed.wait_lost()


class _MuxerNegotiation(MuxerMultistream):
    """Negotiates Yamux and makes ours of it; libp2p's makes its own `Yamux` whatever class it was given."""

    def __init__(self, on_lost: Callable[[Muxer], None]) -> None:
        super().__init__({YAMUX: Yamux}, _NEGOTIATION)
        self._on_lost = on_lost

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> Muxer:
        if conn.is_initiator:
            await conn.write(question(YAMUX))
            return Muxer(conn, peer_id, self._on_lost, answer=question(YAMUX))
        await self._selector.select(conn, False, self.negotiate_timeout)
        return Muxer(conn, peer_id, self._on_lost)


class _NoAutoConnector(AutoConnector):
    """libp2p's own dials everyone it has ever heard of until it has many connections."""

    async def maybe_connect(self) -> None:
        return


class _Network(Libp2pSwarm):
    """libp2p's swarm of connections, with its own ways of dialing and accepting replaced."""

    def __init__(self, identity: Identity, psk: str | None, on_lost: Callable[[str], None]) -> None:
        key_pair = create_new_key_pair(identity.seed)
        noise_key = create_noise_key_pair().private_key
        upgrader = TransportUpgrader({NOISE: BufferedNoise(key_pair, noise_key)}, {YAMUX: Yamux})
        upgrader.muxer_multistream = _MuxerNegotiation(self._muxer_lost)
        upgrader.security_multistream._selector.multiselect_client = OneRoundTrip()
        peerstore = PeerStore()
        self_id = ID.from_pubkey(key_pair.public_key)
        peerstore.add_key_pair(self_id, key_pair)
        super().__init__(
            self_id,
            peerstore,
            upgrader,
            transports=[TCP()],
            retry_config=RetryConfig(max_retries=0),
            # By default it refuses everyone above 300. Nothing is set here about the health of connections:
            # `yamux.py` sees to it.
            connection_config=ConnectionConfig(
                max_connections=MAX_CONNECTIONS,
                min_connections=0,
                low_watermark=0,
                high_watermark=MAX_CONNECTIONS,
                max_connections_per_peer=8,
                outbound_stream_protocol_negotiation_timeout=_NEGOTIATION,
                inbound_stream_protocol_negotiation_timeout=_NEGOTIATION,
            ),
            psk=psk,
        )
        self.auto_connector = _NoAutoConnector(self)
        # No resource manager: its limits are global, and it guards what `yamux.py` bounds per connection.
        self._book: dict[ID, tuple[Multiaddr, ...]] = {}
        self._dialing: dict[ID, trio.Event] = {}
        self._notify_lost = on_lost
        self._ends: dict[Muxer, trio.Event] = {}

    def remember(self, peer_id: ID, addrs: Sequence[Multiaddr]) -> None:
        """Keeps addresses for the next dial, before what is known already.

        Not in libp2p's peerstore: identify replaces what stands there, by 0.0.0.0 for instance.
        """
        merged = (*addrs, *self._book.pop(peer_id, ()))
        self._book[peer_id] = tuple(dict.fromkeys(addr for addr in merged if is_dialable(addr)))[:_MAX_ADDRESSES]
        while len(self._book) > _MAX_BOOK:
            del self._book[next(iter(self._book))]

    def _addresses(self, peer_id: ID) -> list[Multiaddr]:
        addrs = list(self._book.get(peer_id, ()))
        with contextlib.suppress(PeerStoreError):
            addrs += [addr for addr in self.peerstore.addrs(peer_id) if is_dialable(addr)]
        return list(dict.fromkeys(without_peer(addr) for addr in addrs))[:_MAX_ADDRESSES]

    def _live(self, peer_id: ID) -> list[INetConn]:
        return [conn for conn in self.get_connections(peer_id) if not conn.muxed_conn.is_closed]

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        """Connects to a peer: all its addresses side by side, the first that answers wins.

        libp2p's own tries one address, waits 250 ms even on success, and refuses to dial a peer again for 60 s
        after one failure.
        """
        while not (live := self._live(peer_id)):
            if peer_id in self._dialing:
                await self._dialing[peer_id].wait()
                if peer_id not in self._dialing and not self._live(peer_id):
                    raise SwarmException(f"cannot connect to {peer_id}")
                continue
            self._dialing[peer_id] = done = trio.Event()
            try:
                return [await self._dial_first(peer_id, self._addresses(peer_id))]
            finally:
                del self._dialing[peer_id]
                done.set()
        return live

    async def _dial_first(self, peer_id: ID, addrs: Sequence[Multiaddr]) -> INetConn:
        if peer_id == self.self_id:
            raise SwarmException("this is our own peer id")
        winners: list[INetConn] = []
        reasons: list[str] = []

        async def attempt(addr: Multiaddr, failed: trio.Event) -> None:
            try:
                with trio.fail_after(_DIAL_DEADLINE):
                    winners.append(await self.dial_addr(addr, peer_id))
                nursery.cancel_scope.cancel()
            except trio.TooSlowError:
                reasons.append(f"{addr}: no answer within {_DIAL_DEADLINE:g} s")
            except Exception as error:  # whatever a stranger's handshake may raise
                reasons.append(f"{addr}: {_why(error)}")
            finally:
                failed.set()

        async with trio.open_nursery() as nursery:
            for addr in addrs:
                failed = trio.Event()
                nursery.start_soon(attempt, addr, failed)
                with trio.move_on_after(_NEXT_ADDRESS_AFTER):
                    await failed.wait()
        if not winners:
            raise SwarmException(f"cannot connect to {peer_id}: {'; '.join(reasons) or 'no address known'}")
        return winners[0]

    async def _handle_inbound_connection(self, read_write_closer: ReadWriteCloser, maddr: Multiaddr) -> None:
        """Serves an accepted connection until it ends.

        libp2p's own waits here for the end of the whole host and keeps one of its 300 places for as long: after
        300 connections in its life, a host would accept nobody.
        """
        try:
            muxer = await self.upgrade_inbound_raw_conn(RawConnection(read_write_closer, False), maddr)
        except Exception as error:  # whatever a stranger's handshake may raise
            log.debug("refused a connection: %s", error)
            return
        assert isinstance(muxer, Muxer)
        if not muxer.is_closed:
            self._ends[muxer] = end = trio.Event()
            await end.wait()

    def _muxer_lost(self, muxer: Muxer) -> None:
        end = self._ends.pop(muxer, None)
        if end is not None:
            end.set()
        if not self._live(muxer.peer_id):
            self._notify_lost(str(muxer.peer_id))

    async def goodbye(self) -> None:
        """Closes all connections side by side (libp2p's own close takes 0.1 s for each)."""
        async with trio.open_nursery() as nursery:
            for conns in list(self.connections.values()):
                for conn in conns:
                    nursery.start_soon(conn.close)


class Host:
    """A running libp2p host. Made by `open_host`."""

    def __init__(self, network: _Network, libp2p: BasicHost) -> None:
        self._network = network
        self.libp2p = libp2p  # for the DHT
        self.peer_id = str(network.self_id)

    def addrs(self) -> list[str]:
        """Concrete addresses under which this node may be reached, the peer id included."""
        return [str(addr) for addr in self.libp2p.get_addrs()]

    def remember(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Keeps addresses of a peer for the next dial."""
        self._network.remember(ID.from_string(peer_id), [Multiaddr(addr) for addr in addrs])

    def connected(self) -> list[str]:
        return [str(peer) for peer in list(self._network.connections) if self._network._live(peer)]

    def is_connected(self, peer_id: str) -> bool:
        return bool(self._network._live(ID.from_string(peer_id)))

    async def connect(self, peer_id: str) -> None:
        """Makes sure that there is a connection.

        Raises:
            ConnectionError: with the reason for each address that was tried.
        """
        try:
            await self._network.dial_peer(ID.from_string(peer_id))
        except Exception as error:  # libp2p raises many kinds
            raise ConnectionError(str(error)) from error

    async def open_stream(self, peer_id: str, protocol: str) -> StreamBytes:
        """A new stream of that protocol; connects first if necessary. The caller closes or resets it.

        Does not wait for the peer's consent: if it does not speak the protocol, the first read says so.

        Raises:
            ConnectionError: no connection.
        """
        await self.connect(peer_id)
        try:
            stream = await self._network.new_stream(ID.from_string(peer_id))
            assert isinstance(stream, NetStream)
            stream.set_protocol(TProtocol(protocol))
            await stream.muxed_stream.write(question(protocol))
        except Exception as error:  # libp2p raises many kinds
            raise ConnectionError(f"cannot open a stream of {protocol} to {peer_id}: {error}") from error
        return StreamBytes(stream, protocol)

    def set_stream_handler(self, protocol: str, handler: ByteHandler) -> None:
        """`handler` gets every stream of that protocol that a peer opens; it must not raise."""

        async def serve(stream: NetStream) -> None:
            await handler(StreamBytes(stream), str(stream.muxed_conn.peer_id))

        self.libp2p.set_stream_handler(TProtocol(protocol), serve)

    async def disconnect(self, peer_id: str) -> None:
        for conn in self._network.get_connections(ID.from_string(peer_id)):
            await conn.close()


@contextlib.asynccontextmanager
async def open_host(
    identity: Identity,
    *,
    listen: Sequence[Multiaddr],
    announce: Sequence[Multiaddr],
    psk: str | None,
    on_lost: Callable[[str], None],
) -> AsyncIterator[Host]:
    """Runs a host until the block ends. `on_lost` hears of each peer whose last connection ended.

    Raises:
        MachineError: a port is in use, or an address is none of this machine.
    """
    quiet_logs()
    trio.socket.set_custom_socket_factory(PromptSockets())  # for the rest of this run of trio
    for addr in listen:
        _check_free(addr)
    network = _Network(identity, psk, on_lost)
    libp2p = BasicHost(
        network,
        negotiate_timeout=_NEGOTIATION,
        addrs_factory=lambda candidates: [*announce, *concrete(candidates)],
        disable_identify_address_discovery=True,
    )
    libp2p.multiselect = OneAnswer(libp2p.multiselect.handlers)
    libp2p.multiselect_client = OneRoundTrip()
    serve_stream = network.common_stream_handler

    async def guarded(stream: NetStream) -> None:
        # An error that reaches libp2p here, such as that of a peer's garbled negotiation, stops the whole host.
        try:
            await serve_stream(stream)
        except Exception as error:
            log.debug("a stream of %s failed: %r", stream.muxed_conn.peer_id, error)
            await stream.reset()

    network.set_stream_handler(guarded)
    async with libp2p.run(listen_addrs=list(listen)):
        missing = [str(addr) for addr in listen if str(addr) not in network.listeners]
        try:
            if not missing:
                yield Host(network, libp2p)
        finally:
            # In order, and before the tasks of the connections are cancelled: the peers shall hear of it.
            with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True):
                await network.goodbye()
                await libp2p.close()
    if missing:
        raise MachineError(f"cannot listen on {', '.join(missing)}")


def _check_free(addr: Multiaddr) -> None:
    """libp2p listens with SO_REUSEPORT: a second node on a port would silently get half of the connections."""
    values = {protocol.name: value for protocol, value in addr.items()}
    family = socket.AF_INET6 if "ip6" in values else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((values.get("ip6") or values["ip4"], int(values["tcp"])))
        except OSError as error:
            advice = {
                errno.EADDRINUSE: "stop the node that uses the port, or choose another one (0 takes a free one)",
                errno.EADDRNOTAVAIL: "this machine has no such address; /ip4/0.0.0.0/... takes all it has",
                errno.EACCES: "choose a port above 1023",
            }.get(error.errno or 0, "choose another address")
            raise MachineError(f"cannot listen on {addr}: {error.strerror}; {advice}") from error


def _why(error: BaseException) -> str:
    """The reason at the bottom of libp2p's chain of errors about a failed dial, for a person."""
    bottom = error
    while True:
        deeper = bottom.exceptions[0] if isinstance(bottom, BaseExceptionGroup) else None
        deeper = deeper or bottom.__cause__ or bottom.__context__
        if deeper is None:
            break
        bottom = deeper
    if isinstance(bottom, PeerIDMismatchesPubkey):
        return "a peer with another id is there"
    if isinstance(bottom, OSError) and bottom.strerror:
        return bottom.strerror
    if isinstance(error.__cause__, SecurityUpgradeFailure):
        return "what is there is no node of this swarm, or has another swarm key"
    return str(bottom) or type(bottom).__name__
