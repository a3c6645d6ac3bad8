"""The attention cache of a server as a hard budget of tokens, with a fair queue in front of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import trio


class CacheFull(Exception):
    """No room came free in time; the text says how much was wanted and how much there is."""


@dataclass
class _Waiter:
    tokens: int
    granted: trio.Event = field(default_factory=trio.Event)


class CacheBudget:
    """Tokens of one sequence through all blocks of the server; sessions reserve batch x max_length of them.

    Reservations are granted strictly first come, first served: a large one is not overtaken for ever by small ones.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._used = 0
        self._waiting: deque[_Waiter] = deque()

    @property
    def free(self) -> int:
        return self.tokens - self._used

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, tokens: int, timeout: float) -> None:
        """Takes `tokens`, after waiting its turn for at most `timeout` seconds. Takes nothing if cancelled.

        Raises:
            CacheFull: at once if it can never fit, else after the deadline.
        """
        if tokens > self.tokens:
            raise CacheFull(f"{tokens} cache tokens are wanted, this server has {self.tokens} in all")
        if self._waiting or tokens > self.free:
            await self._wait(tokens, timeout)
        else:
            self._used += tokens

    def release(self, tokens: int) -> None:
        """Gives back what `acquire` took."""
        self._used -= tokens
        self._grant()

    async def _wait(self, tokens: int, timeout: float) -> None:
        waiter = _Waiter(tokens)
        self._waiting.append(waiter)
        try:
            with trio.move_on_after(timeout):
                await waiter.granted.wait()
        except BaseException:
            self._leave(waiter)
            raise
        # The grant may come in the instant of the deadline: then it holds.
        if not waiter.granted.is_set():
            self._leave(waiter)
            raise CacheFull(f"{tokens} cache tokens are wanted, {self.free} of {self.tokens} are free")

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.granted.is_set():
            self._used -= waiter.tokens
        else:
            self._waiting.remove(waiter)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0].tokens <= self.free:
            waiter = self._waiting.popleft()
            self._used += waiter.tokens
            waiter.granted.set()
