"""py-libp2p's relay: circuits are kept by peer, so the end of an old one closes the same peer's new one."""

from __future__ import annotations

from typing import Any

from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol

CURED = "py-libp2p has cured it: docs/decisions/relay-dcutr-autonat.md says what can be thrown away"
PEER = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)


class Stream:
    """A stream that is at its end."""

    def __init__(self) -> None:
        self.closed = False

    async def read(self, n: int | None = None) -> bytes:
        return b""

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None:
        self.closed = True

    reset = close


async def test_circuits_end_closes_another_of_the_same_peer() -> None:
    protocol = CircuitV2Protocol(new_host(), allow_hop=True)
    old: list[Any] = [Stream(), Stream()]
    new: list[Any] = [Stream(), Stream()]
    protocol._active_relays[PEER] = (old[0], old[1])
    protocol._active_relays[PEER] = (new[0], new[1])  # the same peer has made a second circuit
    await protocol._relay_data(old[0], old[1], PEER)
    assert new[0].closed and new[1].closed, CURED
