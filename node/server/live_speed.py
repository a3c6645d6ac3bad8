"""The speed that a server announces, corrected by what its sessions' steps really take."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from ..planning.cost import LOAD_PER_WAITING

_SAMPLES: Final = 64
_ENOUGH: Final = 16
_NOTABLE: Final = 0.25
"""Smaller differences are not announced: they would only unsettle who plans with them."""


class LiveSpeed:
    """The middle one of the last steps, once there are enough. `note` may be called from another thread.

    Attributes:
        step_seconds: a decode step of one row through the whole span, as it is announced.
    """

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def note(self, rows: int, share: float, seconds: float) -> None:
        """A decode step of `rows` rows at once through `share` of the span, on average, took `seconds`."""
        if share > 0:
            self._samples.append(seconds / share / (1 + LOAD_PER_WAITING * (rows - 1)))

    def correct(self) -> bool:
        """Takes over what was noted; whether that is worth announcing."""
        samples = list(self._samples)
        if len(samples) < _ENOUGH:
            return False
        middle = statistics.median(samples)
        if abs(middle - self.step_seconds) < _NOTABLE * self.step_seconds:
            return False
        self.step_seconds = middle
        return True
