"""Only a relay that was asked for a reservation brings peers, and no address of relays takes all places for that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from petalnode.node.network.host import Host
from petalnode.node.network.nat import circuits
from petalnode.protocols import standard_pb2 as pb
from petalnode.protocols.circuit import STOP, CircuitLimit, RelayRefused, ask_stop
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import StreamClosed
from tests.fuzz.corpus import OTHER
from tests.swarm.relays import host_here, relay_here, reserve


async def brought(relay: Host, target: Host, source: str = OTHER.peer_id) -> None:
    stream = DelimitedStream(await relay.open_stream(target.peer_id, STOP), target.peer_id)
    await ask_stop(stream, source, CircuitLimit(), timeout=60)


async def test_peer_that_was_asked_for_nothing_brings_nobody() -> None:
    async with host_here(listens=True) as target, host_here() as stranger, relay_here() as (relay, _):
        stranger.remember(target.peer_id, target.addrs())
        with pytest.raises(RelayRefused) as refused:
            await brought(stranger, target)
        assert refused.value.status == pb.PERMISSION_DENIED
        await reserve(target, relay)
        await brought(relay, target)
        with pytest.raises(RelayRefused):  # nobody is brought to itself
            await brought(relay, target, target.peer_id)


async def test_silent_circuits_of_one_address_leave_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuits, "NAT", replace(circuits.NAT, max_pending=8))
    async with host_here(listens=True) as target, host_here() as stranger:
        stranger.remember(target.peer_id, target.addrs())
        silent = [await stranger.open_stream(target.peer_id, STOP) for _ in range(4)]
        with pytest.raises(StreamClosed):
            await brought(stranger, target)
        for stream in silent:
            await stream.reset()
        for _ in range(8):  # places are free again, and none is lost to who is refused
            with pytest.raises(RelayRefused):
                await brought(stranger, target)
