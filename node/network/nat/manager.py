"""Finds out whether other nodes reach this node, and makes it reachable if they do not.

Asks peers where they see this node (`autonat.py`), maps a port by UPnP, and keeps reservations at relays. Punches holes
to peers that come over a relay. Relays for others where it can. States the result in a line. `reachability.py` and the
plans decide what follows from what is known; the manager gathers that and carries it out.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio
from multiaddr import Multiaddr

from ....protocols.announcement import RelayOffer
from ....protocols.directory import DIRECTORY, NodeInfo
from ....protocols.framing import PeerError
from ....protocols.nat_traversal import AUTONAT, DIAL_REQUEST
from ...version import __version__
from ..addresses import Endpoint, parse_peer, plain_ip
from ..host import Host, keep_up
from ..transport.raw_connection import Path
from .autonat import ObservedAddresses, local_endpoints
from .circuits import Circuits
from .dial_back import DialBackService
from .hole_punching import HolePuncher
from .reachability import (
    NAT,
    LocalEndpoints,
    NatStatus,
    Reachability,
    ReachabilityInputs,
    RelayCandidate,
    carried_over,
    extra_addrs,
    is_public,
    needs_relays,
    reachability,
)
from .relay import RelayLimits, RelayService
from .reservations import Reservations
from .upnp import Upnp

log = logging.getLogger(__name__)


class ServerDirectory(Protocol):
    """What the manager needs of the directory of servers."""

    @property
    def announces(self) -> bool:
        """Whether this node is a server."""

    def addrs_of(self, peer_id: str) -> Sequence[str]:
        """Where a peer may be dialed."""

    def relays(self) -> Collection[str]:
        """The servers that announce free relay reservations."""

    async def ask_node(self, peer_id: str, *, timeout: float) -> NodeInfo:
        """What a peer says of itself. Raises PeerError."""


@dataclass(frozen=True)
class NatConfig:
    """The operator's choices.

    `listens`: whether others may dial this node at all. `announce`: its multiaddrs as the person gave them. `peers`:
    those to join by, which relay for who joins. `relay`: "auto", "off", or the multiaddr of the one relay to use.
    """

    listens: bool
    announce: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    relay: str = "auto"
    limits: RelayLimits = field(default_factory=RelayLimits)


class NatManager:
    """Keeps one node reachable. Its tasks run from `start` until `nursery` ends.

    `addrs_changed` is called when the addresses or the relay offer of this node have changed.

    Raises:
        BadInput: the relay's address is malformed.
    """

    def __init__(
        self,
        host: Host,
        directory: ServerDirectory,
        nursery: trio.Nursery,
        config: NatConfig,
        *,
        addrs_changed: Callable[[], None],
    ) -> None:
        self._host = host
        self._directory = directory
        self._nursery = nursery
        self._config = config
        self._addrs_changed = addrs_changed
        self._named = tuple(filter(None, map(Endpoint.parse, config.announce)))
        self._only_relay = parse_peer(config.relay) if config.relay not in ("auto", "off") else None
        if self._only_relay is not None:
            host.remember(self._only_relay[0], self._only_relay[1:])
        self._offers: dict[str, float] = {}  # who said that it relays, and when
        self._asked: dict[str, float] = {}
        self._upnp = Upnp()
        self._asks_router = False
        self._inputs = ReachabilityInputs(local_endpoints(host.libp2p.get_transport_addrs()))
        self._changed = trio.Event()
        self.reachability = reachability(self._inputs)
        self.circuits = Circuits(host)
        self.relay = RelayService(host, config.limits)
        self._dial_backs = DialBackService(host)
        self._observed = ObservedAddresses(host, self)
        self._hole_puncher = HolePuncher(host, nursery, self)
        self._reservations = Reservations(host, self.circuits, self, wanted=1 if self._only_relay else NAT.wanted)
        host.on_connected(self._on_connected)

    def start(self) -> None:
        parts: list[Callable[[], Awaitable[None]]] = [self._observed.run]
        if self._config.listens and self._config.relay != "off":
            # Only who is public offers itself, but who gets through to us may use us: that is all a relay needs.
            self.relay.start()
            parts += [self._reservations.run, self._find_relays]
        for part in parts:
            self._nursery.start_soon(keep_up, part)

    # --- what others see

    async def wait_changed(self) -> None:
        """Returns when `reachability` has changed."""
        await self._changed.wait()

    def about(self) -> NodeInfo:
        """What this node says of itself when asked."""
        stats = self.relay.stats
        offer = None
        if self.relay.is_serving and is_public(self._inputs):
            offer = RelayOffer(max(self._config.limits.reservations - stats.reservations, 0), stats.reservations)
        role = "server" if self._directory.announces else "bootstrap" if self._config.listens else "client"
        return NodeInfo(
            role, __version__, self.reachability.text, offer, stats.circuits, stats.bytes_relayed, time.time()
        )

    @property
    def local(self) -> LocalEndpoints:
        return self._observed.local

    @property
    def reached(self) -> tuple[Endpoint, ...]:
        return self._inputs.reached

    def observers(self) -> list[str]:
        """Whom to ask, in the order of our trust. Our NAT lets those in to whom we punched, which says nothing."""
        first = dict.fromkeys(parse_peer(peer)[0] for peer in self._config.peers)
        peers = [peer for peer in self._host.connected() if peer not in self._hole_puncher.punched]
        return sorted(peers, key=lambda peer: peer not in first)[: NAT.max_kept]

    def autonat_of(self, peer_id: str, protocols: Sequence[str]) -> str | None:
        """Nodes of petalnode are asked by the first version, others by the second, which proves more, if they have it.

        js-libp2p answers the first over the connection that is there, and then closes it. A reservation goes with it.
        """
        if DIRECTORY.id not in protocols and DIAL_REQUEST in protocols:
            return DIAL_REQUEST
        return AUTONAT if DIRECTORY.id in protocols or peer_id not in self._reservations.relays else None

    # --- how things stand

    def extra_endpoints(self) -> Sequence[Endpoint]:
        mapping = self._upnp.mapping
        return (*self._named, mapping.external) if mapping else self._named

    def update(self) -> None:
        """Recomputes the reachability from what is known now, and does what follows from a change."""
        before, observed = self._inputs, self._observed
        settling = trio.current_time() < observed.settling_until
        mapping = self._upnp.mapping
        self._inputs = now = ReachabilityInputs(
            local=observed.local,
            ip4=carried_over(before.ip4, observed.verdict(4), settling=settling),
            ip6=carried_over(before.ip6, observed.verdict(6), settling=settling),
            named=self._named,
            mapped=(mapping.external,) if mapping else (),
            circuits=self._reservations.circuits,
            relays_allowed=self._config.relay != "off",
            relays_known=len(self.relay_candidates()),
        )
        if now == before:
            return
        self._host.set_extra_addrs([Multiaddr(addr) for addr in extra_addrs(now)])
        self._reservations.enable(needs_relays(now) and self._config.relay != "off")
        if now.ip4.status is NatStatus.CLOSED and now.ip4.translated and not self._asks_router:
            self._asks_router = True
            self._nursery.start_soon(keep_up, self._ask_router)
        self._addrs_changed()
        self._publish(reachability(now))

    def _publish(self, state: Reachability) -> None:
        if state != self.reachability:
            log.info("%s", state.text)
            self.reachability = state
            self._changed.set()
            self._changed = trio.Event()

    # --- what happens

    def _on_connected(self, peer_id: str, path: Path) -> None:
        if path.direct:
            self._observed.wake()

    def moved(self) -> None:
        self._hole_puncher.moved()
        self._nursery.start_soon(self._drop_stranded)

    async def _drop_stranded(self) -> None:
        """Closes the connections that run from an address which this machine no longer has; doubts the others."""
        own = self._observed.local.own_ips
        for peer_id in self._host.connected():
            for connection in self._host.connections(peer_id, direct=True):
                local = plain_ip(connection.local_host) if connection.local_host is not None else None
                if local is not None and local not in own and not (local.is_loopback or local.is_link_local):
                    self._nursery.start_soon(connection.close)
                else:
                    connection.suspect()
        self._reservations.check()

    async def _ask_router(self) -> None:
        """Has the router map our port. Only ever done by a node that others have found to be behind NAT."""
        ports = self._observed.local.ports(4)
        if not ports:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._upnp.run, ports[0])
            while True:
                await self._upnp.changed.wait()
                self._observed.ask_again()

    # --- relays to choose from

    def relay_candidates(self) -> list[RelayCandidate]:
        if self._only_relay is not None:
            return [RelayCandidate(self._only_relay[0], 0)]
        own = self._host.peer_id
        first = dict.fromkeys(parse_peer(peer)[0] for peer in self._config.peers)
        others = {*self._offers, *self._directory.relays()}
        # Everyone in an order of its own, so that all relays get about as many.
        spread = sorted(others - set(first), key=lambda peer: hashlib.sha256(f"{own}{peer}".encode()).digest())
        ranked = [RelayCandidate(peer_id, 0) for peer_id in first] + [RelayCandidate(peer_id, 1) for peer_id in spread]
        return [candidate for candidate in ranked if candidate.peer_id != own]

    def addrs_of(self, relay_id: str) -> Sequence[str]:
        if self._only_relay is not None and relay_id == self._only_relay[0]:
            return self._only_relay[1:]
        return self._directory.addrs_of(relay_id)

    async def _find_relays(self) -> None:
        """Asks connected peers whether they relay, as long as reservations are missing."""
        while True:
            if needs_relays(self._inputs) and len(self._inputs.circuits) < NAT.wanted and not self._only_relay:
                now = trio.current_time()
                known = {candidate.peer_id for candidate in self.relay_candidates()}
                peers = [peer for peer in self._host.connected() if peer not in known and self._host.is_direct(peer)]
                due = [peer for peer in peers if now - self._asked.get(peer, -NAT.ask_again) >= NAT.ask_again]
                self._asked = {peer: when for peer, when in self._asked.items() if now - when < NAT.ask_again}
                self._offers = {peer: when for peer, when in self._offers.items() if now - when < NAT.offer_lasts}
                async with trio.open_nursery() as nursery:
                    for peer in due[: NAT.ask_nodes]:
                        self._asked[peer] = now
                        nursery.start_soon(self._ask_node, peer)
                self._reservations.wake()  # announcements may name others
            await trio.sleep(NAT.ask_pause)

    async def _ask_node(self, peer_id: str) -> None:
        try:
            info = await self._directory.ask_node(peer_id, timeout=NAT.answer)
        except PeerError as error:
            log.debug("%s", error)
            return
        if info.relay is not None and info.relay.free:
            self._offers[peer_id] = trio.current_time()
