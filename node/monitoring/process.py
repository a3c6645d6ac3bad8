"""What this process takes of the machine, and how late its event loop is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import psutil
import trio

from ..server.tallies import Distribution

INTERVAL: Final = 0.25
WINDOW: Final = 10.0
"""Seconds that `LoopDelay.longest` looks back."""
_BOUNDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class LoopDelay:
    """Measures how much later than due a task of the event loop wakes up: for so long everybody waited.

    Attributes:
        seconds: all that was measured so far.
    """

    def __init__(self) -> None:
        self.seconds = Distribution(_BOUNDS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=round(WINDOW / INTERVAL))  # when, and how late

    async def run(self) -> None:
        """Measures four times a second until cancelled, which takes less than 0.1 % of a core."""
        while True:
            due = trio.current_time() + INTERVAL
            await trio.sleep_until(due)
            now = trio.current_time()
            self.note(now, now - due)

    def note(self, now: float, late: float) -> None:
        """At `now` a task has woken up `late` seconds later than due."""
        self.seconds.add(max(0.0, late))
        self._recent.append((now, late))

    def longest(self, now: float) -> float:
        """The longest delay of the last ten seconds."""
        return max((late for at, late in self._recent if now - at <= WINDOW), default=0.0)


@dataclass(frozen=True)
class ProcessFigures:
    """Of this process, since it started where that applies; None where the system does not tell."""

    cpu_seconds: float
    resident_bytes: int
    virtual_bytes: int
    started: float
    threads: int
    open_files: int | None


def process_figures(process: psutil.Process) -> ProcessFigures:
    """Takes less than a millisecond."""
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        try:
            open_files = process.num_fds() if hasattr(process, "num_fds") else None
        except psutil.Error:
            open_files = None
        return ProcessFigures(
            times.user + times.system, memory.rss, memory.vms, process.create_time(), process.num_threads(), open_files
        )
