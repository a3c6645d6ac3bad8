"""Servers that lose what sessions hold: what that costs them, and how often a session is filled anew. Pure.

A loss costs the client a replay: all inputs of the session are sent and computed once more. A server may lose one
session, by a crash or for want of memory: that does not count. One that loses them again and again is asked after
others. If it says itself that it has lost what it just answered for, it is banned at the third time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..network.shares import decayed
from .request import MAX_FAILURES


@dataclass(frozen=True)
class LossPolicy:
    """What losses of sessions cost, and whom."""

    half_life: float = 600.0  # Seconds after which a loss counts half
    forgiven: float = 1.0  # Losses that cost a server nothing
    seconds: float = 5.0  # By which it seems farther away for each one beyond that
    admitted: float = 2.5  # Losses that a server has stated, beyond which it is banned: the third within 12 minutes
    replays: int = MAX_FAILURES  # Of a session, one after another, for each server of its chain
    steps: int = 8  # Answered steps behind which a session may be filled anew once more
    failed_replays: int = 3  # Of one server in one search
    disputes: int = 2  # In one search: others that compute something else than the lost server has signed
    most_servers: int = 1000


LOSSES: Final = LossPolicy()


@dataclass(frozen=True)
class ServerLosses:
    """What one server has lost until `updated`, seconds of the caller's clock, decayed since; `admitted` of them by its
    own words."""

    updated: float
    count: float = 0.0
    admitted: float = 0.0

    def at(self, now: float) -> ServerLosses:
        left = decayed(1.0, now - self.updated, LOSSES.half_life)
        return ServerLosses(max(now, self.updated), self.count * left, self.admitted * left)

    @property
    def is_too_much(self) -> bool:
        return self.admitted > LOSSES.admitted


class LossRecord:
    """The losses of the servers of one client, those that lost something last."""

    def __init__(self) -> None:
        self._servers: dict[str, ServerLosses] = {}

    def note(self, peer_id: str, now: float, *, admitted: bool) -> ServerLosses:
        """With one more loss of this server."""
        before = self._servers.pop(peer_id, ServerLosses(now)).at(now)
        found = replace(before, count=before.count + 1, admitted=before.admitted + admitted)
        self._servers[peer_id] = found
        while len(self._servers) > LOSSES.most_servers:
            del self._servers[next(iter(self._servers))]
        return found

    def penalty_seconds(self, peer_id: str, now: float) -> float:
        """What routing adds to the cost of this server."""
        known = self._servers.get(peer_id)
        return 0.0 if known is None else LOSSES.seconds * max(0.0, known.at(now).count - LOSSES.forgiven)


@dataclass
class ReplayBudget:
    """How often a session may still be filled anew: some times at once, and once more for every few steps that are
    answered. So servers which answer one step each do not make it compute its history for ever."""

    spent: float = 0.0

    def answered(self) -> None:
        """A step has passed a server."""
        self.spent = max(0.0, self.spent - 1 / LOSSES.steps)

    def take(self, servers: int) -> bool:
        """One more replay, of a session over `servers` servers; false if that is one too many."""
        if self.spent + 1 > LOSSES.replays * servers:
            return False
        self.spent += 1
        return True
