"""Pings through the pauses between large messages, so that TCP does not shrink its window in them.

After a silence of one retransmission timeout (a round trip and at least 200 ms) TCP starts anew with ten packets: RFC
5681, section 4.1. A hidden state of 16 KiB then takes two round trips instead of one, and a micro-batch of 256 KiB
five. One small frame within that time is enough to keep a window of any size.
"""

from __future__ import annotations

from typing import Final

import trio

from .limits import NodeLimits

LARGE: Final = 12 * 1024
"""Bytes of a large message: about what TCP sends in its first round trip (ten packets, RFC 6928)."""
_QUIET: Final = 0.15  # seconds between two frames; TCP forgets after 0.2 at least. A ping costs each end half a ms
_LEAST: Final = 5.0  # seconds after a large message in which another one is expected


def seconds_kept(pause: float, longest: float) -> float:
    """For how many seconds a window is worth keeping after a large message. `pause` seconds are between it and the one
    before. Twice as long, for messages that come at intervals, as those of a fine-tuning do. No longer than `longest`,
    and where half of that was too short, not at all."""
    return max(_LEAST, 2 * pause if 2 * pause <= longest else 0.0)


class WindowKeeper:
    """Keeps the window of one connection, after a large message for as long as the node's limits say."""

    def __init__(self, limits: NodeLimits) -> None:
        self._limits = limits
        self._sent_at = self._large_at = -float("inf")
        self._until = -float("inf")  # another large message may follow until then
        self._large = trio.lowlevel.ParkingLot()

    def sent(self, size: int) -> None:
        """A frame with `size` bytes of data has been sent."""
        self._sent_at = now = trio.current_time()
        if size > LARGE:
            self._until = max(self._until, now + seconds_kept(now - self._large_at, self._limits.window_kept))
            self._large_at = now
            self._large.unpark_all()

    async def wait_due(self) -> None:
        """Returns when a ping is due, which is told to `sent` as all else."""
        while True:
            if trio.current_time() > self._until:
                await self._large.park()
            await trio.sleep_until(self._sent_at + _QUIET)
            if trio.current_time() >= self._sent_at + _QUIET:
                return
