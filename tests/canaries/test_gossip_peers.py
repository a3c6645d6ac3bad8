"""py-libp2p's pubsub: peers that were connected before it was attached are never heard of; the mesh is slow."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub

CURED = "py-libp2p has cured it: docs/decisions/gossip-of-evidence.md says what can be thrown away"
PEER = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)


async def test_who_is_connected_already_is_not_heard_of() -> None:
    host = new_host()
    network: Any = host.get_network()
    network.connections[PEER] = [object()]
    router = GossipSub(protocols=["/meshsub/1.1.0"], degree=6, degree_low=4, degree_high=12)  # type: ignore[list-item]
    pubsub = Pubsub(host, router)
    try:
        pubsub.peer_receive_channel.receive_nowait()
    except trio.WouldBlock:
        return
    pytest.fail(CURED)


def test_the_mesh_is_made_every_two_minutes() -> None:
    assert inspect.signature(GossipSub).parameters["heartbeat_interval"].default == 120, CURED
