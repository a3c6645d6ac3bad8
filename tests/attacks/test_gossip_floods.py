"""What a neighbour sends by gossip is read at its rate, in bounds, and answered in bounds; others are heard."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2

from petalnode.crypto.identity import Identity
from petalnode.node.network import gossip
from petalnode.node.network.gossip import GOSSIP, BoundedQueue, Gossip, bounded_control, open_gossip
from petalnode.node.network.host import Host
from petalnode.node.network.shares import Rates, TokenBucket
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.protocols.framing import varint
from tests.attacks.hosts import LOOPBACK, TIMEOUT, delimited, host, knowing
from tests.attacks.stranger.services import gossiped
from tests.node_inspection import pubsub_of

MESHSUB = "/meshsub/1.1.0"
TOPIC = "petalnode/evidence/1"
SUBSCRIBED = rpc_pb2.RPC.SubOpts(subscribe=True, topicid=TOPIC)


class Heard:
    """What a node was told, by maker."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.news = trio.Event()

    def accept(self, maker: str, forwarder: str, data: bytes) -> bool:
        self.messages.append((maker, data))
        self.news.set()
        self.news = trio.Event()
        return True

    async def until(self, wanted: Callable[[], bool]) -> None:
        with trio.fail_after(TIMEOUT):
            while not wanted():
                await self.news.wait()


@asynccontextmanager
async def gossiping(opened: Host, heard: Heard | None = None) -> AsyncIterator[Gossip]:
    heard = heard or Heard()
    async with open_gossip(
        opened,
        TOPIC,
        max_bytes=48 << 10,
        accept=heard.accept,
        forwards=lambda maker, forwarder: True,
    ) as opened_gossip:
        yield opened_gossip


@asynccontextmanager
async def node(heard: Heard | None = None) -> AsyncIterator[tuple[Host, Gossip]]:
    """The one that is attacked."""
    async with host(LOOPBACK) as opened, gossiping(opened, heard) as opened_gossip:
        yield opened, opened_gossip


async def neighbours(told: Gossip, peer_id: str) -> None:
    with trio.fail_after(TIMEOUT):
        while peer_id not in told.peers():  # noqa: ASYNC110 -- libp2p's own event is for tests of its own
            await trio.sleep(0.01)


async def ended(stream: StreamBytes) -> bool:
    """Whether the victim resets the stream."""
    with suppress(OSError), trio.fail_after(TIMEOUT):
        return not await stream.read(1)
    return True


@pytest.mark.parametrize(("together", "least", "most"), [(100, 40, 60), (1, 20, 35)])
async def test_flood_is_read_steadily_while_others_are_heard(
    monkeypatch: pytest.MonkeyPatch, together: int, least: int, most: int
) -> None:
    monkeypatch.setattr(gossip, "GOSSIP", replace(gossip.GOSSIP, of_peer=(0.01, 50.0)))  # as on a machine of any speed

    def flood(heard: Heard) -> int:
        return sum(data == b"flood" for _, data in heard.messages)

    heard = Heard()
    async with node(heard) as (victim, _), knowing(victim) as attacker, knowing(victim) as honest:
        messages = [gossiped(bytes([number] * 32), number, b"flood") for number in range(200)]
        said = [rpc_pb2.RPC(publish=messages[start : start + together]) for start in range(0, 200, together)]
        for half in (said[::2], said[1::2]):
            stream = await attacker.open_stream(victim.peer_id, MESHSUB)
            await stream.write(b"".join(map(delimited, half)))
        async with gossiping(honest) as other:
            await honest.connect(victim.peer_id)
            await neighbours(other, victim.peer_id)
            with trio.fail_after(TIMEOUT):
                while (honest.peer_id, b"honest") not in heard.messages:  # once it is in the mesh
                    await other.publish(b"honest")
                    await trio.sleep(0.1)
        await heard.until(lambda: flood(heard) >= least)
        await trio.sleep(0.2)
    assert flood(heard) <= most


