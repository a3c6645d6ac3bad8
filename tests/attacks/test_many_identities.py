"""Who comes under ever new keys neither fills a node's memory nor makes it forget its own key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.envelope import seal_record
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.transport import address_book
from petalnode.node.network.transport.address_book import MAX_ADDRS, BoundedPeerStore
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from tests.patience import eventually

LIMIT = 8


def keys(count: int) -> Iterator[tuple[ID, KeyPair]]:
    for number in range(count):
        pair = create_new_key_pair(number.to_bytes(32, "big"))
        yield ID.from_pubkey(pair.public_key), pair


def addrs(count: int) -> list[Multiaddr]:
    return [Multiaddr(f"/ip4/192.0.2.7/tcp/{port}") for port in range(1, count + 1)]


@pytest.fixture
def own() -> KeyPair:
    return create_new_key_pair(b"\xff" * 32)


@pytest.fixture
def store(own: KeyPair) -> BoundedPeerStore:
    return BoundedPeerStore(own, LIMIT)


def test_a_node_keeps_its_own_keys(own: KeyPair, store: BoundedPeerStore) -> None:
    for peer_id, _ in keys(3 * LIMIT):
        store.add_addrs(peer_id, addrs(1), 3600)
    own_id = ID.from_pubkey(own.public_key)
    assert store.pubkey(own_id) == own.public_key
    assert store.privkey(own_id) == own.private_key
    with pytest.raises(PeerStoreError):
        store.privkey(next(keys(1))[0])


@pytest.mark.parametrize("way", ["addrs", "protocols", "key", "metadata", "latency", "record"])
def test_whatever_strangers_say_is_kept_of_so_many(store: BoundedPeerStore, way: str) -> None:
    for peer_id, pair in keys(3 * LIMIT):
        match way:
            case "addrs":
                store.add_addrs(peer_id, addrs(1), 3600)
            case "protocols":
                store.add_protocols(peer_id, ["/x"])
            case "key":
                store.add_pubkey(peer_id, pair.public_key)
            case "metadata":
                store.put(peer_id, "agent", "x")
            case "latency":
                store.record_latency(peer_id, 1.0)
            case "record":
                assert store.consume_peer_record(seal_record(PeerRecord(peer_id, addrs(1)), pair.private_key), 3600)
        assert store.has_peer(peer_id)
    assert len(store.peer_ids()) <= LIMIT
    assert len(store.peer_record_map) <= LIMIT


def test_who_is_heard_of_again_stays(store: BoundedPeerStore) -> None:
    known, *others = [peer_id for peer_id, _ in keys(3 * LIMIT)]
    for peer_id in others:
        store.add_addrs(known, addrs(1), 3600)
        store.add_addrs(peer_id, addrs(1), 3600)
    assert store.addrs(known) == addrs(1)


def test_a_peer_has_so_many_addresses(store: BoundedPeerStore) -> None:
    peer_id, _ = next(keys(1))
    for addr in addrs(3 * MAX_ADDRS):
        store.add_addr(peer_id, addr, 3600)
    assert store.addrs(peer_id) == addrs(3 * MAX_ADDRS)[-MAX_ADDRS:]
    store.add_addrs(peer_id, addrs(3 * MAX_ADDRS), 3600)
    assert len(store.addrs(peer_id)) == MAX_ADDRS


def test_a_large_record_is_refused(store: BoundedPeerStore) -> None:
    peer_id, pair = next(keys(1))
    assert not store.consume_peer_record(seal_record(PeerRecord(peer_id, addrs(2000)), pair.private_key), 3600)
    assert not store.has_peer(peer_id)


async def test_node_that_has_met_many_still_identifies_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p's own store would have thrown the node's keys out: it could say who it is to nobody any more."""
    monkeypatch.setattr(address_book, "MAX_PEERS", LIMIT)
    async with open_swarm(SwarmConfig(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))) as node:
        stored = node.host.libp2p.get_peerstore()
        for peer_id, _ in keys(3 * LIMIT):
            stored.add_addrs(peer_id, addrs(1), 3600)
        async with open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as newcomer:
            met, node_id = newcomer.host.libp2p.get_peerstore(), ID.from_string(node.host.peer_id)
            await eventually(lambda: met.has_peer(node_id) and met.get_protocols(node_id), "the node says who it is")
        assert len(stored.peer_ids()) <= LIMIT
