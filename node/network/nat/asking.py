"""What we ask single peers about ourselves: where they see us, and to dial us back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from ....protocols.delimited import DelimitedStream
from ....protocols.nat_traversal import (
    AUTONAT,
    AUTONAT_MAX_MESSAGE,
    IDENTIFY,
    IDENTIFY_MAX_MESSAGE,
    DialAnswer,
    ask_dial_back,
    ask_identify,
)
from ..host import Host
from .endpoint import Endpoint

_DIAL_BACK: Final = 12.0  # seconds, more than any peer tries

T = TypeVar("T")


async def observed_by(host: Host, peer_id: str, *, timeout: float) -> Endpoint | None:
    """Where a directly connected peer sees us come from; None if it does not tell.

    Raises:
        PeerError: no answer in time.
        ConnectionError: there is no direct connection.
    """

    async def ask(stream: DelimitedStream) -> Endpoint | None:
        return Endpoint.parse((await ask_identify(stream, timeout=timeout)).observed or "")

    return await _on_stream(host, peer_id, IDENTIFY, IDENTIFY_MAX_MESSAGE, ask)


async def addrs_of(host: Host, peer_id: str, *, timeout: float) -> tuple[str, ...]:
    """The multiaddrs on which a connected peer says that it listens.

    Raises:
        PeerError: no answer in time.
        ConnectionError: there is no connection.
    """

    async def ask(stream: DelimitedStream) -> tuple[str, ...]:
        return (await ask_identify(stream, timeout=timeout)).addrs

    return await _on_stream(host, peer_id, IDENTIFY, IDENTIFY_MAX_MESSAGE, ask, direct=False)


async def request_dial_back(host: Host, peer_id: str, endpoints: tuple[Endpoint, ...]) -> DialAnswer:
    """Asks a directly connected peer to dial us at these endpoints.

    Raises:
        PeerError: no answer in time, or the peer does not speak AutoNAT.
        ConnectionError: there is no direct connection.
    """

    async def ask(stream: DelimitedStream) -> DialAnswer:
        addrs = [endpoint.multiaddr for endpoint in endpoints]
        return await ask_dial_back(stream, host.peer_id, addrs, timeout=_DIAL_BACK)

    return await _on_stream(host, peer_id, AUTONAT, AUTONAT_MAX_MESSAGE, ask)


async def _on_stream(
    host: Host,
    peer_id: str,
    protocol: str,
    max_message: int,
    ask: Callable[[DelimitedStream], Awaitable[T]],
    *,
    direct: bool = True,
) -> T:
    raw = await host.open_stream(peer_id, protocol, direct=direct)
    stream = DelimitedStream(raw, peer_id, max_message=max_message)
    try:
        answer = await ask(stream)
    except BaseException:
        await stream.reset()
        raise
    await stream.close()
    return answer
