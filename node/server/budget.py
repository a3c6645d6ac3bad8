"""The attention cache of a server as a hard budget of tokens, with a fair queue in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

MOST_OVERTAKING: Final = 3
"""Who has paid goes ahead of the first who has not so many times in a row; then it is the other's turn."""


def next_in_line(paid: Sequence[bool], overtaken: int) -> int:
    """The place in a queue, in order of arrival, of who is next. `paid` says for each whether it has priority;
    `overtaken` how many went ahead of the first that has none since one of those was served."""
    if True not in paid or False not in paid:
        return 0
    return paid.index(overtaken < MOST_OVERTAKING)


def now_overtaken(paid: Sequence[bool], chosen: int, overtaken: int) -> int:
    """`overtaken` after `chosen` was served."""
    return overtaken + 1 if paid[chosen] and False in paid else 0


class CacheFull(Exception):
    """No room came free in time; the text says how much was wanted and how much there is."""


@dataclass
class _Waiter:
    tokens: int
    paid: bool
    granted: trio.Event = field(default_factory=trio.Event)


class CacheBudget:
    """Tokens of one sequence through all blocks of the server; sessions reserve batch x max_length of them.

    Reservations are granted strictly first come, first served: a large one is not overtaken for ever by small ones. Who
    has paid comes first, as `next_in_line` has it.
    What is held only in case that somebody comes back may be lent: whoever needs the room takes it.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._used = 0
        self._waiting: list[_Waiter] = []
        self._overtaken = 0
        self._loans: dict[Loan, int] = {}  # the oldest first

    @property
    def free(self) -> int:
        """Tokens that nobody holds. What is lent counts as held."""
        return self.tokens - self._used

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, tokens: int, timeout: float, *, paid: bool = False) -> None:
        """Takes `tokens`, after waiting its turn for at most `timeout` seconds. Takes nothing if cancelled. `paid`: has
        priority.

        Raises:
            CacheFull: at once if it can never fit, else after the deadline.
        """
        if tokens > self.tokens:
            raise CacheFull(f"{tokens} cache tokens are wanted, this server has {self.tokens} in all")
        if self._waiting or not self._make_room(tokens):
            await self._wait(tokens, timeout, paid)
        else:
            self._used += tokens

    def release(self, tokens: int) -> None:
        """Gives back what `acquire` took."""
        self._used -= tokens
        self._grant()

    def lend(self, tokens: int, on_taken: Callable[[], None]) -> Loan:
        """Offers what `acquire` took to whoever needs it. `on_taken` is called when it is taken, perhaps at once;
        it must not be released then."""
        loan = Loan(self, on_taken)
        self._loans[loan] = tokens
        self._grant()
        return loan

    def _make_room(self, tokens: int) -> bool:
        """Whether so many are free now; takes what is lent, the oldest first, if that is enough."""
        if tokens > self.free + sum(self._loans.values()):
            return False
        while tokens > self.free:
            loan, lent = next(iter(self._loans.items()))
            del self._loans[loan]
            self._used -= lent
            loan.taken = True
            loan.on_taken()
        return True

    async def _wait(self, tokens: int, timeout: float, paid: bool) -> None:
        waiter = _Waiter(tokens, paid)
        self._waiting.append(waiter)
        self._grant()  # whom it overtakes may wait for more than is free
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
        while self._waiting:
            paid = [waiter.paid for waiter in self._waiting]
            place = next_in_line(paid, self._overtaken)
            if not self._make_room(self._waiting[place].tokens):
                return
            self._overtaken = now_overtaken(paid, place, self._overtaken)
            waiter = self._waiting.pop(place)
            self._used += waiter.tokens
            waiter.granted.set()


class Loan:
    """Room of a `CacheBudget` that may be taken. `taken` says whether it was."""

    def __init__(self, budget: CacheBudget, on_taken: Callable[[], None]) -> None:
        self.taken = False
        self.on_taken = on_taken
        self._budget = budget

    def recall(self) -> bool:
        """Ends the offer; false if it was taken already. Safe to call twice."""
        self._budget._loans.pop(self, None)
        return not self.taken
