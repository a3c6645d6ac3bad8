"""A tabu search over the places of servers: every move of one server at once, as arrays over servers x starts.

The best single move is made even if it is none for the better, and the server that moved stays for some turns (Glover,
Tabu Search, 1989): so chains of moves are found that pay only together. No randomness: equal inputs, equal answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..swarm.cost import Floats, Ints, block_throughput

_MOST_TURNS, _LEAST_TURNS = 300, 80


@dataclass(frozen=True)
class SearchEffort:
    """How long the search for better spans goes on."""

    turns_each: int = 4
    """Turns for each server in a small swarm, and a few besides; the more the better, but little is left to find."""
    work: int = 2_200_000
    """Moves looked at in one search of a large swarm, as long as that allows the least of turns: about 0.1 s."""
    patience: float = 0.34
    """The share of the turns without anything better after which the search ends."""
    stays: int = 6
    """Turns for which a server stays where it was moved to."""
    most_movers: int = 400
    """Of more movable servers only this number is looked at turn after turn: those with the best first move."""
    at_once: int = 1024
    """Rows of the arrays; more servers are looked at one part after the other."""
    equal: float = 1e-9


EFFORT: Final = SearchEffort()


@dataclass(frozen=True)
class CostTerms:
    """What a placement costs, in shares of the swarm's throughput.

    cost = gap x (blocks nobody holds) - throughput / scale + evenness x sum over blocks of
           (max(0, level - throughput of the block) / scale)^2 + charge x (blocks reloaded)
    """

    scale: float
    level: float
    evenness: float
    charge: float
    gap: float


@dataclass(frozen=True)
class State:
    """`starts` int [N]; `cost` as in Terms; `empty` blocks that nobody holds; `throughput` of the slowest block."""

    starts: Ints
    cost: float
    empty: int
    throughput: float


class SpanSearch:
    """Servers of `speeds` float [N], above 0, and `lengths` int [N] in blocks, that began at `origin` int [N].

    `reloads` float [N] is how many blocks a move of each is charged for; `movable` indices of those that may move.
    """

    def __init__(
        self,
        speeds: Floats,
        lengths: Ints,
        origin: Ints,
        reloads: Floats,
        movable: Ints,
        num_blocks: int,
        terms: CostTerms,
    ) -> None:
        self._speeds, self._lengths, self._origin, self._reloads = speeds, lengths, origin, reloads
        self._movable, self._blocks, self._terms = movable, num_blocks, terms

    def state(self, starts: Ints) -> State:
        """What this placement is worth."""
        load, count = self._cover(starts)
        empty = int((count == 0).sum())
        moved = float(self._reloads[starts != self._origin].sum())
        throughput = float(load.min()) if not empty else 0.0
        terms = self._terms
        cost = terms.gap * empty - throughput / terms.scale + float(self._unevenness(load).sum()) + terms.charge * moved
        return State(starts, cost, empty, throughput)

    def run(self, starts: Ints, least_throughput: float = 0.0) -> State:
        """The best placement found from `starts` on, among those with no less than `least_throughput` or fewer gaps."""
        best = self.state(starts)
        if not len(self._movable):
            return best
        starts = starts.copy()
        rows = self._promising(starts)
        windows = _Windows(self._lengths[rows], self._blocks)
        stays = np.zeros(len(rows), np.intp)
        since = 0
        affordable = max(EFFORT.work // (len(rows) * self._blocks), _LEAST_TURNS)
        turns = min(20 + EFFORT.turns_each * len(rows), _MOST_TURNS, affordable)
        for turn in range(turns):
            costs = self._neighbours(starts, rows, windows)
            costs[stays > turn] = np.inf
            row, start = np.unravel_index(int(costs.argmin()), costs.shape)
            cost = float(costs[row, start])
            if cost < np.inf:
                starts[rows[row]] = start
                stays[row] = turn + 1 + EFFORT.stays
            since += 1
            if cost < best.cost - EFFORT.equal:
                found = self.state(starts.copy())
                if found.empty < best.empty or found.throughput >= least_throughput * (1 - EFFORT.equal):
                    best, since = found, 0
            if since > EFFORT.patience * turns:
                break
        return best

    def may_leave(self, starts: Ints, rows: Ints) -> NDArray[np.bool_]:
        """Of each of these servers, whether it is the only holder of no block; true of all while there is a gap."""
        count = self._cover(starts)[1]
        if not count.all():
            return np.ones(len(rows), bool)
        alone = np.concatenate([[0], np.cumsum(count == 1)])
        return np.asarray(alone[starts[rows] + self._lengths[rows]] == alone[starts[rows]])

    def costs_after(self, starts: Ints, rows: Ints, targets: Ints) -> Floats:
        """What the placement costs after each of these moves, by itself: float [rows]."""
        costs = self._neighbours(starts, rows, _Windows(self._lengths[rows], self._blocks))
        return np.asarray(costs[np.arange(len(rows)), targets])

    def _promising(self, starts: Ints) -> Ints:
        """The servers that the search looks at, all if they are few."""
        if len(self._movable) <= EFFORT.most_movers:
            return self._movable
        least = []
        for at in range(0, len(self._movable), EFFORT.at_once):
            rows = self._movable[at : at + EFFORT.at_once]
            least.append(self._neighbours(starts, rows, _Windows(self._lengths[rows], self._blocks)).min(axis=1))
        return np.sort(self._movable[np.argsort(np.concatenate(least), kind="stable")[: EFFORT.most_movers]])

    def _cover(self, starts: Ints) -> tuple[Floats, Ints]:
        """Throughput and number of servers of every block."""
        return block_throughput(starts, starts + self._lengths, self._speeds, self._blocks)

    def _unevenness(self, load: Floats) -> Floats:
        missing = np.maximum(self._terms.level - load, 0.0) / self._terms.scale
        return self._terms.evenness * missing * missing

    def _neighbours(self, starts: Ints, rows: Ints, windows: _Windows) -> Floats:
        """The cost after one move: float [rows, num_blocks] by new start; infinite where the server is or cannot be."""
        terms = self._terms
        load, count = self._cover(starts)
        speed, at = self._speeds[rows, None], starts[rows, None]
        own = (windows.places >= at) & (windows.places < at + self._lengths[rows, None])
        without = load - own * speed

        before = self._unevenness(without)
        uneven = before.sum(axis=1, keepdims=True) + windows.sums(self._unevenness(without + speed) - before)
        throughput = windows.least(without, speed)
        costs = uneven - throughput / terms.scale
        if (empty := (count - own) == 0).any():
            left = empty.sum(axis=1, keepdims=True) - windows.sums(empty.astype(float))
            costs += np.where(left > 0.5, terms.gap * left + throughput / terms.scale, 0.0)

        moved = float(self._reloads[starts != self._origin].sum())
        reload, origin = self._reloads[rows, None], self._origin[rows, None]
        costs += terms.charge * (moved + (windows.places != origin) * reload - (at != origin) * reload)
        costs[windows.beyond | (windows.places == at)] = np.inf
        return np.asarray(costs)


class _Windows:
    """Where spans of `lengths` int [rows] lie, by start: sums and least values over them for arrays [rows, blocks]."""

    def __init__(self, lengths: Ints, blocks: int) -> None:
        rows = len(lengths)
        self.places = np.arange(blocks)
        ends = np.minimum(self.places + lengths[:, None], blocks)
        self.beyond = self.places + lengths[:, None] > blocks
        self._shape = (rows, blocks)
        self._ends = ends + np.arange(rows)[:, None] * (blocks + 1)  # into arrays of blocks + 1 columns, laid flat
        # A window of any length is two windows of a power of two that overlap.
        self._sizes: list[tuple[int, Ints, Ints]] = []
        size = 1
        while size <= lengths.max(initial=1):
            some = np.flatnonzero((lengths >= size) & (lengths < 2 * size))
            second = np.clip(ends[some] - size, 0, blocks - 1) + np.arange(len(some))[:, None] * blocks
            self._sizes.append((size, some, second))
            size *= 2

    def sums(self, values: Floats) -> Floats:
        """The sum over the window at each start."""
        sums = np.zeros((self._shape[0], self._shape[1] + 1))
        np.cumsum(values, axis=1, out=sums[:, 1:])
        windows: Floats = sums.ravel().take(self._ends) - sums[:, :-1]
        return windows

    def least(self, without: Floats, speed: Floats) -> Floats:
        """The least of a whole row if `speed` [rows, 1] is added to the window at each start."""
        rows, blocks = self._shape
        before = np.full((rows, blocks), np.inf)
        np.minimum.accumulate(without[:, :-1], axis=1, out=before[:, 1:])
        after = np.full((rows, blocks + 1), np.inf)
        np.minimum.accumulate(without[:, ::-1], axis=1, out=after[:, -2::-1])
        inside = np.empty((rows, blocks))
        window = without
        for size, some, second in self._sizes:
            if size > 1:
                half, doubled = size // 2, window.copy()
                np.minimum(window[:, : blocks - half], window[:, half:], out=doubled[:, : blocks - half])
                window = doubled
            if len(some):
                first = window[some]
                inside[some] = np.minimum(first, first.ravel().take(second))
        least: Floats = np.minimum(np.minimum(inside + speed, before), after.ravel().take(self._ends))
        return least
