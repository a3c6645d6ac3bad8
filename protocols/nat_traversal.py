"""The three standard protocols by which a peer behind NAT learns its address and is reached directly.

- identify, `/ipfs/id/1.0.0`: a peer says under which address it sees us
  (https://github.com/libp2p/specs/blob/master/identify/README.md). libp2p's host answers it; asking is here.
- AutoNAT 1, `/libp2p/autonat/1.0.0`: asks a peer to dial us back
  (https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md).
- DCUtR, `/libp2p/dcutr`: two peers connected through a relay agree on when to dial each other directly
  (https://github.com/libp2p/specs/blob/master/relay/DCUtR.md). The side that accepted the relayed connection starts.

Addresses are textual multiaddrs here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import trio
from multiaddr import Multiaddr

from ..crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from . import standard_pb2 as standard
from .delimited import DelimitedStream
from .framing import ProtocolError

IDENTIFY: Final = "/ipfs/id/1.0.0"


@dataclass(frozen=True)
class TraversalLimits:
    """What messages of identify, AutoNAT and hole punching may have."""

    identify_max_message: int = 64 * 1024  # bytes
    max_listed: int = 64
    autonat_max_message: int = 8 * 1024  # bytes
    autonat_max_addrs: int = 16  # in one request
    max_text: int = 200  # characters
    max_addr: int = 512  # bytes
    punch_max_addrs: int = 8


TRAVERSAL: Final = TraversalLimits()
AUTONAT: Final = "/libp2p/autonat/1.0.0"
PUNCH: Final = "/libp2p/dcutr"


# --- identify


@dataclass(frozen=True)
class Identified:
    """`observed` is the textual multiaddr from which the peer sees us come; `addrs` those it listens on."""

    observed: str | None
    addrs: tuple[str, ...]
    protocols: tuple[str, ...]


async def ask_identify(stream: DelimitedStream, *, timeout: float) -> Identified:
    """What the peer says. Nothing is sent: the protocol starts with its answer.

    Raises:
        PeerError: no answer within `timeout` seconds, or none that can be read.
    """
    message = await stream.receive(standard.Identify, timeout=timeout)
    observed = readable_addrs([message.observed_addr]) if message.observed_addr else ()
    return Identified(
        observed=observed[0] if observed else None,
        addrs=readable_addrs(message.listen_addrs[: TRAVERSAL.max_listed]),
        protocols=tuple(map(_text, message.protocols[: TRAVERSAL.max_listed])),
    )


# --- AutoNAT


class DialStatus(IntEnum):
    """How a dial-back ended."""

    OK = standard.AutoNat.OK
    DIAL_ERROR = standard.AutoNat.E_DIAL_ERROR  # it was tried, and failed
    DIAL_REFUSED = standard.AutoNat.E_DIAL_REFUSED  # it was not tried
    BAD_REQUEST = standard.AutoNat.E_BAD_REQUEST
    INTERNAL_ERROR = standard.AutoNat.E_INTERNAL_ERROR


@dataclass(frozen=True)
class DialAnswer:
    """What the peer that was asked says. `addr` is the address that worked."""

    status: DialStatus
    text: str = ""
    addr: str | None = None


Decide = Callable[[str, tuple[str, ...]], Awaitable[DialAnswer]]


async def ask_dial_back(
    stream: DelimitedStream, own_peer_id: str, addrs: Sequence[str], *, timeout: float
) -> DialAnswer:
    """Asks for a dial-back to any of `addrs`. Waits for it for `timeout` seconds.

    Raises:
        PeerError: no answer in time, or none that can be read.
    """
    dial = standard.AutoNat.Dial(
        peer=standard.AutoNat.PeerInfo(
            id=peer_id_to_bytes(own_peer_id),
            addrs=[Multiaddr(addr).to_bytes() for addr in addrs[: TRAVERSAL.autonat_max_addrs]],
        )
    )
    await stream.send(standard.AutoNat(type=standard.AutoNat.DIAL, dial=dial), timeout=timeout)
    message = await stream.receive(standard.AutoNat, timeout=timeout)
    response = message.dial_response
    if message.type != standard.AutoNat.DIAL_RESPONSE or not response.HasField("status"):
        return DialAnswer(DialStatus.INTERNAL_ERROR, "the answer says nothing")
    reached = readable_addrs([response.addr]) if response.addr else ()
    text = "".join(char for char in _text(response.status_text)[: TRAVERSAL.max_text] if char.isprintable())
    return DialAnswer(DialStatus(response.status), text, reached[0] if reached else None)


async def answer_dial_back(stream: DelimitedStream, decide: Decide, *, timeout: float) -> None:
    """Answers one request with what `decide(peer_id, addrs)` says; it sees only addresses that can be read.

    Raises:
        PeerError: no request came within `timeout` seconds, or the peer did not take the answer.
    """
    request = await stream.receive(standard.AutoNat, timeout=timeout)
    answer = DialAnswer(DialStatus.BAD_REQUEST, "this is no request for a dial-back")
    if request.type == standard.AutoNat.DIAL and request.dial.HasField("peer"):
        try:
            peer_id = peer_id_from_bytes(request.dial.peer.id)
        except ValueError:
            pass
        else:
            answer = await decide(peer_id, readable_addrs(request.dial.peer.addrs[: TRAVERSAL.autonat_max_addrs]))
    response = standard.AutoNat.DialResponse(
        status=standard.AutoNat.ResponseStatus.ValueType(answer.status), status_text=answer.text[: TRAVERSAL.max_text]
    )
    if answer.addr is not None:
        response.addr = Multiaddr(answer.addr).to_bytes()
    message = standard.AutoNat(type=standard.AutoNat.DIAL_RESPONSE, dial_response=response)
    await stream.send(message, timeout=timeout)


def _text(value: str | bytes) -> str:
    """A text of a standard's message, which is bytes where a stranger's is no UTF-8: proto2 lets it through."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def read_addr(data: bytes) -> Multiaddr | None:
    """The multiaddr in a stranger's bytes, at which the library does not look before it is used.

    None if a part of it cannot be read, or it is longer than anybody's."""
    if len(data) > TRAVERSAL.max_addr:  # base58 takes quadratic time
        return None
    try:
        addr = Multiaddr(str(Multiaddr(data)))
        list(addr.items())  # the library writes some texts as bytes that it cannot read
    except Exception:  # of many kinds
        return None
    return addr


