"""What is known of where peers are, here and in libp2p's own parts, and which of it is dialed.

`dialing.py` decides; this is its state, with bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Final, Protocol, TypeVar

import trio
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.peer.envelope import Envelope
from libp2p.peer.id import ID
from libp2p.peer.peerdata import PeerData
from libp2p.peer.peerstore import PeerRecordState, PeerStore
from multiaddr import Multiaddr

from ....protocols.nat_traversal import read_addr
from ..addresses import circuit_of, host_of, ip_of, is_circuit, own_networks
from .dialing import DialBudget, DialContext, FailedAddress, Networks, is_permitted, kept, private_range
from .raw_connection import Path

MAX_PEERS: Final = 8192
"""Whose addresses we remember: more than there can be connections, so that nobody who is connected is forgotten."""
MAX_ADDRS: Final = 32  # of one peer
MAX_RECORD: Final = 8192  # bytes of a signed peer record
_MAX_GIVEN: Final = 1024  # addresses that a person gave, or at which neighbours were found

_Value = TypeVar("_Value")


class _LastUsed(OrderedDict[ID, _Value]):
    """Of more than `limit` peers those are forgotten that were written to the longest time ago."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, peer_id: ID, value: _Value) -> None:
        super().__setitem__(peer_id, value)
        self.move_to_end(peer_id)
        while len(self) > self._limit:
            self.popitem(last=False)

    def setdefault(self, peer_id: ID, default: _Value) -> _Value:
        if peer_id not in self:
            self[peer_id] = default
        self.move_to_end(peer_id)
        return self[peer_id]


class BoundedPeerStore(PeerStore):
    """libp2p's, in which this node's own keys stay.

    libp2p's own, once it knows 1,000, forgets peers without addresses first: the first is the node itself. From then on
    it can neither identify itself nor sign what it publishes. Keys, protocols and signed records have no bound there,
    and for each peer beyond the 1,000 it sorts all of them.
    """

    def __init__(self, own: KeyPair, limit: int | None = None) -> None:
        limit = MAX_PEERS if limit is None else limit
        super().__init__(max_records=limit, max_peers=limit)
        self.peer_data_map = _LastUsed[PeerData](limit)
        self.peer_record_map = _LastUsed[PeerRecordState](limit)
        self._own = own
        self._own_id = ID.from_pubkey(own.public_key)
        self.add_key_pair(self._own_id, own)

    def pubkey(self, peer_id: ID) -> PublicKey:
        return self._own.public_key if peer_id == self._own_id else super().pubkey(peer_id)

    def privkey(self, peer_id: ID) -> PrivateKey:
        return self._own.private_key if peer_id == self._own_id else super().privkey(peer_id)

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        """As libp2p's, of those that can be read; of more than `MAX_ADDRS` the last stay."""
        super().add_addrs(peer_id, [addr for addr in addrs[-MAX_ADDRS:] if read_addr(addr.to_bytes()) is not None], ttl)
        known = self.peer_data_map[peer_id]
        known.addrs = known.addrs[-MAX_ADDRS:]

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        """As libp2p's; a record of more than `MAX_RECORD` bytes is refused."""
        return len(envelope.marshal_envelope()) <= MAX_RECORD and super().consume_peer_record(envelope, ttl)


@dataclass
class _Page:
    """What is remembered of a peer's addresses; at those that are `proven` it has answered."""

    addrs: tuple[Multiaddr, ...] = ()
    failing: dict[Multiaddr, FailedAddress] = field(default_factory=dict)
    proven: set[Multiaddr] = field(default_factory=set)


class AnnouncementSources(Protocol):
    """Who knows where announcements came from."""

    def source_of(self, peer_id: str) -> str:
        """The address that the peer's announcement came from, "" for none."""


class Connected(Protocol):
    """Who has connections: `paths` are the ways of all of them."""

    def paths(self) -> Iterable[Path]: ...


