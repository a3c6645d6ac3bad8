"""What an attacker has: keys of its own, what others have signed, and nodes that listen to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch

from petalnode.crypto.evidence import ACCUSATION_DOMAIN
from petalnode.crypto.identity import Identity
from petalnode.node.swarm.view import SwarmView
from petalnode.node.trust.bundle import Bundle
from petalnode.node.trust.evidence_message import EvidenceMessage
from petalnode.node.trust.receipt_log import LoggedBatch
from petalnode.node.trust.store import TrustStore
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import Refusal
from tests.signing_server import SigningServer
from tests.tiny_models import HIDDEN

ATTACKER = Identity.from_seed(bytes(range(11, 43)))
HONEST = Identity.from_seed(bytes(range(12, 44)))


def hidden(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def altered(bundle: Bundle, change: Callable[[wire.Evidence, dict[str, bytes]], None]) -> Bundle:
    """Evidence that the attacker has changed and signed."""
    evidence, payloads = wire.Evidence(), dict(bundle.payloads)
    evidence.CopyFrom(bundle.evidence)
    change(evidence, payloads)
    statement = evidence.SerializeToString(deterministic=True)
    return Bundle(statement, ATTACKER.peer_id, ATTACKER.sign(ACCUSATION_DOMAIN, statement), payloads)


def signed_anew(server: SigningServer, logged: LoggedBatch, **signed: object) -> LoggedBatch:
    """A receipt for a request that no honest server takes, by a server that is the attacker's own."""
    request = logged.asked.hash(logged.protocol)
    receipt = replace(logged.receipt, request_hash=request, **signed).signed(server.identity)  # type: ignore[arg-type]
    return replace(logged, receipt=receipt)


class Listener:
    """The swarm of a validator, without a network. `bundles` is what the authors of messages hand out.

    Attributes:
        published: the evidence that the validator has found to be right.
    """

    def __init__(self, **bundles: Bundle) -> None:
        self.trust = TrustStore()
        self.peer_id = Identity.generate().peer_id
        self.published: list[Bundle] = []
        self.view = SwarmView()
        self.evidence = SimpleNamespace(on_evidence=[])
        self._bundles = {bundle.id: bundle for bundle in bundles.values()}

    def hear(self, message: EvidenceMessage, author: str) -> None:
        for callback in self.evidence.on_evidence:
            callback(message, author, author)

    @property
    def host(self) -> Listener:
        return self

    def origin_of(self, peer_id: str) -> str:
        return peer_id

    async def fetch_evidence(self, author: str, evidence_id: bytes, **how: object) -> Bundle:
        if evidence_id not in self._bundles:
            raise Refusal(wire.ERROR_NOT_FOUND, "this evidence is not here")
        return self._bundles[evidence_id]

    async def publish_evidence(self, bundle: Bundle, *, recomputed: bool, one_bit: bool = False) -> None:
        self.published.append(bundle)
