"""Who reached a node through a relay cannot make it dial, nor hold the places of those whom it has reached itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from petalnode.node.network.nat import hole_punching
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import PeerError, StreamClosed
from petalnode.protocols.nat_traversal import PUNCH, exchange_first
from tests.swarm.met_at_a_relay import met_at_a_relay
from tests.swarm.relays import until

ADDRS = ["/ip4/203.0.113.5/tcp/1"]


@pytest.mark.parametrize("lower_target", [True, False])
async def test_who_came_through_a_relay_does_not_start(lower_target: bool) -> None:
    async with met_at_a_relay(lower_target=lower_target) as (target, client, _):
        stream = DelimitedStream(await client.open_stream(target.peer_id, PUNCH), target.peer_id)
        with pytest.raises(StreamClosed, match="closed the stream"):
            await exchange_first(stream, ADDRS, timeout=60)


async def test_peer_that_falls_silent_holds_place_for_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "PUNCHING", replace(hole_punching.PUNCHING, message=300.0, whole=2.0))
    async with met_at_a_relay(dialer_punches=True) as (target, client, _):
        await until(lambda: target.is_connected(client.peer_id), "the relayed connection")
        for _ in range(3):
            stream = DelimitedStream(await target.open_stream(client.peer_id, PUNCH), client.peer_id)
            await exchange_first(stream, [], timeout=60)
            with pytest.raises(PeerError):
                await stream.receive_bytes(timeout=60)
