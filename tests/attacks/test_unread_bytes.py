"""A peer to which nothing was granted has 256 KiB of a stream unread, and all of them together little."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.memory import budgets_of
from petalnode.node.network.transport.muxed_stream import INITIAL_WINDOW, WINDOW
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.ids import StreamProtocol
from petalnode.protocols.inference import INFERENCE, PUSH
from petalnode.protocols.training import FORWARD
from tests.attacks.granted_session import CLIENT, STRANGER, TIMEOUT, UPSTREAM
from tests.attacks.one_server import one_server, pushed
from tests.memory_muxer import MemoryRaw, accepted, muxer, settled
from tests.node_inspection import limits_of, raw_of
from tests.patience import eventually
from tests.swarm.raw import RawSession, values

KIB = 1 << 10
STALLED = StreamProtocol("/petalnode/test/stalled/1", wire.PushFrame)
PIECE = 64 * KIB
KEYS, STREAMS = 4, 100


async def stalled(stream: MessageStream[wire.PushFrame]) -> None:
    """Serves a stream that waits for its turn."""
    await stream.wait_lost()


async def test_handler_that_has_granted_nothing_is_sent_little() -> None:
    """4 MiB of each stream were open before anybody had looked at what it is for."""
    async with (
        open_swarm(SwarmConfig(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))) as node,
        open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as attacker,
        trio.open_nursery() as nursery,
    ):
        node.set_handler(STALLED, stalled)
        stream = await attacker.new_stream(node.peer_id, STALLED, timeout=TIMEOUT)
        sent: list[int] = []

        async def send() -> None:
            while True:
                await raw_of(stream).write(bytes(PIECE))
                sent.append(PIECE)

        nursery.start_soon(send)
        held = limits_of(node.host)
        await eventually(lambda: held.unread > INITIAL_WINDOW - PIECE, "the window is used up")
        for _ in range(3):
            await attacker.measure_rtt(node.peer_id, timeout=TIMEOUT)
        assert held.unread <= INITIAL_WINDOW
        assert sum(sent) <= INITIAL_WINDOW
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_unread_streams_take_a_small_budget_only() -> None:
    limits = NodeLimits(budgets_of(0))
    async with AsyncExitStack() as stack:
        _, server, granted = await stack.enter_async_context(
            accepted(MemoryRaw(origin="192.0.2.1"), limits=limits, key=3)
        )
        granted.grant()
        server.send(1, bytes(60 * KIB))
        for _ in range(40):
            server.send(1, bytes(50 * KIB))
        await settled()
        for key in range(KEYS):
            raw = MemoryRaw(origin=f"198.51.100.{key % 2}")
            ours, other = await stack.enter_async_context(muxer(raw, limits=limits, key=10 + key))
            for number in range(1, 2 * STREAMS, 2):
                other.open(number)
                for _ in range(4):
                    other.send(number, bytes(60 * KIB))
                await settled()
            assert ours.lost is None
        assert granted.lost is None and granted.unread == 2060 * KIB
        assert limits.unread <= limits.budgets.ungranted + 2060 * KIB
        assert limits.budgets.ungranted < KEYS * STREAMS * INITIAL_WINDOW / 4


@pytest.mark.virtual_time
async def test_stream_that_is_granted_more_counts_with_others() -> None:
    limits = NodeLimits()
    async with accepted(MemoryRaw(origin="192.0.2.1"), limits=limits) as (ours, other, stream):
        other.send(1, bytes(1000))
        await settled()
        address = limits.of_address("192.0.2.1")
        assert (ours.held(), ours.held(False), address.unread) == (1000, 1000, [1000, 0])
        stream.grant()
        assert stream.widened == WINDOW - INITIAL_WINDOW
        assert (ours.held(), ours.held(False), address.unread, limits.unread) == (1000, 0, [0, 1000], 1000)
        await stream.read(400)
        assert (ours.held(True), address.unread, limits.unread) == (600, [0, 600], 600)


async def test_granted_session_lets_its_client_send_much(blocks: BlockSpan) -> None:
    with trio.fail_after(TIMEOUT):
        async with one_server(blocks) as server:
            stream, raw = server.connect(INFERENCE, server.service.handle_session, CLIENT)
            session = RawSession(stream, server.session(STRANGER).ready)
            assert not raw.widened
            await session.open(upstream=peer_id_to_bytes(UPSTREAM.peer_id))
            assert raw.widened
            refused, refused_raw = server.connect(INFERENCE, server.service.handle_session, STRANGER)
            await refused.send(wire.InferenceFrame(open=wire.Open()), timeout=TIMEOUT)
            await refused.receive(timeout=TIMEOUT)
            assert not refused_raw.widened
            pushes, pushed_raw = server.connect(PUSH, server.service.handle_push, STRANGER)
            push = pushed(session, CLIENT, STRANGER, 1, 0, values(1))
            await pushes.send(push, [values(1)], timeout=TIMEOUT)
            await pushes.receive(timeout=TIMEOUT)
            assert not pushed_raw.widened
            pushes, pushed_raw = server.connect(PUSH, server.service.handle_push, UPSTREAM)
            push = pushed(session, CLIENT, UPSTREAM, 1, 0, values(1))
            await pushes.send(push, [values(1)], timeout=TIMEOUT)
            while not (pushed_raw.widened and pushed_raw.granted):
                await trio.lowlevel.checkpoint()
            batch, batch_raw = server.connect(FORWARD, server.service.handle_forward, STRANGER)
            await batch.send(wire.BatchFrame(open=wire.BatchOpen()), timeout=TIMEOUT)
            await batch.receive(timeout=TIMEOUT)
            assert not batch_raw.widened
