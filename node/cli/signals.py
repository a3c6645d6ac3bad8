"""Ctrl-C and SIGTERM for commands that run until they are told to stop."""

from __future__ import annotations

import os
import signal
import sys

import trio

from ..errors import ExitCode


class StopSignal:
    """`event` is set by the first signal; the second one ends the process at once."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.interrupted = False

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self.event.is_set():
                    os._exit(ExitCode.INTERRUPTED)
                self.interrupted = number == signal.SIGINT
                self.event.set()

    async def watch_stdin(self) -> None:
        """Sets `event` when standard input ends, as it does when the parent process is gone."""
        await trio.to_thread.run_sync(_read_to_end, sys.stdin.fileno(), abandon_on_cancel=True)
        self.event.set()

    @property
    def exit_code(self) -> ExitCode:
        """Ctrl-C is an interruption; SIGTERM is how a service is told to stop, and no error."""
        return ExitCode.INTERRUPTED if self.interrupted else ExitCode.DONE


def _read_to_end(descriptor: int) -> None:
    # Not through Python's buffer: a thread that is left behind in there aborts the interpreter when it ends.
    while os.read(descriptor, 1 << 16):
        pass
