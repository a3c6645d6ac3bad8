"""Asks peers how they see this node, a few at a time, for as long as it runs; `reachability.py` judges the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import trio
from multiaddr import Multiaddr

from ....protocols.framing import PeerError
from ....protocols.nat_traversal import DialStatus
from ..addresses import Endpoint, concrete, own_networks
from ..host import Host
from .autonat import observed_by, request_dial_back
from .reachability import DialBack, LocalEndpoints, Observation, Observer, Verdict, candidates, judge, whom_to_ask

log = logging.getLogger(__name__)

_LOOK_AROUND: Final = 1.0  # seconds between two looks at the own interfaces
_BREATH: Final = 0.2  # seconds between two looks for peers to ask, when many come at once
_EVERYWHERE: Final = (Multiaddr("/ip4/0.0.0.0/tcp/1"), Multiaddr("/ip6/::/tcp/1"))
_IDENTIFY: Final = 5.0  # seconds
_SETTLING: Final = 20.0  # seconds for the answers after a change
_MAX_KEPT: Final = 64  # peers whose observation is kept


class ObservedAddresses:
    """What peers have said of this node since it is where it is now.

    `observers` gives the peers to ask, in the order of trust; `extra` the endpoints that were named by a person or
    mapped by a router. `changed` is called whenever something may have changed, `moved` before that when the own
    addresses have.
    """

    def __init__(
        self,
        host: Host,
        *,
        observers: Callable[[], Sequence[str]],
        extra: Callable[[], Collection[Endpoint]],
        changed: Callable[[], None],
        moved: Callable[[], None],
    ) -> None:
        self.local = local_endpoints(host.libp2p.get_transport_addrs())
        self._host = host
        self._peers = observers
        self._extra = extra
        self._changed = changed
        self._moved = moved
        self._observations: dict[str, Observation] = {}
        self._asked: dict[str, float] = {}
        self.settling_until = 0.0  # until then, those asked again have not all answered
        self._generation = 0  # what was asked before a move says nothing about after
        self._news = trio.Event()

    def verdict(self, version: int) -> Verdict:
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
            self._moved()
            self._changed()

    def _observers(self) -> list[Observer]:
        found = []
        for peer_id in self._peers():
            ends = [Endpoint.parse(path.remote_addr or "") for path in self._host.paths(peer_id) if path.direct]
            found += [Observer(peer_id, end.ip) for end in ends[:1] if end is not None]
        return found

    async def _ask(self, peer_id: str) -> None:
        generation = self._generation
        try:
            ends = [path.remote_addr for path in self._host.paths(peer_id) if path.direct]
            observer = Endpoint.parse(ends[0] or "") if ends else None
            if observer is None:
                return
            seen = await observed_by(self._host, peer_id, timeout=_IDENTIFY)
            # Already this can prove a NAT; that the dial-back fails may take seconds more.
            self._keep(
                generation, Observation(peer_id, observer.ip, seen, DialBack.NOT_TRIED, None, trio.current_time())
            )
            endpoints = candidates(seen, self.local, self._extra())
            answer = await request_dial_back(self._host, peer_id, endpoints)
        except (PeerError, ConnectionError) as error:
            log.debug("%s cannot tell how it sees us: %s", peer_id, error)
            return
        outcome = {DialStatus.OK: DialBack.REACHED, DialStatus.DIAL_ERROR: DialBack.FAILED}.get(
            answer.status, DialBack.NOT_TRIED
        )
        reached = Endpoint.parse(answer.addr or "") if outcome is DialBack.REACHED else None
        if outcome is DialBack.REACHED and reached not in endpoints:
            outcome, reached = DialBack.NOT_TRIED, None  # nothing that we asked for
        log.debug("%s sees us at %s; dialing back: %s %s", peer_id, seen, outcome.value, answer.text)
        self._keep(generation, Observation(peer_id, observer.ip, seen, outcome, reached, trio.current_time()))

    def _keep(self, generation: int, observation: Observation) -> None:
        before = self._observations.get(observation.observer)
        says_less = observation.dial_back is DialBack.NOT_TRIED and before is not None
        if generation == self._generation and not says_less:
            self._observations.pop(observation.observer, None)
            self._observations[observation.observer] = observation
            while len(self._observations) > _MAX_KEPT:
                del self._observations[next(iter(self._observations))]
            self._changed()


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
