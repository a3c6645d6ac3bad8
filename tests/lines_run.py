"""A bound on how much Python a piece of work takes: unlike its time, that is the same on every machine."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class LinesRun:
    """Raises AssertionError as soon as this thread has run more than `most` lines in the block, in functions that are
    entered there."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._check()  # what was raised may have been caught

    def _check(self) -> None:
        assert self.count <= self._most, f"more than {self._most:,} lines were run"

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "line"
        self._check()
        return self._trace
