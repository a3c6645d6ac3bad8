"""Signals and typed lines, handled while the node keeps running."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn

import trio
import typer

from ..errors import BadInput, ExitCode, PetalnodeError, unwrapped
from .process import interrupted, say_error, shown

STOP_GRACE = 1.0


ENDING: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals by which a person, a service manager or a closed terminal ends a command."""


async def stopped_by_signal(function: Callable[[trio.Event], Awaitable[object]]) -> int | None:
    """Awaits `function(stop)` until it is done; a signal of `ENDING` sets `stop`. The signal, if one came."""
    stop = trio.Event()
    came: list[int] = []
    with unwrapped(PetalnodeError), trio.open_signal_receiver(*_heeded()) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_signals, signals, came, stop, nursery.cancel_scope)
            await function(stop)
            nursery.cancel_scope.cancel()
    return next((number for number in came if number != signal.SIGINT), came[0] if came else None)


async def _watch_signals(
    signals: AsyncIterator[int], came: list[int], stop: trio.Event, scope: trio.CancelScope
) -> None:
    async for number in signals:
        came.append(number)
        stop.set()
        # A token is on its way; a long prompt or a silent server is not waited for.
        await trio.sleep(STOP_GRACE)
        scope.cancel()


def _heeded() -> list[signal.Signals]:
    """Those of `ENDING` that end this process: `nohup` has SIGHUP ignored."""
    return [number for number in ENDING if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN]


def at_terminal() -> bool:
    """Whether a person reads what is asked and can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class LineReader:
    """Reads lines in a thread, so that the node stays alive meanwhile, and leaves the terminal as it was."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> None:
        try:
            import readline  # noqa: F401  (line editing and history for input())
            import termios

            self._saved = termios.tcgetattr(sys.stdin.fileno())
        except (ImportError, OSError):
            pass  # Windows, or no terminal to restore

    def __exit__(self, *exc_info: object) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    async def read(self, prompt: str) -> str | None:
        """A line, or None at the end.

        Raises:
            BadInput: it is not text.
        """
        try:
            return await trio.to_thread.run_sync(input, shown(prompt), abandon_on_cancel=True)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise BadInput(f"what was typed is not {error.encoding}: {error.reason}") from None


class StopSignal:
    """`event` is set by the first signal; the second one ends the process at once."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.number: int | None = None

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(*_heeded()) as signals:
            task_status.started()
            async for number in signals:
                if self.event.is_set():
                    say_error("ended at once")
                    os._exit(ExitCode.INTERRUPTED)
                self.number = number
                self.event.set()

    def leave(self) -> NoReturn:
        """Says what has stopped the command, and ends it.

        Raises:
            typer.Exit: with the exit code.
        """
        if self.number is not None:
            interrupted(self.number)
        raise typer.Exit(self.exit_code)

    @property
    def interrupted(self) -> bool:
        return self.number == signal.SIGINT

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
