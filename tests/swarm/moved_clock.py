"""A process whose wall clock a test moves: `time.time` and `time.time_ns` follow a file, as after a battery has died.

`install(file)` changes this process only. The file holds the seconds by which the clock is wrong; no file: none.
Timers (`time.monotonic`, trio's clock) go on, as the system's do.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

DAY = 86400.0
_LOOK = 0.1  # seconds


def install(file: Path) -> None:
    honest, honest_ns, wrong, pause = time.time, time.time_ns, [0.0], threading.Event()

    def look() -> None:
        while not pause.wait(_LOOK):
            try:
                wrong[0] = float(file.read_text() or 0)
            except OSError:
                wrong[0] = 0.0

    time.time = lambda: honest() + wrong[0]
    time.time_ns = lambda: honest_ns() + int(wrong[0] * 1e9)
    threading.Thread(target=look, daemon=True).start()


def move(file: Path, seconds: float) -> None:
    """Moves the clock of the process that follows `file`; 0 puts it right."""
    written = file.with_suffix(".new")
    written.write_text(str(seconds))
    written.replace(file)
