"""Whose presence is in doubt: a server that was killed said no goodbye, it is missed only if somebody asks. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from .holder import Holder

AT_ONCE: Final = 16
"""Servers that are asked together."""
ASKERS: Final = 64
"""About so many servers ask after the only holder of a block at each check, however large the swarm is."""


def worth_asking(
    holders: Sequence[Holder], own: str, sure: Collection[str], num_blocks: int, chance: random.Random
) -> tuple[str, ...]:
    """The peer ids of those that should be asked whether they are still there: the only holders of a block first, then
    any, at random, so that each server is asked about as often as it asks.

    Not those that are `sure` to be there, because there is a connection to them or they have just been asked.
    """
    counts = np.zeros(num_blocks, np.intp)
    for holder in holders:
        counts[holder.span.start : holder.span.end] += 1
    alone: list[str] = []
    others: list[str] = []
    for holder in holders:
        if holder.peer_id != own and holder.peer_id not in sure:
            lonely = counts[holder.span.start : holder.span.end].min() <= 1
            (alone if lonely else others).append(holder.peer_id)
    if chance.random() * len(holders) > ASKERS:
        alone = []
    first = chance.sample(alone, min(len(alone), AT_ONCE))
    return (*first, *chance.sample(others, min(len(others), AT_ONCE - len(first))))


def is_overdue(made: float, expires: float, now: float) -> bool:
    """Whether a server has not repeated its announcement when it should have; times in seconds since 1970.

    It does so after a third of an announcement's lifetime; half of it leaves time for that to come round.
    """
    return now > made + (expires - made) / 2
