"""py-libp2p's AutoNAT: the dial-back is `host.connect`, which does nothing while the peer that asks is connected."""

from __future__ import annotations

from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.autonat.autonat import AutoNATService
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from multiaddr import Multiaddr

CURED = "py-libp2p has cured it: docs/decisions/relay-dcutr-autonat.md says what can be thrown away"
PEER = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)
UNREACHABLE = Multiaddr("/ip4/203.0.113.7/tcp/4001")


class Connection:
    """The connection over which the peer asks."""

    is_closed = False


async def test_reachable_peer_is_told_without_being_dialed() -> None:
    host = new_host()
    network: Any = host.get_network()
    assert isinstance(network, Swarm)
    network.connections[PEER] = [Connection()]
    dialed = []

    async def dial(addr: Multiaddr, *_: Any, **__: Any) -> None:
        dialed.append(addr)
        raise OSError("unreachable")

    network._dial_with_retry = network.dial_addr = dial
    with trio.fail_after(600):
        found = await AutoNATService(host)._try_dial(PEER, [UNREACHABLE.to_bytes()])  # type: ignore[arg-type]
    assert found == UNREACHABLE.to_bytes() and not dialed, CURED
