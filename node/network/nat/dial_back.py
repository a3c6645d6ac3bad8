"""Dials peers back that ask for it, by AutoNAT 1 and 2, so that they learn whether others reach them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from multiaddr import Multiaddr

from ....protocols import standard_pb2 as standard
from ....protocols.delimited import DelimitedStream
from ....protocols.framing import PeerError
from ....protocols.nat_traversal import (
    AUTONAT,
    DIAL_BACK,
    DIAL_REQUEST,
    TRAVERSAL,
    DialAnswer,
    DialStatus,
    answer_dial_back,
    bring_nonce,
    demand_bytes,
    receive_dial_request,
)
from ..addresses import Endpoint, IPAddress, own_networks
from ..host import Host
from ..shares import ShareCount, origin_of_ip
from ..transport.negotiation import reason_of
from ..transport.stream_bytes import StreamBytes

log = logging.getLogger(__name__)
_Answer = standard.AutoNat2.DialResponse


@dataclass(frozen=True)
class DialBackPolicy:
    """How many peers are dialed back, and how long an own request may take."""

    dialing: float = 5.0  # seconds that we try to reach a peer, all its addresses side by side
    request: float = 5.0  # seconds for the request to come, and for what it costs
    max_dialed: int = 8  # addresses in one dial-back
    period: float = 60.0  # seconds, in which these are the most dial-backs:
    per_host: int = 6  # to one IP address, or one /64 of IPv6, and for one
    in_all: int = 60
    at_once: int = 16
    at_once_of_host: int = 2
    dial_back: float = 12.0  # seconds, more than any peer tries


DIALS: Final = DialBackPolicy()


class Budget:
    """Keeps dial-backs few: without it, we would be a tool to flood others with."""

    def __init__(self) -> None:
        self._lately = ShareCount(DIALS.in_all, DIALS.per_host, seconds=DIALS.period)
        self._running = ShareCount(DIALS.at_once, DIALS.at_once_of_host)

    def take(self, *ips: IPAddress, now: float) -> bool:
        """Whether one more dial-back may start at `now` (seconds). `ips` are where it goes, and who asks for it if that
        is somewhere else. `give_back` when it has ended."""
        origins = sorted({origin_of_ip(str(ip)) for ip in ips})
        if not all(self._running.has_room(origin, DIALS.at_once_of_host) for origin in origins):
            return False
        return self._lately.add(*origins, most=DIALS.per_host, now=now) and self._running.add(*origins)

    def give_back(self, *ips: IPAddress) -> None:
        self._running.remove(*(origin_of_ip(str(ip)) for ip in ips))


class DialBackService:
    """Dials peers back that ask for it.

    By AutoNAT 1 only at the IP address that they come from; by AutoNAT 2 also at another public one, for a price.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._budget = Budget()
        host.set_stream_handler(AUTONAT, self._serve)
        host.set_stream_handler(DIAL_REQUEST, self._serve_request)

    async def _serve(self, raw: StreamBytes, peer_id: str) -> None:
        async def decide(asked_for: str, addrs: tuple[str, ...]) -> DialAnswer:
            if asked_for != peer_id:
                return DialAnswer(DialStatus.BAD_REQUEST, "a peer asks for itself only")
            return await self._dial_back(raw, peer_id, addrs)

        try:
            async with DelimitedStream(raw, peer_id, max_message=TRAVERSAL.autonat_max_message) as stream:
                await answer_dial_back(stream, decide, timeout=DIALS.request)
        except PeerError as error:
            log.debug("no dial-back: %s", error)

    async def _dial_back(self, raw: StreamBytes, peer_id: str, addrs: tuple[str, ...]) -> DialAnswer:
        observed = raw.path.endpoint
        if observed is None:
            return DialAnswer(DialStatus.DIAL_REFUSED, "through a relay nobody can tell where a peer is")
        asked = dict.fromkeys(Endpoint.parse(addr) for addr in addrs)
        wanted = [endpoint for endpoint in asked if endpoint and endpoint.can_be_dialed]
        allowed = [endpoint for endpoint in wanted if endpoint.ip == observed.ip][: DIALS.max_dialed]
        if not allowed:
            return DialAnswer(DialStatus.DIAL_REFUSED, f"none of the addresses is at {observed.ip}, where you are")
        if not self._budget.take(observed.ip, now=trio.current_time()):
            return DialAnswer(DialStatus.DIAL_REFUSED, "busy; ask again later")
        try:
            targets = [Multiaddr(endpoint.multiaddr) for endpoint in allowed]
            return DialAnswer(DialStatus.OK, addr=await self._host.dial_fresh(peer_id, targets, timeout=DIALS.dialing))
        except ConnectionError as error:
            return DialAnswer(DialStatus.DIAL_ERROR, str(error))
        finally:
            self._budget.give_back(observed.ip)

    # --- AutoNAT 2

    async def _serve_request(self, raw: StreamBytes, peer_id: str) -> None:
        try:
            async with DelimitedStream(raw, peer_id, max_message=TRAVERSAL.autonat_max_message) as stream:
                addrs, nonce = await receive_dial_request(stream, timeout=DIALS.request)
                answer = await self._dial_one(stream, raw.path.endpoint, addrs, nonce)
                await stream.send(standard.AutoNat2(dial_response=answer), timeout=DIALS.request)
        except PeerError as error:
            log.debug("no dial-back: %s", error)

    async def _dial_one(
        self, stream: DelimitedStream, observed: Endpoint | None, addrs: Sequence[str], nonce: int
    ) -> _Answer:
        """Dials the first address that may be dialed; who is seen elsewhere pays for that."""
        chosen = [
            (index, endpoint)
            for index, endpoint in enumerate(map(Endpoint.parse, addrs))
            if observed is not None and endpoint is not None and may_be_dialed(endpoint, observed)
        ]
        if observed is None or not chosen:
            return _Answer(status=standard.AutoNat2.E_DIAL_REFUSED)
        index, endpoint = chosen[0]
        ips = {endpoint.ip, observed.ip}
        if not self._budget.take(*ips, now=trio.current_time()):
            return _Answer(status=standard.AutoNat2.E_REQUEST_REJECTED)
        try:
            if endpoint.ip != observed.ip:
                least, most = TRAVERSAL.dial_data
                price = least + secrets.randbelow(most - least)
                await demand_bytes(stream, index, price, timeout=DIALS.request)
            status = await self._bring(stream.peer_id, endpoint, nonce)
            return _Answer(status=standard.AutoNat2.ANSWERED, addr_idx=index, dial_status=status)
        finally:
            self._budget.give_back(*ips)

    async def _bring(self, peer_id: str, endpoint: Endpoint, nonce: int) -> standard.AutoNat2.DialStatus.ValueType:
        """Brings the nonce to the peer at this address; what became of that."""
        reached = False
        with trio.move_on_after(DIALS.dialing):
            try:
                async with self._host.apart(peer_id, Multiaddr(endpoint.multiaddr)) as connection:
                    reached = True
                    stream = DelimitedStream(await connection.open_stream(DIAL_BACK), peer_id)
                    await bring_nonce(stream, nonce, timeout=DIALS.dialing)
                    return standard.AutoNat2.OK
            except Exception as error:  # whatever a stranger's handshake may raise
                log.debug("no number was brought to %s at %s: %s", peer_id, endpoint, reason_of(error))
        return standard.AutoNat2.E_DIAL_BACK_ERROR if reached else standard.AutoNat2.E_DIAL_ERROR


def may_be_dialed(endpoint: Endpoint, observed: Endpoint) -> bool:
    """Whether a peer that is seen at `observed` may have us dial this: no machine of a private network but itself."""
    if not endpoint.can_be_dialed or endpoint.ip == observed.ip:
        return endpoint.can_be_dialed
    version = endpoint.ip.version  # from behind NAT all of IPv4 is reached
    ways = (network for network in own_networks() if network.version == version and not network.is_loopback)
    return endpoint.ip.is_global and any(version == 4 or network.is_global for network in ways)
