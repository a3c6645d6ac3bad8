"""A peer's side of relaying: reservations at relays, circuits to others, circuits from others."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio
from multiaddr import Multiaddr

from ....protocols import standard_pb2 as pb
from ....protocols.circuit import (
    HOP,
    STOP,
    answer_stop,
    ask_connection,
    ask_reservation,
    receive_stop,
)
from ....protocols.delimited import DelimitedStream
from ....protocols.framing import PeerError
from ..addresses import circuit_address, dialable_among, is_circuit
from ..host import Host
from ..shares import ShareCount
from ..transport.stream_bytes import StreamBytes
from .reachability import NAT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reservation:
    """A reservation at a relay: its end (seconds since 1970), and the circuit addresses to announce, without our id."""

    relay_id: str
    expires: int
    addrs: tuple[Multiaddr, ...]


class Circuits:
    """Lets a host be reached through relays, and reach others through them. Exists as long as its host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pending = ShareCount(NAT.max_pending)
        self._asked: set[str] = set()  # relays that were asked for a reservation: no other has a peer to bring
        host.on_lost(self._asked.discard)
        host.set_circuit_dialer(self.open)
        host.set_stream_handler(STOP, self._accept)

    async def reserve(self, relay_id: str) -> Reservation:
        """Asks a relay for a reservation, or renews it; connects first if need be. It holds on that connection only.

        Raises:
            RelayRefused: with the relay's status.
            PeerError: no answer, or none that fits.
            ConnectionError: there is no direct connection, and none can be made.
        """
        await self._host.connect(relay_id, direct=True)
        raw = await self._host.open_stream(relay_id, HOP, direct=True)
        self._asked.add(relay_id)
        async with DelimitedStream(raw, relay_id) as stream:
            terms = await ask_reservation(stream, timeout=NAT.answer)
        addrs = [Multiaddr(raw.path.remote_addr)] if raw.path.remote_addr and not raw.path.inbound else []
        addrs += [addr for addr in dialable_among(terms.addrs) if not is_circuit(addr)]
        circuits = dict.fromkeys(circuit_address(addr, relay_id) for addr in addrs)
        return Reservation(relay_id, terms.expires, tuple(circuits))

    async def open(self, relay_id: str, target: str) -> StreamBytes:
        """A stream that the relay has connected to `target`; connects to the relay first if need be.

        Raises:
            ConnectionError: with the relay and what it said, or why it cannot be reached.
        """
        try:
            await self._host.connect(relay_id, direct=True)
            raw = await self._host.open_stream(relay_id, HOP, direct=True)
        except ConnectionError as error:
            raise ConnectionError(f"the relay cannot be reached: {error}") from None
        stream = DelimitedStream(raw, relay_id)
        try:
            await ask_connection(stream, target, timeout=NAT.by_relay)
        except PeerError as error:
            await stream.reset()
            raise ConnectionError(f"the relay: {error}") from None
        except BaseException:
            await stream.reset()
            raise
        return raw

    async def dial(self, relay_id: str, target: str) -> None:
        """Makes a connection to `target` through the relay, beside those that there are.

        Raises:
            ConnectionError: with the reason.
        """
        with trio.move_on_after(2 * NAT.by_relay):
            raw = await self.open(relay_id, target)
            await self._host.adopt(
                raw, peer_id=target, initiator=True, relay=relay_id, addr=_circuit_text(raw, relay_id)
            )
            return
        raise ConnectionError(f"{target} did not answer through the relay {relay_id}")

    async def _accept(self, raw: StreamBytes, relay_id: str) -> None:
        """Serves a STOP stream: a relay brings a peer."""
        origin = raw.origin
        if not self._pending.add(origin):
            await raw.reset()
            return
        try:
            await self._take(raw, relay_id)
        except (PeerError, ConnectionError) as error:
            log.debug("no circuit from %s: %s", relay_id, error)
            await raw.reset()
        finally:
            self._pending.remove(origin)

    async def _take(self, raw: StreamBytes, relay_id: str) -> None:
        stream = DelimitedStream(raw, relay_id)
        source = await receive_stop(stream, timeout=NAT.answer)
        admitted = raw.path.direct and relay_id in self._asked and source != self._host.peer_id
        await answer_stop(stream, pb.OK if admitted else pb.PERMISSION_DENIED, timeout=NAT.answer)
        if not admitted:
            await stream.close()
            return
        raw.widen()
        with trio.move_on_after(NAT.by_relay):
            addr = _circuit_text(raw, relay_id)
            await self._host.adopt(raw, peer_id=source, initiator=False, relay=relay_id, addr=addr)
            raw.grant()  # not before: the handshake is work for the relay's address
            return
        await raw.reset()


def _circuit_text(raw: StreamBytes, relay_id: str) -> str | None:
    addr = raw.path.remote_addr
    return None if addr is None else str(circuit_address(Multiaddr(addr), relay_id))
