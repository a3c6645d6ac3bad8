"""Kademlia's provider records in hostile hands: ids near a key, floods of records, providers that are none."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network import kad_store
from petalnode.node.network.kad_store import LIFETIME, MAX_OF_KEY, FairProviderStore
from petalnode.node.network.provider_lookup import LOOKUP, Contact, Lookup, LookupAnswer, add, answer_of, ask, distance
from petalnode.node.network.transport.bandwidth import ByteCount
from petalnode.node.swarm import provider_records
from petalnode.node.swarm.provider_records import SEARCH, ProviderRecords, blocks_sought
from petalnode.node.testing import MemoryNetwork, open_network
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import SignedAnnouncement
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.ids import Span, blocks_key
from tests.announcements import signed
from tests.attacks.trap import Trap, victim
from tests.directory_node import DirectoryNode
from tests.origins import At
from tests.unit.provider_table import KEY, OWN, PEERS, PROVIDER, Table, peer

# --- ids near a key


def mined(count: int, host: str, rank: int) -> list[Contact]:
    """Keys of one attacker, all of them nearer to KEY than the `rank`th of the honest peers."""
    limit = sorted(distance(one.peer_id, KEY) for one in PEERS)[rank]
    found: list[Contact] = []
    number = 1_000_000
    while len(found) < count:
        number += 1
        contact = peer(number, host)
        if distance(contact.peer_id, KEY) < limit:
            found.append(contact)
    return found


class Hostile(Table):
    """Honest peers, and an attacker's whom all of them have heard of, and who name only each other and `false` ones."""

    def __init__(self, ours: Sequence[Contact], false: Sequence[Contact] = ()) -> None:
        super().__init__(PEERS)
        for known in self.knows.values():
            known.extend(ours)
        self.ours = {one.peer_id for one in ours}
        self.false = (*ours, *false)
        self.peers.update({one.peer_id: one for one in ours})

    async def ask(self, contact: Contact) -> LookupAnswer | None:
        if contact.peer_id not in self.ours:
            return await super().ask(contact)
        self.asked.append(contact.peer_id)
        return LookupAnswer((), tuple(random.Random(len(self.asked)).sample(self.false, min(20, len(self.false)))))


@pytest.fixture(scope="module")
def nearest_ids() -> list[Contact]:
    return mined(30, "11.200.0.1", 20)


def test_ids_near_a_key_hide_nothing(nearest_ids: list[Contact]) -> None:
    """Thirty keys that one machine has made are among the nearest; records are kept and sought beyond them."""
    table = Hostile(nearest_ids)
    kept = table.keep(PROVIDER, [PEERS[0]])
    assert len([contact for contact in kept if contact.peer_id not in table.ours]) >= LOOKUP.closest - 1, kept
    for start in PEERS[1::75]:
        table.asked.clear()
        assert table.found([start]) == [PROVIDER]
        assert len(table.asked) <= LOOKUP.max_asked


def test_absent_peers_use_up_little_of_look_ups(nearest_ids: list[Contact]) -> None:
    """Each with an address that nobody else has: they cost as many questions as it takes to doubt who names them."""
    false = [
        Contact(one.peer_id, (f"/ip4/11.201.{number}.1/tcp/1",))
        for number, one in enumerate(mined(60, "11.200.0.1", 5))
    ]
    table = Hostile(nearest_ids[:4], false)
    table.keep(PROVIDER, [PEERS[0]])
    for start in PEERS[1::75]:
        assert table.found([start]) == [PROVIDER]


def test_who_names_endless_providers_is_heard_equally_often() -> None:
    lookup = Lookup(KEY, [*PEERS[:3], peer(3_000_000)], OWN)
    flood = tuple(peer(4_000_000 + number, f"11.202.{number}.1") for number in range(200))
    while (contact := lookup.next()) is not None:
        lookup.answered(contact.peer_id, LookupAnswer((PROVIDER,) if contact in PEERS else flood, ()))
    providers = list(lookup.providers(random.Random(1)))
    assert PROVIDER in providers[:2] and len(providers) <= 33


def test_an_answer_without_end_is_read_in_part() -> None:
    many = [Message.Peer(id=ID.from_string(one.peer_id).to_bytes(), addrs=[b"\x04\x01"]) for one in PEERS]
    addrs = [Multiaddr(f"/ip4/11.0.0.1/tcp/{port}").to_bytes() for port in range(1, 400)]
    many += [
        Message.Peer(id=b"\x01", addrs=addrs),
        Message.Peer(id=bytes(5000), addrs=addrs),
        Message.Peer(id=ID.from_string(OWN).to_bytes(), addrs=[*addrs, b"/" * 5000]),
    ]
    answer = answer_of(Message(type=Message.GET_PROVIDERS, providerPeers=many * 20, closerPeers=many * 20))
    assert len(answer.providers) <= 128 and len(answer.closer) <= 80
    assert all(len(contact.addrs) <= 8 for contact in (*answer.providers, *answer.closer))


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.close()


