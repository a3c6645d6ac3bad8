"""Memory of a server as a hard budget, with a fair queue in front of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Literal

import trio


@dataclass(frozen=True)
class BudgetPolicy:
    """Who waits for memory, and what is taken back from whom. Times in seconds."""

    most_overtaking: int = 3
    """This number of times in a row, who has paid goes ahead of the first who has not; then it is the other's turn."""
    idle: float = 60.0  # Without a request, after which what somebody holds beyond its share goes to who waits
    long_idle: float = 300.0
    """After which all that somebody holds does; and for which nobody has to give back what is not idle."""
    contested: float = 5.0
    """For which an address that has more than its share keeps a session from one that has less. With 30 s, keys at five
    addresses that open sessions together every 20 s left others a server for moments only."""
    look: float = 1.0  # Between two looks of who waits at what others have left idle
    between: float = 0.5  # Between two looks of all who wait together


BUDGETS: Final = BudgetPolicy()


def next_in_line(paid: Sequence[bool], overtaken: int) -> int:
    """The place in a queue, in order of arrival, of who is next. `paid` says for each whether it has priority;
    `overtaken` how many went ahead of the first that has none since one of those was served."""
    if True not in paid or False not in paid:
        return 0
    return paid.index(overtaken < BUDGETS.most_overtaking)


def now_overtaken(paid: Sequence[bool], chosen: int, overtaken: int) -> int:
    """`overtaken` after `chosen` was served."""
    return overtaken + 1 if paid[chosen] and False in paid else 0


@dataclass(frozen=True)
class Holding:
    """What `holder` at `address` has of a budget. `idle`: seconds since its last request, None while it is not to be
    taken; `age`: seconds since it was granted."""

    holder: str
    amount: int
    idle: float | None
    age: float
    paid: bool = False
    address: str = ""


def to_reclaim(held: Sequence[Holding], wanted: int, claimant: str, capacity: int, address: str = "") -> list[int]:
    """The places in `held` of what has to be taken so that `claimant` gets `wanted` more. None if that is not to be.

    Shares are soft: one who is alone may hold everything. For a claimant within an equal share, what was idle for
    longest goes first, of those who hold more than theirs. What nobody has used for very long goes next. A few requests
    keep anything from being idle. So what one has held for very long beyond half of all goes, too. What was paid for
    goes only when it is idle for very long.

    Keys are free and addresses are not. A claimant whose `address` would stay within an equal share of all addresses
    need not wait for so long. What others have held for some seconds beyond such a share goes, too.
    """
    by_holder = ((BUDGETS.idle, 0.0, 1.0, 0.0), (BUDGETS.long_idle, 0.0, 0.0, 0.0), (0.0, BUDGETS.long_idle, 1.0, 0.5))
    chosen = _reclaimed([one.holder for one in held], held, wanted, claimant, capacity, by_holder)
    if chosen or not address:
        return chosen
    by_address = ((BUDGETS.idle, 0.0, 1.0, 0.0), (0.0, BUDGETS.contested, 1.0, 0.0))
    return _reclaimed([one.address for one in held], held, wanted, address, capacity, by_address)


def _reclaimed(
    names: Sequence[str],
    held: Sequence[Holding],
    wanted: int,
    claimant: str,
    capacity: int,
    passes: Sequence[tuple[float, float, float, float]],
) -> list[int]:
    """`passes` over what is held by `names`: seconds idle and of age at least, of who has more than a number of shares
    and such a part of all."""
    totals = Counter[str]()
    for name, holding in zip(names, held, strict=True):
        totals[name] += holding.amount
    share = capacity // len({*totals, claimant})
    if totals[claimant] + wanted > share:
        return []
    chosen: list[int] = []
    by_idleness = sorted(range(len(held)), key=lambda place: -(held[place].idle or 0.0))
    for least_idle, least_age, shares, part in passes:
        most = max(int(shares * share), int(part * capacity)) if shares or part else -1
        for place in by_idleness:
            holding = held[place]
            if (
                wanted > 0
                and place not in chosen
                and names[place] != claimant
                and holding.idle is not None
                and holding.idle >= (BUDGETS.long_idle if holding.paid else least_idle)
                and holding.age >= least_age
                and totals[names[place]] > most
            ):
                chosen.append(place)
                totals[names[place]] -= holding.amount
                wanted -= holding.amount
    return chosen if wanted <= 0 else []


