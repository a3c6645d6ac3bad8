"""Streams to the servers that come next: when one is opened, given up and tried again, and what is told of a push."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.server.requests.pushes import (
    PUSHES,
    PushedReceipt,
    Pushes,
    PushStream,
    Upstream,
)
from petalnode.node.server.requests.replies import REPLIES, SendQueue
from petalnode.node.server.steps import StepOutput
from petalnode.node.testing import MemoryStream, message_streams, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import StreamClosed
from petalnode.protocols.inference import PUSH, Refusal, receipt_to_wire, sha256
from tests.receipts import CLIENT, OTHER, RECEIPT, SERVER

pytestmark = pytest.mark.virtual_time

NEXT = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(60, 60 + PUSHES.most_targets + 1)]
PEER = peer_id_to_bytes(NEXT[0])
settled = trio.testing.wait_all_tasks_blocked


class Network:
    """Opens streams in memory, on a relayed connection unless `direct`, and fails as often as it is told.

    Attributes:
        opened: when a stream was asked for: (peer, with `direct`, seconds).
        streams: those that were given, both ends.
    """

    def __init__(self, *, direct: bool = True, failures: int = 0) -> None:
        self.direct = direct
        self.failures = failures
        self.opened: list[tuple[str, bool, float]] = []
        self.streams: list[tuple[MemoryStream, MemoryStream, PushStream]] = []
        self.answers = trio.Event()
        self.answers.set()
        self.has_direct = trio.Event()

    async def open_push(self, peer_id: str, *, direct: bool = False) -> PushStream:
        self.opened.append((peer_id, direct, trio.current_time()))
        await self.answers.wait()
        if self.failures:
            self.failures -= 1
            raise StreamClosed("nobody is there", peer_id)
        ends = stream_pair()
        ends[0].direct = self.direct or direct
        ours, theirs = message_streams(PUSH, SERVER.peer_id, peer_id, ends=ends)
        self.streams.append((*ends, theirs))
        return ours

    def watch_direct(self, peer_id: str) -> trio.Event:
        return self.has_direct


def output(size: int = 4) -> StepOutput:
    tensor = wire.Tensor(shape=[size], dtype="int8", codec="none", nbytes=size)
    return StepOutput(tensor, bytes(size), b"", b"", 0, 0.0, 0.0)


@asynccontextmanager
async def pushing(network: Callable[[], Network]) -> AsyncIterator[Any]:
    with trio.fail_after(36000):  # of the clock that jumps
        async with trio.open_nursery() as nursery:
            connector = network()
            yield connector, Pushes(connector, nursery)
            nursery.cancel_scope.cancel()


PUSHED = wire.Push(nonce=b"n" * 16)


async def send(pushes: Pushes, size: int = 4, peer: bytes = PEER) -> bool:
    return await pushes.send(peer, PUSHED, output(size))


@pytest.mark.virtual_time
async def test_step_is_pushed_once_there_is_a_stream() -> None:
    async with pushing(Network) as (network, pushes):
        network.answers = trio.Event()
        begun = trio.current_time()
        assert not await send(pushes) and not await send(pushes)
        await settled()
        assert not await send(pushes)
        assert trio.current_time() == begun and len(network.opened) == 1
        network.answers.set()
        await settled()
        assert await send(pushes) and await send(pushes, 5)
        for size in (4, 5):
            frame, payloads = await network.streams[0][2].receive(timeout=1)
            assert frame.push == PUSHED and payloads == [bytes(size)]
        assert network.opened == [(NEXT[0], False, begun)]


@pytest.mark.virtual_time
async def test_unavailable_stream_is_retried_ever_less() -> None:
    async with pushing(lambda: Network(failures=100)) as (network, pushes):
        pushes.prepare(PEER)
        await trio.sleep(1000)
        assert len(network.opened) == 1
        for _ in range(600):
            assert not await send(pushes)
            await trio.sleep(0.5)
        times = [at for _, _, at in network.opened[1:]]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert pauses == [
            2 * PUSHES.first_pause,
            4,
            8,
            16,
            32,
            PUSHES.longest_pause,
            PUSHES.longest_pause,
            PUSHES.longest_pause,
        ]


@pytest.mark.virtual_time
async def test_name_that_is_no_peer_gets_nothing() -> None:
    async with pushing(Network) as (network, pushes):
        assert not await send(pushes, peer=b"nobody")
        await settled()
        assert not await send(pushes, peer=b"nobody") and not network.opened


@pytest.mark.virtual_time
@pytest.mark.parametrize("end", ["error", "cut", "closed"])
async def test_who_declines_pushes_gets_none_a_while(end: str) -> None:
    async with pushing(Network) as (network, pushes):
        for number in range(3):
            assert not await send(pushes)
            await settled()
            assert await send(pushes)
            _, theirs, stream = network.streams[number]
            if end == "error":
                await stream.send(wire.PushFrame(error=wire.Error(message="no")), timeout=1)
            else:
                await (theirs.reset() if end == "cut" else theirs.close())
            await settled()
            assert network.streams[number][0].is_lost
            assert not await send(pushes)
            await trio.sleep(0.9 * 2**number)
            assert not await send(pushes)
            await settled()
            assert len(network.opened) == number + 1
            await trio.sleep(0.2 * 2**number)


@pytest.mark.virtual_time
async def test_after_stream_that_lasted_pause_is_short_again() -> None:
    async with pushing(Network) as (network, pushes):
        pushes.prepare(PEER)
        for number, (lasting, pause) in enumerate(
            [(PUSHES.longest_pause, 1), (PUSHES.longest_pause, 2), (61, 1), (1, 2)], 1
        ):
            await trio.sleep(lasting)
            await network.streams[-1][1].reset()
            await trio.sleep(0.9 * pause)
            pushes.prepare(PEER)
            await settled()
            assert len(network.opened) == number
            await trio.sleep(0.1 * pause)
            pushes.prepare(PEER)
            await settled()
            assert len(network.opened) == number + 1


@pytest.mark.virtual_time
async def test_unread_push_is_told_as_unsent() -> None:
    """The client relays it then. Nothing else is pushed on a stream on which half a message stands."""
    async with pushing(Network) as (network, pushes):
        pushes.prepare(PEER)
        await settled()
        size, begun = 3 << 20, trio.current_time()
        assert not await send(pushes, size)
        assert trio.current_time() - begun == pytest.approx(PUSHES.timeout + 3)
        written = network.streams[0][0].written
        assert not await send(pushes) and network.streams[0][0].written == written


@pytest.mark.virtual_time
async def test_push_into_a_broken_stream_is_told() -> None:
    async with pushing(Network) as (network, pushes):
        pushes.prepare(PEER)
        await settled()
        network.streams[0][0].cut()
        assert not await send(pushes)


@pytest.mark.virtual_time
async def test_one_session_pushes_to_a_few_servers_only() -> None:
    async with pushing(Network) as (network, pushes):
        for peer_id in NEXT:
            pushes.prepare(peer_id_to_bytes(peer_id))
        await settled()
        assert sorted(peer_id for peer_id, _, _ in network.opened) == sorted(NEXT[: PUSHES.most_targets])
        assert not await send(pushes, peer=peer_id_to_bytes(NEXT[-1]))
        assert await send(pushes, peer=peer_id_to_bytes(NEXT[0]))


@pytest.mark.virtual_time
async def test_relayed_stream_gives_way_to_direct_one() -> None:
    async with pushing(lambda: Network(direct=False)) as (network, pushes):
        pushes.prepare(PEER)
        await settled()
        assert await send(pushes)
        network.failures = 3
        network.has_direct.set()
        await trio.sleep(PUSHES.first_pause + 2 + 4 + 1)
        begun = network.opened[0][2]
        assert [at - begun for _, direct, at in network.opened if direct] == [0, 1, 3, 7]
        assert await send(pushes, 5)
        (_, _, relayed), (_, _, direct) = network.streams
        assert (await relayed.receive(timeout=1))[1] == [bytes(4)]  # is still read there
        with pytest.raises(StreamClosed):
            await relayed.receive(timeout=1)
        assert (await direct.receive(timeout=1))[1] == [bytes(5)]
        await trio.sleep(1000)
        assert len(network.opened) == 5 and await send(pushes)


@pytest.mark.virtual_time
async def test_relayed_stream_ending_early_is_not_replaced() -> None:
    async with pushing(lambda: Network(direct=False)) as (network, pushes):
        pushes.prepare(PEER)
        await settled()
        await network.streams[0][1].reset()
        await settled()
        network.has_direct.set()
        await trio.sleep(100)
        assert len(network.opened) == 1 and not await send(pushes)


@pytest.mark.virtual_time
async def test_the_streams_are_closed_with_the_session() -> None:
    async with pushing(Network) as (network, pushes):
        for peer_id in NEXT[:2]:
            pushes.prepare(peer_id_to_bytes(peer_id))
        await settled()
        network.failures = 1
        pushes.prepare(peer_id_to_bytes(NEXT[2]))
        await settled()
        await pushes.close()
        for _, _, stream in network.streams:
            with pytest.raises(StreamClosed):
                await stream.receive(timeout=1)


# --- who may push


STEP = wire.Step(sequence=1, previous_receipt=RECEIPT.hash())


def test_push_comes_with_its_servers_receipt() -> None:
    PushedReceipt(receipt_to_wire(RECEIPT), SERVER.peer_id, RECEIPT.client, STEP).check()
    unreadable = receipt_to_wire(RECEIPT)
    unreadable.client = b"nobody"
    short = replace(RECEIPT, reply_hash=b"short").signed(SERVER)
    forged = RECEIPT.signed(OTHER)
    for receipt, pusher, client, step in (
        (unreadable, SERVER, RECEIPT.client, STEP),
        (receipt_to_wire(RECEIPT), SERVER, OTHER.peer_id, STEP),
        (receipt_to_wire(RECEIPT), OTHER, RECEIPT.client, STEP),
        (receipt_to_wire(RECEIPT), SERVER, RECEIPT.client, wire.Step(previous_receipt=b"x" * 32)),
        (receipt_to_wire(short), SERVER, RECEIPT.client, wire.Step(previous_receipt=short.hash())),
        (receipt_to_wire(forged), SERVER, RECEIPT.client, wire.Step(previous_receipt=forged.hash())),
    ):
        with pytest.raises(Refusal) as refused:
            PushedReceipt(receipt, pusher.peer_id, client, step).check()
        assert refused.value.code == wire.ERROR_BAD_REQUEST


def may_push(upstream: Upstream, pusher: Identity, previous: bytes = b"") -> bool:
    with suppress(Refusal):
        upstream.check(pusher.peer_id, wire.Receipt(previous_receipt=previous))
        return True
    return False


def test_one_server_at_a_time_may_push() -> None:
    upstream = Upstream(peer_id_to_bytes(SERVER.peer_id), CLIENT.peer_id)
    assert may_push(upstream, SERVER)
    assert not may_push(upstream, OTHER) and not may_push(upstream, CLIENT)
    assert may_push(Upstream(b"", CLIENT.peer_id), CLIENT) and not may_push(Upstream(b"", CLIENT.peer_id), SERVER)
    named = sha256(b"of the server that took its place")
    upstream.relayed(wire.Step(previous_receipt=named))
    upstream.relayed(wire.Step())  # the client has sent a step itself, which says nothing new
    assert may_push(upstream, OTHER, named) and not may_push(upstream, OTHER, sha256(b""))
    assert not may_push(upstream, OTHER) and may_push(upstream, SERVER)
    upstream.pushed(OTHER.peer_id)
    assert may_push(upstream, OTHER) and not may_push(upstream, SERVER)


# --- what leaves a session


async def test_outputs_leave_in_order_while_more_is_computed() -> None:
    left: list[int] = []
    gate = trio.Event()

    async def send(number: int) -> None:
        await gate.wait()
        left.append(number)

    async with trio.open_nursery() as nursery:
        queue = SendQueue(nursery)
        for number, size in enumerate((REPLIES.inline + 1, REPLIES.bytes_in_flight - 2 * REPLIES.inline, 10)):
            await queue.put(size, partial(send, number))  # the small one waits for those before it
        assert left == []
        with trio.move_on_after(1) as scope:
            await queue.put(REPLIES.inline, partial(send, 3))
        assert scope.cancelled_caught  # too much waits
        gate.set()
        await queue.put(REPLIES.inline, partial(send, 4))
        await queue.empty()
        assert left == [0, 1, 2, 4]
        await queue.put(REPLIES.inline, partial(send, 5))
        assert left[-1] == 5  # at once


async def test_nobody_waits_for_a_session_that_is_over() -> None:
    """A step that was pushed ends, whether its output waits for room, comes later, or is to be handed on."""
    network = Network()
    async with trio.open_nursery() as pushers:
        async with trio.open_nursery() as session:
            queue, pushes = SendQueue(session), Pushes(network, session)  # type: ignore[arg-type]
            for _ in range(2):
                pushers.start_soon(queue.put, REPLIES.bytes_in_flight, trio.sleep_forever)
            await settled()
            session.cancel_scope.cancel()
        await queue.put(REPLIES.bytes_in_flight, trio.sleep_forever)
        await queue.empty()
        assert not await pushes.send(PEER, wire.Push(), output())
    assert network.opened == []