async def test_burst_of_honest_neighbour_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a node passes on in some minutes, and heartbeats; here, what is not read at once is never read."""
    bucket = TokenBucket(*gossip.GOSSIP.of_peer)
    bucket.take_ahead(24 * 5 + 12 * 5 * 2)  # messages of others, and two heartbeats of 5 s
    assert bucket.delay(1) == 0
    never = {name: (1e-6, getattr(GOSSIP, name)[1]) for name in ("of_peer", "of_address")}
    monkeypatch.setattr(gossip, "GOSSIP", replace(GOSSIP, **never))
    heard = Heard()
    async with node(heard) as (victim, _), knowing(victim) as neighbour:
        messages = [gossiped(bytes([number] * 32), number, b"passed on") for number in range(100)]
        stream = await neighbour.open_stream(victim.peer_id, MESHSUB)
        await stream.write(delimited(rpc_pb2.RPC(publish=messages)))
        await heard.until(lambda: len(heard.messages) == 100)


async def test_many_fields_and_unreadable_ones_end_the_stream() -> None:
    fields = rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True)] * (GOSSIP.max_fields + 1))
    long = varint(GOSSIP.max_rpc + 1)
    async with node() as (victim, told), knowing(victim) as attacker:
        for said in (delimited(fields), long, b"\xff" * 20, varint(3) + b"\xff\xff\xff"):
            stream = await attacker.open_stream(victim.peer_id, MESHSUB)
            await stream.write(said)
            assert await ended(stream)
        stream = await attacker.open_stream(victim.peer_id, MESHSUB)
        await stream.write(delimited(rpc_pb2.RPC()))
        await stream.close()
        assert await ended(stream), "closed as well"
        with trio.fail_after(TIMEOUT):
            while pubsub_of(told)._streams:  # noqa: ASYNC110 -- nothing is kept of who has no stream
                await trio.sleep(0.01)


@pytest.mark.virtual_time
async def test_who_gives_up_waiting_leaves_rate_to_others() -> None:
    rates = Rates(1, 10)
    with trio.move_on_after(2):
        await rates.wait("peer", 100)
    assert rates.of("peer").delay(10) == 0
    begun = trio.current_time()
    for _ in range(3):
        await rates.wait("peer", 10)
    assert trio.current_time() - begun == 20


async def test_who_is_outside_the_mesh_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "GOSSIP", replace(gossip.GOSSIP, max_backoffs=8))
    peers = [ID.from_string(Identity.from_seed(bytes([number]) * 32).peer_id) for number in range(10)]
    left = rpc_pb2.RPC(control=rpc_pb2.ControlMessage(prune=[rpc_pb2.ControlPrune(topicID=TOPIC, backoff=3600)]))
    async with node() as (_, told):
        router = pubsub_of(told).router
        for peer in peers:
            await router.handle_rpc(left, peer)
        assert list(router.back_off[TOPIC]) == peers[2:], "the oldest go"
        assert min(router.back_off[TOPIC].values()) > time.time() + 3000


async def test_message_beside_anothers_record_does_not_count() -> None:
    heard = Heard()
    async with node(heard) as (victim, _), knowing(victim) as attacker:
        stream = await attacker.open_stream(victim.peer_id, MESHSUB)
        for number, record in enumerate((b"of nobody", None)):
            message = gossiped(bytes(32), number, bytes([number]))
            await stream.write(delimited(rpc_pb2.RPC(publish=[message], senderRecord=record)))
        await heard.until(lambda: bool(heard.messages))
        assert [data for _, data in heard.messages] == [b"\1"]


async def test_peers_oldest_stream_is_not_read_any_more() -> None:
    async with node() as (victim, _), knowing(victim) as attacker:
        streams = []
        for _ in range(5):
            streams.append(await attacker.open_stream(victim.peer_id, MESHSUB))
            await streams[-1].write(varint(GOSSIP.max_rpc) + bytes(1000))
        assert await ended(streams[0])


async def test_slow_messages_leave_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a message is memory that no budget counts."""
    monkeypatch.setattr(gossip, "_MAX_LARGE", 4)
    heard = Heard()
    async with node(heard) as (victim, _), knowing(victim) as attacker, knowing(victim) as other:
        streams = [await attacker.open_stream(victim.peer_id, MESHSUB) for _ in range(3)]
        for stream in streams:
            await stream.write(varint(GOSSIP.max_rpc) + bytes(100_000))
        assert await ended(streams[-1]), "without a place"
        stream = await other.open_stream(victim.peer_id, MESHSUB)
        await stream.write(delimited(rpc_pb2.RPC(publish=[gossiped(bytes(32), 1, bytes(20_000))])))
        await heard.until(lambda: bool(heard.messages))


async def test_message_is_sent_once_however_often_asked_for() -> None:
    size = 40 << 10
    message = gossiped(bytes(32), 1, bytes(size))
    name = (message.from_id + message.seqno).hex().encode()
    asked = rpc_pb2.ControlMessage(iwant=[rpc_pb2.ControlIWant(messageIDs=[name] * 200)] * 8)
    heard, got, enough = Heard(), 0, trio.Event()

    async def hear(raw: StreamBytes, _: str) -> None:
        nonlocal got
        with suppress(OSError):
            while data := await raw.read(1 << 16):
                got += len(data)
                if got > size:
                    enough.set()

    async with node(heard) as (victim, told), knowing(victim) as attacker:
        attacker.set_stream_handler(MESHSUB, hear)
        stream = await attacker.open_stream(victim.peer_id, MESHSUB)
        await stream.write(delimited(rpc_pb2.RPC(subscriptions=[SUBSCRIBED])))
        await neighbours(told, attacker.peer_id)
        await stream.write(delimited(rpc_pb2.RPC(publish=[message])))
        await heard.until(lambda: bool(heard.messages))
        assert pubsub_of(told).router.cost_of(bounded_control(asked, TOPIC)) == 1 + size // GOSSIP.answered
        await stream.write(delimited(rpc_pb2.RPC(control=asked)))
        with trio.fail_after(TIMEOUT):
            await enough.wait()
        await trio.sleep(0.3)
        assert got < 2 * size


async def test_what_waits_for_neighbour_has_bound_in_bytes() -> None:
    queue = BoundedQueue()
    large = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=bytes(48 << 10))])
    taken = sum(queue.push(large) for _ in range(32))
    assert taken == GOSSIP.max_queued // large.ByteSize() < 8
    assert await queue.pop() == large
    assert queue.push(large) and not queue.push(large)
    assert max(part.ByteSize() for part in queue.split_rpc(rpc_pb2.RPC(publish=[*large.publish] * 8))) <= GOSSIP.max_rpc
    while len(queue):
        await queue.pop()
    queue.close()
    assert not queue.push(large) and await queue.pop() is None


async def test_an_error_beside_the_gossip_is_not_lost() -> None:
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True, allow_unwrapped=True):
        async with node():
            raise ValueError("of the block")
