"""A person at a terminal: lines and Ctrl-C, beside a node that goes on meanwhile."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from ..errors import PetalnodeError, unwrapped

STOP_GRACE = 1.0


async def stopped_by_ctrl_c(function: Callable[[trio.Event], Awaitable[object]]) -> bool:
    """Awaits `function(stop)` until it is done; Ctrl-C sets `stop`. True if that happened."""
    stop = trio.Event()
    with unwrapped(PetalnodeError), trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                async for _ in signals:
                    stop.set()
                    # A token is on its way; a long prompt or a silent server is not waited for.
                    await trio.sleep(STOP_GRACE)
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await function(stop)
            nursery.cancel_scope.cancel()
    return stop.is_set()


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
        """A line, or None at the end."""
        try:
            return await trio.to_thread.run_sync(input, prompt, abandon_on_cancel=True)
        except EOFError:
            return None
