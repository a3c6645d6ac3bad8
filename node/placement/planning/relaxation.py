"""A lower bound on what a cycle costs, from walks that may visit a machine more than once.

A cycle starts at its root and passes every other machine at most once. Without that rule the best way on depends only
on where a token is and how many blocks are still to do. A dynamic programme finds it. Two things make the bound tight
(both are known from routing vehicles: Christofides, Mingozzi and Toth, 1981):

- A walk may not turn back at once, u - v - u. For that the best two ways on by different next machines are kept.
- A machine that the best walk visits more than once becomes dearer (a Lagrange multiplier). Each price is taken off the
  bound once, since a cycle pays it once at most.

A label (a path from the root, see label_search.py) fills every machine that it visits. What it takes too much is given
back at the rate of its slowest machine, of which there are few kinds: `Bound` holds the ways on for each kind.

R roots are computed side by side, each with its own machines and prices; N machines, K blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...swarm.cost import Bools, Floats, Ints

MAX_RATES: Final = 4
"""Kinds of slowest machines; with more speeds than that, a machine counts for the next slower kind."""


@dataclass(frozen=True)
class Machines:
    """The machines of a problem in order of speed, with room for no more than all blocks.

    `give_back` float [Q] are the rates, slowest last, and `rate` int [N] each machine's kind.
    """

    capacity: Ints
    seconds: Floats  # per block
    way: Floats
    blocks: int
    give_back: Floats
    rate: Ints


@dataclass(frozen=True)
class Roots:
    """What cycles of each root may use, and at which prices: `root` int [R], `allowed` bool [R, N], without the root
    itself; `prices` float [R, N], nothing for what is not allowed."""

    root: Ints
    allowed: Bools
    prices: Floats

    def __len__(self) -> int:
        return len(self.root)

    def chosen(self, which: Ints) -> Roots:
        return Roots(self.root[which], self.allowed[which], self.prices[which])


@dataclass(frozen=True)
class Bound:
    """Of `roots`: `least` float [R], no cycle of the root costs less; `visits` int [R, N] of the walk that costs it.

    `on` float [Q, K + 1, R, N] is the least from leaving a machine until back at its root. It goes by the number of
    blocks to do. What is done beyond them is given back at rate q; `following` is the machine that comes next there,
    `otherwise` the same cost if another one has to.
    """

    roots: Roots
    least: Floats
    visits: Ints
    on: Floats
    following: Ints
    otherwise: Floats


@dataclass(frozen=True)
class _Ways:
    """By blocks to do [K + 1, R, N]: the best way on, and the best by another next machine.

    On arrival with r blocks to do a machine computes `count[r]` of them, or `other_count[r]` if the way on may not lead
    to `barred[r]`.
    """

    first: Floats
    first_next: Ints
    second: Floats
    second_next: Ints
    count: Ints
    other_count: Ints
    barred: Ints


def bound(machines: Machines, roots: Roots) -> Bound:
    """The bound of each root, and what its labels are compared with."""
    ways = _walks(machines, roots)
    own = machines.capacity[roots.root]
    to_do = np.arange(machines.blocks + 1)[:, None]
    spare = to_do - (machines.blocks - own)
    number = np.arange(len(roots))
    whole = ways.first[:, number, roots.root] + (own - spare) * machines.seconds[roots.root]
    whole[spare < 0] = np.inf
    best = whole.argmin(0)
    least = whole[best, number] - roots.prices.sum(1)
    visits = np.stack(
        [_visits(ways, number, int(roots.root[number]), int(best[number])) for number in range(len(roots))]
    )
    return Bound(roots, least, visits, *_given_back(machines, ways))


def _walks(machines: Machines, roots: Roots) -> _Ways:
    blocks, size = machines.blocks, len(machines.capacity)
    shape = (blocks + 1, len(roots), size)
    first, second = np.empty(shape), np.empty(shape)
    first_next, second_next = np.full(shape, -1), np.full(shape, -1)
    count, other_count, barred = np.empty(shape, np.intp), np.empty(shape, np.intp), np.empty(shape, np.intp)
    first[0] = second[0] = machines.way[:, roots.root].T
    usable = roots.allowed.any(0)
    most = int(machines.capacity[usable].max(initial=1))
    counts = np.arange(most, 0, -1)[:, None]
    computing = np.where(counts <= machines.capacity, counts * machines.seconds, np.inf)[:, None, :]
    arriving = machines.way.T + np.where(roots.allowed, roots.prices, np.inf)[:, :, None]  # [R, to, from]
    arriving[:, np.arange(size), np.arange(size)] = np.inf
    one, names = np.arange(len(roots))[:, None], np.arange(size)
    for to_do in range(1, blocks + 1):
        window = slice(max(0, to_do - most), to_do)
        width = window.stop - window.start
        spent = computing[most - width :] + first[window]
        at = spent.argmin(0)
        least = spent[at, one, names]
        bar = first_next[window][at, one, names]
        spent = computing[most - width :] + np.where(first_next[window] == bar, second[window], first[window])
        other = spent.argmin(0)
        otherwise = spent[other, one, names]
        count[to_do], other_count[to_do], barred[to_do] = width - at, width - other, bar
        total = arriving + np.where(bar[:, :, None] == names, otherwise[:, :, None], least[:, :, None])
        at = total.argmin(1)
        first[to_do], first_next[to_do] = total[one, at, names], at
        total[one, at, names] = np.inf
        at = total.argmin(1)
        second[to_do], second_next[to_do] = total[one, at, names], at
    return _Ways(first, first_next, second, second_next, count, other_count, barred)


def _visits(ways: _Ways, number: int, root: int, to_do: int) -> Ints:
    """How often the best walk of one root visits each machine."""
    visits = np.zeros(ways.first.shape[2], np.intp)
    here, before = root, -1
    while to_do > 0:
        follows = ways.first_next[to_do, number, here]
        if follows == before:
            follows = ways.second_next[to_do, number, here]
        before, here = here, int(follows)
        visits[here] += 1
        at = (to_do, number, here)
        to_do -= int((ways.other_count if ways.barred[at] == before else ways.count)[at])
    return visits


def _given_back(machines: Machines, ways: _Ways) -> tuple[Floats, Ints, Floats]:
    """`on`, `following` and `otherwise` of `Bound`: the best of doing this number of blocks or more."""
    rates = machines.give_back[:, None, None]
    shape = (len(machines.give_back), *ways.first.shape)
    on, following, otherwise = np.empty(shape), np.empty(shape, np.intp), np.empty(shape)
    value, name, other = (
        np.broadcast_to(ways_on[-1], (shape[0], *shape[2:])) for ways_on in (ways.first, ways.first_next, ways.second)
    )
    on[:, -1], following[:, -1], otherwise[:, -1] = value, name, other
    for to_do in range(machines.blocks - 1, -1, -1):
        # Either exactly this number, or one more and the pay for one given back.
        value, other = value - rates, other - rates
        exact, exact_name, exact_other = ways.first[to_do], ways.first_next[to_do], ways.second[to_do]
        better = exact < value
        same = exact_name == name
        other = np.minimum(
            np.where(better, exact_other, other),
            np.where(same, np.where(better, other, exact_other), np.where(better, value, exact)),
        )
        value, name = np.where(better, exact, value), np.where(better, exact_name, name)
        on[:, to_do], following[:, to_do], otherwise[:, to_do] = value, name, other
    return on, following, otherwise
