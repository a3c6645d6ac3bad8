"""Look-ups of provider records: whom they ask, what they take, and how many peers keep a record."""

from __future__ import annotations

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from petalnode.node.network.provider_lookup import (
    LOOKUP,
    Contact,
    Lookup,
    LookupAnswer,
    answer_of,
    claimed_origins,
    distance,
    look_up,
)
from tests.unit.provider_table import KEY, OWN, PEERS, PROVIDER, Table, peer

pytestmark = pytest.mark.virtual_time


def test_look_up_finds_the_nearest_from_anywhere() -> None:
    table = Table(PEERS)
    nearest = sorted((one.peer_id for one in PEERS), key=lambda peer_id: distance(peer_id, KEY))[: LOOKUP.closest]
    for start in PEERS[::60]:
        table.asked.clear()
        found = [contact.peer_id for contact in table.look_up([start]).nearest()]
        assert len(found) == LOOKUP.closest and len(set(found) & set(nearest)) >= LOOKUP.closest - 2
        assert found == sorted(found, key=lambda peer_id: distance(peer_id, KEY))
        assert len(table.asked) == len(set(table.asked)) <= LOOKUP.max_asked


def test_stranger_who_knows_one_peer_finds_values() -> None:
    table = Table(PEERS)
    assert len(table.keep(PROVIDER, [PEERS[0]])) == LOOKUP.closest
    for start in PEERS[1::75]:
        assert table.found([start]) == [PROVIDER]


def test_value_outlives_most_of_its_keepers() -> None:
    table = Table(PEERS)
    kept = table.keep(PROVIDER, [PEERS[0]])
    table.dead.update(contact.peer_id for contact in kept[: LOOKUP.closest - 3])
    start = next(one for one in PEERS if one.peer_id not in table.dead)
    assert table.found([start]) == [PROVIDER]


def test_small_look_up_asks_each_peer_once() -> None:
    few = PEERS[:4]
    table = Table(few)
    lookup = table.look_up(few[:1])
    assert sorted(table.asked) == sorted(one.peer_id for one in few)
    assert {contact.peer_id for contact in lookup.nearest()} == set(table.asked)


def test_peers_behind_one_address_find_each_other() -> None:
    """A swarm on one machine, or of one campus."""
    table = Table([peer(number, "11.0.0.1") for number in range(40)])
    start = list(table.peers.values())
    table.keep(PROVIDER, start[:1])
    assert table.found(start[-1:]) == [PROVIDER]


async def test_look_up_ends_at_its_deadline() -> None:
    table = Table(PEERS)
    lookup, begun = Lookup(KEY, PEERS[:1], OWN), trio.current_time()
    await look_up(lookup, table.ask, timeout=0.25)
    assert trio.current_time() - begun == 0.25 and lookup.nearest()


def test_messages_are_read_as_go_and_js_write() -> None:
    """GET_PROVIDERS: type 3, key 2, closerPeers 8, providerPeers 9; of a peer its id 1, addrs 2, connection 3. Without
    signed records, which only py-libp2p adds; js adds a clusterLevel."""
    own = ID.from_string(PROVIDER.peer_id).to_bytes()
    addr = Multiaddr(PROVIDER.addrs[0]).to_bytes()
    sent = b"\x0a" + bytes([len(own)]) + own + b"\x12" + bytes([len(addr)]) + addr + b"\x18\x01"
    answer = b"\x08\x03\x12" + bytes([len(KEY)]) + KEY + b"\x50\x00" + b"\x4a" + bytes([len(sent)]) + sent
    answer += b"\x42" + bytes([len(sent)]) + sent
    assert answer_of(Message.FromString(answer)) == LookupAnswer((PROVIDER,), (PROVIDER,))


def test_where_a_peer_is_said_to_be() -> None:
    private, public = "/ip4/192.168.1.7/tcp/1", "/ip4/11.0.0.1/tcp/1"
    assert claimed_origins(Contact("x", (private, public, "/ip6/2a00:1:2:3::7/tcp/1"))) == {
        "11.0.0.1",
        "2a00:1:2:3::/64",
    }
    assert claimed_origins(Contact("x", (private,))) == {"192.168.1.7"}
    assert claimed_origins(Contact("x", ("/ip4/11.0.0.1/udp/1",))) == {"x"}
