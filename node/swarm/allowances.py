"""How many pages of announcements a peer gets from a directory: they cost far more to make than to ask for."""

from __future__ import annotations

from typing import Final

import trio

_BURST: Final = 120  # pages at once for one peer, and
_PER_SECOND: Final = 12.0  # on however many streams; a client asks on a new one whenever it looks for servers
_MAX_COUNTED: Final = 1000  # peers


class PageAllowances:
    """Counts the pages of each peer, of those that asked last."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # pages that a peer may have, and when that was

    def take(self, peer_id: str) -> bool:
        """Whether a peer gets one more page, on whichever stream; counts it."""
        now = trio.current_time()
        left, counted = self._left.pop(peer_id, (float(_BURST), now))
        left = min(left + (now - counted) * _PER_SECOND, _BURST)
        self._left[peer_id] = (left - 1 if left >= 1 else left), now
        while len(self._left) > _MAX_COUNTED:
            del self._left[next(iter(self._left))]
        return left >= 1
