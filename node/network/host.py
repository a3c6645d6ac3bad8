"""The libp2p host: TCP, Noise, Yamux. What py-libp2p 0.8 does wrong is done right here and in two other files.
`transport/noise.py`: many system calls and turns of the loop per message. `transport/yamux.py`: cancelled writes that
kill a connection, readers reset after 5 s, frozen peers never noticed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final

import trio
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.host import basic_host
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify as libp2p_identify
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.envelope import Envelope, make_unsigned
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from ...crypto.identity import Identity
from ..errors import MachineError
from ..version import __version__
from .addresses import check_free, concrete, dialable, ip_of, is_loopback, is_webrtc, port_of
from .shares import origin_of_ip
from .standard_protocols import IDENTIFY_PUSH, PING, answer_pings, identify, keep_identified, take_pushes
from .transport.address_book import AnnouncementSources
from .transport.bandwidth import Bandwidth
from .transport.connections import CircuitDialer, Network, path_of
from .transport.negotiation import OneAnswer, OneRoundTrip, reason_of
from .transport.raw_connection import Path, PromptSockets, RawConnection, SocketConnection, remote_multiaddr
from .transport.stream_bytes import CircuitConnection, Connection, StreamBytes
from .transport.websocket import Certificate

log = logging.getLogger(__name__)

GOSSIP_PROTOCOLS: Final = ("/meshsub/1.1.0",)
_RESTART_PAUSE: Final = 5.0  # seconds until a part that failed is started again
_CLOSING: Final = 2.0  # seconds for closing all connections

ByteHandler = Callable[[StreamBytes, str], Awaitable[None]]


def quiet_logs() -> None:
    """Silences libp2p, which resets its logger at import and logs every lost stream as an error.

    Part of it logs to the root logger, which in passing installs a handler there.
    """
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("libp2p.") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.CRITICAL)  # some set their own
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    if not any(isinstance(entry, _NotFromLibp2p) for entry in root.filters):
        root.addFilter(_NotFromLibp2p())


class _NotFromLibp2p(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        # A logger's filters see only what was logged to that logger itself: here, to the root.
        return "libp2p" not in record.pathname


async def keep_up(part: Callable[[], Awaitable[None]]) -> None:
    """Runs a part of the node for ever: an error of ours must not take the node, which is serving sessions, down."""
    while True:
        try:
            await part()
        except Exception:
            log.exception("%s failed", part.__qualname__)
        await trio.sleep(_RESTART_PAUSE)


class Host:
    """A running libp2p host. Made by `open_host`."""

    def __init__(self, network: Network, libp2p: BasicHost, addresses: _Addresses) -> None:
        self._network = network
        self._addresses = addresses
        self.libp2p = libp2p  # for the DHT
        self.peer_id = str(network.self_id)
        self.socket_bytes, self.traffic = network.bandwidth.sockets, network.limits.traffic

    # --- addresses

    def addrs(self) -> list[str]:
        """Concrete addresses under which this node may be reached, the peer id included."""
        return [str(addr) for addr in self.libp2p.get_addrs()]

    def set_extra_addrs(self, addrs: Sequence[Multiaddr]) -> None:
        """From now on `addrs()` also gives these (without /p2p): relayed, mapped, found to be public."""
        self._addresses.extra = tuple(addrs)

    def withheld(self, addrs: Sequence[Multiaddr]) -> None:
        """From now on `addrs()` leaves these (without /p2p) out, unless they were announced by the operator."""
        self._addresses.withheld = frozenset(addrs)

    def listen_ports(self) -> list[tuple[socket.AddressFamily, int]]:
        """The TCP ports that are listened on, each with its family (AF_INET or AF_INET6)."""
        return [port_of(addr) for addr in self.libp2p.get_transport_addrs() if not is_webrtc(addr)]

    def remember(self, peer_id: str, addrs: Sequence[str]) -> None:
        """Keeps addresses of a peer, direct ones and circuits, for the next dial. Those of no use are left out.

        They are of a person, or found on this machine or network: what strangers announce is for `learn`.
        """
        self._network.book.remember(_id(peer_id), _dialable(addrs), given=True)

    def learn(self, peer_id: str, addrs: Sequence[str]) -> None:
        """As `remember`, of addresses that a peer has announced: dialed where a stranger may send us, and seldom enough
        (`transport/dialing.py`)."""
        self._network.book.remember(_id(peer_id), _dialable(addrs), given=False)

    def permitted(self, peer_id: str, addrs: Sequence[str]) -> list[str]:
        """Of these addresses of a peer those that would be dialed."""
        return [str(addr) for addr in self._network.book.permitted(_id(peer_id), _dialable(addrs))]

    def take_dial(self, peer_id: str, addr: str) -> bool:
        """Whether an address of this peer may be dialed now, for who does so without `connect`; counts it."""
        parsed = dialable(addr)
        return parsed is not None and self._network.book.take_dial(_id(peer_id), parsed)

    def share_dials(self, sources: AnnouncementSources) -> None:
        """Dials at announced addresses are shared by where the announcements came from."""
        self._network.book.sources = sources

    def knows(self, peer_id: str) -> bool:
        """Whether there is a connection to this peer, or an address to dial."""
        return self._network.knows(_id(peer_id))

    # --- connections

    def connected(self) -> list[str]:
        return [str(peer) for peer in list(self._network.connections) if self._network.live(peer)]

    def is_connected(self, peer_id: str) -> bool:
        return bool(self._network.live(_id(peer_id)))

    def is_direct(self, peer_id: str) -> bool:
        """Whether there is a connection to this peer that needs no relay."""
        return bool(self._network.live(_id(peer_id), direct=True))

    def connections(self, peer_id: str, *, direct: bool = False) -> list[Connection]:
        """The live connections to a peer, or the direct ones, the one that new streams take first."""
        return [Connection(conn) for conn in self._network.live(_id(peer_id), direct=direct)]

    def paths(self, peer_id: str) -> list[Path]:
        """The ways of the live connections to a peer, the one that new streams take first."""
        return [path_of(conn) for conn in self._network.live(_id(peer_id))]

    def origin_of(self, peer_id: str, *, is_relay: bool = False) -> str:
        """The address, as `origin_of_ip` counts them, at which a connected peer is, or the relay through which it came.
        The peer id itself where that is not known. A relay is where it is directly: two may come through each other."""
        for path in self.paths(peer_id):
            if not path.direct and path.relay is not None and not is_relay:
                return self.origin_of(path.relay, is_relay=True)
            ip = ip_of(Multiaddr(path.remote_addr)) if path.direct and path.remote_addr is not None else None
            if ip is not None:
                return origin_of_ip(str(ip))
        return peer_id

    @property
    def is_serving(self) -> bool:
        """Whether peers have used sessions or batches of this node in the last second."""
        return self._network.limits.is_serving

    async def connect(self, peer_id: str, *, direct: bool = False) -> None:
        """Makes sure that there is a connection, or a direct one.

        Raises:
            ConnectionError: with the reason for each address that was tried.
        """
        try:
            await self._network.dial_peer(_id(peer_id), direct=direct)
        except Exception as error:  # libp2p raises many kinds
            raise ConnectionError(str(error)) from None

    async def dial_fresh(self, peer_id: str, addrs: Sequence[Multiaddr], *, timeout: float) -> str:
        """Whether the peer answers at one of `addrs`, by connections of their own, closed at once; returns which.

        Raises:
            ConnectionError: at none within `timeout` seconds, with the reason for each.
        """
        found: list[str] = []
        reasons: list[str] = []

        async def attempt(addr: Multiaddr) -> None:
            try:
                await self._network.probe(addr, _id(peer_id))
                found.append(str(addr))
                nursery.cancel_scope.cancel()
            except Exception as error:  # whatever a stranger's handshake may raise
                reasons.append(f"{addr}: {reason_of(error)}")

        with trio.move_on_after(timeout):
            async with trio.open_nursery() as nursery:
                for addr in addrs:
                    nursery.start_soon(attempt, addr)
        if not found:
            raise ConnectionError("; ".join(reasons) or f"no answer within {timeout:g} s")
        return found[0]

    @contextlib.asynccontextmanager
    async def apart(self, peer_id: str, addr: Multiaddr) -> AsyncIterator[Connection]:
        """A connection dialed for the length of the block, which nobody else uses.

        Raises:
            Exception: of many kinds, if there is none; see `reason_of`.
        """
        muxer = await self._network.dial_apart(addr, _id(peer_id))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxer.start)
            await muxer.event_started.wait()
            yield Connection(SwarmConn(muxer, self._network))
            await muxer.close()

    async def adopt(
        self,
        raw: trio.SocketStream | StreamBytes,
        *,
        peer_id: str | None,
        initiator: bool,
        relay: str | None = None,
        addr: str | None = None,
    ) -> str:
        """Makes a connection of this host out of a socket or of a stream through `relay`. Returns the peer's id.

        `peer_id` is whom to expect; only who is no `initiator` may leave it open. `addr` is the peer's multiaddr, as
        in `Path`. Ends `raw` if that fails. A peer that stands still is not given up: the caller sets a deadline.

        Raises:
            ConnectionError: with the reason.
        """
        connection: RawConnection
        if isinstance(raw, StreamBytes):
            connection = CircuitConnection(raw, Path(False, relay, addr, inbound=not initiator))
        else:
            path = Path(True, None, addr or remote_multiaddr(raw), inbound=not initiator)
            connection = SocketConnection(raw, path, self._network.bandwidth)
        try:
            conn = await self._network.secure(connection, None if peer_id is None else _id(peer_id))
        except Exception as error:  # whatever a stranger's handshake may raise
            raise ConnectionError(reason_of(error)) from None
        return str(conn.muxed_conn.peer_id)

    @contextlib.contextmanager
    def punching(self, peer_id: str, addrs: Sequence[str]) -> Iterator[None]:
        """For the length of the block, we are the client also on connections that come from these addresses.

        Two who dial each other at once agreed before who is the client. One of them may find the other's listening
        socket instead of the dialing one.
        """
        peer = _id(peer_id)
        self._network.punching.update(dict.fromkeys(addrs, peer))
        try:
            yield
        finally:
            for addr in addrs:
                self._network.punching.pop(addr, None)

    def relayed_streams(self, peer_id: str) -> int:
        """How many streams are open with a peer through relays, without gossip, which is no reason to keep one."""
        live = self._network.live(_id(peer_id))
        return sum(
            conn.muxed_conn.open_streams
            - sum(str(stream.get_protocol()) in GOSSIP_PROTOCOLS for stream in conn.get_streams())
            for conn in live
            if not path_of(conn).direct
        )

    async def disconnect(self, peer_id: str) -> None:
        for conn in self._network.get_connections(_id(peer_id)):
            await conn.close()

    async def close_path(self, peer_id: str, *, relayed_only: bool = True) -> None:
        """Closes the connections to a peer that run through relays, or all of them; their streams die."""
        for conn in self._network.live(_id(peer_id)):
            if not (relayed_only and path_of(conn).direct):
                await conn.close()

    def on_connected(self, callback: Callable[[str, Path], None]) -> None:
        """`callback(peer_id, path)` is called for every new connection from now on; it must not raise."""
        self._network.on_connected.append(callback)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` is called for each peer whose last connection ended; it must not raise."""
        self._network.on_lost.append(callback)

    def set_circuit_dialer(self, dialer: CircuitDialer) -> None:
        """`dialer(relay id, peer id)` returns a stream that the relay, whose addresses are remembered, has connected to
        the peer; it raises ConnectionError."""
        self._network.circuit_dialer = dialer

    # --- streams

    async def open_stream(self, peer_id: str, protocol: str, *, direct: bool = False) -> StreamBytes:
        """A new stream of that protocol; connects first if necessary. The caller closes or resets it.

        It runs on a direct connection if there is one. With `direct`, it does so or not at all, and nothing is
        dialed. Does not wait for the peer's consent: if it does not speak the protocol, the first read says so.

        Raises:
            ConnectionError: no connection.
        """
        if not direct:
            await self.connect(peer_id)
        reason = "there is no direct connection" if direct else "the connection is gone"
        for conn in self.connections(peer_id, direct=direct):
            try:
                return await conn.open_stream(protocol)
            except ConnectionError as error:
                reason = str(error)
        raise ConnectionError(f"cannot open a stream of {protocol} to {peer_id}: {reason}")

    def sign_envelope(self, domain: str, payload_type: bytes, payload: bytes) -> bytes:
        """A signed envelope with our key (https://github.com/libp2p/specs/blob/master/RFC/0002-signed-envelopes.md)."""
        key = self.libp2p.get_private_key()
        signature = key.sign(make_unsigned(domain, payload_type, payload))
        return bytes(Envelope(key.get_public_key(), payload_type, payload, signature).marshal_envelope())

    def set_stream_handler(self, protocol: str, handler: ByteHandler) -> None:
        """`handler` gets every stream of that protocol that a peer opens; it must not raise.

        A peer may send 256 KiB on one that were not read yet, and more once the handler grants something.
        """
        self.libp2p.set_stream_handler(TProtocol(protocol), functools.partial(_serve, handler))

    def remove_stream_handler(self, protocol: str) -> None:
        """From now on a peer that asks for the protocol is refused."""
        self.libp2p.multiselect.handlers.pop(TProtocol(protocol), None)


