"""The speed that a server announces, corrected by what its sessions' steps really take."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from ...swarm.cost import LOAD_PER_WAITING

_SAMPLES: Final = 64
_ENOUGH: Final = 16
_LONG: Final = 32
"""Tokens at once from which a pass says how fast a long prefill is."""
_NOTABLE: Final = 0.1
"""Smaller differences are noise, and not announced."""


class LiveSpeed:
    """The middle one of the last steps, once there are enough. The notes may come from another thread.

    Attributes:
        step_seconds: a decode step of one row through the whole span, as it is announced.
        token_seconds: a token of a long prefill through the whole span.
    """

    def __init__(self, step_seconds: float, token_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.token_seconds = token_seconds
        self._steps: deque[float] = deque(maxlen=_SAMPLES)
        self._tokens: deque[float] = deque(maxlen=_SAMPLES)
        self._used = False

    def note_decode(self, rows: int, share: float, seconds: float) -> None:
        """A decode step of `rows` rows at once through `share` of the span, on average, took `seconds`."""
        self._used = True
        if share > 0:
            self._steps.append(seconds / share / (1 + LOAD_PER_WAITING * (rows - 1)))

    def note_prefill(self, tokens: int, share: float, seconds: float) -> None:
        """`tokens` tokens (of all rows) at once through `share` of the span took `seconds`."""
        if share > 0 and tokens >= _LONG:
            self._tokens.append(seconds / share / tokens)

    def correct(self) -> bool:
        """Takes over what was noted; whether that is worth announcing."""
        return self._take(_middle(self._steps), _middle(self._tokens))

    def was_used(self) -> bool:
        """Whether there were steps since this was last asked: then a measurement would know less than they do."""
        used, self._used = self._used, False
        return used

    def measured(self, step_seconds: float, token_seconds: float) -> bool:
        """Takes over what was measured anew, in place of steps of long ago; whether that is worth announcing."""
        self._steps.clear()
        self._tokens.clear()
        return self._take(step_seconds, token_seconds)

    def _take(self, step_seconds: float | None, token_seconds: float | None) -> bool:
        step, token = _corrected(self.step_seconds, step_seconds), _corrected(self.token_seconds, token_seconds)
        if (step, token) == (self.step_seconds, self.token_seconds):
            return False
        self.step_seconds, self.token_seconds = step, token
        return True


def _middle(samples: deque[float]) -> float | None:
    """The middle sample, None if there are too few."""
    found = list(samples)
    return statistics.median(found) if len(found) >= _ENOUGH else None


def _corrected(said: float, found: float | None) -> float:
    """What was found if it is notably another, else what was said."""
    return found if found is not None and abs(found - said) >= _NOTABLE * said else said
