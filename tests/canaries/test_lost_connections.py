"""py-libp2p's connections: one that ends while it is added stays in the table, and a stream that the peer leaves half
open stays for as long as its connection."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service

CURED = "py-libp2p has cured it: docs/decisions/yamux-and-noise.md says what can be thrown away"
PEER = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)


class Lost:
    """A connection under a muxer that ends as soon as streams are waited for."""

    peer_id = PEER
    is_initiator = False
    is_established = True

    def __init__(self) -> None:
        self.event_started = trio.Event()
        self.is_closed = False

    async def start(self) -> None:
        self.event_started.set()

    async def accept_stream(self) -> Any:
        raise MuxedConnUnavailable("lost")

    async def close(self) -> None:
        self.is_closed = True


async def test_connection_ending_while_added_stays_among_the_living() -> None:
    swarm = new_host().get_network()
    assert isinstance(swarm, Swarm)
    async with background_trio_service(swarm):
        lost: Any = Lost()
        await swarm.add_conn(lost)
        await trio.testing.wait_all_tasks_blocked()
        assert lost.is_closed and PEER in swarm.connections, CURED


class OneStream:
    """What lies under a muxer: the other end opens stream 1, and is silent from then on."""

    def __init__(self) -> None:
        self._said = struct.pack("!BBHII", 0, 1, 1, 1, 0)  # a window update with SYN

    async def read(self, size: int | None = None) -> bytes:
        if not self._said:
            await trio.sleep_forever()
        data, self._said = self._said[:size], self._said[size:] if size is not None else b""
        return data

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.virtual_time
async def test_stream_closed_by_us_only_is_never_freed() -> None:
    """So do the handlers of identify and ping leave theirs."""
    under: Any = OneStream()
    muxer = Yamux(under, PEER, is_initiator=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        stream = await muxer.accept_stream()
        await stream.close()
        await trio.sleep(3600)
        assert len(muxer.streams) == 1, CURED
        nursery.cancel_scope.cancel()
