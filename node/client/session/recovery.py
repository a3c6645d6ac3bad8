"""What to do when the stream to a server has ended: wait for the same server, or take others. Pure functions.

A stream ends when the server dies, and just as well when a relay does, when a NAT forgets or when this machine changes
its address. In the latter cases the server still has the cache, and taking the session up again costs a dial and one
round trip where a replacement costs a replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_LOSSES: Final = 4
"""Streams to one server that may end at one step, one after another."""
ROUND_TRIPS: Final = 8
"""For a dial (TCP, Noise, Yamux; a circuit's two more) and the Resume."""
LEAST_HEAD_START: Final = 0.25
MOST_HEAD_START: Final = 2.0
FIRST_TIMEOUT: Final = 2.0
LONGEST_TIMEOUT: Final = 8.0
PAUSE: Final = 0.3


@dataclass(frozen=True)
class Loss:
    """What is known when a stream has ended in the middle of a step.

    kept: seconds for which the server said it keeps the session; 0: not at all.
    gone: the session is known to be over there, or was looked for long enough.
    attempts: how often taking it up again has failed since.
    losses: streams to this server that have ended at this step, this one included.
    standby_ready: others are prepared to take its place.
    round_trip: to the server, in seconds.
    """

    kept: float
    gone: bool = False
    attempts: int = 0
    losses: int = 1
    standby_ready: bool = False
    round_trip: float = 0.0


@dataclass(frozen=True)
class LossPlan:
    """`rejoin`: wait for the same server. `replace_after`: seconds until others are brought to its place beside that,
    or until the first attempt has failed; whichever is ready first goes on."""

    rejoin: bool
    replace_after: float


def after_loss(loss: Loss) -> LossPlan:
    """Whether to wait for the same server, and from when on others are prepared meanwhile."""
    if loss.kept <= 0 or loss.gone or loss.standby_ready or loss.losses > MOST_LOSSES:
        return LossPlan(rejoin=False, replace_after=0.0)
    if loss.attempts:
        return LossPlan(rejoin=True, replace_after=0.0)
    head_start = min(MOST_HEAD_START, max(LEAST_HEAD_START, ROUND_TRIPS * loss.round_trip))
    return LossPlan(rejoin=True, replace_after=head_start)


def attempt_timeout(attempts: int, round_trip: float) -> float:
    """Seconds that the next attempt may take after `attempts` that failed."""
    return min(LONGEST_TIMEOUT, FIRST_TIMEOUT * 2.0 ** min(attempts, 8) + ROUND_TRIPS * round_trip)
