"""A stranger's requests in Kademlia take little memory and time, whatever is in them, and keep nobody else out."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network import kad_service
from petalnode.node.network.dht import Dht, open_dht
from petalnode.node.network.host import Host
from petalnode.node.network.kad_messages import MAX_REQUEST_FIELDS, BadMessage, parse
from petalnode.node.network.kad_store import server_key
from petalnode.node.network.standard_protocols import IDENTIFY_PUSH
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.protocols.announcement import SignedAnnouncement
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import PeerError, varint
from tests.announcements import signed
from tests.attacks.hosts import LOOPBACK, TIMEOUT, delimited, host, knowing

KAD = "/ipfs/kad/1.0.0"
MIB = 1 << 20


@asynccontextmanager
async def node() -> AsyncIterator[tuple[Host, Dht]]:
    """The one that is attacked."""
    async with host(LOOPBACK) as opened, open_dht(opened, serve=True) as table:
        yield opened, table


async def answer(stream: StreamBytes, victim: Host, question: Message) -> Message:
    """Raises PeerError if none comes."""
    messages = DelimitedStream(stream, victim.peer_id, max_message=8 * MIB)
    await messages.send(question, timeout=TIMEOUT)
    return await messages.receive(Message, timeout=TIMEOUT)


async def asked(asking: Host, victim: Host, question: Message) -> Message | None:
    stream = await asking.open_stream(victim.peer_id, KAD)
    try:
        return await answer(stream, victim, question)
    except PeerError:
        return None
    finally:
        await stream.reset()


FIND = Message(type=Message.FIND_NODE, key=b"\x12\x20" + bytes(32))


def announced(identity: Identity, ago: float = 0) -> SignedAnnouncement:
    return signed(identity, now=time.time() - ago, lifetime=300)


def put(key: bytes, value: bytes, **more: bytes) -> Message:
    return Message(type=Message.PUT_VALUE, key=key, record=Record(key=key, value=value, **more))


def padded_key() -> Message:
    """Valid under libp2p's own rules: a public key under its own id, and 1 MiB that no signature covers."""
    pair = create_new_key_pair()
    key = b"/pk/" + ID.from_pubkey(pair.public_key).to_bytes().hex().encode()
    return put(key, pair.public_key.serialize(), author=bytes(MIB - 1024))


async def test_padded_records_are_not_kept() -> None:
    async with node() as (victim, _), knowing(victim) as attacker:
        for _ in range(4):
            record = padded_key()
            await asked(attacker, victim, record)
            found = await asked(attacker, victim, Message(type=Message.GET_VALUE, key=record.key))
            assert found is not None and not found.HasField("record")


async def test_record_keeps_key_and_value_of_known_namespaces() -> None:
    identity = Identity.generate()
    key = server_key(identity.peer_id).encode()
    value = announced(identity).to_bytes()
    async with node() as (victim, _), knowing(victim) as attacker:
        request = put(key, value, author=bytes(8000), signature=bytes(8000))
        for _ in range(2):  # the same value again is no fault
            kept = await asked(attacker, victim, request)
            assert kept is not None and kept.record.value == value
        found = await asked(attacker, victim, Message(type=Message.GET_VALUE, key=key))
        assert found is not None and found.record.value == value
        assert not found.record.author and not found.record.signature
        for bad in (padded_key(), put(key, b""), put(key, value[:-1]), put(key[:-1], value), put(b"/pk/x", value)):
            bad.record.ClearField("author")
            assert await asked(attacker, victim, bad) is None
        misplaced = put(key, value)
        misplaced.record.key = b"/petalnode/models"
        assert await asked(attacker, victim, misplaced) is None
        other = put(key, value)
        other.key = b"/petalnode/models"
        assert await asked(attacker, victim, other) is None
        assert await asked(attacker, victim, put(key, announced(identity, ago=10).to_bytes())) is None
        stream = await attacker.open_stream(victim.peer_id, KAD)
        assert await answer(stream, victim, FIND)
        await stream.close()
        with trio.fail_after(TIMEOUT):
            assert await stream.read(1) == b"", "closed as well"


async def test_specified_questions_are_answered_and_leavers_records_dropped() -> None:
    async with node() as (victim, table), node() as (other, _), knowing(victim) as asking:

        def named(peer: Host) -> tuple[bytes, tuple[bytes, ...]]:
            return ID.from_string(peer.peer_id).to_bytes(), tuple(addr.to_bytes() for addr in listened(peer))

        def listened(peer: Host) -> list[Multiaddr]:
            return [Multiaddr(addr.rpartition("/p2p/")[0]) for addr in peer.addrs()]

        async def ask(kind: Message.MessageType, key: bytes = b"k", *left: bytes) -> Message | None:
            question = Message(type=kind, key=key)
            for peer_id in left:
                question.providerPeers.add(id=peer_id, addrs=[b"no multiaddr", listened(other)[0].to_bytes()])
            return await asked(asking, victim, question)

        def peers(found: Iterable[Message.Peer]) -> list[tuple[bytes, tuple[bytes, ...]]]:
            return [(peer.id, tuple(peer.addrs)) for peer in found]

        await table.add_peer(other.peer_id, other.addrs())
        assert await ask(Message.PING) == Message(type=Message.PING)
        for key in (b"", bytes(200)):
            assert await ask(Message.FIND_NODE, key) is None
        found = await ask(Message.FIND_NODE)
        assert found is not None and peers(found.closerPeers) == [named(other)]
        found = await ask(Message.FIND_NODE, named(victim)[0])
        assert found is not None and peers(found.closerPeers) == [named(victim), named(other)]
        own = ID.from_string(asking.peer_id).to_bytes()
        assert await ask(Message.ADD_PROVIDER, b"k", named(other)[0], own) is not None
        found = await ask(Message.GET_PROVIDERS)
        assert found is not None and peers(found.providerPeers) == [(own, named(other)[1][:1])]
        (provider,) = (await table.look_up(b"k", timeout=TIMEOUT)).providers(random.Random(1))
        assert provider.peer_id == asking.peer_id and provider.addrs == (str(listened(other)[0]),)