basic_host.update_peerstore_from_identify = keep_identified
libp2p_identify.AGENT_VERSION = f"petalnode/{__version__}"


class _Libp2pHost(BasicHost):
    """libp2p's host, which takes the relay's part out of a circuit address and so claims the relay's for its own."""

    def __init__(self, network: Network, addresses: _Addresses) -> None:
        self._addresses, self._live = addresses, network.live
        super().__init__(network, disable_identify_address_discovery=True)

    async def _identify_peer(self, peer_id: ID, *, reason: str) -> None:
        """As libp2p's own, which reads up to 1 MiB."""
        for conn in self._live(peer_id)[:1]:
            if await identify(Connection(conn), self.get_peerstore(), peer_id) and self._live(peer_id):
                self._identified_peers[peer_id] = reason

    def get_addrs(self) -> list[Multiaddr]:
        own = Multiaddr(f"/p2p/{self.get_id()}")
        return [addr.encapsulate(own) for addr in self._addresses(list(self.get_transport_addrs()))]


@functools.lru_cache(maxsize=4096)
def _id(peer_id: str) -> ID:
    """libp2p's form of a peer id, which takes a while to make."""
    return ID.from_string(peer_id)


def _dialable(addrs: Sequence[str]) -> list[Multiaddr]:
    return [addr for addr in map(dialable, addrs) if addr is not None]


