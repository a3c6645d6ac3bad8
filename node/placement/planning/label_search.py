"""The search for the cheapest cycle: labels, all paths of one length at a time, the dearest cut off by a bound.

A label is a path from a root through machines that are all filled to their capacity. Of labels with the same machines
and the same last one only the cheapest counts (Held and Karp, 1962). A label is dropped whose path and relaxed walk
back to the root cost no less than the best cycle so far. What is left is often few. Where it is more than `width`, only
those of the lowest bound are kept, and then the search proves nothing.

A relaxed walk may visit a machine more than once. So the best way on depends only on the machine and on how many blocks
are still to do. A dynamic programme finds it. What a label takes too much is given back at the rate of its slowest
machine, of which there are few kinds: `Bound` holds the ways on for each kind.

R roots are computed side by side, each with its own machines; N machines, K blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...swarm.cost import Bools, Floats, Ints

MAX_MACHINES: Final = 64
"""A label's machines are the bits of one word."""
MAX_RATES: Final = 4
"""Kinds of slowest machines; with more speeds than that, a machine counts for the next slower kind."""
TOLERANCE: Final = 1e-12
"""Seconds by which one cycle has to be better than another."""

_PAIRS_AT_ONCE: Final = 40_000
"""Labels times machines that are looked at before it is asked again whether the time is over."""

_Words = NDArray[np.uint64]


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
    """Which machines cycles of each root may use: `root` int [R], `allowed` bool [R, N], without the root itself."""

    root: Ints
    allowed: Bools

    def __len__(self) -> int:
        return len(self.root)

    def chosen(self, which: Ints) -> Roots:
        return Roots(self.root[which], self.allowed[which])


@dataclass(frozen=True)
class Bound:
    """Of `roots`: `least` float [R], no cycle of the root costs less. `on` float [Q, K + 1, R, N] is the least from
    leaving a machine until back at its root, by the number of blocks to do. What is done beyond them is given back at
    rate q."""

    roots: Roots
    least: Floats
    on: Floats


def bound(machines: Machines, roots: Roots) -> Bound:
    """The bound of each root, and what its labels are compared with."""
    blocks, size = machines.blocks, len(machines.capacity)
    walks = np.empty((blocks + 1, len(roots), size))
    walks[0] = machines.way[:, roots.root].T
    most = int(machines.capacity[roots.allowed.any(0)].max(initial=1))
    counts = np.arange(most, 0, -1)[:, None]
    computing = np.where(counts <= machines.capacity, counts * machines.seconds, np.inf)[:, None, :]
    arriving = machines.way.T + np.where(roots.allowed, 0.0, np.inf)[:, :, None]  # [R, to, from]
    arriving[:, np.arange(size), np.arange(size)] = np.inf
    for to_do in range(1, blocks + 1):
        window = slice(max(0, to_do - most), to_do)
        there = (computing[most - (window.stop - window.start) :] + walks[window]).min(0)
        walks[to_do] = (arriving + there[:, :, None]).min(1)

    on = np.empty((len(machines.give_back), *walks.shape))
    on[:, blocks] = walks[blocks]
    for to_do in range(blocks - 1, -1, -1):
        # Either exactly this number, or one more and the pay for one given back.
        on[:, to_do] = np.minimum(walks[to_do], on[:, to_do + 1] - machines.give_back[:, None, None])

    own = machines.capacity[roots.root]
    spare = np.arange(blocks + 1)[:, None] - (blocks - own)
    whole = walks[:, np.arange(len(roots)), roots.root] + (own - spare) * machines.seconds[roots.root]
    return Bound(roots, np.where(spare < 0, np.inf, whole).min(0), on)


@dataclass(frozen=True)
class Cycle:
    """The cheapest cycle found so far, its machines in order; `seconds` infinite if there is none."""

    machines: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class _Labels:
    """Paths, in arrays of one length. `ways` is the cost without computing."""

    root: Ints  # which root of the bound
    last: Ints
    passed: _Words
    room: Ints
    cost: Floats
    ways: Floats
    rate: Ints  # of the slowest machine
    path: Ints  # [L, length]

    def __len__(self) -> int:
        return len(self.root)

    def chosen(self, which: Ints) -> _Labels:
        return _Labels(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def _joined(parts: Sequence[_Labels]) -> _Labels:
    if len(parts) == 1:
        return parts[0]
    return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in _Labels.__dataclass_fields__))


