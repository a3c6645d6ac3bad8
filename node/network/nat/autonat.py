"""AutoNAT and identify: asks peers how they see this node, and to dial it back.

`ObservedAddresses` asks a few at a time, for as long as the node runs; `reachability.py` judges the answers.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import trio
from multiaddr import Multiaddr

from ....protocols.delimited import DelimitedStream
from ....protocols.framing import PeerError
from ....protocols.nat_traversal import (
    AUTONAT,
    DIAL_BACK,
    DIAL_REQUEST,
    IDENTIFY,
    TRAVERSAL,
    DialAnswer,
    DialStatus,
    Identified,
    ask_dial,
    ask_dial_back,
    ask_identify,
    take_nonce,
)
from ..addresses import Endpoint, concrete, own_networks
from ..host import Host
from ..transport.stream_bytes import StreamBytes
from .dial_back import DIALS
from .reachability import (
    NAT,
    DialBack,
    IpVerdict,
    LocalEndpoints,
    NatNode,
    Observation,
    Observer,
    candidates,
    counts,
    counts_as_asked,
    judge,
    whom_to_ask,
)

log = logging.getLogger(__name__)

_EVERYWHERE: Final = (Multiaddr("/ip4/0.0.0.0/tcp/1"), Multiaddr("/ip6/::/tcp/1"))


async def identified(host: Host, peer_id: str, *, timeout: float, direct: bool = True) -> Identified:
    """What a connected peer says of itself, and of where it sees us come from.

    Raises:
        PeerError: no answer in time.
        ConnectionError: there is no connection, or no direct one.
    """
    raw = await host.open_stream(peer_id, IDENTIFY, direct=direct)
    async with DelimitedStream(raw, peer_id, max_message=TRAVERSAL.identify_max_message) as stream:
        return await ask_identify(stream, timeout=timeout)


async def observed_by(host: Host, peer_id: str, *, timeout: float) -> Endpoint | None:
    """Where a directly connected peer sees us come from; None if it does not say. Raises as `identified` does."""
    return Endpoint.of_socket((await identified(host, peer_id, timeout=timeout)).observed or "")


async def request_dial_back(host: Host, peer_id: str, endpoints: tuple[Endpoint, ...]) -> DialAnswer:
    """Asks a directly connected peer to dial us at these endpoints, by AutoNAT 1.

    Raises:
        PeerError: no answer in time, or the peer does not speak AutoNAT.
        ConnectionError: there is no direct connection.
    """
    addrs = [endpoint.multiaddr for endpoint in endpoints]
    raw = await host.open_stream(peer_id, AUTONAT, direct=True)
    async with DelimitedStream(raw, peer_id, max_message=TRAVERSAL.autonat_max_message) as stream:
        return await ask_dial_back(stream, host.peer_id, addrs, timeout=DIALS.dial_back)


class DialRequests:
    """Asks peers to dial us by AutoNAT 2, and takes the numbers that they bring.

    A peer dials one address only: it is asked anew for the others when it has failed.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._nonces: dict[int, bool] = {}  # those that peers were given, and whether they have been brought
        host.set_stream_handler(DIAL_BACK, self._take)

    async def ask(self, peer_id: str, endpoints: tuple[Endpoint, ...]) -> DialAnswer:
        """As `request_dial_back`; `OK` is proven by a connection."""
        left = [endpoint.multiaddr for endpoint in endpoints]
        answer = DialAnswer(DialStatus.DIAL_REFUSED, "there is no address to dial")
        while left:
            answer = await self._ask(peer_id, left)
            if answer.status is not DialStatus.DIAL_ERROR or answer.addr is None:
                break
            left.remove(answer.addr)
        return answer

    async def _ask(self, peer_id: str, addrs: Sequence[str]) -> DialAnswer:
        nonce = secrets.randbits(64)
        self._nonces[nonce] = False
        try:
            raw = await self._host.open_stream(peer_id, DIAL_REQUEST, direct=True)
            async with DelimitedStream(raw, peer_id, max_message=TRAVERSAL.autonat_max_message) as stream:
                answer = await ask_dial(stream, addrs, nonce, timeout=DIALS.dial_back)
        finally:
            was_brought = self._nonces.pop(nonce)
        if answer.status is DialStatus.OK and not was_brought:
            return DialAnswer(DialStatus.INTERNAL_ERROR, "it says that it dialed, and did not")
        return answer

    async def _take(self, raw: StreamBytes, peer_id: str) -> None:
        try:
            async with DelimitedStream(raw, peer_id) as stream:
                nonce = await take_nonce(stream, self._nonces, timeout=DIALS.request)
                if nonce in self._nonces and raw.path.direct and raw.path.inbound:  # else it dialed nobody
                    self._nonces[nonce] = True
        except PeerError as error:
            log.debug("no dial-back of ours: %s", error)


