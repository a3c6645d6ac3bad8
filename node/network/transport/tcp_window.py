"""Pings through the pauses between large messages, so that TCP does not shrink its window in them.

After a silence of one retransmission timeout, a round trip and at least 200 ms, TCP starts anew with ten packets
(RFC 5681, section 4.1): a hidden state of 16 KiB then takes two round trips instead of one, and a micro-batch of
256 KiB five. One small frame within that time is enough to keep a window of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

LARGE: Final = 12 * 1024
"""Bytes of a large message: about what TCP sends in its first round trip (ten packets, RFC 6928)."""
_QUIET: Final = 0.15  # seconds; TCP forgets its window after 0.2 and a round trip. A ping costs each end half a ms
_LEAST: Final = 5.0  # seconds after a large message in which another one is expected


def seconds_kept(pause: float, longest: float) -> float:
    """For how many seconds a window is worth keeping after a large message that came `pause` seconds after the one
    before it: twice as long, for messages that come at intervals, as those of a fine-tuning do; no longer than
    `longest`, and where half of that was too short, not at all."""
    return max(_LEAST, 2 * pause if 2 * pause <= longest else 0.0)


class WindowKeeper:
    """Keeps the window of one connection. `longest` says how many seconds it may do that after a large message."""

    def __init__(self, longest: Callable[[], float]) -> None:
        self._longest = longest
        self._last = -float("inf")  # large message
        self._until = 0.0  # another one may follow until then
        self._large = trio.lowlevel.ParkingLot()
        self._sent_lately = False

    def sent(self, size: int) -> None:
        """A frame with so many bytes of data has been sent."""
        self._sent_lately = True
        if size > LARGE:
            now = trio.current_time()
            self._until = max(self._until, now + seconds_kept(now - self._last, self._longest()))
            self._last = now
            self._large.unpark_all()

    async def run(self, ping: Callable[[], None]) -> None:
        while True:
            if trio.current_time() > self._until:
                await self._large.park()
            self._sent_lately = False
            await trio.sleep(_QUIET)
            if not self._sent_lately:
                ping()