@pytest.mark.parametrize("addr", [b"no multiaddr", b"\xff\xff", b"\x36\x03a/b", b"\xa5\x03\xff\x07" + bytes(1023)])
async def test_unreadable_addresses_end_no_look_up(addr: bytes) -> None:
    """Before, one connected stranger, or one record, ended all look-ups of a node: libp2p reads addresses late."""
    async with node() as (victim, table), knowing(victim) as attacker:
        stream = await attacker.open_stream(victim.peer_id, IDENTIFY_PUSH)
        await stream.write(delimited(Identify(listen_addrs=[addr], protocols=[KAD])))
        assert await stream.read(1) == b""  # it has been read
        question = Message(type=Message.ADD_PROVIDER, key=b"k")
        question.providerPeers.add(id=ID.from_string(attacker.peer_id).to_bytes(), addrs=[addr])
        assert await asked(attacker, victim, question)
        assert await asked(attacker, victim, FIND)
        for key in (b"k", b"other"):
            assert not [*(await table.look_up(key, timeout=TIMEOUT)).providers(random.Random(1))]


async def test_thousand_requests_in_a_frame_are_answered_steadily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kad_service, "OF_PEER", (0.001, 50.0))  # as on a machine of any speed
    answered = 0
    async with node() as (victim, _), knowing(victim) as attacker, knowing(victim) as honest:
        stream = await attacker.open_stream(victim.peer_id, KAD)

        async def flood() -> None:
            nonlocal answered
            messages = DelimitedStream(stream, victim.peer_id, max_message=MIB)
            with suppress(PeerError):
                while True:
                    await messages.receive(Message, timeout=TIMEOUT)
                    answered += 1

        async with trio.open_nursery() as nursery:
            await stream.write(delimited(FIND) * 1000)
            nursery.start_soon(flood)
            for _ in range(40):
                assert await asked(honest, victim, FIND)
            nursery.cancel_scope.cancel()
    assert 0 < answered <= 55


async def test_one_addresss_keys_share_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kad_service, "OF_ADDRESS", (0.001, 50.0))
    kinds = (Message.PING, Message.FIND_NODE, Message.GET_VALUE, Message.GET_PROVIDERS, Message.ADD_PROVIDER)
    answered = 0

    async def flood(attacker: Host, victim: Host) -> None:
        nonlocal answered
        stream = await attacker.open_stream(victim.peer_id, KAD)
        messages = DelimitedStream(stream, victim.peer_id, max_message=MIB)
        await stream.write(b"".join(delimited(Message(type=kind, key=b"k")) for kind in kinds) * 20)
        with suppress(PeerError):
            while True:
                await messages.receive(Message, timeout=TIMEOUT)
                answered += 1

    async with node() as (victim, _), knowing(victim) as one, knowing(victim) as other, trio.open_nursery() as nursery:
        for attacker in (one, other):
            nursery.start_soon(flood, attacker, victim)
    assert 50 <= answered <= 55


async def test_silent_streams_keep_nobody_out() -> None:
    async with node() as (victim, _), knowing(victim) as attacker, knowing(victim) as honest:
        silent = [await attacker.open_stream(victim.peer_id, KAD) for _ in range(140)]
        assert await asked(attacker, victim, FIND)  # all before it have arrived
        assert await asked(honest, victim, FIND)
        lost = 0
        for stream in silent:
            with trio.move_on_after(TIMEOUT):
                await stream.wait_lost()
                lost += 1
        assert lost == len(silent)  # nobody is waited for without end
        assert await asked(honest, victim, FIND)


@pytest.mark.parametrize(
    "data",
    [
        b"\x08\x04\x12\x02ab" + b"\x4a\x00" * 20_000,
        b"\x08\x04\x12\x02ab" + b"\x4a\xa0\x9c\x01" + b"\x12\x00" * 10_000,
        b"\x08\x04\x12\x02ab" + b"\x52\x80" * 100,
        b"\x08\x04\x12\x02ab" + b"\x43" * 20_000,
        b"\x08\x04\x12\x7fab",
    ],
    ids=["peers", "addresses", "a number without an end", "groups", "cut short"],
)
async def test_a_message_is_bounded_before_it_is_parsed(data: bytes) -> None:
    with pytest.raises(BadMessage):
        parse(data, max_fields=MAX_REQUEST_FIELDS)
    async with node() as (victim, _), knowing(victim) as attacker:
        stream = await attacker.open_stream(victim.peer_id, KAD)
        await stream.write(varint(len(data)) + data)
        with pytest.raises(ConnectionResetError):
            await stream.read(1)