class BudgetFull(Exception):
    """No room came free in time; the text says how much was wanted and how much there is."""


@dataclass
class _LeaseWaiter:
    amount: int
    paid: bool
    holder: str
    address: str
    granted: trio.Event = field(default_factory=trio.Event)
    lease: Lease | None = None


class MemoryBudget:
    """Room for requests: cache tokens (of one sequence through all blocks of the server), or bytes. Whoever is refused
    is told in `unit`s, which are `scale` each. No share of `network/shares.py`: what is held may be lent and reclaimed.

    Requests wait first come, first served: a large one is not overtaken for ever by small ones. Who has paid comes
    first, as `next_in_line` has it. Who asks for more than an equal share of all holders comes last. What is held
    only in case that somebody comes back may be lent: whoever needs the room takes it. What is in use may be taken
    back as `to_reclaim` has it.

    Attributes:
        on_change: is told of what nobody holds, whenever that has changed.
    """

    def __init__(self, capacity: int, unit: str = "cache tokens", scale: int = 1) -> None:
        self.capacity = capacity
        self.on_change: Callable[[int], None] = lambda free: None
        self._unit = unit
        self._scale = scale
        self._used = 0
        self._waiting: list[_LeaseWaiter] = []
        self._overtaken = 0
        self._looked = -math.inf
        self._lent: dict[Lease, Callable[[], None]] = {}  # the oldest first
        self._held: dict[Lease, None] = {}  # of all who are named

    @property
    def free(self) -> int:
        """What nobody holds. What is lent counts as held."""
        return self.capacity - self._used

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(
        self, amount: int, timeout: float, *, paid: bool = False, holder: str = "", address: str = ""
    ) -> Lease:
        """Takes `amount`, after waiting its turn for at most `timeout` seconds. Takes nothing if cancelled. `paid`: has
        priority. Without a `holder` it belongs to nobody's share; without the `address` of one, to none of addresses.

        Raises:
            BudgetFull: at once if it can never fit, else after the deadline.
        """
        if amount > self.capacity:
            raise self._full(amount, f"this server has {self.capacity // self._scale} in all")
        waiter = _LeaseWaiter(amount, paid, holder, address)
        if self._waiting or not self._make_room(waiter):
            return await self._wait(waiter, timeout)
        return self._leased(waiter)

    def _hold(self, amount: int) -> None:
        self._used += amount
        self.on_change(self.free)

    def _leased(self, waiter: _LeaseWaiter) -> Lease:
        self._hold(waiter.amount)
        lease = Lease(self, waiter.amount, holder=waiter.holder, address=waiter.address, paid=waiter.paid)
        if waiter.holder:
            self._held[lease] = None
        return lease

    def _full(self, amount: int, there: str) -> BudgetFull:
        return BudgetFull(f"{amount // self._scale} {self._unit} are wanted, {there}")

    def _make_room(self, waiter: _LeaseWaiter) -> bool:
        """Whether so much is free now; takes what is lent, the oldest first, and what is to be taken back, if that is
        enough."""
        amount, holder = waiter.amount, waiter.holder
        missing = amount - self.free - sum(lease.amount for lease in self._lent)
        if missing > 0:
            held = [lease for lease in self._held if lease not in self._lent]
            holdings = [lease.holding() for lease in held]
            places = to_reclaim(holdings, missing, holder, self.capacity, waiter.address) if holder else []
            if not places:
                return False
            for place in places:
                held[place].take()
        while amount > self.free:
            next(iter(self._lent)).take()
        return True

    def _line(self) -> list[_LeaseWaiter]:
        """Those who wait, in order: only whose address would stay within its share, if there are any; of these only who
        would itself, if there are any.

        The requests of one holder do not overtake each other.
        """
        first = {waiter.holder: waiter for waiter in reversed(self._waiting)}
        line = [waiter for waiter in self._waiting if not waiter.holder or first[waiter.holder] is waiter]
        if len({lease.address for lease in self._held} | {waiter.address for waiter in self._waiting}) > 1:
            line = self._with_share(line, "address") or line
        return self._with_share(line, "holder") or line or self._waiting

    def _with_share(self, line: list[_LeaseWaiter], kind: Literal["holder", "address"]) -> list[_LeaseWaiter]:
        """Those whose holder, or address, would still be within an equal share. Strangers choose how many there are, so
        each is looked at once."""
        name_of = attrgetter(kind)
        held = Counter[str](dict.fromkeys(map(name_of, self._waiting), 0))
        for lease in self._held:
            held[name_of(lease)] += lease.amount
        share = self.capacity // max(len(held), 1)
        return [waiter for waiter in line if not name_of(waiter) or held[name_of(waiter)] + waiter.amount <= share]

    async def _wait(self, waiter: _LeaseWaiter, timeout: float) -> Lease:
        self._waiting.append(waiter)
        self._grant()  # whom it overtakes may wait for more than is free
        try:
            with trio.move_on_after(timeout):
                while not waiter.granted.is_set():
                    with trio.move_on_after(BUDGETS.look):
                        await waiter.granted.wait()
                    if trio.current_time() - self._looked >= BUDGETS.between:
                        self._grant()
        except BaseException:
            self._leave(waiter)
            raise
        # The grant may come in the instant of the deadline: then it holds.
        if waiter.lease is None:
            self._leave(waiter)
            scale = self._scale
            raise self._full(waiter.amount, f"{self.free // scale} of {self.capacity // scale} are free")
        return waiter.lease

    def _leave(self, waiter: _LeaseWaiter) -> None:
        if waiter.lease is not None:
            waiter.lease.release()
        else:
            self._waiting.remove(waiter)
            self._grant()

    def _grant(self) -> None:
        self._looked = trio.current_time()
        while self._waiting:
            line = self._line()
            paid = [waiter.paid for waiter in line]
            place = next_in_line(paid, self._overtaken)
            waiter = line[place]
            if not self._make_room(waiter):
                return
            self._overtaken = now_overtaken(paid, place, self._overtaken)
            self._waiting.remove(waiter)
            waiter.lease = self._leased(waiter)
            waiter.granted.set()


