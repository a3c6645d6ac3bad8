"""Some roots that are bounded and searched together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from .cycle import Bools, Ints
from .labels import TOLERANCE, Found, search
from .relaxation import Bound, Machines, Roots, bound

_SHORTER: Final = 0.9
"""How much shorter every step is than the one before."""


class Group:
    """The roots of which it is not known yet that no better cycle goes through them, with the best bound of each."""

    def __init__(self, machines: Machines, roots: Roots) -> None:
        self._machines = machines
        self._best = self._latest = bound(machines, roots)
        self._step = 1.0
        self._done = False

    def __len__(self) -> int:
        return len(self._best.roots)

    @property
    def least(self) -> float:
        """Seconds; no cycle through these roots takes less."""
        return float(self._best.least.min())

    def is_open(self, found: Found) -> bool:
        """Whether there may be a better cycle than `found`. Forgets the roots where there is none."""
        kept = np.flatnonzero(self._best.least < found.seconds - TOLERANCE)
        if len(kept) < len(self._best.roots):
            self._best, self._latest = _chosen(self._best, kept), _chosen(self._latest, kept)
        return len(self) > 0 and not self._done

    def search(self, found: Found, width: int, is_over: Callable[[], bool]) -> Found:
        """The best cycle through one of these roots, or `found`; see `labels.search`."""
        found, self._done = search(self._machines, self._best, found, width, is_over)
        return found

    def sharpen(self, found: Found) -> None:
        """Changes the prices (a step of the subgradient method, of Polyak's length) and keeps what bounds better."""
        roots = self._latest.roots
        excess = np.where(roots.allowed, self._latest.visits - 1.0, 0.0)
        excess[(roots.prices <= 0) & (excess < 0)] = 0.0
        gap = np.maximum(found.seconds - self._latest.least, 0.0)
        length = self._step * gap / np.maximum((excess**2).sum(1), 1.0)
        prices = np.maximum(roots.prices + length[:, None] * excess, 0.0)
        self._step *= _SHORTER
        self._latest = bound(self._machines, replace(roots, prices=prices))
        self._best = _merged(self._best, self._latest, self._latest.least > self._best.least)


def _chosen(bound: Bound, which: Ints) -> Bound:
    return Bound(
        bound.roots.chosen(which),
        bound.least[which],
        bound.visits[which],
        bound.on[:, :, which],
        bound.following[:, :, which],
        bound.otherwise[:, :, which],
    )


def _merged(old: Bound, new: Bound, better: Bools) -> Bound:
    """The bounds of the roots from `new` where it is `better`, bool [R]."""
    if better.all():
        return new
    row = table = better[:, None]
    return Bound(
        replace(old.roots, prices=np.where(row, new.roots.prices, old.roots.prices)),
        np.where(better, new.least, old.least),
        np.where(row, new.visits, old.visits),
        np.where(table, new.on, old.on),
        np.where(table, new.following, old.following),
        np.where(table, new.otherwise, old.otherwise),
    )
