"""Turns for work that holds the interpreter, of which one client must not have too much."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class FairTurns:
    """Blocks of which one runs at a time. Owners who wait take turns, however many blocks each has waiting."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: OrderedDict[str, deque[trio.Event]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Waits for a turn of `owner`, and has it for the length of the block."""
        if self._busy:
            await self._wait(owner)
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str) -> None:
        given = trio.Event()
        self._waiting.setdefault(owner, deque()).append(given)
        try:
            await given.wait()
        except trio.Cancelled:
            if given.is_set():
                self._pass_on()
            else:
                self._forget(owner, given)
            raise

    def _pass_on(self) -> None:
        """The turn stays taken until whoever is given it is done, so that nobody comes in between."""
        if not self._waiting:
            self._busy = False
            return
        owner, waiting = self._waiting.popitem(last=False)
        waiting.popleft().set()
        if waiting:
            self._waiting[owner] = waiting

    def _forget(self, owner: str, given: trio.Event) -> None:
        self._waiting[owner].remove(given)
        if not self._waiting[owner]:
            del self._waiting[owner]
