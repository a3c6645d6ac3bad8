"""The room of a store that is shared by the addresses of those who leave things there."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class AddressShares(Generic[_Key]):
    """How much of `most` the entries of each address take; of who has most, the newest goes (max-min fairness).

    What is stored lies elsewhere: whoever adds an entry drops what `surplus` names until that is nothing. Each call
    takes a time that does not grow with the number of entries, and with the logarithm of that of addresses.
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
