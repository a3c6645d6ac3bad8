"""AutoNAT both ways, and identify: dials peers back that ask for it; asks single peers about this node's addresses."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio
from multiaddr import Multiaddr

from ....protocols.delimited import DelimitedStream
from ....protocols.framing import PeerError
from ....protocols.nat_traversal import (
    AUTONAT,
    AUTONAT_MAX_MESSAGE,
    IDENTIFY,
    IDENTIFY_MAX_MESSAGE,
    DialAnswer,
    DialStatus,
    answer_dial_back,
    ask_dial_back,
    ask_identify,
)
from ..addresses import Endpoint, IPAddress
from ..host import Host
from ..transport.stream_bytes import StreamBytes

log = logging.getLogger(__name__)

_DIALING: Final = 5.0  # seconds that we try to reach a peer, all its addresses side by side
_REQUEST: Final = 5.0  # seconds for the request to come
_MAX_DIALED: Final = 8  # addresses in one dial-back
_PERIOD: Final = 60.0  # seconds, in which there are at most so many dial-backs:
_PER_HOST: Final = 6  # to one IP address
_IN_ALL: Final = 60
_AT_ONCE: Final = 8


class Budget:
    """Keeps dial-backs few: without it, we would be a tool to flood others with."""

    def __init__(self) -> None:
        self._spent: deque[tuple[float, IPAddress]] = deque()
        self._running = 0

    def take(self, ip: IPAddress, now: float) -> bool:
        """Whether one more dial-back to `ip` may start at `now` (seconds). `give_back` when it has ended."""
        while self._spent and now - self._spent[0][0] >= _PERIOD:
            self._spent.popleft()
        to_host = sum(spent == ip for _, spent in self._spent)
        if to_host >= _PER_HOST or len(self._spent) >= _IN_ALL or self._running >= _AT_ONCE:
            return False
        self._spent.append((now, ip))
        self._running += 1
        return True

    def give_back(self) -> None:
        self._running -= 1


class DialBackService:
    """Dials peers back that ask for it, only at the IP address that they come from."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._budget = Budget()
        host.set_stream_handler(AUTONAT, self._serve)

    async def _serve(self, raw: StreamBytes, peer_id: str) -> None:
        stream = DelimitedStream(raw, peer_id, max_message=AUTONAT_MAX_MESSAGE)

        async def decide(asked_for: str, addrs: tuple[str, ...]) -> DialAnswer:
            if asked_for != peer_id:
                return DialAnswer(DialStatus.BAD_REQUEST, "a peer asks for itself only")
            return await self._dial_back(raw, peer_id, addrs)

        try:
            await answer_dial_back(stream, decide, timeout=_REQUEST)
        except PeerError as error:
            log.debug("no dial-back: %s", error)
            await stream.reset()
        else:
            await stream.close()

    async def _dial_back(self, raw: StreamBytes, peer_id: str, addrs: tuple[str, ...]) -> DialAnswer:
        observed = Endpoint.parse(raw.path.remote_addr or "") if raw.path.direct else None
        if observed is None:
            return DialAnswer(DialStatus.DIAL_REFUSED, "through a relay nobody can tell where a peer is")
        asked = dict.fromkeys(Endpoint.parse(addr) for addr in addrs)
        wanted = [endpoint for endpoint in asked if endpoint and endpoint.can_be_dialed]
        allowed = [endpoint for endpoint in wanted if endpoint.ip == observed.ip][:_MAX_DIALED]
        if not allowed:
            return DialAnswer(DialStatus.DIAL_REFUSED, f"none of the addresses is at {observed.ip}, where you are")
        if not self._budget.take(observed.ip, trio.current_time()):
            return DialAnswer(DialStatus.DIAL_REFUSED, "busy; ask again later")
        try:
            targets = [Multiaddr(endpoint.multiaddr) for endpoint in allowed]
            return DialAnswer(DialStatus.OK, addr=await self._host.dial_fresh(peer_id, targets, timeout=_DIALING))
        except ConnectionError as error:
            return DialAnswer(DialStatus.DIAL_ERROR, str(error))
        finally:
            self._budget.give_back()


# --- the asking side


_DIAL_BACK: Final = 12.0  # seconds, more than any peer tries

T = TypeVar("T")


async def observed_by(host: Host, peer_id: str, *, timeout: float) -> Endpoint | None:
    """Where a directly connected peer sees us come from; None if it does not say.

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
