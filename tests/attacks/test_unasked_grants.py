"""Who was given a wide window, but granted nothing, is a stranger still: it is measured, and is not being served."""

from __future__ import annotations

import math

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.transport.limits import WORK
from petalnode.node.server.lifecycle.other_servers import serve_transfers
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.directory import DIRECTORY_LIMITS, TRANSFER
from tests.memory_muxer import accepted, settled
from tests.node_inspection import limits_of
from tests.swarm.processes import LOOPBACK
from tests.swarm.relays import echoed, host_here, relay_here, reserve

TIMEOUT = 60.0


async def test_the_test_of_a_line_is_no_grant() -> None:
    """Who had asked for one byte was measured no more, and had the node give less to all other strangers."""
    async with (
        open_swarm(SwarmConfig(Identity.generate(), listen=(LOOPBACK,))) as node,
        open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as stranger,
    ):
        serve_transfers(node)
        limits = limits_of(node.host)
        use = limits.of_address("127.0.0.1")
        stream = await stranger.new_stream(node.peer_id, TRANSFER, timeout=TIMEOUT)
        for size in (1, DIRECTORY_LIMITS.transfer_bytes):
            before = use.recent.amount()
            frame = wire.TransferFrame(wanted=size, tensors=[wire.Tensor(nbytes=size)])
            await stream.send(frame, [bytes(size)], timeout=TIMEOUT)
            _, [payload] = await stream.receive(timeout=TIMEOUT)
            assert len(payload) == size
        assert use.recent.amount() - before > DIRECTORY_LIMITS.transfer_bytes / WORK.bytes_of_unit / 2, (
            "what it sent is counted"
        )
        assert limits.served_at == -math.inf, "nobody uses what it was granted"


async def test_circuit_serves_no_end_until_a_grant() -> None:
    async with relay_here() as (relay, _), host_here() as target, host_here() as stranger:
        stranger.remember(target.peer_id, await reserve(target, relay))
        stream = await stranger.open_stream(target.peer_id, "/echo/1")
        await echoed(stream, bytes(100_000))
        for host in (relay, target):
            assert limits_of(host).served_at == -math.inf


@pytest.mark.virtual_time
async def test_wide_window_and_grant_are_independent() -> None:
    async with accepted() as (ours, other, stream):
        stream.widen(1 << 20)
        other.send(1, bytes(1000))
        await settled()
        assert stream.widened and (ours.held(False), ours.limits.served_at) == (1000, -math.inf)
        other.open(3)
        session = await ours.accept_stream()
        session.grant(0)
        other.send(3, bytes(10))
        await settled()
        assert not session.widened and (ours.held(True), ours.limits.served_at) == (10, trio.current_time())
