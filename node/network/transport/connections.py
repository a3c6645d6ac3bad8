"""libp2p's swarm of connections, with its own ways of dialing and accepting replaced."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import trio
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection as Libp2pRawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm as Libp2pSwarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.dns_utils import resolve_multiaddr_with_retry
from multiaddr import Multiaddr

from ....crypto.identity import Identity
from ..addresses import circuit_of, ip_of, is_circuit, is_dialable, own_networks, transport_of, without_peer
from .address_book import AddressBook, BoundedPeerStore
from .bandwidth import Bandwidth
from .dialing import DIALING, DialAttempt, FailedAddress, failed, kept, one_per_relay, plan
from .limits import LIMITS, WORK, NodeLimits, metered
from .negotiation import OneAnswer, OneRoundTrip, question, reason_of
from .noise import BufferedNoise
from .raw_connection import Path, PskConnection, RawConnection, SocketConnection, Tcp, remote_multiaddr
from .stream_bytes import CircuitConnection, StreamBytes
from .websocket import Certificate, accept, connect
from .yamux import Muxer, MuxerOwner

if TYPE_CHECKING:
    from .webrtc.connection import WebRtcConnection

    Raw = RawConnection | WebRtcConnection

log = logging.getLogger(__name__)

_OFTEN: Final = "dialed too often in the last minute"
_FOREIGN: Final = (
    "not dialed: an address of this machine, or of a private network that this node is not in; with --peer it is dialed"
)

CircuitDialer = Callable[[str, str], Awaitable[StreamBytes]]
PathHandler = Callable[[str, Path], None]


@dataclass
class _Dial:
    """A dial under way; `failure` is set once it has failed."""

    done: trio.Event = field(default_factory=trio.Event)
    failure: str | None = None


class _MuxerNegotiation(MuxerMultistream):
    """Negotiates Yamux and makes ours of it; libp2p's makes its own `Yamux` whatever class it was given."""

    def __init__(self, owner: MuxerOwner) -> None:
        super().__init__({YAMUX: Yamux})
        self._selector.multiselect = OneAnswer(self._selector.multiselect.handlers)
        self._owner = owner

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> Muxer:
        if conn.is_initiator:
            await conn.write(question(YAMUX))
            return Muxer(conn, peer_id, self._owner, answer=question(YAMUX))
        await self._selector.select(conn, False, self.negotiate_timeout)
        return Muxer(conn, peer_id, self._owner)


class _NoAutoConnector(AutoConnector):
    """libp2p's own dials every peer of its peerstore until it has many connections."""

    async def maybe_connect(self) -> None:
        return


