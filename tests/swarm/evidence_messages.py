"""Evidence and messages about it for tests of what nodes make of them."""

from __future__ import annotations

import time
from dataclasses import replace

from petalnode.crypto.identity import Identity
from petalnode.node.trust.bundle import Bundle, equivocation_bundle
from petalnode.node.trust.evidence_gossip import EvidenceGossip
from petalnode.node.trust.evidence_message import (
    Endorsement,
    EvidenceMessage,
    TrustedValidators,
)
from petalnode.node.trust.store import TrustStore
from tests.receipts import RECEIPT

KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 9)]
LIAR, ACCUSER, ANN, BEN, STRANGER = KEYS[:5]
NOW = time.time()


def equivocation(accused: Identity = LIAR, nonce: bytes = b"n" * 16, *, real: bool = True) -> Bundle:
    first = replace(RECEIPT, nonce=nonce, time_ms=round(NOW * 1000)).signed(accused)
    second = replace(first, reply_hash=b"x" * 32).signed(accused if real else STRANGER)
    return equivocation_bundle(ACCUSER, accused.peer_id, first, second)


def dated(message: EvidenceMessage, now: float) -> bytes:
    return replace(message, time_ms=round(now * 1000)).to_bytes()


def numeric(number: int = 0, *endorsers: Identity, accused: Identity = LIAR) -> bytes:
    """Evidence that has to be recomputed and is too large for gossip."""
    key = bytes([number]) * 32
    signed = [Endorsement.made(endorser, key, accused.peer_id, round(NOW * 1000)) for endorser in endorsers]
    return EvidenceMessage(key, accused.peer_id, round(NOW * 1000), None, tuple(signed)).to_bytes()


def node(trusted: TrustedValidators | None = None) -> tuple[EvidenceGossip, TrustStore]:
    store = TrustStore(None, trusted or TrustedValidators({}), clock=lambda: NOW)
    return EvidenceGossip(Identity.generate(), store, clock=lambda: NOW), store


def receive(gossip: EvidenceGossip, data: bytes, author: str = "author", forwarder: str = "forwarder") -> bool:
    return gossip.accept(author, forwarder, data)
