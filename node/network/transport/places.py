"""Places for streams that strangers may hold for long, a fixed number of them, shared by peer and by address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from ..shares import may_have_more

PATIENCE: Final = 5.0
"""Seconds for which a place may be idle while somebody waits who has none."""


@dataclass(eq=False)
class Place:
    """What one stream holds. `since` is when it was last at work; one that is `busy` is not taken away."""

    peer_id: str
    origin: str
    since: float
    busy: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @contextmanager
    def working(self) -> Iterator[None]:
        """The place is at work during the block, and so is not given to others."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            self.since = trio.current_time()


class Places:
    """`most` places. A peer, and an address, may have more as long as as many are left for others.

    Where none is left, who has fewer gets an idle place of the address that has the most. So no number of keys at one
    address keeps others out, nor do silent streams from many addresses.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: list[Place] = []

    def __len__(self) -> int:
        return len(self._taken)

    @contextmanager
    def take(self, peer_id: str, origin: str) -> Iterator[Place | None]:
        """A place for the length of the block, which is cancelled if the place is given up. None if there is none."""
        if not self._has_room(peer_id, origin):
            yield None
            return
        place = Place(peer_id, origin, trio.current_time())
        self._taken.append(place)
        try:
            with place.scope:
                yield place
        finally:
            if place in self._taken:
                self._taken.remove(place)

    def _has_room(self, peer_id: str, origin: str) -> bool:
        peers, origins = Counter(p.peer_id for p in self._taken), Counter(p.origin for p in self._taken)
        total = len(self._taken)
        if all(may_have_more(own, total, self._most, 1) for own in (peers[peer_id], origins[origin])):
            return True
        victim = given_up(self._taken, peer_id, origin, trio.current_time())
        if victim is None:
            return False
        self._taken.remove(victim)
        victim.scope.cancel()
        return True


def given_up(taken: list[Place], peer_id: str, origin: str, now: float) -> Place | None:
    """The place that goes to a stream of this peer at this address. None if no idle one is of somebody with more."""
    peers, origins = Counter(p.peer_id for p in taken), Counter(p.origin for p in taken)

    def more(place: Place) -> int:
        """How many more its holder has than the newcomer: the address, or within one address the peer."""
        if place.origin == origin:
            return peers[place.peer_id] - peers[peer_id]
        return origins[place.origin] - origins[origin]

    idle = [p for p in taken if not p.busy and (more(p) > 1 or (more(p) == 1 and now - p.since >= PATIENCE))]
    return max(idle, key=lambda place: (more(place), now - place.since), default=None)