class Network(Libp2pSwarm):
    """All connections of the host: a list for each peer, direct ones and circuits.

    `on_connected` is called for every new connection, `on_lost` for each peer whose last one ended; neither may raise.
    """

    def __init__(
        self,
        identity: Identity,
        psk: str | None,
        bandwidth: Bandwidth,
        *,
        on_loopback: bool,
        certificate: Certificate | None = None,
        webrtc: bool = False,
    ) -> None:
        self._keys = key_pair = create_new_key_pair(identity.seed)
        noise_key = create_noise_key_pair().private_key
        upgrader = TransportUpgrader({NOISE: BufferedNoise(key_pair, noise_key)}, {YAMUX: Yamux})
        self.limits = NodeLimits()
        upgrader.muxer_multistream = _MuxerNegotiation(self)
        security = upgrader.security_multistream._selector
        security.multiselect = OneAnswer(security.multiselect.handlers)
        security.multiselect_client = OneRoundTrip()
        self._tcp = Tcp(self.limits)
        self._webrtc = None
        if webrtc:
            from .webrtc.listener import WebRtc  # an extra, of which aiortc takes a while to import

            self._webrtc = WebRtc(identity.seed, self.limits, bandwidth)
        super().__init__(
            ID.from_pubkey(key_pair.public_key),
            BoundedPeerStore(key_pair),
            upgrader,
            transports=[self._tcp, *filter(None, [self._webrtc])],
            retry_config=RetryConfig(max_retries=0),
            # By default it refuses everyone above 300. Nothing is set here about the health of connections:
            # `yamux.py` sees to it.
            connection_config=ConnectionConfig(
                max_connections=LIMITS.connections,
                min_connections=0,
                low_watermark=0,
                high_watermark=LIMITS.connections,
                max_connections_per_peer=LIMITS.connections_of_peer,
                outbound_stream_protocol_negotiation_timeout=LIMITS.patience,
                inbound_stream_protocol_negotiation_timeout=LIMITS.patience,
            ),
        )
        self.auto_connector = _NoAutoConnector(self)
        # No resource manager: its limits are global, and it guards what `limits.py` bounds for each peer.
        self.on_connected: list[PathHandler] = []
        self.on_lost: list[Callable[[str], None]] = []
        self.circuit_dialer: CircuitDialer | None = None
        self.bandwidth = bandwidth
        self._certificate = certificate
        self._key = psk  # libp2p's own `psk` would put its cipher under everything once more
        self.book = AddressBook(self, on_loopback=on_loopback)
        self._dialing: dict[tuple[ID, bool], _Dial] = {}
        self._ends: dict[Muxer, trio.Event] = {}
        # Whoever dials us from one of these multiaddrs is punching, and expects us to be the client (DCUtR).
        self.punching: dict[str, ID] = {}

    async def _notify(self, method: str, *args: Any) -> None:
        """As libp2p's own, which starts a task for each listener; nobody listens for streams."""
        if method not in ("opened_stream", "closed_stream"):
            await super()._notify(method, *args)

    # --- connections

    def paths(self) -> Iterator[Path]:
        return (path_of(conn) for conns in self.connections.values() for conn in conns)

    def live(self, peer_id: ID, *, direct: bool = False) -> list[SwarmConn]:
        """The connections to a peer that work, the best one first: direct before relayed, new before old."""
        conns = [conn for conn in self.get_connections(peer_id) if not conn.muxed_conn.is_closed]
        conns.sort(key=lambda conn: path_of(conn).direct)
        return [conn for conn in reversed(conns) if path_of(conn).direct or not direct]

    def _select_connection(self, connections: list[SwarmConn], peer_id: ID) -> SwarmConn:
        usable = [conn for conn in self.live(peer_id) if conn in connections]
        return usable[0] if usable else connections[0]

    async def secure(self, raw: Raw, peer_id: ID | None) -> SwarmConn:
        """Makes a connection of the host out of a raw one: swarm key, Noise, Yamux. Closes the raw one if that fails.

        `peer_id` is whom to expect, None for whoever it is (only if the peer made the connection).

        Raises:
            Exception: of many kinds, whatever a stranger's handshake may lead to; see `reason_of`.
        """
        if len(self.get_connections()) >= LIMITS.connections:
            await raw.close()
            raise SwarmException(f"there are {LIMITS.connections} connections already")
        try:
            muxer = await self._upgraded(raw, peer_id)
            conn = await self.add_conn(muxer, direction="inbound" if raw.path.inbound else "outbound")
            if muxer.lost is not None:  # meanwhile; libp2p has added it all the same, after it was removed
                self.remove_conn(conn)
                raise SwarmException(muxer.lost)
        except BaseException as error:
            try:
                if raw.path.inbound and isinstance(error, Exception):
                    await raw.drain()  # it shall read our first words, which say that this is another swarm
            finally:
                await raw.close()
            raise
        self.book.met(raw.path)
        for handler in self.on_connected:
            handler(str(muxer.peer_id), raw.path)
        return conn

    async def _upgraded(self, raw: Raw, peer_id: ID | None) -> Muxer:
        if not isinstance(raw, RawConnection):
            return await raw.own_muxer(self._keys, self)
        secured = await self.upgrader.upgrade_security(PskConnection(raw, self._key), raw.is_initiator, peer_id)
        if peer_id not in (None, secured.get_remote_peer()):
            raise PeerIDMismatchesPubkey(f"expected {peer_id}")
        return cast(Muxer, await self.upgrader.upgrade_connection(secured, secured.get_remote_peer()))

    def with_certificate(self, addr: Multiaddr) -> Multiaddr:
        """An address of this node; where it is of WebRTC, with the hash of our certificate."""
        return addr if self._webrtc is None else self._webrtc.with_certificate(addr)

    async def _handle_inbound_connection(
        self, read_write_closer: ReadWriteCloser | WebRtcConnection, maddr: Multiaddr
    ) -> None:
        """Serves an accepted connection until it ends.

        libp2p's own waits here for the whole host's end and keeps one of its 300 places for as long: after 300
        connections in its life, a host would accept nobody.
        """
        raw: Raw = read_write_closer
        if isinstance(read_write_closer, TrioTCPStream):
            path = Path(direct=True, relay=None, remote_addr=remote_multiaddr(read_write_closer.stream), inbound=True)
            raw = SocketConnection(read_write_closer.stream, path, self.bandwidth)
        host = raw.origin
        if not self.limits.inbound.add(host):
            log.info("refused a connection: there are too many from %s", host)
            await raw.close()
            return
        try:
            muxer = await self._accept(raw, transport_of(maddr) or ())
            if muxer is not None and not muxer.is_closed:
                self._ends[muxer] = end = trio.Event()
                await end.wait()
        finally:
            self.limits.inbound.remove(host)

    async def _accept(self, raw: Raw, transport: Sequence[str]) -> Muxer | None:
        """Makes a connection of the host out of an accepted one; None if nothing comes of it."""
        host = raw.origin
        if not self.limits.handshakes.add(host):
            log.info("refused a connection: too many from %s have not finished their handshake", host)
            await raw.close()
            return None
        address = self.limits.of_address(host)
        address.users += 1
        punching = self.punching.get(raw.path.remote_addr or "")
        raw.is_initiator = punching is not None
        try:
            with trio.fail_after(LIMITS.patience):
                await self.limits.work_turn(address)
                self.limits.worked(address, WORK.handshake)
                secured = await metered(self._secure_accepted(raw, punching, transport), self.limits, address)
                return cast(Muxer, secured.muxed_conn)
        except Exception as error:  # whatever a stranger's handshake may raise
            log.debug("refused a connection from %s: %s", raw.path.remote_addr, reason_of(error))
            await raw.close()  # which nobody has done if its turn did not come
        finally:
            address.users -= 1
            self.limits.handshakes.remove(host)
        return None

    async def _secure_accepted(self, raw: Raw, peer_id: ID | None, transport: Sequence[str]) -> SwarmConn:
        if isinstance(raw, RawConnection):
            raw = await accept(raw, transport, self._certificate, self.limits)
        return await self.secure(raw, peer_id)

    def muxer_lost(self, muxer: Muxer) -> None:
        end = self._ends.pop(muxer, None)
        if end is not None:
            end.set()
        if not self.live(muxer.peer_id):
            for handler in self.on_lost:
                handler(str(muxer.peer_id))

    async def close_all(self) -> None:
        """Closes all connections side by side, circuits before what they run on (libp2p's own close takes 0.1 s
        each)."""
        conns = [conn for of_peer in self.connections.values() for conn in of_peer]
        for direct in (False, True):
            async with trio.open_nursery() as nursery:
                for conn in conns:
                    if path_of(conn).direct == direct:
                        nursery.start_soon(conn.close)

    # --- dialing

    def _addresses(self, peer_id: ID) -> tuple[Multiaddr, ...]:
        addrs = list(self.book.addrs(peer_id))
        with contextlib.suppress(PeerStoreError):
            addrs += [without_peer(addr) for addr in self.peerstore.addrs(peer_id) if is_dialable(addr)]
        return kept(addrs)

    def knows(self, peer_id: ID) -> bool:
        """Whether there is a connection to this peer, or an address to dial."""
        return bool(self.live(peer_id) or self._addresses(peer_id))

    async def dial_peer(self, peer_id: ID, *, direct: bool = False) -> list[SwarmConn]:
        """Connects to a peer, if there is no connection yet: the first of its addresses that answers wins.

        With `direct`, only a direct connection will do. libp2p's own tries one address, and waits 250 ms even on
        success. It refuses to dial a peer again for 60 s after one failure.
        """
        key = (peer_id, direct)
        while not (live := self.live(peer_id, direct=direct)):
            if key in self._dialing:
                dial = self._dialing[key]
                await dial.done.wait()
                if dial.failure is not None:
                    raise SwarmException(dial.failure)
                continue
            self._dialing[key] = dial = _Dial()
            try:
                addrs = [addr for addr in self._addresses(peer_id) if not (direct and is_circuit(addr))]
                return [await self._dial_first(peer_id, addrs)]
            except SwarmException as error:
                dial.failure = str(error)
                raise
            finally:
                del self._dialing[key]
                dial.done.set()
        return live

    async def _dial_first(self, peer_id: ID, addrs: Sequence[Multiaddr]) -> SwarmConn:
        if peer_id == self.self_id:
            raise SwarmException("this is our own peer id")
        failing = self.book.failing(peer_id)
        permitted = self.book.permitted(peer_id, addrs)
        reasons = [f"{addr}: {_FOREIGN}" for addr in addrs if addr not in permitted]
        for attempts in plan(one_per_relay(permitted, failing), own_networks(), failing, trio.current_time()):
            winner = await self._race(peer_id, attempts, failing, reasons)
            if winner is not None:
                return winner
        raise SwarmException(f"cannot connect to {peer_id}: {'; '.join(reasons) or 'no address known'}")

    async def _race(
        self, peer_id: ID, attempts: Sequence[DialAttempt], failing: dict[Multiaddr, FailedAddress], reasons: list[str]
    ) -> SwarmConn | None:
        winners: list[SwarmConn] = []
        running: dict[Multiaddr, float] = {}
        idle = trio.Event()

        async def run(addr: Multiaddr) -> None:
            nonlocal idle
            try:
                if self.book.take_dial(peer_id, addr):
                    winners.append(await self._dial(addr, peer_id))
                    failing.pop(addr, None)
                    self.book.answered(peer_id, addr)
                    nursery.cancel_scope.cancel()
                else:
                    reasons.append(f"{addr}: {_OFTEN}")
            except Exception as error:  # whatever a stranger's handshake may raise
                reasons.append(f"{addr}: {reason_of(error)}")
                failing[addr] = failed(failing.get(addr), trio.current_time())
            del running[addr]
            if not running:
                idle.set()

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for attempt in attempts:
                if running:
                    with trio.move_on_at(start + attempt.after):
                        await idle.wait()
                idle = trio.Event()
                running[attempt.addr] = trio.current_time()
                nursery.start_soon(run, attempt.addr)
        if not winners:
            return None
        now = trio.current_time()
        for addr, since in running.items():  # still trying when another one won
            if now - since > DIALING.overtaken:
                failing[addr] = failed(failing.get(addr), now)
        return winners[0]

    async def _dial(self, addr: Multiaddr, peer_id: ID) -> SwarmConn:
        limit = DIALING.by_circuit if is_circuit(addr) else DIALING.directly
        with trio.move_on_after(limit):
            return await self.secure(await self._open_raw(addr, peer_id), peer_id)
        raise SwarmException(f"no answer within {limit:g} s")

    async def _open_raw(self, addr: Multiaddr, peer_id: ID) -> RawConnection:
        circuit = circuit_of(addr)
        if circuit is None:
            raw = await self._tcp.dial(addr) if ip_of(addr) is not None else await self._dial_name(addr, peer_id)
            assert isinstance(raw, Libp2pRawConnection) and isinstance(raw.stream, TrioTCPStream)
            stream = raw.stream.stream
            path = Path(direct=True, relay=None, remote_addr=remote_multiaddr(stream) or str(addr), inbound=False)
            return await connect(SocketConnection(stream, path, self.bandwidth), addr, self.limits)
        if self.circuit_dialer is None:
            raise SwarmException("this node does not use relays")
        stream = await self.circuit_dialer(circuit.relay_id, str(peer_id))
        return CircuitConnection(stream, Path(False, circuit.relay_id, str(addr), inbound=False))

    async def _dial_name(self, addr: Multiaddr, peer_id: ID) -> IRawConnection:
        """Dials the addresses that a DNS name is resolved to now, which are judged as if they had been announced."""
        reason = "the name leads to no address"
        for resolved in (await resolve_multiaddr_with_retry(addr) or [])[: DIALING.max_resolved]:
            bare = without_peer(resolved)
            if not is_dialable(bare) or ip_of(bare) is None or is_circuit(bare):
                continue
            if not self.book.is_given(addr) and not self.book.permitted(peer_id, [bare]):
                reason = _FOREIGN
                continue
            if not self.book.take_dial(peer_id, addr if self.book.is_given(addr) else bare):
                reason = _OFTEN
                continue
            try:
                return await self._tcp.dial(bare)
            except Exception as error:  # libp2p raises many kinds
                reason = reason_of(error)
        raise SwarmException(reason)

    async def probe(self, addr: Multiaddr, peer_id: ID) -> None:
        """Dials one address and closes at once: whether the peer answers there, whatever connections there are.

        Raises:
            Exception: of many kinds, if it does not; see `reason_of`.
        """
        raw = await self._open_raw(addr, peer_id)
        try:
            await self.upgrader.upgrade_security(PskConnection(raw, self._key), True, peer_id)
        finally:
            await raw.close()

    async def dial_apart(self, addr: Multiaddr, peer_id: ID) -> Muxer:
        """As `probe`, but to the end: a connection that is none of the host's yet. Raises as `probe` does."""
        raw = await self._open_raw(addr, peer_id)
        try:
            return await self._upgraded(raw, peer_id)
        except BaseException:
            await raw.close()
            raise


def path_of(conn: SwarmConn) -> Path:
    muxer = conn.muxed_conn
    assert isinstance(muxer, Muxer)
    path: Path = muxer.path
    return path
