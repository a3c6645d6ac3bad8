"""Kademlia's stores, its routing table, and who loses a stream: pure state, at addresses that the tests choose."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.kad_messages import KAD, MAX_ANSWER_FIELDS, BadMessage, parse, record_of
from petalnode.node.network.kad_service import OF_PEER, PATIENCE, TableStream, to_drop
from petalnode.node.network.kad_store import (
    ENTRY_BYTES,
    MAX_VALUE,
    MODELS_KEY,
    Value,
    ValueStore,
    models_value,
    open_value,
    server_key,
)
from petalnode.node.network.provider_lookup import Contact, distance
from petalnode.node.network.routing_table import K, KnownPeer, RoutingTable, superfluous
from petalnode.node.network.shares import AddressShares, Rates
from petalnode.protocols.announcement import BadAnnouncement, SignedAnnouncement
from petalnode.protocols.framing import varint
from tests.announcements import identity_of, signed
from tests.origins import Backed

pytestmark = pytest.mark.virtual_time

NOW = 1_800_000_000.0
SERVER = Identity.from_seed(b"s" * 32)


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


# --- shares of addresses


def test_of_who_has_most_the_newest_goes() -> None:
    shares = AddressShares[str](10)
    for number in range(9):
        shares.hold(f"many{number}", "11.0.0.1")
    shares.hold("one", "11.0.0.2")
    assert shares.surplus() is None and len(shares) == shares.total == 10
    shares.hold("two", "11.0.0.2")
    assert shares.surplus() == "many8"
    shares.remove("many8")
    assert shares.surplus() is None
    shares.hold("two", "11.0.0.2", 9)  # grows, and is older than nothing else there
    assert shares.surplus() == "two" and shares.total == 18
    shares.hold("two", "11.0.0.3", 1)  # another one's from now on
    assert shares.origin_of("two") == "11.0.0.3" and shares.total == 10


def test_shares_agree_with_counting_all_entries_each_time() -> None:
    rng = random.Random(1)
    shares, held = AddressShares[int](300), dict[int, tuple[str, int]]()
    for _ in range(5000):
        key, origin, size = rng.randrange(400), f"11.0.0.{rng.randrange(12)}", rng.randrange(1, 6)
        if rng.random() < 0.3 and key in held:
            shares.remove(key)
            del held[key]
        else:
            shares.hold(key, origin, size)
            held[key] = origin, size
        while (surplus := shares.surplus()) is not None:
            of_origin: dict[str, int] = {}
            for whose, taken in held.values():
                of_origin[whose] = of_origin.get(whose, 0) + taken
            assert of_origin[held[surplus][0]] == max(of_origin.values())
            shares.remove(surplus)
            del held[surplus]
        assert shares.total == sum(size for _, size in held.values()) <= 300 and len(shares) == len(held)
    assert len(shares._heap) < 100


# --- values


def announced(
    identity: Identity = SERVER, *, version: int = 1, at: float = NOW, lifetime: float = 300.0, addrs: Any = ()
) -> Any:
    return signed(identity, now=at, lifetime=lifetime, model_version=bytes([version]) * 32, addrs=addrs)


def opened(key: str, value: bytes, now: float = NOW) -> Value:
    return trio.run(open_value, key, value, now)


def server_value(record: SignedAnnouncement, now: float = NOW) -> Value:
    return opened(server_key(record.content.peer_id), record.to_bytes(), now)


def test_newer_announcement_is_kept_until_it_expires() -> None:
    clock = Clock()
    kept = ValueStore(clock)
    key = server_key(SERVER.peer_id)
    old, new = server_value(announced()), server_value(announced(at=NOW + 1), NOW + 1)
    assert kept.get(key) is None
    assert kept.put(key, old, "11.0.0.1") and kept.put(key, old, "11.0.0.2")
    clock.now += 1
    assert kept.put(key, new, "11.0.0.1") and not kept.put(key, old, "11.0.0.1")
    assert not kept.put(key, Value(b"as new", new.until, order=new.order), "11.0.0.1")
    assert kept.get(key) == (new, NOW + 1) and len(kept) == 1
    clock.now = new.until + 0.1
    assert kept.get(key) is None and not len(kept)


def test_expired_values_are_dropped_one_at_a_time() -> None:
    clock = Clock()
    kept = ValueStore(clock)
    for number in range(10):
        kept.put(f"k{number}", Value(b"v", NOW + number), "11.0.0.1")
    clock.now += 4.5
    steps = kept.drop_expired()
    next(steps)
    assert len(kept) == 9
    assert len(list(steps)) == 9 and len(kept) == 5


def test_values_of_other_keys_and_times_are_none() -> None:
    record = announced()
    value = record.to_bytes()
    listed = models_value([record])
    for key, bad in (
        (server_key(Identity.from_seed(b"t" * 32).peer_id), value),
        ("/pk/x", value),
        ("", value),
        (server_key(SERVER.peer_id), value + b"\x00"),
        (server_key(SERVER.peer_id), announced(at=NOW - 1000).to_bytes()),
        (MODELS_KEY, value[:5]),
        (MODELS_KEY, b""),
        (MODELS_KEY, listed * 33),
        (MODELS_KEY, listed + b"\xfa\x7f" + varint(MAX_VALUE) + bytes(MAX_VALUE)),
        (MODELS_KEY, bytes(33 * 1024)),
    ):
        with pytest.raises(BadAnnouncement):
            opened(key, bad)
    assert opened(MODELS_KEY, listed * 32).models == {b"\x01" * 32}


@pytest.mark.parametrize(("addrs", "listed"), [((), 32), (("/dns4/" + ".".join(["a" * 60] * 4) + "/tcp/1",) * 8, 14)])
def test_best_backed_models_are_listed(addrs: tuple[str, ...], listed: int) -> None:
    records = [announced(version=number, addrs=addrs) for number in range(40)]
    value = models_value(records, Backed({bytes([number]) * 32: number for number in range(40)}))
    assert opened(MODELS_KEY, value).models == {bytes([number]) * 32 for number in range(40 - listed, 40)}


def test_list_ranks_models_by_backing_then_length() -> None:
    one, two = announced(version=1, lifetime=100), announced(Identity.from_seed(b"t" * 32), version=2)
    short, long = (opened(MODELS_KEY, models_value(records)) for records in ([one], [one, two]))
    other = opened(MODELS_KEY, models_value([two]))
    assert long.until == short.until < other.until and long.order == short.order < other.order
    for records in ([one, announced(version=1)], [announced(version=1), one]):
        assert opened(MODELS_KEY, models_value(records)) == opened(MODELS_KEY, models_value([announced(version=1)]))
    kept = ValueStore(Clock())
    assert kept.put(MODELS_KEY, short, "") and kept.put(MODELS_KEY, long, "")
    assert not kept.put(MODELS_KEY, other, "")
    kept.models = Backed({b"\x01" * 32: 3})
    assert not kept.put(MODELS_KEY, other, "")
    kept.models = Backed({b"\x02" * 32: 5, b"\x01" * 32: -9})
    assert kept.put(MODELS_KEY, other, "")


def test_one_address_fills_its_share_and_nobody_elses() -> None:
    kept = ValueStore(Clock(), most=100 * (ENTRY_BYTES + 1000))
    value = Value(bytes(1000), NOW + 100)
    for number in range(20):
        assert kept.put(f"honest{number}", value, f"11.0.0.{number}")
    taken = [kept.put(f"false{number}", value, "11.66.0.1") for number in range(500)]
    assert len(kept) == 100 and sum(taken) == 80
    assert all(kept.get(f"honest{number}") for number in range(20))
    assert kept.put("late", value, "11.0.1.1") and len(kept) == 100
    assert kept.put("false0", Value(bytes(30_000), NOW + 100, order=1.0), "11.66.0.1")
    assert len(kept) < 90 and all(kept.get(f"honest{number}") for number in range(20))


class Key(str):
    """What is looked at in C, as keys of a dictionary, runs a line here too."""

    def __hash__(self) -> int:
        return super().__hash__()


def test_full_stores_put_costs_no_more() -> None:
    """Counted in lines that run, of which looking through all of it would take a thousand times as many."""
    kept = ValueStore(Clock())
    value = Value(b"v", NOW + 100)
    number = lines = 0
    while kept.put(Key(f"k{number}"), value, Key(f"11.0.{number % 100}.1")):
        number += 1

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        for number in range(1000):
            kept.put(Key(f"f{number}"), value, "11.66.0.1")
    finally:
        sys.settrace(before)
    assert 1000 < lines < 1000 * 200


# --- messages


def test_what_the_specification_allows_is_read() -> None:
    peer = Message.Peer(id=b"\x12\x20" + bytes(32), addrs=[Multiaddr("/ip4/11.0.0.1/tcp/1").to_bytes()] * 16)
    message = Message(type=Message.GET_PROVIDERS, key=b"k", closerPeers=[peer] * 20, providerPeers=[peer] * 200)
    message.record.CopyFrom(record_of(b"k", b"v", 1_800_000_000.5))
    message.clusterLevelRaw = -1
    assert parse(message.SerializeToString(), max_fields=MAX_ANSWER_FIELDS) == message
    assert message.record.timeReceived == "2027-01-15T08:00:00Z" and not record_of(b"k", b"v").timeReceived
    assert parse(b"", max_fields=0) == Message()
    fixed = b"\x79" + bytes(8) + b"\x7d" + bytes(4)
    assert parse(fixed, max_fields=2).type == Message.PUT_VALUE


@pytest.mark.parametrize(
    "data", [b"\x79" + bytes(7), b"\x7d" + bytes(3), b"\x12\x02a", b"\x12", b"\x80", b"\x4a\x02\x12\x02"]
)
def test_a_message_that_is_cut_short_is_none(data: bytes) -> None:
    with pytest.raises(BadMessage):
        parse(data, max_fields=10)


def test_fields_are_counted_with_those_within() -> None:
    peer = Message.Peer(id=b"i", addrs=[b"a"] * 3)
    data = Message(key=b"k", closerPeers=[peer] * 2, providerPeers=[peer]).SerializeToString()
    assert parse(data, max_fields=16)
    with pytest.raises(BadMessage, match="more than 15 fields"):
        parse(data, max_fields=15)


# --- streams and rates


def place(origin: str, peer: str, *, waiting: bool = True) -> TableStream:
    made = TableStream(peer, origin)
    made.waiting = waiting
    return made


def test_most_streams_owner_loses_the_silent_one() -> None:
    honest = place("11.0.0.1", "h")
    many = [place("11.66.0.1", f"a{number % 3}", waiting=number != 1) for number in range(7)]
    assert to_drop([honest, *many]) is many[0]
    assert to_drop([honest, *many[1:]]) is many[2]
    busy = [place("11.66.0.1", "a", waiting=False) for _ in range(3)]
    assert to_drop([honest, *busy]) is busy[0]
    neighbour = place("11.66.0.1", "h")
    assert to_drop([neighbour, *busy]) is busy[0]


async def test_peers_questions_are_limited_and_soon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petalnode.node.network.shares.REMEMBERED", 3)
    rate, most = OF_PEER
    rates = Rates(rate, most)
    bucket = rates.of("a")
    assert bucket is rates.of("a") is not rates.of("b")
    for _ in range(int(most)):
        assert bucket.delay(1) == 0
        bucket.take_ahead(1)
    assert bucket.delay(1) == pytest.approx(1 / rate)
    bucket.take_ahead(PATIENCE * rate)
    assert bucket.delay(1) > PATIENCE
    await trio.sleep(PATIENCE + 1 / rate + 0.001)
    assert bucket.delay(1) == 0
    for name in ("c", "d", "e"):
        rates.of(name)
    assert rates.of("a") is bucket and len(rates) <= 3


# --- the routing table


@dataclass
class FakeHost:
    """A node that has connections with the peers of `at`, by the address of each."""

    peer_id: str = SERVER.peer_id
    at: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = PeerStore()
        self.libp2p = SimpleNamespace(get_peerstore=lambda: self.store)

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in self.at

    def origin_of(self, peer_id: str) -> str:
        return self.at[peer_id]


def ids() -> Iterator[str]:
    number = 0
    while True:
        yield identity_of(number).peer_id
        number += 1


def in_first_bucket(count: int) -> list[str]:
    """Peers whose keys differ from ours in the first bit."""
    own = distance(SERVER.peer_id, b"")
    far = (peer_id for peer_id in ids() if (distance(peer_id, b"") ^ own).bit_length() == 256)
    return [next(far) for _ in range(count)]


def addr(host: str) -> list[Multiaddr]:
    return [Multiaddr(f"/ip4/{host}/tcp/1")]


@asynccontextmanager
async def a_table() -> AsyncIterator[Any]:
    host = FakeHost()
    yield host, RoutingTable(host)  # type: ignore[arg-type]


@pytest.mark.virtual_time
async def test_located_kademlia_peers_are_named() -> None:
    peers = in_first_bucket(4)
    async with a_table() as (host, table):
        for peer_id in (*peers[:3], host.peer_id):
            table.learn(peer_id, addr("11.0.0.1"))
        table.learn(peers[3], [])
        assert len(table) == 3
        own = ID.from_string(peers[0])
        host.store.add_protocols(own, ["/ipfs/id/1.0.0"])
        host.store.add_protocols(ID.from_string(peers[1]), ["/ipfs/id/1.0.0", KAD])
        table.add(peers[0])
        assert len(table) == 3  # it was looked up a moment ago
        await trio.sleep(61)
        for peer_id in peers[:2]:
            table.add(peer_id)
        named = [peer.contact.peer_id for peer in table.nearest(b"k")]
        assert named == sorted(peers[1:3], key=lambda peer_id: distance(peer_id, b"k"))
        assert table.nearest(b"k", 1)[0].addrs == (addr("11.0.0.1")[0].to_bytes(),)
        table.remove(peers[1])
        table.remove(peers[1])
        assert len(table) == 1


@pytest.mark.virtual_time
async def test_a_full_bucket_is_shared_by_addresses() -> None:
    peers = in_first_bucket(3 * K)
    honest, false = peers[:5], peers[5:]
    async with a_table() as (host, table):
        for peer_id in false:
            host.at[peer_id] = "11.66.0.1"
            table.learn(peer_id, addr("11.66.0.1"))
            await trio.sleep(1)
        assert len(table) == K
        for number, peer_id in enumerate(honest):
            table.learn(peer_id, addr(f"11.0.0.{number}"))
        for peer_id in false:
            table.add(peer_id)
        named = {peer.contact.peer_id for peer in table.nearest(b"k")}
        assert len(table) == K and set(honest) <= named


@pytest.mark.virtual_time
async def test_newest_at_an_address_goes_whenever_heard() -> None:
    peers = in_first_bucket(K + 1)
    async with a_table() as (host, table):
        host.at = {peer_id: f"11.0.0.{max(number, 1)}" for number, peer_id in enumerate(peers)}
        for peer_id in peers[:-1]:
            table.learn(peer_id, addr(host.at[peer_id]))
            await trio.sleep(1)
        await trio.sleep(61)
        table.add(peers[0])
        table.learn(peers[-1], addr(host.at[peers[-1]]))
        assert {peer.contact.peer_id for peer in table.nearest(b"k")} == {*peers} - {peers[1]}


@pytest.mark.virtual_time
async def test_one_addresss_near_peers_are_not_all_named() -> None:
    peers = sorted(itertools.islice(ids(), 30), key=lambda peer_id: distance(peer_id, b"k"))
    async with a_table() as (host, table):
        host.at = {peer_id: f"11.0.0.{max(number, 21)}" for number, peer_id in enumerate(peers)}
        for peer_id in peers:
            table.learn(peer_id, addr("11.0.0.1"))
        assert len(table) == 30
        named = [peer.contact.peer_id for peer in table.nearest(b"k")]
        assert named == [peers[0], *peers[22:], *peers[1:12]]


def known(name: str, origin: str, since: float, seen: float) -> KnownPeer:
    return KnownPeer(Contact(name), (), frozenset({origin}), since, seen, seen)


def test_connected_stays_and_else_the_last_heard() -> None:
    old, new, away, gone = (
        known("old", "11.0.0.1", 1, 9),
        known("new", "11.0.0.2", 8, 8),
        known("away", "11.0.0.3", 2, 7),
        known("gone", "11.0.0.4", 1, 6),
    )
    here = frozenset({"old", "new"})
    assert superfluous([old, new, away, gone], here) is gone
    assert superfluous([old, new, away], here) is away
    assert superfluous([old, new], here) is new
    assert (
        superfluous(
            [old, new, gone, known("twin", "11.0.0.1", 3, 3)], frozenset({"old", "new", "twin"})
        ).contact.peer_id
        == "twin"
    )
