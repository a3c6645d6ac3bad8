"""A tabu search over the places of servers, for those that run and for plans: every move of one server at once, as
arrays over servers x starts. Where a server may hold more or fewer blocks it has a row for each number.

The best single move is made even if it is none for the better. The server that moved stays for some turns (Glover, Tabu
Search, 1989). So chains of moves are found that pay only together. No randomness: equal inputs, equal answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..swarm.cost import Bools, Floats, Ints, block_throughput

_MOST_TURNS, _LEAST_TURNS = 300, 80


@dataclass(frozen=True)
class SearchEffort:
    """How long the search for better spans goes on."""

    turns_each: int = 4
    """Turns for each server in a small swarm, and a few besides. The more the better, but little is left to find."""
    work: int = 2_200_000
    """Moves looked at in one search of a large swarm, as long as that allows the least of turns: about 0.1 s."""
    patience: float = 0.34
    """The share of the turns without anything better after which the search ends."""
    stays: int = 6
    """Turns for which a server stays where it was moved to."""
    most_rows: int = 400
    """Of more rows only this number is looked at turn after turn: those with the best first move."""
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
class ServerRows:
    """What servers may hold: `server` int [R], in order, each has one row or more. `length` int [R] is in blocks, 0
    only where it has none yet. `speed` float [R], above 0, is what it then adds to each of them. `allowed` bool [R,
    blocks], by start; None: everywhere."""

    server: Ints
    length: Ints
    speed: Floats
    allowed: Bools | None = None

    def of(self, which: Ints | slice) -> ServerRows:
        allowed = None if self.allowed is None else self.allowed[which]
        return ServerRows(self.server[which], self.length[which], self.speed[which], allowed)


@dataclass(frozen=True)
class State:
    """`starts` and `rows` int [N], where each server is and which of its rows it has; `cost` as in CostTerms; `empty`
    blocks that nobody holds; `throughput` of the slowest block."""

    starts: Ints
    rows: Ints
    cost: float
    empty: int
    throughput: float


class SpanSearch:
    """Servers that began at `origin` int [N], each with its first row.

    `reloads` float [N] is how many blocks a move of each is charged for; `movable` indices of those that may move.
    """

    def __init__(
        self, rows: ServerRows, origin: Ints, reloads: Floats, movable: Ints, num_blocks: int, terms: CostTerms
    ) -> None:
        self._rows, self._origin, self._reloads = rows, origin, reloads
        self._movable, self._blocks, self._terms = movable, num_blocks, terms
        self._first = np.searchsorted(rows.server, np.arange(len(origin)))
        self._may = np.flatnonzero(np.isin(rows.server, movable) & (rows.length > 0))
        self._windows: dict[int, tuple[Ints, _Windows]] = {}

    def state(self, starts: Ints, rows: Ints | None = None) -> State:
        """What this placement is worth; by default with everyone's first row."""
        rows = self._first if rows is None else rows
        load, count = self._cover(starts, rows)
        empty = int((count == 0).sum())
        moved = float(self._reloads[starts != self._origin].sum())
        throughput = float(load.min()) if not empty else 0.0
        terms = self._terms
        cost = terms.gap * empty - throughput / terms.scale + float(self._unevenness(load).sum()) + terms.charge * moved
        return State(starts, rows, cost, empty, throughput)

    def run(self, start: State, least_throughput: float = 0.0) -> State:
        """The best placement found from `start` on, among those with no less than `least_throughput` or fewer gaps."""
        best = start
        if not len(self._movable):
            return best
        starts, rows = start.starts.copy(), start.rows.copy()
        among = self._promising(starts, rows)
        choice = self._rows.of(among)
        windows = _Windows(choice.length, self._blocks)
        stays = np.zeros(len(starts), np.intp)
        since = 0
        affordable = max(EFFORT.work // (len(among) * self._blocks), _LEAST_TURNS)
        turns = min(20 + EFFORT.turns_each * len(np.unique(choice.server)), _MOST_TURNS, affordable)
        for turn in range(turns):
            costs = self._neighbours(starts, rows, among, windows)
            costs[stays[choice.server] > turn] = np.inf
            row, at = np.unravel_index(int(costs.argmin()), costs.shape)
            cost = float(costs[row, at])
            if cost < np.inf:
                server = choice.server[row]
                starts[server], rows[server] = at, among[row]
                stays[server] = turn + 1 + EFFORT.stays
            since += 1
            if cost < best.cost - EFFORT.equal:
                found = self.state(starts.copy(), rows.copy())
                if found.empty < best.empty or found.throughput >= least_throughput * (1 - EFFORT.equal):
                    best, since = found, 0
            if since > EFFORT.patience * turns:
                break
        return best

    def settle(self, start: State, first: Ints, rounds: int) -> State:
        """Places the servers `first`, then all that may move in turn, each where it costs least. It ends when none
        moves or these rounds are over. For a few servers of many rows, where `run` would look at too much."""
        starts, rows, cost = start.starts.copy(), start.rows.copy(), np.inf
        for server in first:
            self._settle_one(starts, rows, int(server), np.inf)
        for _ in range(rounds):
            before = cost
            cost = self.state(starts, rows).cost
            if cost >= before - EFFORT.equal:
                break
            for server in self._movable:
                cost = self._settle_one(starts, rows, int(server), cost)
        return self.state(starts, rows)

    def _settle_one(self, starts: Ints, rows: Ints, server: int, cost: float) -> float:
        """Moves a server where the placement costs least, if that is less than now; returns what it costs then."""
        among, windows = self._of_server(server)
        if not len(among):
            return cost
        costs = self._neighbours(starts, rows, among, windows)
        row, at = np.unravel_index(int(costs.argmin()), costs.shape)
        least = float(costs[row, at])
        if not least < cost - EFFORT.equal:
            return cost
        starts[server], rows[server] = at, among[row]
        return least

    def _of_server(self, server: int) -> tuple[Ints, _Windows]:
        found = self._windows.get(server)
        if found is None:
            among = self._may[self._rows.server[self._may] == server]
            found = self._windows[server] = among, _Windows(self._rows.length[among], self._blocks)
        return found

    def may_leave(self, starts: Ints, servers: Ints) -> Bools:
        """Of each of these servers, whether it is the only holder of no block; true of all while there is a gap."""
        count = self._cover(starts, self._first)[1]
        if not count.all():
            return np.ones(len(servers), bool)
        alone = np.concatenate([[0], np.cumsum(count == 1)])
        ends = starts[servers] + self._rows.length[self._first[servers]]
        return np.asarray(alone[ends] == alone[starts[servers]])

    def costs_after(self, starts: Ints, servers: Ints, targets: Ints) -> Floats:
        """What the placement costs after each of these moves, by itself: float [servers]."""
        rows = self._first[servers]
        costs = self._neighbours(starts, self._first, rows, _Windows(self._rows.length[rows], self._blocks))
        return np.asarray(costs[np.arange(len(rows)), targets])

    def _promising(self, starts: Ints, rows: Ints) -> Ints:
        """The rows that the search looks at, all if they are few."""
        if len(self._may) <= EFFORT.most_rows:
            return self._may
        least = []
        for at in range(0, len(self._may), EFFORT.at_once):
            some = self._may[at : at + EFFORT.at_once]
            windows = _Windows(self._rows.length[some], self._blocks)
            least.append(self._neighbours(starts, rows, some, windows).min(axis=1))
        return np.sort(self._may[np.argsort(np.concatenate(least), kind="stable")[: EFFORT.most_rows]])

    def _cover(self, starts: Ints, rows: Ints) -> tuple[Floats, Ints]:
        """Throughput and number of servers of every block."""
        return block_throughput(starts, starts + self._rows.length[rows], self._rows.speed[rows], self._blocks)

    def _unevenness(self, load: Floats) -> Floats:
        missing = np.maximum(self._terms.level - load, 0.0) / self._terms.scale
        return self._terms.evenness * missing * missing

    def _neighbours(self, starts: Ints, held: Ints, rows: Ints, windows: _Windows) -> Floats:
        """The cost after one move, to one of `rows`: float [rows, num_blocks] by new start; infinite where the server
        is or cannot be. `held` are the rows that servers have now."""
        terms, choice = self._terms, self._rows.of(rows)
        load, count = self._cover(starts, held)
        now = self._rows.of(held[choice.server])
        speed, at = choice.speed[:, None], starts[choice.server, None]
        own = (windows.places >= at) & (windows.places < at + now.length[:, None])
        without = load - own * now.speed[:, None]

        before = self._unevenness(without)
        uneven = before.sum(axis=1, keepdims=True) + windows.sums(self._unevenness(without + speed) - before)
        throughput = windows.least(without, speed)
        costs = uneven - throughput / terms.scale
        if (empty := (count - own) == 0).any():
            left = empty.sum(axis=1, keepdims=True) - windows.sums(empty.astype(float))
            costs += np.where(left > 0.5, terms.gap * left + throughput / terms.scale, 0.0)

        if terms.charge:
            costs += terms.charge * self._reloaded(starts, choice.server, windows)
        costs[windows.beyond | ((windows.places == at) & (rows == held[choice.server])[:, None])] = np.inf
        if choice.allowed is not None:
            costs[~choice.allowed] = np.inf
        return np.asarray(costs)

    def _reloaded(self, starts: Ints, servers: Ints, windows: _Windows) -> Floats:
        """Blocks that are charged for after each move."""
        moved = float(self._reloads[starts != self._origin].sum())
        reload, origin = self._reloads[servers, None], self._origin[servers, None]
        now = starts[servers, None]
        return np.asarray(moved + (windows.places != origin) * reload - (now != origin) * reload)


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