def readable_addrs(addrs: Iterable[bytes]) -> tuple[str, ...]:
    """The multiaddrs among these bytes, as texts; what cannot be read is left out."""
    return tuple(str(addr) for addr in map(read_addr, addrs) if addr is not None)


# --- DCUtR


async def exchange_first(
    stream: DelimitedStream, addrs: Sequence[str], *, timeout: float
) -> tuple[tuple[str, ...], float]:
    """The starting side: sends its addresses; returns the other's, and the seconds of the round trip.

    Raises:
        PeerError: no answer within `timeout` seconds, or another one.
    """
    sent = trio.current_time()
    await stream.send(_connect(addrs), timeout=timeout)
    theirs = await _receive_connect(stream, timeout)
    return theirs, trio.current_time() - sent


async def give_sign(stream: DelimitedStream, *, timeout: float) -> None:
    """The starting side: signals the other one to dial now. To dial itself half a round trip later is up to the caller.

    Raises:
        PeerError: the peer did not take it.
    """
    await stream.send(standard.HolePunch(type=standard.HolePunch.SYNC), timeout=timeout)


async def exchange_second(stream: DelimitedStream, addrs: Sequence[str], *, timeout: float) -> tuple[str, ...]:
    """The other side: returns the starter's addresses when it has given the sign to dial.

    Raises:
        PeerError: the messages did not come within `timeout` seconds each, or others.
    """
    theirs = await _receive_connect(stream, timeout)
    await stream.send(_connect(addrs), timeout=timeout)
    sign = await stream.receive(standard.HolePunch, timeout=timeout)
    if sign.type != standard.HolePunch.SYNC:
        raise ProtocolError(f"{stream.peer_id} gave no sign to dial", stream.peer_id)
    return theirs


def _connect(addrs: Sequence[str]) -> standard.HolePunch:
    observed = [Multiaddr(addr).to_bytes() for addr in addrs[: TRAVERSAL.punch_max_addrs]]
    return standard.HolePunch(type=standard.HolePunch.CONNECT, observed_addrs=observed)


async def _receive_connect(stream: DelimitedStream, timeout: float) -> tuple[str, ...]:
    message = await stream.receive(standard.HolePunch, timeout=timeout)
    if message.type != standard.HolePunch.CONNECT or not message.HasField("type"):
        raise ProtocolError(f"{stream.peer_id} sent no addresses to dial", stream.peer_id)
    return readable_addrs(message.observed_addrs[: TRAVERSAL.punch_max_addrs])
