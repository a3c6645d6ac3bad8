"""Circuits through relays: the two protocols of https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md.

A peer behind NAT reserves a place at a relay (HOP, RESERVE). Whoever wants to reach it asks that relay (HOP, CONNECT),
which asks the peer (STOP, CONNECT). Then the two streams carry what the two peers say to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ..crypto.identity import any_peer_id_from_bytes, any_peer_id_to_bytes
from . import standard_pb2 as pb
from .delimited import DelimitedStream
from .framing import PeerError, ProtocolError

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
VOUCHER_DOMAIN: Final = "libp2p-relay-rsvp"
VOUCHER_TYPE: Final = b"\x03\x02"
_MAX_ADDRS: Final = 32  # of a relay in its answer

Status: TypeAlias = pb.RelayStatus.ValueType
_WORDS: Final[dict[Status, str]] = {
    pb.RESERVATION_REFUSED: "it has no place left",
    pb.RESOURCE_LIMIT_EXCEEDED: "it carries as much as it allows",
    pb.PERMISSION_DENIED: "it does not allow it",
    pb.CONNECTION_FAILED: "it cannot reach the peer",
    pb.NO_RESERVATION: "the peer has no reservation there",
    pb.MALFORMED_MESSAGE: "it did not understand the message",
    pb.UNEXPECTED_MESSAGE: "it did not expect the message",
}


class RelayRefused(PeerError):
    """The relay, or the peer behind it, said no; `status` is a `Status`."""

    def __init__(self, status: Status, peer_id: str) -> None:
        super().__init__(f"{peer_id} refused: {_WORDS.get(status, f'status {status}')}", peer_id)
        self.status = status


@dataclass(frozen=True)
class CircuitLimit:
    """What a circuit may carry: `seconds` in all, `data` bytes each way; 0 is without limit."""

    seconds: int = 0
    data: int = 0


@dataclass(frozen=True)
class Terms:
    """A reservation as the relay grants it: until when (seconds since 1970), the relay's multiaddrs (binary, mostly
    with /p2p), its voucher, and what a circuit carries."""

    expires: int
    addrs: tuple[bytes, ...]
    voucher: bytes
    limit: CircuitLimit


@dataclass(frozen=True)
class HopRequest:
    """What a peer asks of a relay: to reach `target`, or, if that is None, a reservation."""

    target: str | None


# --- the peers' side


async def ask_reservation(stream: DelimitedStream, *, timeout: float) -> Terms:
    """Asks for a reservation, or to renew it.

    Raises:
        RelayRefused: with the relay's status.
        PeerError: no answer within `timeout` seconds, or none that fits; the stream is of no use any more.
    """
    await stream.send(pb.HopMessage(type=pb.HopMessage.RESERVE), timeout=timeout)
    answer = await _hop_status(stream, timeout)
    granted = answer.reservation
    if not granted.HasField("expire"):
        raise await _violation(stream, "a reservation without an end")
    return Terms(granted.expire, tuple(granted.addrs[:_MAX_ADDRS]), granted.voucher, _limit(answer.limit))


async def ask_connection(stream: DelimitedStream, target: str, *, timeout: float) -> CircuitLimit:
    """Asks to be connected to `target`. From then on the bytes of the stream go there, and come from there.

    Raises:
        RelayRefused: with the relay's status.
        PeerError: no answer within `timeout` seconds, or none that fits; the stream is of no use any more.
    """
    peer = pb.RelayPeer(id=any_peer_id_to_bytes(target))
    await stream.send(pb.HopMessage(type=pb.HopMessage.CONNECT, peer=peer), timeout=timeout)
    return _limit((await _hop_status(stream, timeout)).limit)


async def receive_stop(stream: DelimitedStream, *, timeout: float) -> str:
    """The id of the peer that a relay wants to connect to us; `answer_stop` has to follow.

    Raises:
        PeerError: no request within `timeout` seconds, or none that fits.
    """
    message = await stream.receive(pb.StopMessage, timeout=timeout)
    if message.type != pb.StopMessage.CONNECT or not message.HasField("type"):
        await answer_stop(stream, pb.UNEXPECTED_MESSAGE, timeout=timeout)
        raise await _violation(stream, "an answer where a request was expected")
    try:
        return any_peer_id_from_bytes(message.peer.id)
    except ValueError:
        await answer_stop(stream, pb.MALFORMED_MESSAGE, timeout=timeout)
        raise await _violation(stream, "a peer id that is none") from None


async def answer_stop(stream: DelimitedStream, status: Status, *, timeout: float) -> None:
    """Raises PeerError as `DelimitedStream.send`."""
    await stream.send(pb.StopMessage(type=pb.StopMessage.STATUS, status=status), timeout=timeout)


# --- the relay's side


async def receive_hop(stream: DelimitedStream, *, timeout: float) -> HopRequest:
    """What the peer asks for; one of the answers has to follow.

    Raises:
        PeerError: no request within `timeout` seconds, or none that fits.
    """
    message = await stream.receive(pb.HopMessage, timeout=timeout)
    if message.type == pb.HopMessage.RESERVE and message.HasField("type"):
        return HopRequest(None)
    if message.type != pb.HopMessage.CONNECT:
        await answer_refused(stream, pb.UNEXPECTED_MESSAGE, timeout=timeout)
        raise await _violation(stream, "an answer where a request was expected")
    try:
        return HopRequest(any_peer_id_from_bytes(message.peer.id))
    except ValueError:
        await answer_refused(stream, pb.MALFORMED_MESSAGE, timeout=timeout)
        raise await _violation(stream, "a peer id that is none") from None


async def answer_reserved(stream: DelimitedStream, terms: Terms, *, timeout: float) -> None:
    """Raises PeerError as `DelimitedStream.send`."""
    granted = pb.RelayReservation(expire=terms.expires, addrs=terms.addrs, voucher=terms.voucher)
    answer = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, reservation=granted, limit=_to_wire(terms.limit))
    await stream.send(answer, timeout=timeout)


async def answer_connected(stream: DelimitedStream, limit: CircuitLimit, *, timeout: float) -> None:
    """Raises PeerError as `DelimitedStream.send`."""
    answer = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, limit=_to_wire(limit))
    await stream.send(answer, timeout=timeout)


async def answer_refused(stream: DelimitedStream, status: Status, *, timeout: float) -> None:
    """Raises PeerError as `DelimitedStream.send`."""
    await stream.send(pb.HopMessage(type=pb.HopMessage.STATUS, status=status), timeout=timeout)


async def ask_stop(stream: DelimitedStream, source: str, limit: CircuitLimit, *, timeout: float) -> None:
    """Asks the target whether it accepts a circuit from `source`.

    Raises:
        RelayRefused: with the target's status.
        PeerError: no answer within `timeout` seconds, or none that fits.
    """
    peer = pb.RelayPeer(id=any_peer_id_to_bytes(source))
    message = pb.StopMessage(type=pb.StopMessage.CONNECT, peer=peer, limit=_to_wire(limit))
    await stream.send(message, timeout=timeout)
    answer = await stream.receive(pb.StopMessage, timeout=timeout)
    if answer.type != pb.StopMessage.STATUS:
        raise await _violation(stream, "a request where an answer was expected")
    if answer.status != pb.OK:
        raise RelayRefused(answer.status, stream.peer_id)


def voucher_payload(relay: str, peer: str, expires: int) -> bytes:
    """What a relay signs for the peer that has a reservation until `expires` (seconds since 1970)."""
    voucher = pb.RelayVoucher(relay=any_peer_id_to_bytes(relay), peer=any_peer_id_to_bytes(peer), expiration=expires)
    return voucher.SerializeToString(deterministic=True)


async def _hop_status(stream: DelimitedStream, timeout: float) -> pb.HopMessage:
    answer = await stream.receive(pb.HopMessage, timeout=timeout)
    if answer.type != pb.HopMessage.STATUS:
        raise await _violation(stream, "a request where an answer was expected")
    if answer.status != pb.OK:
        raise RelayRefused(answer.status, stream.peer_id)
    return answer


async def _violation(stream: DelimitedStream, what: str) -> ProtocolError:
    await stream.close()
    return ProtocolError(f"{stream.peer_id} sent {what}", stream.peer_id)


def _limit(limit: pb.RelayLimit) -> CircuitLimit:
    return CircuitLimit(limit.duration, limit.data)


def _to_wire(limit: CircuitLimit) -> pb.RelayLimit | None:
    """Without any limit there is no such field, by which others tell circuits that are limited."""
    return pb.RelayLimit(duration=limit.seconds, data=limit.data) if limit.seconds or limit.data else None


def binary_addrs(addrs: Sequence[bytes], room: int) -> tuple[bytes, ...]:
    """As many of the addresses, from the first on, as fit into `room` bytes."""
    kept: list[bytes] = []
    for addr in addrs[:_MAX_ADDRS]:
        room -= len(addr) + 4
        if room < 0:
            break
        kept.append(addr)
    return tuple(kept)