@dataclass(eq=False)
class Lease:
    """Room of a `MemoryBudget` that a request holds until it is released, or taken while lent or idle.

    Attributes:
        taken: somebody else took it; it must not be used any more.
        over: it was taken or released.
        busy: a request is under way, so that it is not taken now.
        on_taken: called when it is taken; None while it may not be.
    """

    _budget: MemoryBudget
    amount: int
    taken: bool = False
    over: bool = False
    holder: str = ""
    address: str = ""
    paid: bool = False
    busy: bool = False
    on_taken: Callable[[], None] | None = None
    _used_at: float = field(default_factory=trio.current_time)
    _granted_at: float = field(default_factory=trio.current_time)

    def holding(self) -> Holding:
        now, may_be_taken = trio.current_time(), self.on_taken is not None and not self.busy
        idle = now - self._used_at if may_be_taken else None
        return Holding(self.holder, self.amount, idle, now - self._granted_at, self.paid, self.address)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For the length of a request."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            self._used_at = trio.current_time()

    def take(self) -> None:
        """Takes it from who holds it. For the budget."""
        on_taken = self._budget._lent.pop(self, self.on_taken)
        self._budget._held.pop(self, None)
        self._budget._hold(-self.amount)
        self.taken = self.over = True
        if on_taken is not None:
            on_taken()

    def release(self) -> None:
        """Gives the room back; does nothing if it is over already."""
        if not self.over:
            self.over = True
            self._budget._lent.pop(self, None)
            self._budget._held.pop(self, None)
            self._budget._hold(-self.amount)
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
