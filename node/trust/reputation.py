"""What a node thinks of another one: its reputation, 0 to 1, and whether it is banned. Pure; no clock, no file.

The reputation grows with tokens that the peer computed for this node, and with those that were recomputed. It decays
over time, and falls with every fault. A new key starts at 0, so that throwing away a key that was caught gains nothing.
A node publishes neither reputations nor bans.

A node bans for what it has checked itself: what it was sent, evidence that proves itself, evidence that it recomputed.
Beyond that only for what `quorum` validators that its owner trusts, of as many owners, state that they have recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from ..network.shares import backoff, decayed


@dataclass(frozen=True)
class ReputationPolicy:
    """What service and faults of a server count for, and for how long."""

    half_life: float = 14 * 86400.0  # Seconds after which tokens and faults count half
    newcomer_tokens: float = 10_000.0  # Recomputed tokens that bring a newcomer half of the way to 1
    served_share: float = 0.01  # What a token counts that was answered with a valid receipt, and that nobody recomputed
    fault_factor: float = 0.1  # What a fault leaves of a reputation
    newcomer_seconds: float = 0.002
    """Added to the cost of a server without any reputation, compared with one of reputation 1."""
    proven_seconds: float = 7 * 86400.0  # A ban for a fault that was proved, by whomever
    cheated_seconds: float = 3600.0
    """A ban for an answer that does not fit its receipt, the first time; twice as long every other time."""
    one_bit_seconds: float = 600.0
    """A first ban for an answer of the exact kind in which one bit is wrong: memory does that."""
    longest_seconds: float = 30 * 86400.0
    max_bans: int = 10_000


REPUTATION: Final = ReputationPolicy()
Source = Literal["own", "evidence", "one bit", "validators"]


@dataclass(frozen=True)
class ServiceRecord:
    """What is known of a peer at `updated` (seconds since 1970): recomputed tokens (or their equivalent) and faults,
    both decayed until then."""

    first_seen: float
    updated: float
    tokens: float = 0.0
    faults: float = 0.0

    def at(self, now: float) -> ServiceRecord:
        """The same, decayed until `now`."""
        left = decayed(1.0, now - self.updated, REPUTATION.half_life)
        return replace(self, updated=max(now, self.updated), tokens=self.tokens * left, faults=self.faults * left)

    def after_tokens(self, tokens: int, now: float, *, recomputed: bool) -> ServiceRecord:
        """With more tokens that were answered right; `recomputed` if somebody has made sure of it."""
        later = self.at(now)
        return replace(later, tokens=later.tokens + tokens * (1.0 if recomputed else REPUTATION.served_share))

    def after_fault(self, now: float) -> ServiceRecord:
        """With one more fault. Earlier tokens count no more: they may have been computed to gain trust."""
        later = self.at(now)
        return replace(later, tokens=0.0, faults=later.faults + 1)


def newcomer(now: float) -> ServiceRecord:
    return ServiceRecord(first_seen=now, updated=now)


def reputation(record: ServiceRecord | None, now: float) -> float:
    """From 0, for a stranger or a cheat, to 1."""
    if record is None:
        return 0.0
    later = record.at(now)
    return float(later.tokens / (later.tokens + REPUTATION.newcomer_tokens) * REPUTATION.fault_factor**later.faults)


def penalty_seconds(record: ServiceRecord | None, now: float) -> float:
    """What routing adds to the cost of a server: next to nothing for a newcomer, so that new servers get sessions. A
    minute or more for one that was at fault lately, which is a last resort."""
    faults = record.at(now).faults if record is not None else 0.0
    return REPUTATION.newcomer_seconds * (1.0 - reputation(record, now)) + 60.0 * min(faults, 10.0) * (faults > 0.05)


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


def extended(before: Ban | None, peer_id: str, reason: str, source: Source, now: float) -> Ban:
    """The ban for another fault; never shorter than the one that holds already."""
    count = before.count + 1 if before is not None else 1
    seconds = REPUTATION.proven_seconds
    if source == "one bit" and before is None:
        seconds = REPUTATION.one_bit_seconds
    if source == "own":
        seconds = backoff(count, REPUTATION.cheated_seconds, REPUTATION.longest_seconds)
    until = now + min(seconds, REPUTATION.longest_seconds)
    if before is not None and before.until > until:
        return Ban(peer_id, before.until, before.reason, before.source, count)
    return Ban(peer_id, until, reason[:500], source, count)
