"""How much slower than a quiet machine this one is right now: what promises made in seconds are multiplied by."""

from __future__ import annotations

from time import perf_counter
from typing import Final

import pytest

_NUMBERS: Final = 2_000_000
QUIET: Final = 0.08
"""Seconds of the reference work on a quiet core of 2.5 GHz."""


def _work() -> int:
    total = 0
    for number in range(_NUMBERS):
        total ^= number * number
    return total


class Slowness:
    """Times some reference work; that of other processes on the same cores counts as slowness too."""

    def __init__(self) -> None:
        self._most = 1.0

    def __call__(self) -> float:
        """A factor of at least 1: the largest so far, this moment included. Takes as long as the work does."""
        begun = perf_counter()
        _work()
        self._most = max(self._most, (perf_counter() - begun) / QUIET)
        return self._most


@pytest.fixture
def slowness() -> Slowness:
    """Has been measured once, so that a test that measures again at its end knows the worse of the two."""
    measured = Slowness()
    measured()
    return measured
