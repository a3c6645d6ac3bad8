"""Which peer gives its place up when one more could be asked for pieces: a pure choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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
