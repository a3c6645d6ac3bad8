"""Limits that strangers share: a fair share of what there is, a token bucket for rates, and turns of those who wait.

A share is soft wherever nothing has to be taken back. Who is alone gets half of all, and whoever comes next half of
what is left. So nobody can leave nothing for the others.
"""

from __future__ import annotations

import heapq
import ipaddress
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import trio

from ...protocols.framing import StreamTimeout

REMEMBERED: Final = 4096
"""Names without anything that counts, and things counted for a time, from which on the oldest are forgotten."""


class Origins(Protocol):
    """Where peers are: a `Host`."""

    def origin_of(self, peer_id: str) -> str:
        """The address at which a peer is, as `origin_of_ip` counts them."""


class _OneByOne:
    def origin_of(self, peer_id: str) -> str:
        return peer_id


ONE_BY_ONE: Final = _OneByOne()
"""Each peer is at an address of its own."""


def origin_of_ip(host: str, prefix: int = 64) -> str:
    """What counts as one address: an IPv4 address, or the network of `prefix` bits that an IPv6 one is in. Text that is
    no address stands for itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, prefix), strict=False))


# --- shares


def may_have_more(own: int, total: int, most: float, least: int) -> bool:
    """Whether who holds `own` of the `total` that is taken may have one more, of `most` in all. No more than is left
    for others, but `least` as long as there are any."""
    return total < most and own < max(least, most - total)


class ShareCount:
    """Counts what peers or addresses hold of `most`, as `may_have_more` has it.

    With `seconds`, what was counted is given back by itself after that time: then `most` and `least` are of a period.
    Such methods need `now`, in seconds of any clock.
    """

    def __init__(self, most: float, least: int = 0, *, seconds: float = math.inf) -> None:
        self.total = 0
        self._most = most
        self._least = least
        self._seconds = seconds
        self._held: Counter[str] = Counter()
        self._lately: deque[tuple[float, tuple[str, ...]]] = deque()

    def __len__(self) -> int:
        """How many hold something."""
        return len(self._held)

    def of(self, holder: str) -> int:
        return self._held[holder]

    def has_room(self, holder: str, most: float = math.inf, *, now: float = 0.0) -> bool:
        """Whether this one may have one more, and has fewer than `most`."""
        while self._lately and now - self._lately[0][0] >= self._seconds:
            self.remove(*self._lately[0][1])
        own = self._held[holder]
        return own < most and may_have_more(own, self.total, self._most, self._least)

    def add(self, *holders: str, most: float = math.inf, now: float = 0.0) -> bool:
        """Whether each of the holders may have one more: of a peer and its address, both. Counts it then."""
        if not all(self.has_room(holder, most, now=now) for holder in holders):
            return False
        self.count(*holders, now=now)
        return True

    def count(self, *holders: str, now: float = 0.0) -> None:
        """Counts one more for each of the holders, whether there is room or not."""
        self._held.update(set(holders))
        self.total += 1
        if self._seconds < math.inf:
            self._lately.append((now, holders))
            if len(self._lately) > REMEMBERED:
                self.remove(*self._lately[0][1])

    def remove(self, *holders: str) -> None:
        """Gives back what was counted for the same holders."""
        if self._lately:
            self._lately.remove(next(entry for entry in self._lately if entry[1] == holders))
        self.total -= 1
        for holder in set(holders):
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]

    def remove_all(self, *holders: str) -> None:
        """Gives back all that was counted lately for these holders, among others."""
        for _, counted in [entry for entry in self._lately if {*holders} <= {*entry[1]}]:
            self.remove(*counted)


_Key = TypeVar("_Key", bound=Hashable)


class AddressShares(Generic[_Key]):
    """How much of `most` the entries of each address take; of who has most, the newest goes (max-min fairness).

    What is stored lies elsewhere: whoever adds an entry drops what `surplus` names until that is nothing. Each call's
    time grows with the logarithm of the number of addresses, and not with that of entries.
    """

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most = most
        self._entries: dict[_Key, tuple[str, int]] = {}
        self._of_origin: dict[str, dict[_Key, None]] = {}  # in the order in which they came
        self._held: Counter[str] = Counter()
        self._heap: list[tuple[int, str]] = []  # the most first; what is no longer so is passed over

    def __len__(self) -> int:
        return len(self._entries)

    def origin_of(self, key: _Key) -> str:
        """The address that an entry counts for."""
        return self._entries[key][0]

    def hold(self, key: _Key, origin: str, size: int = 1) -> None:
        """From now on the entry takes so much room of this address's share. It keeps its age if it is not new there."""
        before, held = self._entries.get(key, (None, 0))
        if before is not None and before != origin:
            self.remove(key)
            held = 0
        self._entries[key] = origin, size
        self._of_origin.setdefault(origin, {})[key] = None
        self._count(origin, size - held)

    def remove(self, key: _Key) -> None:
        origin, size = self._entries.pop(key)
        of_origin = self._of_origin[origin]
        del of_origin[key]
        if not of_origin:
            del self._of_origin[origin]
        self._count(origin, -size)

    def surplus(self) -> _Key | None:
        """The entry that has to go; None if there is room for all."""
        if self.total <= self._most:
            return None
        while -self._heap[0][0] != self._held[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return next(reversed(self._of_origin[self._heap[0][1]]))

    def _count(self, origin: str, change: int) -> None:
        self.total += change
        self._held[origin] += change
        if not self._held[origin]:
            del self._held[origin]
        else:
            heapq.heappush(self._heap, (-self._held[origin], origin))
        if len(self._heap) > 2 * len(self._held) + 64:
            self._heap = [(-held, origin) for origin, held in self._held.items()]
            heapq.heapify(self._heap)


# --- what is counted, tried again, and said


def decayed(value: float, seconds: float, half_life: float) -> float:
    """What is left of a count after `seconds`. A clock that went back forgets nothing."""
    return value * math.exp2(-max(0.0, seconds) / half_life)


def backoff(failures: float, first: float, longest: float, factor: float = 2.0) -> float:
    """Seconds until the next try after `failures` in a row: `factor` times as long each time."""
    return float(min(first * factor ** min(failures - 1, 64), longest))


def middle(seen: Iterable[float], unknown: float = 0.0) -> float:
    """The median, the lower one of two; `unknown` if nothing was seen.

    Fewer than half of the values do not move it: those of strangers, who say what they like, or of moments in which
    something else kept a machine busy. What one thing takes, as this node sees it, is an `Estimate` instead.
    """
    ordered = sorted(seen)
    return ordered[(len(ordered) - 1) // 2] if ordered else unknown


# --- rates


class TokenBucket:
    """Lets `rate` things per second pass in the long run, and `most` at once."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = most
        self._tokens = most
        self._at = trio.current_time()

    def set_rate(self, rate: float, most: float) -> None:
        """From now on."""
        self._refill()
        self._rate, self._most = rate, most

    def take(self) -> bool:
        """Whether one more may pass. Looks at the clock only when no tokens are left."""
        self._tokens -= 1
        if self._tokens < 0:
            self._refill()
        return self._tokens >= 0

    def delay(self, cost: float) -> float:
        """Seconds until so much may pass, after all that went ahead of its time."""
        self._refill()
        seconds = (cost - self._tokens) / self._rate
        return seconds if seconds > 1e-6 else 0.0  # less is rounding

    def take_ahead(self, cost: float) -> None:
        """Takes so much, of the tokens to come if need be."""
        self._refill()
        self._tokens -= cost

    @property
    def may_be_forgotten(self) -> bool:
        """Whether it is full, as a new one is."""
        self._refill()
        return self._tokens >= self._most

    def _refill(self) -> None:
        now = trio.current_time()
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now


class Forgettable(Protocol):
    @property
    def may_be_forgotten(self) -> bool:
        """Whether a new one would have about the same values."""


_Use = TypeVar("_Use", bound=Forgettable)


class Remembered(Generic[_Use]):
    """What is remembered of each peer, or of each address: as many as there are that may not be forgotten.

    All of them are looked through when they have doubled since the last time, not for each new name.
    """

    def __init__(self, make: Callable[[str], _Use]) -> None:
        self._make = make
        self._uses: dict[str, _Use] = {}
        self._most = REMEMBERED

    def __len__(self) -> int:
        return len(self._uses)

    def of(self, name: str) -> _Use:
        use = self._uses.get(name)
        if use is None:
            if len(self._uses) >= self._most:
                self._uses = {known: use for known, use in self._uses.items() if not use.may_be_forgotten}
                self._most = max(REMEMBERED, 2 * len(self._uses))
            use = self._uses[name] = self._make(name)
        return use

    def all(self) -> Iterable[_Use]:
        return self._uses.values()


class Rates(Remembered[TokenBucket]):
    """A token bucket for each peer, or for each address."""

    def __init__(self, rate: float, most: float) -> None:
        super().__init__(lambda _: TokenBucket(rate, most))

    async def wait(self, name: str, cost: float) -> None:
        """Waits until so much of this one may pass. Who gives up leaves it to others."""
        bucket = self.of(name)
        delay = bucket.delay(cost)
        bucket.take_ahead(cost)
        try:
            await trio.sleep(delay)
        except trio.Cancelled:
            bucket.take_ahead(-cost)
            raise


# --- turns

_Item = TypeVar("_Item")


class Line(Generic[_Item]):
    """Those who wait: one of each holder in turn, and those of one holder in the order in which they came."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, deque[_Item]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[tuple[Hashable, _Item]]:
        """The first of each holder, whoever is next first."""
        return ((holder, queue[0]) for holder, queue in self._queues.items())

    def join(self, holder: Hashable, item: _Item) -> None:
        self._queues.setdefault(holder, deque()).append(item)

    def leave(self, holder: Hashable, item: _Item) -> None:
        self._queues[holder].remove(item)
        if not self._queues[holder]:
            del self._queues[holder]

    def go_behind(self, holder: Hashable) -> None:
        """The holder has had its turn."""
        if holder in self._queues:
            self._queues.move_to_end(holder)


@dataclass(eq=False)
class _WaitingTurn:
    given: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    since: float = math.inf


class Turns:
    """Lets `at_once` holders do something at once, each one thing. Those who wait take turns, however many things each
    of them waits with."""

    def __init__(self, at_once: int = 1, contended: float = math.inf) -> None:
        """`contended`: seconds that a turn may take while others wait."""
        self._at_once = at_once
        self._contended = contended
        self._running: dict[Hashable, _WaitingTurn] = {}
        self._waiting = Line[_WaitingTurn]()

    @asynccontextmanager
    async def turn(self, holder: str) -> AsyncIterator[None]:
        """Waits for a turn, and has it for the length of the block.

        Raises:
            StreamTimeout: it was taken away, because others wait and this holder is slow.
        """
        own = _WaitingTurn()
        self._waiting.join(holder, own)
        self._pass_on()
        try:
            await own.given.wait()
            with own.scope:
                yield
        finally:
            if self._running.get(holder) is own:
                del self._running[holder]
                self._waiting.go_behind(holder)
            else:
                self._waiting.leave(holder, own)
            self._pass_on()
        if own.scope.cancelled_caught:
            raise StreamTimeout(f"{holder} is too slow while others wait", holder)

    def _pass_on(self) -> None:
        """Gives free turns to those who are next, and has the others end in time if more wait.

        A turn is taken from when it is given, so that nobody comes in between.
        """
        for holder, first in list(self._waiting):
            if len(self._running) < self._at_once and holder not in self._running:
                self._waiting.leave(holder, first)
                self._waiting.go_behind(holder)
                self._running[holder] = first
                first.since = trio.current_time()
                first.given.set()
        # Whose turn it is need not hurry for what else it waits with.
        if any(holder not in self._running for holder, _ in self._waiting):
            for running in self._running.values():
                running.scope.deadline = min(running.scope.deadline, running.since + self._contended)