def search(machines: Machines, bound: Bound, best: Cycle, width: int, until: float) -> tuple[Cycle, bool]:
    """The best cycle that was found through one of the roots of `bound`, or `best`; and whether nothing was cut.

    If nothing was, no cycle of these roots is better.
    """
    labels = _from_roots(machines, bound)
    best, least = _closed(machines, bound, labels, bound.least.copy(), best)
    labels = labels.chosen(np.flatnonzero(least < best.seconds - TOLERANCE))
    whole = True
    while len(labels):
        parts = []
        for rows in np.array_split(np.arange(len(labels)), 1 + len(labels) * len(machines.capacity) // _PAIRS_AT_ONCE):
            if time.monotonic() > until:
                return best, False
            parts.append(_extended(machines, bound, labels.chosen(rows), best))
        labels, least = _joined([part for part, _ in parts]), np.concatenate([costs for _, costs in parts])
        kept = np.flatnonzero(~_redundant(machines, labels))
        labels, least = labels.chosen(kept), least[kept]
        best, least = _closed(machines, bound, labels, least, best)
        kept = np.flatnonzero(least < best.seconds - TOLERANCE)
        kept = kept[_undominated(labels.chosen(kept))]
        if len(kept) > width:
            kept = kept[np.argsort(least[kept], kind="stable")[:width]]
            whole = False
        labels = labels.chosen(kept)
    return best, whole


def _from_roots(machines: Machines, bound: Bound) -> _Labels:
    roots = bound.roots
    return _Labels(
        root=np.arange(len(roots)),
        last=roots.root,
        passed=np.uint64(1) << roots.root.astype(np.uint64),
        room=machines.capacity[roots.root],
        cost=machines.capacity[roots.root] * machines.seconds[roots.root],
        ways=np.zeros(len(roots)),
        rate=machines.rate[roots.root],
        path=roots.root[:, None],
    )


def _extended(machines: Machines, bound: Bound, labels: _Labels, best: Cycle) -> tuple[_Labels, Floats]:
    """Every label by every machine that may still bring a better cycle, and the least that such a cycle costs."""
    bits = np.uint64(1) << np.arange(len(machines.capacity), dtype=np.uint64)
    free = bound.roots.allowed[labels.root] & ((labels.passed[:, None] & bits) == 0)
    old, new = np.nonzero(free)
    root, way = labels.root[old], machines.way[labels.last[old], new]
    room = labels.room[old] + machines.capacity[new]
    rate = np.maximum(labels.rate[old], machines.rate[new])
    computing = machines.capacity[new] * machines.seconds[new]
    cost = labels.cost[old] + way + computing
    to_do = machines.blocks - room
    on = bound.on[rate, np.maximum(to_do, 0), root, new]
    least = cost + on + np.minimum(to_do, 0) * machines.give_back[rate]
    kept = np.flatnonzero(least < best.seconds - TOLERANCE)
    old, new = old[kept], new[kept]
    extended = _Labels(
        root=root[kept],
        last=new,
        passed=labels.passed[old] | bits[new],
        room=room[kept],
        cost=cost[kept],
        ways=labels.ways[old] + way[kept],
        rate=rate[kept],
        path=np.concatenate([labels.path[old], new[:, None]], axis=1),
    )
    return extended, least[kept]


def _closed(machines: Machines, bound: Bound, labels: _Labels, least: Floats, best: Cycle) -> tuple[Cycle, Floats]:
    """The best of these labels as cycles, or `best`; and `least`, higher for those that have room for all blocks."""
    full = np.flatnonzero(labels.room >= machines.blocks)
    if not full.size:
        return best, least
    passed = (labels.passed[full, None] >> np.arange(len(machines.capacity), dtype=np.uint64)) & np.uint64(1)
    blocks, left = split(machines, passed.astype(np.intp))
    spent = labels.ways[full] + np.where(left < 0, np.inf, blocks @ machines.seconds)
    number, last = labels.root[full], labels.last[full]
    whole = spent + machines.way[last, labels.path[full, 0]]
    at = int(whole.argmin())
    if whole[at] < best.seconds - TOLERANCE:
        best = Cycle(tuple(labels.path[full[at]].tolist()), float(whole[at]))
    # What others compute instead is taken off the slowest machine that has more than one block.
    slowest = len(machines.capacity) - 1 - (blocks > 1)[:, ::-1].argmax(1)
    on = bound.on[machines.rate[slowest], 0, number, last]
    least = least.copy()
    least[full] = np.maximum(least[full], spent + on)
    return best, least


def split(machines: Machines, passed: Ints) -> tuple[Ints, Ints]:
    """How the machines of each row [L, N] share the blocks in the least time; and what they have no room for [L],
    negative where there are more machines than blocks."""
    once = passed * np.minimum(machines.capacity, 1)
    left = machines.blocks - once.sum(1)
    more = passed * machines.capacity - once
    filled = np.minimum(np.cumsum(more, axis=1), left[:, None])  # machines are in order of speed
    blocks = once + np.diff(filled, axis=1, prepend=0)
    return blocks, np.where(left < 0, left, machines.blocks - blocks.sum(1))


def _redundant(machines: Machines, labels: _Labels) -> NDArray[np.bool_]:
    """Labels that are no dearer without some machine on the way. The others have room enough, none of them is slower,
    and the way past it is no longer. However a cycle goes on from there, it is no dearer without that machine."""
    found = np.zeros(len(labels), bool)
    roomy = np.flatnonzero(labels.room > machines.blocks)
    spare, path = labels.room[roomy] - machines.blocks, labels.path[roomy]
    slowest = machines.seconds[path.max(1, initial=0)]  # machines are in order of speed
    for before, here, after in zip(path.T, path.T[1:], path.T[2:], strict=False):
        fits = (machines.capacity[here] <= spare) & (machines.seconds[here] == slowest)
        detour = machines.way[before, here] + machines.way[here, after] - machines.way[before, after]
        found[roomy] |= fits & (detour >= 0)
    return found


def _undominated(labels: _Labels) -> Ints:
    """The cheapest label of each set of machines with each last one."""
    order = np.lexsort((labels.cost, labels.last, labels.passed))
    passed, last = labels.passed[order], labels.last[order]
    first = np.ones(len(order), bool)
    first[1:] = (passed[1:] != passed[:-1]) | (last[1:] != last[:-1])
    return order[first]
