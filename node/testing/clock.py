"""A clock that never makes a test wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from trio.testing import MockClock

T = TypeVar("T")


def run_autojumping(main: Callable[..., Awaitable[T]], *args: object, threshold: float = 0.0) -> T:
    """`trio.run` with virtual time: when all tasks have waited for `threshold` real seconds, the next deadline is now.

    Threads are not tasks: where one computes for the test, `threshold` must be longer than it takes.
    """
    return trio.run(main, *args, clock=MockClock(autojump_threshold=threshold))