class ObservedAddresses:
    """What peers have said of this node since it is where it is now."""

    def __init__(self, host: Host, node: NatNode) -> None:
        self.local = local_endpoints(host.libp2p.get_transport_addrs())
        self._host = host
        self._node = node
        self._dial_requests = DialRequests(host)
        self._observations: dict[str, Observation] = {}
        self._asked: dict[str, float] = {}
        self._unanswered: dict[str, int] = {}  # questions in a row, by peer
        self.settling_until = 0.0  # until then, those asked again have not all answered
        self._generation = 0  # what was asked before a move says nothing about after
        self._news = trio.Event()

    def verdict(self, version: int) -> IpVerdict:
        return judge(version, self._observations.values(), self.local, trio.current_time())

    def observed(self) -> tuple[Endpoint, ...]:
        """Where peers have seen us come from, the latest first."""
        latest = sorted(self._observations.values(), key=lambda observation: -observation.at)
        return tuple(dict.fromkeys(observation.seen for observation in latest if observation.seen))

    def ask_again(self) -> None:
        """Forgets what was said: something has changed since."""
        self._generation += 1
        self.settling_until = trio.current_time() + NAT.settling
        self._observations.clear()
        self._asked.clear()
        self.wake()

    def wake(self) -> None:
        """There may be others to ask."""
        self._news.set()

    async def run(self) -> None:
        looked = -NAT.look_around
        async with trio.open_nursery() as nursery:
            while True:
                self._news = trio.Event()
                now = trio.current_time()
                if now - looked >= NAT.look_around:
                    looked = now
                    await self._look_around()
                self._asked = {peer: when for peer, when in self._asked.items() if now - when < NAT.retry}
                for peer_id in whom_to_ask(self._observers(), self._observations, self._asked, self.local, now):
                    self._asked[peer_id] = now
                    nursery.start_soon(self._ask, peer_id)
                await trio.sleep_until(now + NAT.breath)
                with trio.move_on_at(looked + NAT.look_around):
                    await self._news.wait()

    async def _look_around(self) -> None:
        # In a thread, since a machine may have many interfaces, each of which is asked about.
        local = await trio.to_thread.run_sync(local_endpoints, self._host.libp2p.get_transport_addrs())
        if local != self.local:
            log.info("the addresses of this machine have changed")
            self.local = local
            self.ask_again()
            self._node.moved()
            self._node.update()

    def _observers(self) -> list[Observer]:
        found = []
        for peer_id in self._node.observers():
            ends = [path.endpoint for path in self._host.paths(peer_id) if path.direct]
            found += [Observer(peer_id, end.ip) for end in ends[:1] if end is not None]
        return found

    async def _ask(self, peer_id: str) -> None:
        generation = self._generation
        try:
            ends = [path.endpoint for path in self._host.paths(peer_id) if path.direct]
            observer = ends[0] if ends else None
            if observer is None:
                return
            said = await identified(self._host, peer_id, timeout=NAT.identify)
            seen = Endpoint.of_socket(said.observed or "")
            # Already this can prove a NAT; that the dial-back fails may take seconds more.
            self._keep(
                generation, Observation(peer_id, observer.ip, seen, DialBack.NOT_TRIED, None, trio.current_time())
            )
            protocol = self._node.autonat_of(peer_id, said.protocols)
            if protocol is None:
                return
            endpoints = candidates(seen, self.local, self._node.extra_endpoints())
            if protocol == AUTONAT:
                answer = await request_dial_back(self._host, peer_id, endpoints)
            else:
                answer = await self._dial_requests.ask(peer_id, endpoints)
        except (PeerError, ConnectionError) as error:
            log.debug("%s cannot tell how it sees us: %s", peer_id, error)
            self._note_unanswered(peer_id)
            return
        self._unanswered.pop(peer_id, None)
        outcome = {DialStatus.OK: DialBack.REACHED, DialStatus.DIAL_ERROR: DialBack.FAILED}.get(
            answer.status, DialBack.NOT_TRIED
        )
        reached = Endpoint.parse(answer.addr or "") if outcome is DialBack.REACHED else None
        if outcome is DialBack.REACHED and reached not in endpoints:
            outcome, reached = DialBack.NOT_TRIED, None  # nothing that we asked for
        log.debug("%s sees us at %s; dialing back: %s %s", peer_id, seen, outcome.value, answer.text)
        before, now = self._observations.get(peer_id), trio.current_time()
        doubtful = outcome is DialBack.FAILED and (before is None or before.dial_back is not DialBack.FAILED)
        self._keep(generation, Observation(peer_id, observer.ip, seen, outcome, reached, now, doubtful))

    def _note_unanswered(self, peer_id: str) -> None:
        failures = self._unanswered.pop(peer_id, 0) + 1
        self._unanswered[peer_id] = failures
        while len(self._unanswered) > NAT.max_kept:
            del self._unanswered[next(iter(self._unanswered))]
        self._asked[peer_id] = counts_as_asked(trio.current_time(), failures)

    def _keep(self, generation: int, observation: Observation) -> None:
        before = self._observations.get(observation.observer)
        says_more = before is not None and before.dial_back is not DialBack.NOT_TRIED and counts(before, observation.at)
        if generation == self._generation and not (says_more and observation.dial_back is DialBack.NOT_TRIED):
            self._observations.pop(observation.observer, None)
            self._observations[observation.observer] = observation
            while len(self._observations) > NAT.max_kept:
                del self._observations[next(iter(self._observations))]
            self._node.update()


def local_endpoints(listened: Sequence[Multiaddr]) -> LocalEndpoints:
    """Where a node is now that listens on these addresses, 0.0.0.0 for instance."""
    listening = tuple(_endpoints(listened))
    # What listens on one address only is not found on the others.
    everywhere = frozenset(endpoint.ip for endpoint in _endpoints(_EVERYWHERE))
    own = everywhere | {endpoint.ip for endpoint in listening}
    return LocalEndpoints(listening, own, tuple(own_networks()))


def _endpoints(addrs: Iterable[Multiaddr]) -> Iterator[Endpoint]:
    for addr in concrete(addrs):
        endpoint = Endpoint.parse(str(addr))
        if endpoint is not None:
            yield endpoint
