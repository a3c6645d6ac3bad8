"""What libp2p's own parts keep of other peers, with a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeVar

from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.peer.envelope import Envelope
from libp2p.peer.id import ID
from libp2p.peer.peerdata import PeerData
from libp2p.peer.peerstore import PeerRecordState, PeerStore
from multiaddr import Multiaddr

from ....protocols.nat_traversal import read_addr

MAX_PEERS: Final = 8192
"""More than there can be connections, so that nobody who is connected is forgotten at once."""
MAX_ADDRS: Final = 32  # of one peer
MAX_RECORD: Final = 8192  # bytes of a signed peer record

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

    libp2p's own forgets peers without addresses first, once it knows 1,000, and the first of these is the node itself:
    from then on it can neither identify itself nor sign what it publishes. What comes by other ways than addresses
    (keys, protocols, signed records) has no bound there, and for each peer beyond the 1,000 it sorts all of them.
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
