"""Which piece is asked of which peer, and which peer gives its place up for another: pure, without clock or network."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Piece: TypeAlias = tuple[int, int]
"""The number of a part, and that of a piece in it."""


class PiecePlan:
    """What is missing, who holds it, and who was asked for it.

    The rarest part comes first. Of equally rare parts one that was begun, else one by chance: nodes that fetch the same
    model at once then begin with different parts, and have something for each other.
    """

    def __init__(self, missing: Mapping[int, Iterable[int]], chance: random.Random) -> None:
        self._missing = {part: set(pieces) for part, pieces in missing.items()}
        self._free = {part: sorted(pieces, reverse=True) for part, pieces in self._missing.items()}
        self._luck = {part: chance.random() for part in self._missing}
        self._begun: set[int] = set()
        self._holders: dict[str, frozenset[int]] = {}
        self._asked: dict[Piece, list[str]] = {}

    @property
    def parts(self) -> set[int]:
        """That lack pieces."""
        return {part for part, pieces in self._missing.items() if pieces}

    def holds_all(self, peer: str) -> bool:
        """Whether the peer holds every part that lacks pieces."""
        return peer in self._holders and self.parts <= self._holders[peer]

    def set_holder(self, peer: str, parts: Iterable[int]) -> None:
        """From now on the peer holds these parts."""
        self._holders[peer] = frozenset(parts)

    def drop(self, peer: str) -> None:
        """The peer is not asked any more; others are, for what it was asked for."""
        self._holders.pop(peer, None)
        for piece in [piece for piece, peers in self._asked.items() if peer in peers]:
            self.give_up(peer, piece)

    def give_up(self, peer: str, piece: Piece) -> None:
        """The peer does not send this piece."""
        peers = self._asked.get(piece, [])
        if peer in peers:
            peers.remove(peer)
            if not peers:
                del self._asked[piece]
                if piece[1] in self._missing[piece[0]]:
                    self._free[piece[0]].append(piece[1])

    def lacks(self, peer: str, part: int) -> None:
        """The peer does not hold this part any more."""
        self._holders[peer] = self._holders.get(peer, frozenset()) - {part}

    def is_missing(self, piece: Piece) -> bool:
        return piece[1] in self._missing[piece[0]]

    def got(self, piece: Piece) -> bool:
        """Notes that a piece is here; whether its part is complete with it."""
        self._missing[piece[0]].discard(piece[1])
        self._asked.pop(piece, None)
        return not self._missing[piece[0]]

    def unheld(self) -> set[int]:
        """Parts that lack pieces and that no peer holds."""
        return self.parts - self._held()

    def _held(self) -> set[int]:
        """The parts that were missing and that a peer holds."""
        return self._missing.keys() & set[int]().union(*self._holders.values())

    def take(self, peer: str, *, idle: bool = True) -> Piece | None:
        """What the peer is to be asked for next, and counts as asked for; None if it has nothing that is wanted now.

        When every piece was asked for, an `idle` peer is asked too, for one that fewest were asked for: the last pieces
        wait for no slow peer, however many of those there are.
        """
        mine = self._holders.get(peer, frozenset())
        open_parts = [part for part in mine if self._free.get(part)]
        if open_parts:
            part = min(open_parts, key=self._rank)
            self._begun.add(part)
            piece = (part, self._free[part].pop())
        elif not idle or any(self._free[part] for part in self._held()):
            return None
        else:
            others = [piece for piece, peers in self._asked.items() if piece[0] in mine and peer not in peers]
            if not others:
                return None
            piece = min(others, key=lambda piece: len(self._asked[piece]))
        self._asked.setdefault(piece, []).append(peer)
        return piece

    def _rank(self, part: int) -> tuple[int, bool, float]:
        rarity = sum(part in parts for parts in self._holders.values())
        return rarity, part not in self._begun, self._luck[part]


# --- places


@dataclass(frozen=True)
class FetchPlace:
    """What is known of a peer that is asked for pieces, or that could be."""

    peer: str
    address: str
    """As `Host.origin_of` has it: addresses cost something, peer ids do not."""
    strikes: int = 0
    """Its failures lately."""
    rate: float | None = None
    """Checked bytes per second; None if it was asked for none yet."""
    held: float = 0.0
    """Seconds since it was first asked in this place."""
    idle: float = 0.0
    """Seconds without a piece."""


def place_to_free(
    places: Sequence[FetchPlace], wanting: FetchPlace, *, patience: float, trial: float
) -> FetchPlace | None:
    """The place that goes to the peer `wanting`, when there is no other; None if it has to wait.

    Places go, in this order, from who has brought nothing for `patience`, times its failures and one; from the address
    that has most, if that is two more than this peer's; and, after a `trial`, from the slowest to one that was not
    asked yet or was twice as fast. The last takes from nobody whose address has fewer places, and from nobody faster
    than the mean: however many slow peers come, one that is fast keeps its place.
    """
    idle = [
        place for place in places if place.strikes >= wanting.strikes and place.idle > patience * (1 + place.strikes)
    ]
    if idle:
        return max(idle, key=lambda place: place.idle)
    of_address = Counter(place.address for place in places)
    own = of_address[wanting.address]
    address, most = of_address.most_common(1)[0]
    if most > own + 1:
        crowded = [place for place in places if place.address == address]
        return min(crowded, key=lambda place: (place.held < trial, place.rate or 0.0, -place.held))
    mean = sum(place.rate or 0.0 for place in places) / len(places)
    slow = [
        (rate, -place.held, place)
        for place in places
        if place.held >= trial
        and (rate := place.rate or 0.0) <= mean
        and (wanting.rate is None or wanting.rate > 2 * rate)
        and (of_address[place.address] > own or place.address == wanting.address)
    ]
    return min(slow, key=lambda found: found[:2])[2] if slow else None
