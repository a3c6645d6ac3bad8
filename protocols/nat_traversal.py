"""The standard protocols by which a peer behind NAT learns its address and is reached directly.

- identify, `/ipfs/id/1.0.0`: a peer says under which address it sees us
  (https://github.com/libp2p/specs/blob/master/identify/README.md). libp2p's host answers it; asking is here.
- AutoNAT 1, `/libp2p/autonat/1.0.0`: asks a peer to dial us back
  (https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md).
- AutoNAT 2, `/libp2p/autonat/2/dial-request` and `/dial-back`: the peer dials one address, and brings a number there
  (https://github.com/libp2p/specs/blob/master/autonat/autonat-v2.md).
- DCUtR, `/libp2p/dcutr`: two peers connected through a relay agree on when to dial each other directly
  (https://github.com/libp2p/specs/blob/master/relay/DCUtR.md). The side that accepted the relayed connection starts.

Addresses are textual multiaddrs here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import trio
from multiaddr import Multiaddr

from ..crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from . import standard_pb2 as standard
from .delimited import DelimitedStream
from .framing import ProtocolError, StreamTimeout

IDENTIFY: Final = "/ipfs/id/1.0.0"


@dataclass(frozen=True)
class TraversalLimits:
    """What messages of identify, AutoNAT and hole punching may have."""

    identify_max_message: int = 64 * 1024  # bytes
    max_listed: int = 64
    autonat_max_message: int = 8 * 1024  # bytes
    autonat_max_addrs: int = 16  # in one request
    dial_data: tuple[int, int] = (30_000, 100_000)
    """Bytes that a dial to another IP address costs who asks for it: least and most, by AutoNAT 2."""
    dial_piece: int = 4096  # of these bytes, in one message
    max_text: int = 200  # characters
    max_addr: int = 512  # bytes
    punch_max_addrs: int = 8


TRAVERSAL: Final = TraversalLimits()
AUTONAT: Final = "/libp2p/autonat/1.0.0"
DIAL_REQUEST: Final = "/libp2p/autonat/2/dial-request"
DIAL_BACK: Final = "/libp2p/autonat/2/dial-back"
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


# --- AutoNAT 2


async def ask_dial(stream: DelimitedStream, addrs: Sequence[str], nonce: int, *, timeout: float) -> DialAnswer:
    """Asks for a dial-back to the first of `addrs` that the peer will dial. Pays for that in bytes if the peer wants
    some. Waits for each answer for `timeout` seconds.

    The address of the returned answer is the one that was dialed, with success or without. That it was dialed is proven
    only by the nonce on a stream of `DIAL_BACK`.

    Raises:
        PeerError: no answer in time, none that can be read, or one that asks for too much.
    """
    request = standard.AutoNat2.DialRequest(
        addrs=[Multiaddr(addr).to_bytes() for addr in addrs[: TRAVERSAL.autonat_max_addrs]], nonce=nonce
    )
    await stream.send(standard.AutoNat2(dial_request=request), timeout=timeout)
    message = await stream.receive(standard.AutoNat2, timeout=timeout)
    if message.HasField("dial_data_request"):
        price = message.dial_data_request.num_bytes
        if price > TRAVERSAL.dial_data[1]:
            raise ProtocolError(f"{stream.peer_id} asks for {price} bytes before it dials", stream.peer_id)
        data = standard.AutoNat2.DialDataResponse(data=bytes(TRAVERSAL.dial_piece))
        for _ in range(0, price, TRAVERSAL.dial_piece):
            await stream.send(standard.AutoNat2(dial_data_response=data), timeout=timeout)
        message = await stream.receive(standard.AutoNat2, timeout=timeout)
    response = message.dial_response
    if response.status != standard.AutoNat2.ANSWERED or response.addr_idx >= len(addrs):
        return DialAnswer(DialStatus.DIAL_REFUSED)
    status = {
        standard.AutoNat2.OK: DialStatus.OK,
        standard.AutoNat2.E_DIAL_ERROR: DialStatus.DIAL_ERROR,
    }.get(response.dial_status, DialStatus.INTERNAL_ERROR)
    return DialAnswer(status, addr=addrs[response.addr_idx])


async def receive_dial_request(stream: DelimitedStream, *, timeout: float) -> tuple[tuple[str, ...], int]:
    """The addresses to choose from, empty texts for those that cannot be read, and the nonce.

    Raises:
        PeerError: no request came within `timeout` seconds.
    """
    message = await stream.receive(standard.AutoNat2, timeout=timeout)
    if not message.HasField("dial_request"):
        raise ProtocolError(f"{stream.peer_id} asks for no dial-back", stream.peer_id)
    request = message.dial_request
    addrs = map(read_addr, request.addrs[: TRAVERSAL.autonat_max_addrs])
    return tuple("" if addr is None else str(addr) for addr in addrs), request.nonce


async def demand_bytes(stream: DelimitedStream, index: int, size: int, *, timeout: float) -> None:
    """Has the peer send `size` bytes before one of its addresses is dialed: nobody then gains by having others dialed.

    Raises:
        PeerError: they did not come within `timeout` seconds.
    """
    demand = standard.AutoNat2.DialDataRequest(addr_idx=index, num_bytes=size)
    await stream.send(standard.AutoNat2(dial_data_request=demand), timeout=timeout)
    with trio.move_on_after(timeout):
        while size > 0:
            message = await stream.receive(standard.AutoNat2, timeout=timeout)
            if not message.dial_data_response.data:
                raise ProtocolError(f"{stream.peer_id} sent none of the bytes that its dial costs", stream.peer_id)
            size -= len(message.dial_data_response.data)
        return
    raise StreamTimeout(f"{stream.peer_id} did not send what its dial costs within {timeout:g} s", stream.peer_id)


async def bring_nonce(stream: DelimitedStream, nonce: int, *, timeout: float) -> None:
    """Says the nonce at the address that was dialed.

    Raises:
        PeerError: the peer did not say within `timeout` seconds that it has it.
    """
    await stream.send(standard.AutoNat2.DialBack(nonce=nonce), timeout=timeout)
    await stream.receive(standard.AutoNat2.DialBackResponse, timeout=timeout)


async def take_nonce(stream: DelimitedStream, awaited: Container[int], *, timeout: float) -> int:
    """The nonce that a peer brings, one of `awaited`.

    Raises:
        PeerError: none of them came within `timeout` seconds.
    """
    nonce = (await stream.receive(standard.AutoNat2.DialBack, timeout=timeout)).nonce
    if nonce not in awaited:
        raise ProtocolError(f"{stream.peer_id} brings a number that nobody waits for", stream.peer_id)
    await stream.send(standard.AutoNat2.DialBackResponse(status=0), timeout=timeout)
    return nonce


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