class _Addresses:
    """What this node says of where it is."""

    def __init__(self, announce: Sequence[Multiaddr]) -> None:
        self._announce = announce
        self.extra: tuple[Multiaddr, ...] = ()
        self.withheld: frozenset[Multiaddr] = frozenset()

    def __call__(self, listening: list[Multiaddr]) -> list[Multiaddr]:
        """The addresses to give, without /p2p, of a node that listens there; those that nodes do not dial, last."""
        own = [addr for addr in concrete(listening) if addr not in self.withheld]
        return sorted(dict.fromkeys((*self._announce, *self.extra, *own)), key=is_webrtc)


@contextlib.asynccontextmanager
async def open_host(
    identity: Identity,
    *,
    listen: Sequence[Multiaddr],
    announce: Sequence[Multiaddr],
    psk: str | None,
    max_upload: int | None = None,
    max_download: int | None = None,
    certificate: Certificate | None = None,
) -> AsyncIterator[Host]:
    """Runs a host until the block ends.

    `psk` is a private swarm's key, 64 hexadecimal digits. `max_upload` and `max_download` are in bytes per second,
    over all connections together. Small messages do not wait behind large ones. `certificate` is for /tls/ws.

    Raises:
        MachineError: a port is in use, or an address is none of this machine.
    """
    quiet_logs()
    trio.socket.set_custom_socket_factory(PromptSockets())  # for the rest of this run of trio
    for addr in listen:
        check_free(addr)
    on_loopback = bool(listen) and all(is_loopback(addr) for addr in (*listen, *announce))
    bandwidth = Bandwidth.of(max_upload, max_download)
    webrtc = any(map(is_webrtc, listen))
    network = Network(identity, psk, bandwidth, on_loopback=on_loopback, certificate=certificate, webrtc=webrtc)
    addresses = _Addresses([network.with_certificate(addr) for addr in announce])
    libp2p = _Libp2pHost(network, addresses)
    libp2p.multiselect = OneAnswer(libp2p.multiselect.handlers)
    libp2p.multiselect_client = OneRoundTrip()
    network.set_stream_handler(functools.partial(_guarded, network.common_stream_handler))
    async with libp2p.run(listen_addrs=list(listen)):
        missing = [str(addr) for addr in listen if str(addr) not in network.listeners]
        try:
            if not missing:
                host = Host(network, libp2p, addresses)
                host.set_stream_handler(PING, answer_pings())
                host.set_stream_handler(IDENTIFY_PUSH, take_pushes(libp2p.get_peerstore()))
                yield host
        finally:
            # In order, and before the tasks of the connections are cancelled: the peers shall be notified.
            with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True):
                await network.close_all()
                await libp2p.close()
    if missing:
        raise MachineError(f"cannot listen on {', '.join(missing)}")


async def _serve(handler: ByteHandler, stream: NetStream) -> None:
    await handler(StreamBytes(stream), str(stream.muxed_conn.peer_id))


async def _guarded(serve_stream: StreamHandlerFn, stream: NetStream) -> None:
    """An error that reaches libp2p here, such as that of a peer's garbled negotiation, stops the whole host."""
    try:
        await StreamBytes(stream).metered(serve_stream)
    except Exception as error:
        log.debug("a stream of %s failed: %r", stream.muxed_conn.peer_id, error)
        await stream.reset()
    # libp2p's handlers close streams in our direction only; what the peer says then is read by nobody.
    if stream.muxed_stream.write_closed:
        stream.muxed_stream.discard()
