"""Finds out whether others reach this node, and makes itself reachable if they do not.

Asks peers (sightings), asks the router (UPnP), holds places at relays (reservations), punches through to those who
come over a relay, relays for others where it can; and says in a line how things stand. What follows from what is
decided in `verdict.py`, `reachability.py` and the plans; here it is carried out.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio
from multiaddr import Multiaddr

from ....protocols.announcement import RelayOffer
from ....protocols.directory import NodeInfo
from ....protocols.framing import PeerError
from ...swarm.directory import Directory
from ...version import __version__
from ..addresses import parse_peer
from ..host import Host
from ..transport.path import Path
from .autonat import DialBacks
from .circuits import Circuits
from .endpoint import Endpoint, plain_ip
from .hole_punching import Puncher
from .limits import RelayLimits
from .observed_addresses import Sightings, place_of
from .reachability import Reachability, Situation, extra_addrs, is_public, needs_relays, reachability
from .relay import RelayService
from .relay_plan import Candidate
from .reservations import Reservations
from .upnp import Upnp
from .verdict import Standing, carried_over

log = logging.getLogger(__name__)

_WANTED: Final = 2  # places at relays
_MAX_OBSERVERS: Final = 64  # peers to choose from whom to ask about ourselves
_ASK_NODES: Final = 4  # peers asked side by side whether they relay
_ASK_PAUSE: Final = 5.0  # seconds between two rounds of that
_ASK_AGAIN: Final = 15.0  # seconds after which a peer is asked again
_ANSWER: Final = 4.0  # seconds
_OFFER_LASTS: Final = 600.0  # seconds
_RESTART_PAUSE: Final = 5.0


@dataclass(frozen=True)
class ReachConfig:
    """What a person has decided about it.

    `listens`: whether others may dial this node at all; `announce`: its multiaddrs as the person gave them; `peers`:
    those to join by, which relay for who joins; `relay`: "auto", "off", or the multiaddr of the one relay to use.
    """

    listens: bool
    announce: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    relay: str = "auto"
    limits: RelayLimits = field(default_factory=RelayLimits)


class Reach:
    """The reachability of one node. `start` begins; it ends with `nursery`.

    Raises:
        BadInput: the relay's address is malformed.
    """

    def __init__(self, host: Host, directory: Directory, nursery: trio.Nursery, config: ReachConfig) -> None:
        self._host = host
        self._directory = directory
        self._nursery = nursery
        self._config = config
        self._named = tuple(filter(None, map(Endpoint.parse, config.announce)))
        self._only_relay = parse_peer(config.relay) if config.relay not in ("auto", "off") else None
        self._offers: dict[str, float] = {}  # who said that it relays, and when
        self._asked: dict[str, float] = {}
        self._upnp = Upnp()
        self._asks_router = False
        self._situation = Situation(place_of(host.libp2p.get_transport_addrs()))
        self._changed = trio.Event()
        self.reachability = reachability(self._situation)
        self.circuits = Circuits(host)
        self.relay = RelayService(host, config.limits)
        self._dial_backs = DialBacks(host)
        self._sightings = Sightings(
            host, observers=self._observers, extra=self._extra, changed=self._update, moved=self._on_moved
        )
        self._puncher = Puncher(
            host, nursery, place=lambda: self._sightings.place, reached=lambda: self._situation.reached
        )
        self._reservations = Reservations(
            host,
            self.circuits,
            candidates=self._candidates,
            addrs_of=self._addrs_of,
            wanted=1 if self._only_relay else _WANTED,
            changed=self._update,
        )
        directory.about = self.about
        host.on_connected(self._on_connected)

    def start(self) -> None:
        parts: list[Callable[[], Awaitable[None]]] = [self._sightings.run]
        if self._config.listens and self._config.relay != "off":
            # Only who is public offers itself, but who gets through to us may use us: that is all a relay needs.
            self.relay.start()
            parts += [self._reservations.run, self._find_relays]
        for part in parts:
            self._nursery.start_soon(self._keep_up, part)

    async def _keep_up(self, part: Callable[[], Awaitable[None]]) -> None:
        """Runs a part for ever: an error of ours must not take the node down, which may be serving sessions."""
        while True:
            try:
                await part()
            except Exception:
                log.exception("the part %s of reachability failed", part.__qualname__)
            await trio.sleep(_RESTART_PAUSE)

    # --- what others see

    async def wait_changed(self) -> None:
        """Returns when `reachability` has changed."""
        await self._changed.wait()

    def about(self) -> NodeInfo:
        """What this node says of itself when asked."""
        stats = self.relay.stats
        offer = None
        if self.relay.is_serving and is_public(self._situation):
            offer = RelayOffer(max(self._config.limits.reservations - stats.reservations, 0), stats.reservations)
        role = "server" if self._directory.announces else "bootstrap" if self._config.listens else "client"
        return NodeInfo(
            role, __version__, self.reachability.text, offer, stats.circuits, stats.bytes_relayed, time.time()
        )

    def _observers(self) -> list[str]:
        """Whom to ask, in the order of our trust. Our NAT lets those in to whom we punched, which says nothing."""
        first = dict.fromkeys(parse_peer(peer)[0] for peer in self._config.peers)
        peers = [peer for peer in self._host.connected() if peer not in self._puncher.punched]
        return sorted(peers, key=lambda peer: peer not in first)[:_MAX_OBSERVERS]

    # --- how things stand

    def _extra(self) -> Sequence[Endpoint]:
        mapping = self._upnp.mapping
        return (*self._named, mapping.external) if mapping else self._named

    def _update(self) -> None:
        """Takes in what has changed, and does what follows."""
        before, sightings = self._situation, self._sightings
        settling = trio.current_time() < sightings.settling_until
        mapping = self._upnp.mapping
        self._situation = now = Situation(
            place=sightings.place,
            ip4=carried_over(before.ip4, sightings.verdict(4), settling=settling),
            ip6=carried_over(before.ip6, sightings.verdict(6), settling=settling),
            named=self._named,
            mapped=(mapping.external,) if mapping else (),
            circuits=self._reservations.circuits,
            relays_allowed=self._config.relay != "off",
            relays_known=len(self._candidates()),
        )
        if now == before:
            return
        self._host.set_extra_addrs([Multiaddr(addr) for addr in extra_addrs(now)])
        self._reservations.enable(needs_relays(now) and self._config.relay != "off")
        if now.ip4.standing is Standing.CLOSED and now.ip4.translated and not self._asks_router:
            self._asks_router = True
            self._nursery.start_soon(self._keep_up, self._ask_router)
        self._directory.addrs_changed()
        self._tell(reachability(now))

    def _tell(self, state: Reachability) -> None:
        if state != self.reachability:
            log.info("%s", state.text)
            self.reachability = state
            self._changed.set()
            self._changed = trio.Event()

    # --- what happens

    def _on_connected(self, peer_id: str, path: Path) -> None:
        if path.direct:
            self._sightings.wake()

    def _on_moved(self) -> None:
        self._puncher.moved()
        self._nursery.start_soon(self._drop_stranded)

    async def _drop_stranded(self) -> None:
        """Closes the connections that run from an address which this machine no longer has; doubts the others."""
        own = self._sightings.place.own_ips
        for peer_id in self._host.connected():
            for connection in self._host.connections(peer_id, direct=True):
                if connection.local_host is not None and plain_ip(connection.local_host) not in own:
                    self._nursery.start_soon(connection.close)
                else:
                    connection.suspect()
        self._reservations.check()

    async def _ask_router(self) -> None:
        """Has the router map our port. Only ever done by a node that others have found to be behind NAT."""
        ports = self._sightings.place.ports(4)
        if not ports:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._upnp.run, ports[0])
            while True:
                await self._upnp.changed.wait()
                self._sightings.ask_again()

    # --- relays to choose from

    def _candidates(self) -> list[Candidate]:
        if self._only_relay is not None:
            return [Candidate(self._only_relay[0], 0)]
        own = self._host.peer_id
        first = dict.fromkeys(parse_peer(peer)[0] for peer in self._config.peers)
        servers = self._directory.view.servers(now=time.time())
        others = set(self._offers) | {each.peer_id for each in servers if each.relay is not None and each.relay.free}
        # Everyone in an order of its own, so that all relays get about as many.
        spread = sorted(others - set(first), key=lambda peer: hashlib.sha256(f"{own}{peer}".encode()).digest())
        ranked = [Candidate(peer_id, 0) for peer_id in first] + [Candidate(peer_id, 1) for peer_id in spread]
        return [each for each in ranked if each.peer_id != own]

    def _addrs_of(self, relay_id: str) -> Sequence[str]:
        if self._only_relay is not None and relay_id == self._only_relay[0]:
            return self._only_relay[1:]
        return self._directory.addrs_of(relay_id)

    async def _find_relays(self) -> None:
        """Asks connected peers whether they relay, as long as places are missing."""
        while True:
            if needs_relays(self._situation) and len(self._situation.circuits) < _WANTED and not self._only_relay:
                now = trio.current_time()
                known = {each.peer_id for each in self._candidates()}
                peers = [peer for peer in self._host.connected() if peer not in known and self._host.is_direct(peer)]
                due = [peer for peer in peers if now - self._asked.get(peer, -_ASK_AGAIN) >= _ASK_AGAIN]
                self._asked = {peer: when for peer, when in self._asked.items() if now - when < _ASK_AGAIN}
                self._offers = {peer: when for peer, when in self._offers.items() if now - when < _OFFER_LASTS}
                async with trio.open_nursery() as nursery:
                    for peer in due[:_ASK_NODES]:
                        self._asked[peer] = now
                        nursery.start_soon(self._ask_node, peer)
                self._reservations.wake()  # announcements may have told of others
            await trio.sleep(_ASK_PAUSE)

    async def _ask_node(self, peer_id: str) -> None:
        try:
            info = await self._directory.ask_node(peer_id, timeout=_ANSWER)
        except PeerError as error:
            log.debug("%s", error)
            return
        if info.relay is not None and info.relay.free:
            self._offers[peer_id] = trio.current_time()
