"""How quickly a swarm changes, which says how long the gain of a move will last. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WINDOW: Final = 45 * 60.0
_PRIOR: Final = 5 * 60.0
"""So much time at the usual turnover is counted besides, because a window with nothing in it proves little."""
USUAL_PER_HOUR: Final = 0.113
"""Changes per server and hour that count as usual: those of the swarm of Petals' appendix E over a day."""
LEAST, MOST = 0.5, 2.0
_LEFT, _JOINED = 4 / 3, 2 / 3
"""What the throughput has gained is lost when servers leave, much less so when they join."""


@dataclass(frozen=True)
class Change:
    """A server joined, or left, at this time."""

    at: float
    joined: bool


def recent(changes: Sequence[Change], now: float) -> tuple[Change, ...]:
    """Those that still count."""
    return tuple(change for change in changes if now - WINDOW < change.at <= now)


def turnover(changes: Sequence[Change], servers: int, now: float) -> float:
    """How fast `servers` servers come and go by what was seen of late: 1 is usual, within LEAST .. MOST."""
    usual = USUAL_PER_HOUR / 3600 * max(servers, 1)
    weighed = sum(_JOINED if change.joined else _LEFT for change in recent(changes, now))
    return min(max((weighed + _PRIOR * usual) / ((WINDOW + _PRIOR) * usual), LEAST), MOST)
