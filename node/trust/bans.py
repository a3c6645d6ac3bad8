"""Whom a node does not use, and why. Pure; no clock, no file.

A node bans for what it has checked itself: what it was sent, evidence that proves itself, evidence that it recomputed.
Beyond that only for what `quorum` validators that its owner trusts, of as many different owners, say that they have
recomputed: not one of them alone can ban anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from ...crypto.identity import Identity
from ...crypto.statement import Statement

PROVEN_SECONDS: Final = 7 * 86400.0
"""For a fault that was proved, by whomever."""
CHEATED_SECONDS: Final = 3600.0
"""For an answer that does not fit its receipt, the first time; twice as long every other time."""
LONGEST_SECONDS: Final = 30 * 86400.0
MAX_BANS: Final = 10_000

Source = Literal["own", "evidence", "validators"]


@dataclass(frozen=True)
class Ban:
    """`until` is in seconds since 1970; `count` how often the peer was banned here."""

    peer_id: str
    until: float
    reason: str
    source: Source
    count: int = 1

    def holds(self, now: float) -> bool:
        return now < self.until


@dataclass(frozen=True)
class Endorsement(Statement):
    """A validator's signed word that it has recomputed evidence, and that it proves a fault of `accused`."""

    DOMAIN: ClassVar[str] = "petalnode/endorsement/1"

    validator: str
    evidence_id: bytes
    accused: str
    time_ms: int
    signature: bytes = b""

    @property
    def signer(self) -> str:
        return self.validator

    @classmethod
    def made(cls, validator: Identity, evidence_id: bytes, accused: str, time_ms: int) -> Endorsement:
        return cls(validator.peer_id, evidence_id, accused, time_ms).signed(validator)


@dataclass(frozen=True)
class Trusted:
    """The validators that a person trusts, each with who owns it, and how many owners have to agree."""

    owners: Mapping[str, str]
    quorum: int = 2

    def convinced_by(self, endorsements: Iterable[Endorsement]) -> bool:
        """Whether checked endorsements of one piece of evidence are enough. Keys of one owner count once."""
        return len({self.owners[each.validator] for each in endorsements if each.validator in self.owners}) >= max(
            1, self.quorum
        )


NOBODY: Final = Trusted({})


def extended(before: Ban | None, peer_id: str, reason: str, source: Source, now: float) -> Ban:
    """The ban for another fault; never shorter than what holds already."""
    count = before.count + 1 if before is not None else 1
    seconds = PROVEN_SECONDS if source != "own" else CHEATED_SECONDS * 2.0 ** min(count - 1, 16)
    until = now + min(seconds, LONGEST_SECONDS)
    if before is not None and before.until > until:
        return Ban(peer_id, before.until, before.reason, before.source, count)
    return Ban(peer_id, until, reason[:500], source, count)


def parse_trusted(text: str) -> tuple[str, str]:
    """Reads PEER or PEER=OWNER; without an owner a validator is its own.

    Raises:
        ValueError: it is no peer id.
    """
    from ...crypto.identity import peer_id_to_bytes

    peer_id, _, owner = text.partition("=")
    peer_id_to_bytes(peer_id)
    return peer_id, owner or peer_id