async def test_no_local_service_is_dialed_for_an_answer(trap: Trap) -> None:
    """Neither as a peer nearer to the key nor as a provider, nor as the relay of one."""
    circuit = f"{trap.addr}/p2p/{PEERS[1].peer_id}/p2p-circuit"
    private = ("/ip4/127.0.0.1/tcp/1", "/ip4/169.254.169.254/tcp/80", "/ip4/0.0.0.0/tcp/1")
    async with victim() as host:
        for one in (Contact(PEERS[2].peer_id, (trap.addr,)), Contact(PEERS[3].peer_id, (circuit, *private))):
            assert await ask(host, one, Message(type=Message.GET_PROVIDERS, key=KEY), ByteCount()) is None
            assert not await add(host, one, KEY, ["/ip4/11.0.0.1/tcp/1"], ByteCount())
        assert not trap.was_dialed


# --- records that a node keeps for others


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock) -> FairProviderStore:
    origins = {one.peer_id: one.addrs[0].split("/")[2] for one in (*PEERS, PROVIDER)}
    return FairProviderStore(At(origins, "attacker"), clock, random.Random(1))


def addrs_of(contact: Contact) -> list[bytes]:
    return [Multiaddr(addr).to_bytes() for addr in contact.addrs]


def keep(kept: FairProviderStore, key: bytes, contact: Contact) -> None:
    kept.add(key, contact.peer_id, addrs_of(contact))


def flood(kept: FairProviderStore, count: int, key: Callable[[int], bytes]) -> None:
    for number in range(count):
        peer_id = str(ID(b"\x12\x20" + number.to_bytes(32, "big")))
        kept.add(key(number), peer_id, [Multiaddr("/ip4/11.66.0.1/tcp/1").to_bytes()])


def named(kept: FairProviderStore, key: bytes) -> set[str]:
    return {found.peer_id for found in kept.providers(key)}


def test_early_peer_with_many_keys_misses_some_places() -> None:
    kept = store(Clock())
    flood(kept, 1000, lambda _: KEY)
    for one in PEERS[: MAX_OF_KEY - 1]:
        keep(kept, KEY, one)
    flood(kept, 2000, lambda _: KEY)
    there = named(kept, KEY)
    assert len(there) == MAX_OF_KEY and {one.peer_id for one in PEERS[: MAX_OF_KEY - 1]} <= there


def test_a_store_is_not_filled_by_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kad_store, "MAX_RECORDS", 640)
    kept = store(Clock())
    for number, one in enumerate(PEERS):
        keep(kept, blocks_key("ab" * 6, number), one)
    flood(kept, 5000, lambda number: blocks_key("cd" * 6, number))
    assert len(kept) == 640
    for number, one in enumerate(PEERS):
        assert named(kept, blocks_key("ab" * 6, number)) == {one.peer_id}


def test_record_lasts_its_time_and_has_few_addresses() -> None:
    clock = Clock()
    kept = store(clock)
    short = [f"/ip4/11.0.0.1/tcp/{port}" for port in range(1, 100)]
    long = [f"/dns4/{'a' * 60}.{'b' * 60}.{'c' * 60}.example/tcp/{port}" for port in range(1, 100)]
    for addrs, expected in ((short, short[:8]), ([*long, *short], [*long[:5], *short[:3]])):
        keep(kept, KEY, Contact(PROVIDER.peer_id, tuple(addrs)))
        (found,) = kept.providers(KEY)
        assert [str(Multiaddr(addr)) for addr in found.addrs] == expected
    clock.now += LIFETIME - 1
    keep(kept, KEY, PEERS[0])
    clock.now += 2
    assert named(kept, KEY) == {PEERS[0].peer_id}
    assert len(list(kept.drop_expired())) == 1
    assert len(kept) == 1
    clock.now += LIFETIME
    list(kept.drop_expired())
    assert not len(kept) and not list(kept.drop_expired())
    usual = FairProviderStore(At(elsewhere="11.0.0.1"))
    keep(usual, KEY, PROVIDER)
    assert named(usual, KEY) == {PROVIDER.peer_id}


# --- providers that are none

VERSION = bytes.fromhex("5f4e7440d715" + "00" * 26)
BLOCKS = 30


def announced(identity: Identity, start: int = 0, version: bytes = VERSION) -> SignedAnnouncement:
    fields = {"model_version": version, "num_blocks": BLOCKS, "addrs": ("/ip4/11.0.0.1/tcp/1",)}
    return signed(identity, Span(start, start + 10), lifetime=300, **fields)


