"""Who sends nothing but small frames holds up nobody else, and not for long."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.transport import limits, muxed_stream
from petalnode.node.network.transport.bandwidth import Traffic
from petalnode.node.network.transport.muxed_stream import INITIAL_WINDOW, MuxedStream
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from tests.attacks.stranger.connections import OF_NO_STREAM, OPENED_AND_RESET, PINGS
from tests.connections import connection_lost
from tests.node_inspection import frames_taken, muxer_of

TIMEOUT = 300.0
AT_ONCE = 256
"""Frames of one peer between two turns of all others."""


@asynccontextmanager
async def three_nodes() -> AsyncIterator[tuple[Swarm, Swarm, Swarm]]:
    async with (
        open_swarm(SwarmConfig(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))) as node,
        open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as honest,
        open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as attacker,
    ):
        yield node, honest, attacker


class FramesPerTurn(trio.abc.Instrument):
    """Counts the frames that are handled in one step of one task."""

    def __init__(self) -> None:
        self.most = self.now = 0

    def note(self) -> None:
        self.now += 1

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.most, self.now = max(self.most, self.now), 0


@pytest.mark.parametrize(
    "frames", [OPENED_AND_RESET, PINGS, OF_NO_STREAM], ids=["opened and reset", "pings", "of no stream"]
)
async def test_others_are_served_and_the_flooder_is_dropped(
    frames: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = replace(limits.LIMITS, frames_per_second=1, opened_per_second=1)  # as on a machine of any speed
    monkeypatch.setattr(limits, "LIMITS", slow)
    counted = FramesPerTurn()
    caplog.set_level(logging.INFO)

    def is_refused() -> bool:
        return any("than any session needs" in record.getMessage() for record in caplog.records)

    trio.lowlevel.add_instrument(counted)
    with frames_taken(counted.note):
        async with three_nodes() as (node, honest, attacker):
            unharmed = connection_lost(node.host, honest.peer_id)

            async def ping() -> None:
                while True:
                    assert await honest.measure_rtt(node.peer_id, timeout=TIMEOUT) < TIMEOUT

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ping)
                while not is_refused():  # the connection may also end before: its flooder stands still as well
                    await attacker.host.connect(node.peer_id)
                    muxer = muxer_of(attacker.host, node.peer_id)
                    dropped = connection_lost(node.host, attacker.peer_id)
                    with suppress(OSError):
                        while muxer.lost is None:
                            muxer.secured_conn.put(frames)
                            await muxer.wait_room()
                            await trio.lowlevel.checkpoint()
                    await dropped.wait()
                nursery.cancel_scope.cancel()
            assert not unharmed.is_set()
            assert await honest.measure_rtt(node.peer_id, timeout=TIMEOUT) < TIMEOUT
    assert 0 < counted.most <= AT_ONCE
    assert is_refused()


class Connection:
    """What a stream needs of its connection; lets everything pass."""

    path = None
    max_data = 65507
    upload = None
    has_room = True
    buffered = 0
    traffic = Traffic()

    def put(self, kind: int, flags: int, stream_id: int, length: int, data: bytes = b"") -> None: ...

    def hold(self, size: int, granted: bool) -> None:
        self.buffered += size

    def forget_if_done(self, stream: MuxedStream) -> None: ...


@pytest.mark.parametrize("size", [2, 7, 100])
async def test_tiny_frames_take_no_more_than_was_counted(size: int) -> None:
    connection = Connection()
    stream = MuxedStream(connection, 1)  # type: ignore[arg-type]
    parts = [index.to_bytes(4, "big") * 25 for index in range(INITIAL_WINDOW // size)]
    tracemalloc.start()
    try:
        for part in parts:
            stream.on_data(part[:size])
        here = [tracemalloc.Filter(True, file) for file in (muxed_stream.__file__, __file__)]  # not other threads
        taken = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(here).traces)
    finally:
        tracemalloc.stop()
    assert connection.buffered == len(parts) * size
    assert taken < 1.5 * connection.buffered
    read = b""
    while stream.unread:
        read += await stream.read(999)
    assert read == b"".join(part[:size] for part in parts)
    assert connection.buffered == 0
