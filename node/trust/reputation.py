"""What a node thinks of another one: a number from 0 to 1 of its own making, told to nobody. Pure; no clock, no file.

It grows with work that was done for this node and with work that was recomputed, decays when nothing is heard, and
falls with every fault. A new key starts at nothing, so that throwing away a key that was caught gains nobody anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

HALF_LIFE: Final = 14 * 86400.0
"""Seconds after which what was done, and what was done wrong, counts half."""
NEWCOMER_TOKENS: Final = 10_000.0
"""Recomputed tokens that bring a newcomer half of the way to 1."""
SERVED_SHARE: Final = 0.01
"""What a token counts that was answered with a receipt in order, and that nobody recomputed."""
FAULT_FACTOR: Final = 0.1
"""What a fault leaves of a reputation."""
NEWCOMER_SECONDS: Final = 0.002
"""By which a server without any reputation seems farther away than one with the best."""


@dataclass(frozen=True)
class Standing:
    """What is known of a peer at `updated` (seconds since 1970): tokens, recomputed or the like of it, and faults, both
    decayed until then."""

    first_seen: float
    updated: float
    tokens: float = 0.0
    faults: float = 0.0

    def at(self, now: float) -> Standing:
        """The same later."""
        left = 0.5 ** (max(0.0, now - self.updated) / HALF_LIFE)
        return replace(self, updated=max(now, self.updated), tokens=self.tokens * left, faults=self.faults * left)

    def after_tokens(self, tokens: int, now: float, *, recomputed: bool) -> Standing:
        """With tokens that were answered right; `recomputed` if somebody has made sure of it."""
        later = self.at(now)
        return replace(later, tokens=later.tokens + tokens * (1.0 if recomputed else SERVED_SHARE))

    def after_fault(self, now: float) -> Standing:
        """With one fault more. What was done before counts no more: it may have been done to be trusted."""
        later = self.at(now)
        return replace(later, tokens=0.0, faults=later.faults + 1)


def newcomer(now: float) -> Standing:
    return Standing(first_seen=now, updated=now)


def reputation(standing: Standing | None, now: float) -> float:
    """From 0, a stranger or a cheat, to 1."""
    if standing is None:
        return 0.0
    later = standing.at(now)
    return float(later.tokens / (later.tokens + NEWCOMER_TOKENS) * FAULT_FACTOR**later.faults)


def penalty_seconds(standing: Standing | None, now: float) -> float:
    """How much farther away a server shall seem when a route is chosen: next to nothing for a newcomer, so that new
    servers get work, and a last resort for one that was at fault lately."""
    faults = standing.at(now).faults if standing is not None else 0.0
    return NEWCOMER_SECONDS * (1.0 - reputation(standing, now)) + 60.0 * min(faults, 10.0) * (faults > 0.05)
