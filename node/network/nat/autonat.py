"""AutoNAT both ways, and identify: dials peers back that ask for it; asks peers how they see this node.

`ObservedAddresses` asks a few at a time, for as long as the node runs; `reachability.py` judges the answers.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio
from multiaddr import Multiaddr

from ....protocols.delimited import DelimitedStream
from ....protocols.framing import PeerError
from ....protocols.nat_traversal import (
    AUTONAT,
    IDENTIFY,
    TRAVERSAL,
    DialAnswer,
    DialStatus,
    answer_dial_back,
    ask_dial_back,
    ask_identify,
)
from ..addresses import Endpoint, IPAddress, concrete, own_networks
from ..host import Host
from ..shares import ShareCount, origin_of_ip
from ..transport.stream_bytes import StreamBytes
from .reachability import (
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


@dataclass(frozen=True)
class DialBackPolicy:
    """How many peers are dialed back, and how long an own request may take."""

    dialing: float = 5.0  # seconds that we try to reach a peer, all its addresses side by side
    request: float = 5.0  # seconds for the request to come
    max_dialed: int = 8  # addresses in one dial-back
    period: float = 60.0  # seconds, in which these are the most dial-backs:
    per_host: int = 6  # to one IP address, or one /64 of IPv6
    in_all: int = 60
    at_once: int = 16
    at_once_of_host: int = 2
    dial_back: float = 12.0  # seconds, more than any peer tries


DIALS: Final = DialBackPolicy()


_LOOK_AROUND: Final = 1.0  # seconds between two looks at the own interfaces
_BREATH: Final = 0.2  # seconds between two looks for peers to ask, when many come at once
_EVERYWHERE: Final = (Multiaddr("/ip4/0.0.0.0/tcp/1"), Multiaddr("/ip6/::/tcp/1"))
_IDENTIFY: Final = 5.0  # seconds
_SETTLING: Final = 20.0  # seconds for the answers after a change
_MAX_KEPT: Final = 64  # peers whose observation is kept


class Budget:
    """Keeps dial-backs few: without it, we would be a tool to flood others with."""

    def __init__(self) -> None:
        self._lately = ShareCount(DIALS.in_all, DIALS.per_host, seconds=DIALS.period)
        self._running = ShareCount(DIALS.at_once, DIALS.at_once_of_host)

    def take(self, ip: IPAddress, now: float) -> bool:
        """Whether one more dial-back to `ip` may start at `now` (seconds). `give_back` when it has ended."""
        origin = origin_of_ip(str(ip))
        if not self._running.has_room(origin, DIALS.at_once_of_host):
            return False
        return self._lately.add(origin, most=DIALS.per_host, now=now) and self._running.add(origin)

    def give_back(self, ip: IPAddress) -> None:
        self._running.remove(origin_of_ip(str(ip)))


class DialBackService:
    """Dials peers back that ask for it, only at the IP address that they come from."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._budget = Budget()
        host.set_stream_handler(AUTONAT, self._serve)

    async def _serve(self, raw: StreamBytes, peer_id: str) -> None:
        stream = DelimitedStream(raw, peer_id, max_message=TRAVERSAL.autonat_max_message)

        async def decide(asked_for: str, addrs: tuple[str, ...]) -> DialAnswer:
            if asked_for != peer_id:
                return DialAnswer(DialStatus.BAD_REQUEST, "a peer asks for itself only")
            return await self._dial_back(raw, peer_id, addrs)

        try:
            await answer_dial_back(stream, decide, timeout=DIALS.request)
        except PeerError as error:
            log.debug("no dial-back: %s", error)
            await stream.reset()
        else:
            await stream.close()

    async def _dial_back(self, raw: StreamBytes, peer_id: str, addrs: tuple[str, ...]) -> DialAnswer:
        observed = raw.path.endpoint
        if observed is None:
            return DialAnswer(DialStatus.DIAL_REFUSED, "through a relay nobody can tell where a peer is")
        asked = dict.fromkeys(Endpoint.parse(addr) for addr in addrs)
        wanted = [endpoint for endpoint in asked if endpoint and endpoint.can_be_dialed]
        allowed = [endpoint for endpoint in wanted if endpoint.ip == observed.ip][: DIALS.max_dialed]
        if not allowed:
            return DialAnswer(DialStatus.DIAL_REFUSED, f"none of the addresses is at {observed.ip}, where you are")
        if not self._budget.take(observed.ip, trio.current_time()):
            return DialAnswer(DialStatus.DIAL_REFUSED, "busy; ask again later")
        try:
            targets = [Multiaddr(endpoint.multiaddr) for endpoint in allowed]
            return DialAnswer(DialStatus.OK, addr=await self._host.dial_fresh(peer_id, targets, timeout=DIALS.dialing))
        except ConnectionError as error:
            return DialAnswer(DialStatus.DIAL_ERROR, str(error))
        finally:
            self._budget.give_back(observed.ip)


