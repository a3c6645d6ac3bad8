"""py-libp2p's peerstore: of more than 1,000 peers it forgets the node itself first, with its keys."""

from __future__ import annotations

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from multiaddr import Multiaddr

CURED = "py-libp2p has cured it: docs/decisions/peerstore.md says what can be thrown away"


def test_nodes_own_keys_are_first_to_go() -> None:
    own = create_new_key_pair(b"\xff" * 32)
    own_id = ID.from_pubkey(own.public_key)
    store = PeerStore(max_peers=8)
    store.add_key_pair(own_id, own)
    for number in range(9):
        peer_id = ID.from_pubkey(create_new_key_pair(number.to_bytes(32, "big")).public_key)
        store.add_addrs(peer_id, [Multiaddr("/ip4/192.0.2.7/tcp/1")], 3600)
    try:
        store.privkey(own_id)
    except PeerStoreError:
        return
    pytest.fail(CURED)


def test_keys_and_protocols_of_peers_have_no_bound() -> None:
    store = PeerStore(max_peers=8)
    for number in range(16):
        peer_id = ID.from_pubkey(create_new_key_pair(number.to_bytes(32, "big")).public_key)
        store.add_protocols(peer_id, ["/x"])
    assert len(store.peer_ids()) == 16, CURED
