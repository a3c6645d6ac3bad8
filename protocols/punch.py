"""/libp2p/dcutr: two peers that talk through a relay agree on when to dial each other directly.

https://github.com/libp2p/specs/blob/master/relay/DCUtR.md. The side that accepted the relayed connection starts.
Addresses are textual multiaddrs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio
from multiaddr import Multiaddr

from . import standard_pb2 as standard
from .autonat import readable_addrs
from .delimited import DelimitedStream
from .framing import ProtocolError

PUNCH: Final = "/libp2p/dcutr"
MAX_ADDRS: Final = 8


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
    """The starting side: tells the other one to dial now; to dial itself half a round trip later is up to the caller.

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
    observed = [Multiaddr(addr).to_bytes() for addr in addrs[:MAX_ADDRS]]
    return standard.HolePunch(type=standard.HolePunch.CONNECT, observed_addrs=observed)


async def _receive_connect(stream: DelimitedStream, timeout: float) -> tuple[str, ...]:
    message = await stream.receive(standard.HolePunch, timeout=timeout)
    if message.type != standard.HolePunch.CONNECT or not message.HasField("type"):
        raise ProtocolError(f"{stream.peer_id} sent no addresses to dial", stream.peer_id)
    return readable_addrs(message.observed_addrs[:MAX_ADDRS])