# --- the asking side


async def observed_by(host: Host, peer_id: str, *, timeout: float) -> Endpoint | None:
    """Where a directly connected peer sees us come from; None if it does not say.

    Raises:
        PeerError: no answer in time.
        ConnectionError: there is no direct connection.
    """

    async with _opened(host, peer_id, IDENTIFY, TRAVERSAL.identify_max_message) as stream:
        return Endpoint.of_socket((await ask_identify(stream, timeout=timeout)).observed or "")


async def addrs_of(host: Host, peer_id: str, *, timeout: float) -> tuple[str, ...]:
    """The multiaddrs on which a connected peer says that it listens.

    Raises:
        PeerError: no answer in time.
        ConnectionError: there is no connection.
    """

    async with _opened(host, peer_id, IDENTIFY, TRAVERSAL.identify_max_message, direct=False) as stream:
        return (await ask_identify(stream, timeout=timeout)).addrs


async def request_dial_back(host: Host, peer_id: str, endpoints: tuple[Endpoint, ...]) -> DialAnswer:
    """Asks a directly connected peer to dial us at these endpoints.

    Raises:
        PeerError: no answer in time, or the peer does not speak AutoNAT.
        ConnectionError: there is no direct connection.
    """

    addrs = [endpoint.multiaddr for endpoint in endpoints]
    async with _opened(host, peer_id, AUTONAT, TRAVERSAL.autonat_max_message) as stream:
        return await ask_dial_back(stream, host.peer_id, addrs, timeout=DIALS.dial_back)


@asynccontextmanager
async def _opened(
    host: Host, peer_id: str, protocol: str, max_message: int, *, direct: bool = True
) -> AsyncIterator[DelimitedStream]:
    """A stream that is closed behind the block, or reset if that fails."""
    raw = await host.open_stream(peer_id, protocol, direct=direct)
    stream = DelimitedStream(raw, peer_id, max_message=max_message)
    try:
        yield stream
    except BaseException:
        await stream.reset()
        raise
    await stream.close()


class ObservedAddresses:
    """What peers have said of this node since it is where it is now."""

    def __init__(self, host: Host, node: NatNode) -> None:
        self.local = local_endpoints(host.libp2p.get_transport_addrs())
        self._host = host
        self._node = node
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
        self.settling_until = trio.current_time() + _SETTLING
        self._observations.clear()
        self._asked.clear()
        self.wake()

    def wake(self) -> None:
        """There may be others to ask."""
        self._news.set()

    async def run(self) -> None:
        looked = -_LOOK_AROUND
        async with trio.open_nursery() as nursery:
            while True:
                self._news = trio.Event()
                now = trio.current_time()
                if now - looked >= _LOOK_AROUND:
                    looked = now
                    await self._look_around()
                for peer_id in whom_to_ask(self._observers(), self._observations, self._asked, self.local, now):
                    self._asked[peer_id] = now
                    nursery.start_soon(self._ask, peer_id)
                await trio.sleep_until(now + _BREATH)
                with trio.move_on_at(looked + _LOOK_AROUND):
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
            seen = await observed_by(self._host, peer_id, timeout=_IDENTIFY)
            # Already this can prove a NAT; that the dial-back fails may take seconds more.
            self._keep(
                generation, Observation(peer_id, observer.ip, seen, DialBack.NOT_TRIED, None, trio.current_time())
            )
            if not self._node.dials_back(peer_id):
                return
            endpoints = candidates(seen, self.local, self._node.extra_endpoints())
            answer = await request_dial_back(self._host, peer_id, endpoints)
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
        while len(self._unanswered) > _MAX_KEPT:
            del self._unanswered[next(iter(self._unanswered))]
        self._asked[peer_id] = counts_as_asked(trio.current_time(), failures)

    def _keep(self, generation: int, observation: Observation) -> None:
        before = self._observations.get(observation.observer)
        says_more = before is not None and before.dial_back is not DialBack.NOT_TRIED and counts(before, observation.at)
        if generation == self._generation and not (says_more and observation.dial_back is DialBack.NOT_TRIED):
            self._observations.pop(observation.observer, None)
            self._observations[observation.observer] = observation
            while len(self._observations) > _MAX_KEPT:
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
