"""How long the event loop of a trio program is held, and by what.

    python -m benchmarks.watched FILE serve ...     # the `petalnode` command, watched

`LoopWatch` is an instrument of trio: it is called before and after each step of a task, and before and after the loop
looks for what is ready. A *pass* is all that runs between two such looks: as long as it takes, whatever comes has to
wait. Its processor time is that of the loop's thread alone, so that other processes on the machine do not count; its
wall-clock time has the waiting for a core in it. It costs 1 to 2 microseconds a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import trio

NOTED: Final = 0.03  # seconds of a pass, on the clock or of processor time, from which on it is written down


class LoopWatch(trio.abc.Instrument):
    """Writes each long pass into `file` as a line of JSON: when it ended (seconds since 1970), its seconds of
    processor time (`cpu`) and on the clock (`wall`), its steps, and the longest step with the task that it was of."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pass = self._step = (time.perf_counter(), time.thread_time())
        self._steps = 0
        self._longest = (0.0, "")

    def after_io_wait(self, timeout: float) -> None:
        self._pass = (time.perf_counter(), time.thread_time())
        self._steps, self._longest = 0, (0.0, "")

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._step = (time.perf_counter(), time.thread_time())

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps += 1
        seconds = time.thread_time() - self._step[1]
        if seconds > self._longest[0]:
            self._longest = (seconds, where(task) if seconds > NOTED / 4 else task.name)

    def before_io_wait(self, timeout: float) -> None:
        wall, cpu = time.perf_counter() - self._pass[0], time.thread_time() - self._pass[1]
        if max(wall, cpu) > NOTED:
            step, task = self._longest
            fields = {"at": time.time(), "cpu": cpu, "wall": wall, "steps": self._steps, "step": step, "task": task}
            with self._file.open("a") as file:
                file.write(json.dumps(fields) + "\n")


def where(task: trio.lowlevel.Task) -> str:
    """The task, and where it stands: the places in its coroutines, the outermost first."""
    places, coroutine = [], task.coro
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return f"{task.name}: {' > '.join(places)}"


def watch(file: Path) -> None:
    """Watches every loop that this process runs from now on."""
    run = trio.run

    def watched(*arguments: Any, **options: Any) -> Any:
        return run(*arguments, **options, instruments=[LoopWatch(file)])

    trio.run = watched


if __name__ == "__main__":
    from petalnode.__main__ import main

    with suppress(PermissionError):  # a session of its own, as in light_node.py
        os.setsid()
    watch(Path(sys.argv.pop(1)))
    main()
