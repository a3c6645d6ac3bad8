"""--max-upload and --max-download on real connections: the limit holds, and small messages do not wait behind it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from petalnode.node.models import compute_manifest
from petalnode.node.network.host import Host
from petalnode.node.swarm.streams import MessageStreams
from petalnode.node.weights.fetching import open_weights
from petalnode.node.weights.holder import WeightsHolder
from petalnode.protocols.weights import PIECE_BYTES, ask_piece, receive_piece
from tests.swarm.relay_node import ECHO
from tests.swarm.relays import echoed, host_here, received, until
from tests.weights_network import saved_model

MIB = 1024 * 1024
RATE = 2 * MIB
SIZE = 5 * MIB
LARGE = 24 * MIB  # takes 12 s at this rate


@pytest.mark.parametrize("limit", ["max_upload", "max_download"])
async def test_large_data_keep_the_limit_and_small_pass(limit: str) -> None:
    limits = {limit: RATE}
    async with host_here(listens=True) as server, host_here(listens=True) as other, host_here(**limits) as client:
        for host in (server, other):
            client.remember(host.peer_id, host.addrs())
        bulk, small = [await client.open_stream(host.peer_id, ECHO) for host in (server, other)]
        began, back = time.perf_counter(), 0

        async def receive() -> None:
            nonlocal back
            while back < LARGE:
                back += len(await bulk.read(MIB))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk.write, bytes(LARGE))
            nursery.start_soon(receive)
            await until(lambda: back > 0, "the large data pass")
            for _ in range(20):
                await small.write(bytes(16 * 1024))
                await received(small, 16 * 1024)
            assert back < LARGE
            await until(lambda: back > SIZE, "some of them have passed")
            passed, seconds = back, time.perf_counter() - began
            nursery.cancel_scope.cancel()
        # A quarter of a second's worth may go at once at the start, and a socket's buffer lies before the reader.
        assert seconds > (passed - RATE // 2 - MIB) / RATE


async def test_the_limit_is_over_all_connections_together():
    async with host_here(listens=True) as one, host_here(listens=True) as two, host_here(max_upload=RATE) as client:
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for host in (one, two):
                client.remember(host.peer_id, host.addrs())
                nursery.start_soon(echoed, await client.open_stream(host.peer_id, ECHO), bytes(2 * MIB))
        assert time.perf_counter() - began > (4 * MIB - RATE // 2 - MIB) / RATE


class _Node:
    """What handing on and fetching weights ask of a swarm, over a host alone."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._streams = MessageStreams(host)
        self.set_handler, self.open_stream = self._streams.set_handler, self._streams.open_stream


async def test_weights_that_are_handed_on_keep_to_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    folder = saved_model(tmp_path)
    manifest = compute_manifest(folder)
    pieces = 6
    async with host_here(listens=True, max_upload=RATE) as server, host_here() as client:
        WeightsHolder(cast(Any, _Node(server)), manifest, folder).start()
        client.remember(server.peer_id, server.addrs())
        began = time.perf_counter()
        async with open_weights(cast(Any, _Node(client)), server.peer_id) as stream:
            for _ in range(pieces):
                await ask_piece(stream, manifest.version, 1, 0, timeout=60.0)
            for _ in range(pieces):
                assert await receive_piece(stream, timeout=60.0) is not None
        assert time.perf_counter() - began > (pieces * PIECE_BYTES - RATE // 2 - MIB) / RATE