class Provider:
    """A node that a record leads to, and that answers as `answer` has it."""

    def __init__(self, network: MemoryNetwork, answer: Callable[[Identity], SignedAnnouncement | None]) -> None:
        identity = Identity.generate()
        self.asked = 0
        self.peer_id = identity.peer_id
        node = network.node(identity)

        async def serve(stream: MessageStream[wire.DirectoryFrame]) -> None:
            await stream.receive(timeout=10)
            self.asked += 1
            record = answer(identity)
            if record is None:
                await trio.sleep_forever()
            else:
                records = wire.DirectoryRecords(records=[record.to_wire()] * self.times)
                await stream.send(wire.DirectoryFrame(records=records), timeout=10)

        self.times = 1
        node.set_handler(DIRECTORY, serve)


@asynccontextmanager
async def a_stranger() -> AsyncIterator[Any]:
    """Runs `main(network, stranger, providers of each key, the stranger's records)` on virtual time."""
    async with open_network() as network:
        stranger = DirectoryNode(network, Identity.generate())
        network.nodes[stranger.peer_id] = stranger
        listed: dict[bytes, list[str]] = {}

        async def look_up(key: bytes, *, timeout: float) -> Lookup:
            await trio.sleep(0.1)
            lookup = Lookup(key, [PEERS[0]], stranger.peer_id)
            contact = lookup.next()
            assert contact is not None
            lookup.answered(contact.peer_id, LookupAnswer(tuple(map(Contact, listed.get(key, ()))), ()))
            return lookup

        async def close_opened() -> None:
            pass

        dht: Any = SimpleNamespace(look_up=look_up, close_opened=close_opened)
        records = ProviderRecords(streams=stranger, dht=dht, directory=stranger.directory, ttl=45)
        yield network, stranger, listed, records


def known(stranger: DirectoryNode) -> set[str]:
    return {server.peer_id for server in stranger.view.servers(VERSION, now=time.time())}


@pytest.mark.virtual_time
async def test_honest_server_is_found_among_false_providers() -> None:
    """Who gives another's announcement, one of other blocks or of another version, two at once, one that is not its
    own though signed, or nothing at all."""
    other = Identity.generate()
    async with a_stranger() as (network, stranger, listed, records):
        honest = Provider(network, announced)
        false = [
            Provider(network, lambda _: announced(other)),
            Provider(network, lambda identity: announced(identity, 20)),
            Provider(network, lambda identity: announced(identity, version=b"\x11" * 32)),
            Provider(network, lambda _: None),
            Provider(network, lambda identity: replace(announced(identity), signature=bytes(64))),
            Provider(network, announced),
        ]
        false[-1].times = 2
        listed[blocks_key(VERSION.hex(), 0)] = [*(one.peer_id for one in false), honest.peer_id, stranger.peer_id]
        assert await records.find(blocks_sought(VERSION.hex(), BLOCKS), timeout=15)
        assert known(stranger) >= {honest.peer_id} and other.peer_id not in known(stranger)
        assert not known(stranger) & {false[index].peer_id for index in (0, 2, 3, 4, 5)}
        assert all(one.asked == 1 for one in (honest, *false))


@pytest.mark.virtual_time
async def test_flood_of_records_costs_bounded_number_of_meetings() -> None:
    async with a_stranger() as (_network, stranger, listed, records):
        tried: list[str] = []
        new_stream = stranger.new_stream

        async def counted(peer_id: str, *args: Any, **options: Any) -> Any:
            tried.append(peer_id)
            return await new_stream(peer_id, *args, **options)

        stranger.new_stream = counted  # type: ignore[method-assign]
        ids = [one.peer_id for one in PEERS]
        for number in range(8):
            listed[blocks_key(VERSION.hex(), number)] = ids[30 * number : 30 * number + 30]
        assert await records.find(blocks_sought(VERSION.hex(), BLOCKS), timeout=15)
        assert len(tried) == len(set(tried)) == SEARCH.tried_in_all
        tried.clear()
        assert await records.find(blocks_sought(VERSION.hex(), BLOCKS), timeout=15)
        assert not tried  # so soon

        listed[blocks_key("22" * 32, 0)] = ids
        assert await records.find(blocks_sought("22" * 32)[:1], timeout=15)
        assert len(tried) == SEARCH.tried


@pytest.mark.virtual_time
async def test_providers_that_keep_search_waiting_end_with_it() -> None:
    async with a_stranger() as (network, stranger, listed, records):
        silent = [Provider(network, lambda _: None).peer_id for _ in range(40)]
        for number in range(8):
            listed[blocks_key(VERSION.hex(), number)] = random.sample(silent, 20)
        begun = trio.current_time()
        assert await records.find(blocks_sought(VERSION.hex(), BLOCKS), timeout=5)
        assert trio.current_time() - begun <= 5
        assert not known(stranger)


def test_provider_sends_no_more_than_one_announcement_takes() -> None:
    assert provider_records._DIRECTORY.max_header < 20_000
