"""py-libp2p's dialing: 250 ms lost on success, no circuit addresses, a failed peer refused for 60 s."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm, _NegativePeerCache
from libp2p.peer.id import ID
from multiaddr import Multiaddr

CURED = "py-libp2p has cured it: docs/decisions/yamux-and-noise.md says what can be thrown away"
PEER = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)
RELAY = ID.from_pubkey(create_new_key_pair(bytes([1]) * 32).public_key)


def swarm_that_knows(addr: str) -> Swarm:
    swarm = new_host().get_network()
    assert isinstance(swarm, Swarm)
    swarm.peerstore.add_addr(PEER, Multiaddr(addr), 3600)
    return swarm


@pytest.mark.virtual_time
async def test_instant_dial_waits_for_the_next_attempt() -> None:
    swarm = swarm_that_knows("/ip4/203.0.113.7/tcp/4001")

    async def connected(*_: Any, **__: Any) -> object:
        return object()

    swarm._dial_with_retry = connected  # type: ignore[method-assign, assignment]
    begun = trio.current_time()
    assert len(await swarm.dial_peer(PEER)) == 1
    waited = trio.current_time() - begun
    assert waited == pytest.approx(0.25), CURED


async def test_a_circuit_address_cannot_be_dialed() -> None:
    swarm = swarm_that_knows(f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}/p2p-circuit")
    with pytest.raises(SwarmException) as refused:
        await swarm.dial_peer(PEER)
    assert "relay-only" in str(refused.value), CURED


def test_peer_that_failed_once_is_redialed_late() -> None:
    cache = _NegativePeerCache()
    cache.mark_failed("peer")
    assert cache.is_blocked("peer") and cache._ttl == 60.0, CURED
