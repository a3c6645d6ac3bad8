"""The relay: hands on bytes between peers that cannot reach each other. It sees nothing but ciphertext.

Each circuit lives no longer than its two streams. A second one between the same two peers is another circuit. A peer
that dies or stands still loses its connection within a few seconds (`yamux.py`). Its circuits and its reservation end
with that.

What it gives to others is set by the operator's options (`RelayLimits`); pure functions decide by them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass
from typing import Final

import trio
from multiaddr import Multiaddr

from ....protocols import standard_pb2 as pb
from ....protocols.circuit import (
    HOP,
    STOP,
    VOUCHER_DOMAIN,
    VOUCHER_TYPE,
    CircuitLimit,
    Status,
    Terms,
    answer_connected,
    answer_refused,
    answer_reserved,
    ask_stop,
    binary_addrs,
    receive_hop,
    voucher_payload,
)
from ....protocols.delimited import DelimitedStream
from ....protocols.framing import PeerError
from ..addresses import ip_of, is_circuit
from ..host import Host
from ..shares import may_have_more, origin_of_ip
from ..transport.bandwidth import Throttle
from ..transport.limits import LIMITS
from ..transport.stream_bytes import Connection, StreamBytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RelayPolicy:
    """How long a relay waits for those whose circuits it makes, and what it holds for them."""

    asking: float = 5.0  # seconds for a peer to say what it wants, and to read our answer
    stopping: float = 5.0  # seconds for the target's answer
    window: int = 1024 * 1024  # bytes of a circuit that we hold, each way, for a peer that does not read
    linger: float = 20.0  # seconds without a byte that a circuit lasts after one side has closed its direction
    least_to: int = 2  # circuits to one peer that an address may have as long as there are any
    farewell: float = 2.0  # seconds for the other side to take what a side said before it was lost
    addrs_room: int = 2048  # bytes of addresses in an answer, which may have 4096 in all


RELAY: Final = RelayPolicy()

HOUR: Final = 3600
MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class RelayLimits:
    """The limits of a relay.

    Nobody can take everything: one peer has one reservation and at most `circuits_per_peer` circuits of its own. Peers
    of one address (an IPv4 address, or a /56 of IPv6) have this number of reservations and circuits together. No more
    than is left for others, in all and to each peer. Where circuits have to wait for each other, each peer that dialed
    some has its turn.
    """

    reservations: int = 256  # peers with a reservation at a time
    reservations_per_address: int = 64
    reservation_seconds: int = HOUR
    circuits: int = 256  # at a time, of all peers together
    circuits_per_peer: int = 16  # at a time, that one peer has dialed
    circuits_to_peer: int = 64  # at a time, that lead to one peer
    circuits_per_address: int = 128
    circuit_seconds: int = 0  # none. With a limit, libp2p's other implementations open hardly any stream on a circuit
    circuit_bytes: int = 0  # each way, likewise
    circuit_bytes_per_second: int | None = 64 * MIB  # both ways together; None: no limit
    bytes_per_second: int | None = 128 * MIB  # of all circuits; None: no limit


@dataclass(frozen=True)
class RelayLoad:
    """What a relay carries when somebody asks: in all, and of the peer and the address that ask or are asked for."""

    reservations: int = 0
    reservations_of_address: int = 0
    circuits: int = 0
    circuits_of_address: int = 0
    circuits_of_peer: int = 0
    circuits_to_peer: int = 0
    circuits_of_address_to_peer: int = 0


def admit_reservation(load: RelayLoad, limits: RelayLimits, *, renews: bool) -> Status:
    """Whether a peer gets a reservation; who has one keeps it."""
    own = load.reservations_of_address
    free = own < limits.reservations_per_address and may_have_more(
        own, load.reservations, limits.reservations, LIMITS.least_of_address
    )
    return pb.OK if renews or free else pb.RESERVATION_REFUSED


def admit_circuit(load: RelayLoad, limits: RelayLimits) -> Status:
    """Whether a peer gets one more circuit, to a peer that has a reservation."""
    free = (
        load.circuits_of_peer < limits.circuits_per_peer
        and load.circuits_of_address < limits.circuits_per_address
        and may_have_more(load.circuits_of_address, load.circuits, limits.circuits, LIMITS.least_of_address)
        and may_have_more(
            load.circuits_of_address_to_peer, load.circuits_to_peer, limits.circuits_to_peer, RELAY.least_to
        )
    )
    return pb.OK if free else pb.RESOURCE_LIMIT_EXCEEDED


def origin_of(addr: str) -> str:
    """What counts as one address: the IPv4 address of a multiaddr, or the /56 of an IPv6 one, as one line has it."""
    return origin_of_ip(str(ip_of(Multiaddr(addr))), 56)


@dataclass(frozen=True)
class RelayStats:
    """What the relay does now, and has done since it started."""

    reservations: int
    circuits: int
    circuits_made: int
    refused: int
    bytes_relayed: int


@dataclass(frozen=True)
class _GrantedReservation:
    connection: Connection
    expires: float  # seconds since 1970
    origin: str


class _Circuit:
    """A circuit from `source` to `target`, being set up or running."""

    def __init__(self, source: str, target: str, origin: str, rate: int | None, shared: Throttle | None) -> None:
        self.source = source
        self.target = target
        self.origin = origin
        self.moved = trio.current_time()  # when the last byte came
        self.carried = 0  # bytes, both ways
        self._own = None if rate is None else Throttle(rate)
        self._shared = shared

    def may_pass(self) -> bool:
        """Whether something may go now; `spend` has to follow."""
        return (self._own is None or self._own.is_free()) and (self._shared is None or self._shared.is_free())

    def spend(self, size: int) -> None:
        for throttle in (self._own, self._shared):
            if throttle is not None:
                throttle.spend(size)

    async def turn(self, size: int) -> None:
        """Waits until `size` bytes may go, and counts them: each circuit in its own limit, each peer in the shared."""
        if self._own is not None:
            await self._own.turn(self)
            self._own.spend(size)
        if self._shared is not None:
            await self._shared.turn(self.source)
            self._shared.spend(size)


class _Direction:
    """One direction of a circuit: `sink` is its end, `left` are the bytes that it may still carry."""

    def __init__(self, circuit: _Circuit, sink: StreamBytes, left: float) -> None:
        self._circuit = circuit
        self._sink = sink
        self._left = left
        self._is_sending = False  # what was read before is still on its way

    def take(self, data: bytes) -> bool:
        size = len(data)
        if self._is_sending or size > self._left or not self._circuit.may_pass():
            return False
        try:
            taken = self._sink.write_nowait(data)
        except OSError:
            return False
        if taken:
            self._circuit.spend(size)
            self._count(size)
        return taken

    async def send(self, data: bytes) -> None:
        """
        Raises:
            OSError: the stream is broken, or the circuit has carried all that it may.
        """
        self._is_sending = True
        if len(data) > self._left:
            raise ConnectionAbortedError("the circuit has carried all that it may")
        await self._circuit.turn(len(data))
        await self._sink.write(data)
        self._count(len(data))
        self._is_sending = False

    def _count(self, size: int) -> None:
        self._left -= size
        self._circuit.carried += size
        self._circuit.moved = trio.current_time()


class RelayService:
    """Serves HOP between `start` and `stop`."""

    def __init__(self, host: Host, limits: RelayLimits) -> None:
        self._host = host
        self._limits = limits
        self._reservations: dict[str, _GrantedReservation] = {}
        self._circuits: set[_Circuit] = set()
        self._made = 0
        self._refused = 0
        self._bytes = 0  # of circuits that have ended
        self._throttle = None if limits.bytes_per_second is None else Throttle(limits.bytes_per_second)
        self.is_serving = False

    @property
    def stats(self) -> RelayStats:
        carried = self._bytes + sum(circuit.carried for circuit in self._circuits)
        return RelayStats(len(self._live()), len(self._circuits), self._made, self._refused, carried)

    def start(self) -> None:
        """From now on, peers may make reservations and connect to those who did."""
        self.is_serving = True
        self._host.set_stream_handler(HOP, self._serve)

    def stop(self) -> None:
        """Takes no more requests. The circuits that run go on."""
        self.is_serving = False
        self._host.remove_stream_handler(HOP)
        self._reservations.clear()

    async def _serve(self, raw: StreamBytes, peer_id: str) -> None:
        stream = DelimitedStream(raw, peer_id)
        try:
            request = await receive_hop(stream, timeout=RELAY.asking)
            if not raw.path.direct:
                await self._refuse(stream, pb.PERMISSION_DENIED)
            elif request.target is None:
                await self._reserve(raw, stream)
            else:
                await self._connect(raw, stream, request.target)
        except (PeerError, OSError) as error:
            log.debug("relay: %s", error)
            await raw.reset()

    async def _refuse(self, stream: DelimitedStream, status: Status) -> None:
        self._refused += 1
        await answer_refused(stream, status, timeout=RELAY.asking)
        await stream.close()

    # --- reservations

    async def _reserve(self, raw: StreamBytes, stream: DelimitedStream) -> None:
        peer_id = stream.peer_id
        status = admit_reservation(self._load(_origin(raw)), self._limits, renews=peer_id in self._live())
        if status != pb.OK:
            await self._refuse(stream, status)
            return
        connection = raw.connection
        expires = int(time.time()) + self._limits.reservation_seconds
        self._reservations[peer_id] = _GrantedReservation(connection, expires, _origin(raw))
        self._suspect_older(peer_id, connection)
        addrs = [Multiaddr(addr) for addr in self._host.addrs()]
        own = binary_addrs([addr.to_bytes() for addr in addrs if not is_circuit(addr)], RELAY.addrs_room)
        payload = voucher_payload(self._host.peer_id, peer_id, expires)
        voucher = self._host.sign_envelope(VOUCHER_DOMAIN, VOUCHER_TYPE, payload)
        terms = Terms(expires, own, voucher, self._circuit_limit())
        await answer_reserved(stream, terms, timeout=RELAY.asking)
        await stream.close()

    def _suspect_older(self, peer_id: str, connection: Connection) -> None:
        """A peer that comes anew has mostly lost what it had: its older connections have to show that they live."""
        for other in self._host.connections(peer_id):
            if other != connection:
                other.suspect()

    def _live(self) -> dict[str, _GrantedReservation]:
        now = time.time()
        held = self._reservations
        self._reservations = {
            peer_id: reservation
            for peer_id, reservation in held.items()
            if reservation.expires > now and not reservation.connection.is_lost
        }
        return self._reservations

    def _load(self, origin: str, source: str = "", target: str = "") -> RelayLoad:
        live = self._live()
        return RelayLoad(
            reservations=len(live),
            reservations_of_address=sum(reservation.origin == origin for reservation in live.values()),
            circuits=len(self._circuits),
            circuits_of_address=sum(circuit.origin == origin for circuit in self._circuits),
            circuits_of_peer=sum(circuit.source == source for circuit in self._circuits),
            circuits_to_peer=sum(circuit.target == target for circuit in self._circuits),
            circuits_of_address_to_peer=sum(
                (circuit.origin, circuit.target) == (origin, target) for circuit in self._circuits
            ),
        )

    # --- circuits

    async def _connect(self, raw: StreamBytes, stream: DelimitedStream, target: str) -> None:
        source = stream.peer_id
        held = self._live().get(target)
        if held is None or target == source:
            await self._refuse(stream, pb.NO_RESERVATION)
            return
        origin = _origin(raw)
        status = admit_circuit(self._load(origin, source, target), self._limits)
        if status != pb.OK:
            self._suspect_older(source, raw.connection)  # what it has left behind there may be what fills its limits
            await self._refuse(stream, status)
            return
        circuit = _Circuit(source, target, origin, self._limits.circuit_bytes_per_second, self._throttle)
        self._circuits.add(circuit)
        try:
            await self._run(circuit, held.connection, raw, stream)
        finally:
            self._circuits.discard(circuit)
            self._bytes += circuit.carried

    async def _run(self, circuit: _Circuit, connection: Connection, raw: StreamBytes, stream: DelimitedStream) -> None:
        onward = await self._open_stop(circuit, connection)
        if onward is None:
            connection.suspect()
            await self._refuse(stream, pb.CONNECTION_FAILED)
            return
        try:
            await answer_connected(stream, self._circuit_limit(), timeout=RELAY.asking)
            self._made += 1
            raw.grant(RELAY.window)
            await self._carry(circuit, raw, onward)
        finally:
            await onward.end()
            await raw.end()

    async def _open_stop(self, circuit: _Circuit, connection: Connection) -> StreamBytes | None:
        """A stream to the target that has accepted the circuit."""
        try:
            onward = await connection.open_stream(STOP, window=RELAY.window)
        except ConnectionError as error:
            log.debug("relay: %s is gone: %s", circuit.target, error)
            return None
        try:
            stop = DelimitedStream(onward, circuit.target)
            await ask_stop(stop, circuit.source, self._circuit_limit(), timeout=RELAY.stopping)
        except (PeerError, OSError) as error:
            log.debug("relay: %s", error)
            await onward.reset()
            return None
        except BaseException:
            await onward.reset()
            raise
        return onward

    async def _carry(self, circuit: _Circuit, here: StreamBytes, there: StreamBytes) -> None:
        """Until both directions have ended, or one is broken, or the circuit has lasted long enough."""
        with trio.move_on_after(self._limits.circuit_seconds or math.inf):
            async with trio.open_nursery() as nursery:
                ended: list[StreamBytes] = []

                async def one_way(source: StreamBytes, sink: StreamBytes) -> None:
                    with contextlib.suppress(OSError):
                        await self._pump(circuit, source, sink)
                        await sink.close_write()
                        ended.append(sink)
                        if len(ended) < 2:
                            await self._linger(circuit)
                    nursery.cancel_scope.cancel()

                async def watch(stream: StreamBytes) -> None:
                    await stream.wait_lost()
                    await trio.sleep(RELAY.farewell)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(one_way, here, there)
                nursery.start_soon(one_way, there, here)
                nursery.start_soon(watch, here)
                nursery.start_soon(watch, there)

    async def _linger(self, circuit: _Circuit) -> None:
        """Returns when nothing has come from the direction that is still open for a while."""
        while True:
            rest = circuit.moved + RELAY.linger - trio.current_time()
            if rest <= 0:
                return
            await trio.sleep(rest)

    async def _pump(self, circuit: _Circuit, source: StreamBytes, sink: StreamBytes) -> None:
        """Hands on what comes from `source` until it ends. Reads no more before the sink has taken what was read.

        What the sink takes without waiting goes on at once, in the task that reads the source's connection.

        Raises:
            OSError: one of the streams is broken, or the circuit has carried all that it may.
        """
        direction = _Direction(circuit, sink, self._limits.circuit_bytes or math.inf)
        source.divert(direction)
        while data := await source.read(RELAY.window):
            await direction.send(data)

    def _circuit_limit(self) -> CircuitLimit:
        return CircuitLimit(self._limits.circuit_seconds, self._limits.circuit_bytes)


def _origin(raw: StreamBytes) -> str:
    """Where a peer comes from, as far as one machine or line cannot easily come from elsewhere, too."""
    addr = raw.path.remote_addr
    return "" if addr is None else origin_of(addr)