class _Whereabouts:
    """Finds out where this node is, from its interfaces and the connections that it made.

    `on_loopback` says that it listens on loopback only. A node that does not listen counts as one, as long as all peers
    that it dialed, or that came, are there.
    """

    def __init__(self, network: Connected, *, on_loopback: bool) -> None:
        self._on_loopback = on_loopback
        self._network = network
        self._dialed_loopback = self._met_others = False
        self._interfaces: Networks = ()
        self._opened: set[IPv4Network | IPv6Network] = set()  # private ranges that we have dialed a named address of

    def note(self, path: Path) -> None:
        """There is a new connection."""
        end = path.endpoint
        if end is None:
            return
        if end.ip.is_loopback:
            self._dialed_loopback |= not path.inbound
            return
        self._met_others = True
        found = None if path.inbound else private_range(end.ip)
        if found is not None and not any(end.ip in network for network in self.here.networks):
            self._opened.add(found)

    @property
    def here(self) -> DialContext:
        networks = own_networks()
        if set(networks) != set(self._interfaces):  # this machine is somewhere else now
            self._interfaces = networks
            self._opened.clear()
            for path in self._network.paths():
                self.note(path)
        on_loopback = self._on_loopback or (self._dialed_loopback and not self._met_others)
        return DialContext((*networks, *self._opened), on_loopback)


class AddressBook:
    """The addresses of peers. `on_loopback` says that this node listens on loopback only.

    Attributes:
        sources: where peers' announcements came from; by these, dials are shared.
    """

    def __init__(self, network: Connected, *, on_loopback: bool) -> None:
        self._pages: dict[ID, _Page] = {}
        self._given: set[Multiaddr] = set()
        self._whereabouts = _Whereabouts(network, on_loopback=on_loopback)
        self._budget = DialBudget()
        self.sources: AnnouncementSources | None = None

    def remember(self, peer_id: ID, addrs: Sequence[Multiaddr], *, given: bool) -> None:
        """Keeps addresses, without the peer id at their end, for the next dial, before what is known already.

        `given` says that they are no stranger's: they are dialed wherever they lead.
        What circuit addresses say of their relays is kept behind what is known of these: it is not from themselves.
        Not in libp2p's peerstore: identify replaces what stands there, by 0.0.0.0 for instance.
        """
        page = self._page(peer_id)
        addrs = tuple(dict.fromkeys(addrs))
        circuits = [circuit for circuit in map(circuit_of, addrs) if circuit is not None]
        if given:
            for addr in (*addrs, *(circuit.relay_addr for circuit in circuits)):
                if len(self._given) < _MAX_GIVEN:
                    self._given.add(addr)
        if page.addrs[: len(addrs)] != addrs:
            page.addrs = kept((*addrs, *page.addrs))
            page.proven &= set(page.addrs)
            for addr in [addr for addr in page.failing if addr not in page.addrs]:
                del page.failing[addr]
            for circuit in circuits:
                relay = self._page(ID.from_string(circuit.relay_id))
                relay.addrs = kept((*relay.addrs, circuit.relay_addr))

    def _page(self, peer_id: ID) -> _Page:
        """What is remembered of the peer; whoever was not looked up for the longest time is forgotten for it."""
        page = self._pages.pop(peer_id, None) or _Page()
        self._pages[peer_id] = page
        while len(self._pages) > MAX_PEERS:
            del self._pages[next(iter(self._pages))]
        return page

    def addrs(self, peer_id: ID) -> tuple[Multiaddr, ...]:
        page = self._pages.get(peer_id)
        return () if page is None else page.addrs

    def failing(self, peer_id: ID) -> dict[Multiaddr, FailedAddress]:
        """What has failed, for who dials to keep."""
        return self._page(peer_id).failing

    def met(self, path: Path) -> None:
        """There is a new connection."""
        self._whereabouts.note(path)

    # --- what is dialed

    def is_given(self, addr: Multiaddr) -> bool:
        """Whether a person gave this address, or a neighbour was found there."""
        return addr in self._given

    def permitted(self, peer_id: ID, addrs: Iterable[Multiaddr]) -> list[Multiaddr]:
        """Of these addresses of a peer those that may be dialed, though only strangers say that it is there."""
        here, proven = self._whereabouts.here, self._page(peer_id).proven
        return [addr for addr in addrs if addr in self._given or addr in proven or is_permitted(addr, here)]

    def take_dial(self, peer_id: ID, addr: Multiaddr) -> bool:
        """Whether an address may be dialed now; counts it. The dial to a circuit's relay is counted by itself."""
        if is_circuit(addr) or addr in self._given or addr in self._page(peer_id).proven:
            return True
        source = "" if self.sources is None else self.sources.source_of(str(peer_id))
        return self._budget.take(str(peer_id), host_of(addr), trio.current_time(), source)

    def answered(self, peer_id: ID, addr: Multiaddr) -> None:
        """The peer is at this address."""
        self._budget.give_back(str(peer_id), host_of(addr))
        proven = self._page(peer_id).proven
        if ip_of(addr) is not None and not is_circuit(addr) and len(proven) < MAX_ADDRS:
            proven.add(addr)  # no name: it may lead elsewhere the next time
