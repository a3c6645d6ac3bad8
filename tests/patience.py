"""Deadlines that do not depend on how fast this machine is, or on what else it does."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final

import trio

from tests.swarm import warm_python

_LOOK: Final = 1.0
"""Seconds between two looks at a process; only the waiting for a core in between counts as well."""
WORKING: Final = 0.1
"""Of a core: who uses more, or would if it got it, is at work. Idle nodes use about a hundredth."""
LONGEST_PAUSE: Final = 90.0
"""Seconds, more than nodes let pass between two tries of anything: rounds of 15 s, a look around after 60 s."""


def children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def worked(pid: int) -> float:
    """Seconds that a process and its descendants have computed, or waited for a core to compute on."""
    total = 0.0
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                ran, waited, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
                total += (int(ran) + int(waited)) / 1e9
    own = warm_python.elsewhere() if pid == os.getpid() else []
    copies = [copy.pid for copy in own if copy.returncode is None]
    return total + sum(worked(child) for child in (*children(pid), *copies))


class Patience:
    """Is over once a process has made no progress for some seconds: it neither worked nor wrote anything.

    Where the system does not tell (it is not Linux), after these seconds.
    """

    def __init__(self, seconds: float, pid: int, written: Callable[[], int] = int, working: float = WORKING) -> None:
        self._seconds = seconds
        self._pid = pid
        self._written = written
        self._working = working
        self._looked = monotonic()
        self._deadline = self._looked + seconds
        self._seen = (worked(pid), written())

    @property
    def is_over(self) -> bool:
        now = monotonic()
        if now >= self._looked + _LOOK:
            before, self._seen = self._seen, (worked(self._pid), self._written())
            if self._seen[1] != before[1] or abs(self._seen[0] - before[0]) > self._working * (now - self._looked):
                self._deadline = now + self._seconds
            self._looked = now
        return now >= self._deadline


async def eventually(condition: Callable[[], Any], what: str, seconds: float = LONGEST_PAUSE) -> None:
    """Asks again and again, by a plain or an async function, until `condition` holds: for what no event tells.

    Raises:
        AssertionError: neither this process nor any that it started has worked in earnest for these seconds.
    """
    patience = Patience(seconds, os.getpid(), working=0.5)
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        if patience.is_over:
            raise AssertionError(f"not within {seconds:g} s in which not much was done: {what}")
        await trio.sleep(0.02)
