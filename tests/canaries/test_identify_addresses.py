"""py-libp2p's identify: what a peer says of its addresses replaces all that is known of them, 0.0.0.0 included."""

from __future__ import annotations

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from multiaddr import Multiaddr

CURED = "py-libp2p has cured it: docs/decisions/yamux-and-noise.md says what can be thrown away"
PEER = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)
NOWHERE = Multiaddr("/ip4/0.0.0.0/tcp/4001")
KNOWN = Multiaddr("/ip4/203.0.113.7/tcp/4001")


async def test_what_identify_brings_replaces_the_address_that_worked() -> None:
    store = PeerStore()
    store.add_addr(PEER, KNOWN, 3600)
    await update_peerstore_from_identify(store, PEER, Identify(listen_addrs=[NOWHERE.to_bytes()]))
    assert store.addrs(PEER) == [NOWHERE], CURED
