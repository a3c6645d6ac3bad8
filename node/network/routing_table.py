"""The peers of Kademlia that this node knows: whom it asks first, and whom it names to who asks.

Buckets of Maymounkov and Mazieres 2002 (section 2.2): 20 peers for each number of first bits that a peer's key shares
with ours. But a full one is shared by the addresses at which its peers are, since keys cost nothing.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from .addresses import MAX_ADDRS, without_peer
from .host import Host
from .kad_messages import KAD
from .kad_store import LIFETIME
from .provider_lookup import Contact, claimed_origins, distance, nearest_around

K: Final = 20  # Kademlia's number: peers of a bucket, and those to name to who asks
_LOOKED_AT: Final = 64  # peers, to name some of them
_FRESH: Final = 60.0  # seconds for which it is not looked up again where a peer is


@dataclass
class KnownPeer:
    """A peer, its multiaddrs as they are sent, and the addresses that it counts for.

    `since` is when it came into the table, `seen` when it was last heard of. `looked_up` is when its addresses were.
    """

    contact: Contact
    addrs: tuple[bytes, ...]
    origins: frozenset[str]
    since: float
    seen: float
    looked_up: float


def superfluous(peers: Sequence[KnownPeer], connected: frozenset[str]) -> KnownPeer:
    """Whom a bucket drops: of the peers at the address that has most there, one that is not connected, longest unheard.
    If all are connected, the newest."""
    counts = Counter(origin for peer in peers for origin in peer.origins)
    return max(peers, key=lambda peer: _rank(peer, counts, connected))


def _rank(peer: KnownPeer, counts: Counter[str], connected: frozenset[str]) -> tuple[int, bool, float]:
    is_away = peer.contact.peer_id not in connected
    most = max(counts[origin] for origin in peer.origins)
    return most, is_away, -peer.seen if is_away else peer.since


class RoutingTable:
    """The buckets of the node of `host`. A peer is in one if it speaks Kademlia and its addresses are known."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._peerstore = host.libp2p.get_peerstore()
        self._own_key = distance(host.peer_id, b"")
        self._buckets: dict[int, dict[str, KnownPeer]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def _bucket(self, peer_id: str) -> dict[str, KnownPeer]:
        # The keys of both are hashed with the same one: what they have in common stays so.
        common = 256 - (distance(peer_id, b"") ^ self._own_key).bit_length()
        return self._buckets.setdefault(common, {})

    def learn(self, peer_id: str, addrs: Sequence[Multiaddr]) -> None:
        """Adds a peer, which is said to be at these addresses."""
        if addrs:
            self._peerstore.add_addrs(ID.from_string(peer_id), addrs, int(LIFETIME))
        self.add(peer_id)

    def add(self, peer_id: str) -> None:
        """A peer has been heard of."""
        if peer_id == self._host.peer_id:
            return
        now = trio.current_time()
        bucket = self._bucket(peer_id)
        held = bucket.get(peer_id)
        if held is not None and now - held.looked_up < _FRESH:
            held.seen = now
            return
        peer = self._looked_up(peer_id, held.since if held is not None else now)
        if peer is None:
            bucket.pop(peer_id, None)
            return
        bucket[peer_id] = peer
        if len(bucket) > K:
            connected = frozenset(filter(self._host.is_connected, bucket))
            del bucket[superfluous(list(bucket.values()), connected).contact.peer_id]

    def _looked_up(self, peer_id: str, since: float) -> KnownPeer | None:
        contact = self.contact(peer_id)
        if not contact.addrs or not self._may_serve(peer_id):
            return None
        is_here = self._host.is_connected(peer_id)
        origins = {self._host.origin_of(peer_id)} if is_here else claimed_origins(contact)
        addrs = tuple(Multiaddr(addr).to_bytes() for addr in contact.addrs)
        now = trio.current_time()
        return KnownPeer(contact, addrs, frozenset(origins), since, now, now)

    def _may_serve(self, peer_id: str) -> bool:
        """Whether the peer speaks Kademlia, as far as it has said what it speaks."""
        protocols = self._peerstore.get_protocols(ID.from_string(peer_id))
        return not protocols or KAD in protocols

    def contact(self, peer_id: str) -> Contact:
        """Where a peer is, as far as it is known."""
        with contextlib.suppress(PeerStoreError):
            addrs = self._peerstore.addrs(ID.from_string(peer_id))
            return Contact(peer_id, tuple(str(without_peer(addr)) for addr in addrs[-MAX_ADDRS:]))
        return Contact(peer_id)

    def remove(self, peer_id: str) -> None:
        """A peer does not answer."""
        self._bucket(peer_id).pop(peer_id, None)

    def nearest(self, key: bytes, count: int = K) -> list[KnownPeer]:
        """The peers nearest to a key: ids near a key are free, so not too many of one address."""
        known = {peer_id: peer for bucket in self._buckets.values() for peer_id, peer in bucket.items()}
        near = heapq.nsmallest(max(count, _LOOKED_AT), known, key=lambda peer_id: distance(peer_id, key))
        if len(near) > count:
            near = nearest_around(key, ((peer_id, known[peer_id].origins) for peer_id in near), count)
        return [known[peer_id] for peer_id in near]
