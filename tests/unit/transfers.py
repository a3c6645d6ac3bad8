"""Peers with points, and transfers between them."""

from __future__ import annotations

from petalnode.crypto.credits import Transfer
from petalnode.crypto.identity import Identity

ISSUER = Identity.from_seed(b"i" * 32)
PEERS = tuple(Identity.from_seed(bytes([number]) * 32) for number in range(4))
START = 1_800_000_000_000
A, B = PEERS[0], PEERS[1]


def transfer(
    spender: Identity, recipient: str, points: int, sequence: int, until_ms: int = START + 60_000, issuer: str = ""
) -> Transfer:
    return Transfer(issuer or ISSUER.peer_id, spender.peer_id, recipient, points, sequence, until_ms).signed(spender)
