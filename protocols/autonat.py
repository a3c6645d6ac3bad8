"""/libp2p/autonat/1.0.0: asks a peer to dial us back, so that we learn whether others reach us.

Version 1 of https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md. Addresses are textual multiaddrs here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from multiaddr import Multiaddr

from ..crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from . import standard_pb2 as standard
from .delimited import DelimitedStream

AUTONAT: Final = "/libp2p/autonat/1.0.0"
MAX_MESSAGE: Final = 8 * 1024  # bytes
MAX_ADDRS: Final = 16  # in one request
_MAX_TEXT: Final = 200  # characters


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
            id=peer_id_to_bytes(own_peer_id), addrs=[Multiaddr(addr).to_bytes() for addr in addrs[:MAX_ADDRS]]
        )
    )
    await stream.send(standard.AutoNat(type=standard.AutoNat.DIAL, dial=dial), timeout=timeout)
    message = await stream.receive(standard.AutoNat, timeout=timeout)
    response = message.dial_response
    if message.type != standard.AutoNat.DIAL_RESPONSE or not response.HasField("status"):
        return DialAnswer(DialStatus.INTERNAL_ERROR, "the answer says nothing")
    reached = readable_addrs([response.addr]) if response.addr else ()
    text = "".join(char for char in response.status_text[:_MAX_TEXT] if char.isprintable())
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
            answer = await decide(peer_id, readable_addrs(request.dial.peer.addrs[:MAX_ADDRS]))
    response = standard.AutoNat.DialResponse(
        status=standard.AutoNat.ResponseStatus.ValueType(answer.status), status_text=answer.text[:_MAX_TEXT]
    )
    if answer.addr is not None:
        response.addr = Multiaddr(answer.addr).to_bytes()
    message = standard.AutoNat(type=standard.AutoNat.DIAL_RESPONSE, dial_response=response)
    await stream.send(message, timeout=timeout)


def readable_addrs(addrs: Iterable[bytes]) -> tuple[str, ...]:
    """The multiaddrs among these bytes, as texts."""
    found = []
    for addr in addrs:
        try:
            found.append(str(Multiaddr(addr)))
        except Exception:  # the library raises many kinds for a stranger's bytes
            continue
    return tuple(found)
