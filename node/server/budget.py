"""Memory of a server as a hard budget, with a fair queue in front of it."""

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


class BudgetFull(Exception):
    """No room came free in time; the text says how much was wanted and how much there is."""


@dataclass
class _Waiter:
    amount: int
    paid: bool
    granted: trio.Event = field(default_factory=trio.Event)


class MemoryBudget:
    """Room for requests: cache tokens (of one sequence through all blocks of the server), or bytes. Whoever is refused
    is told in `unit`s, which are `scale` each.

    Requests wait strictly first come, first served: a large one is not overtaken for ever by small ones. Who has paid
    comes first, as `next_in_line` has it. What is held only in case that somebody comes back may be lent: whoever needs
    the room takes it.
    """

    def __init__(self, capacity: int, unit: str = "cache tokens", scale: int = 1) -> None:
        self.capacity = capacity
        self._unit = unit
        self._scale = scale
        self._used = 0
        self._waiting: list[_Waiter] = []
        self._overtaken = 0
        self._lent: dict[Lease, Callable[[], None]] = {}  # the oldest first

    @property
    def free(self) -> int:
        """What nobody holds. What is lent counts as held."""
        return self.capacity - self._used

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, amount: int, timeout: float, *, paid: bool = False) -> Lease:
        """Takes `amount`, after waiting its turn for at most `timeout` seconds. Takes nothing if cancelled. `paid`: has
        priority.

        Raises:
            BudgetFull: at once if it can never fit, else after the deadline.
        """
        if amount > self.capacity:
            raise self._full(amount, f"this server has {self.capacity // self._scale} in all")
        if self._waiting or not self._make_room(amount):
            await self._wait(amount, timeout, paid)
        else:
            self._used += amount
        return Lease(self, amount)

    def _full(self, amount: int, there: str) -> BudgetFull:
        return BudgetFull(f"{amount // self._scale} {self._unit} are wanted, {there}")

    def _make_room(self, amount: int) -> bool:
        """Whether so much is free now; takes what is lent, the oldest first, if that is enough."""
        if amount > self.free + sum(lease.amount for lease in self._lent):
            return False
        while amount > self.free:
            lease, on_taken = next(iter(self._lent.items()))
            del self._lent[lease]
            self._used -= lease.amount
            lease.taken = lease.over = True
            on_taken()
        return True

    async def _wait(self, amount: int, timeout: float, paid: bool) -> None:
        waiter = _Waiter(amount, paid)
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
            scale = self._scale
            raise self._full(amount, f"{self.free // scale} of {self.capacity // scale} are free")

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.granted.is_set():
            self._used -= waiter.amount
        else:
            self._waiting.remove(waiter)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            paid = [waiter.paid for waiter in self._waiting]
            place = next_in_line(paid, self._overtaken)
            if not self._make_room(self._waiting[place].amount):
                return
            self._overtaken = now_overtaken(paid, place, self._overtaken)
            waiter = self._waiting.pop(place)
            self._used += waiter.amount
            waiter.granted.set()


@dataclass(eq=False)
class Lease:
    """Room of a `MemoryBudget` that a request holds, until it is released, or taken while it is lent.

    Attributes:
        taken: somebody else took it; it must not be used any more.
        over: it was taken or released.
    """

    _budget: MemoryBudget
    amount: int
    taken: bool = False
    over: bool = False

    def release(self) -> None:
        """Gives the room back; does nothing if it is over already."""
        if not self.over:
            self.over = True
            self._budget._lent.pop(self, None)
            self._budget._used -= self.amount
            self._budget._grant()

    def lend(self, on_taken: Callable[[], None]) -> None:
        """Offers the room to whoever needs it. `on_taken` is called when it is taken, perhaps at once."""
        if not self.over:
            self._budget._lent[self] = on_taken
            self._budget._grant()

    def recall(self) -> bool:
        """Ends the offer; false if the room was taken already. Safe to call twice."""
        self._budget._lent.pop(self, None)
        return not self.taken
