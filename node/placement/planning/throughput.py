"""Which machine serves which blocks so that the whole swarm computes the most tokens a second.

A token needs every block once, so the swarm is as quick as its slowest block: the throughput of a block is the sum over
the machines that hold it, and what counts is the least of these (Petals, NeurIPS 2023, appendix D). A machine that
holds b blocks and computes one in s seconds passes 1 / (b s) tokens a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ....protocols.ids import Span
from ...errors import SwarmError
from ...swarm.cost import Floats, Ints, throughput_bound

_KICKS_EACH: Final = 15
"""Times that some machines are placed anew in search of something better, for each of them. A fixed number, so equal
inputs have equal plans."""
_ROUNDS: Final = 4
_SEED: Final = 7
_MAX_SIZES: Final = 64
"""Lengths of span that are tried for one machine."""
_MAX_WORK: Final = 80_000_000
"""Spans looked at in all of these together: about a second."""
_LEAST_WORK: Final = 4_000
"""Spans that could be looked at in the time that placing a machine takes in any case."""


@dataclass(frozen=True)
class Spread:
    """A span per machine, None where it can hold no block; `tokens_per_second` of the slowest block, and `bound`, which
    no placement exceeds."""

    spans: tuple[Span | None, ...]
    tokens_per_second: float
    bound: float


def most_throughput(capacity: Ints, block_seconds: Floats, num_blocks: int) -> Spread:
    """Places machines by local search. `capacity` int [N] in blocks, `block_seconds` float [N], above 0.

    Raises:
        SwarmError: all machines together cannot hold the model.
    """
    room = np.minimum(capacity, num_blocks)
    if room.sum() < num_blocks:
        raise SwarmError(f"the machines together hold {room.sum()} of {num_blocks} blocks")
    search = _Search(room, block_seconds, num_blocks)
    chance = np.random.default_rng(_SEED)
    # One behind the other: bad, but without a gap, and all that there is where there is just room enough.
    ends = np.minimum(np.cumsum(room), num_blocks)
    search.restore(np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1))
    best, best_score = search.spans.copy(), search.score()
    search.restore(np.zeros_like(best))
    search.settle(np.argsort(room / np.maximum(block_seconds, 1e-12), kind="stable")[::-1])
    if search.score() > best_score:
        best, best_score = search.spans.copy(), search.score()
    movable = np.flatnonzero(room > 0)
    work = _ROUNDS * len(movable) * max(min(int(room.max()), _MAX_SIZES) * num_blocks, _LEAST_WORK)
    for _ in range(min(_KICKS_EACH * len(movable), _MAX_WORK // work)):
        if best_score[0] >= search.target * (1 - 1e-9):
            break
        some = chance.choice(movable, size=min(len(movable), int(chance.integers(2, 6))), replace=False)
        for machine in some:
            search.remove(machine)
        search.settle(some)
        if search.score() > best_score:
            best, best_score = search.spans.copy(), search.score()
        elif chance.random() < 0.7:
            search.restore(best)
    spans = tuple(Span(int(start), int(end)) if start < end else None for start, end in best)
    return Spread(spans, best_score[0], search.target)


class _Search:
    """A placement that is changed machine by machine; `spans` int [N, 2], empty for a machine that is out."""

    def __init__(self, room: Ints, block_seconds: Floats, num_blocks: int) -> None:
        self._room = room
        self._speed = 1 / np.maximum(block_seconds, 1e-12)
        self._blocks = num_blocks
        self.target = throughput_bound(room, block_seconds, num_blocks)
        self.spans = np.zeros((len(room), 2), np.intp)
        self._load = np.zeros(num_blocks)

    def score(self) -> tuple[float, float]:
        """Tokens a second; then how near all blocks are to the bound."""
        return float(self._load.min()), -float((np.maximum(self.target - self._load, 0) ** 2).sum())

    def restore(self, spans: Ints) -> None:
        self.spans = spans.copy()
        self._load[:] = 0.0
        for machine in range(len(spans)):
            self._add(machine, 1)

    def remove(self, machine: int) -> None:
        self._add(machine, -1)
        self.spans[machine] = 0

    def settle(self, order: Ints) -> None:
        """Places these machines, then all in turn, each where it closes most of what is missing, until none moves or
        several rounds are over."""
        for machine in order:
            self._place(int(machine))
        for _ in range(_ROUNDS):
            moved = False
            for machine in np.flatnonzero(self._room > 0):
                before = tuple(self.spans[machine])
                self.remove(int(machine))
                self._place(int(machine), before)
                moved |= tuple(self.spans[machine]) != before
            if not moved:
                break

    def _place(self, machine: int, before: tuple[int, ...] = (0, 0)) -> None:
        """The span that lowers sum max(0, bound - throughput)^2 most; the one `before` if no other is better."""
        room = int(self._room[machine])
        if room == 0:
            return
        sizes = np.unique(np.linspace(1, room, min(room, _MAX_SIZES)).round().astype(np.intp))
        missing = np.maximum(self.target - self._load, 0)
        rates = self._speed[machine] / sizes
        closed = missing**2 - np.maximum(missing - rates[:, None], 0) ** 2
        sums = np.concatenate([np.zeros((len(sizes), 1)), np.cumsum(closed, axis=1)], axis=1)
        starts = np.arange(self._blocks)
        ends = np.minimum(starts + sizes[:, None], self._blocks)
        gain = np.take_along_axis(sums, ends, axis=1) - sums[:, :-1]
        gain[starts + sizes[:, None] > self._blocks] = -1.0
        size, start = np.unravel_index(int(gain.argmax()), gain.shape)
        span = (int(start), int(start + sizes[size]))
        if before != (0, 0):
            at = np.flatnonzero(sizes == before[1] - before[0])
            if at.size and gain[at[0], before[0]] >= gain[size, start] * (1 - 1e-9):
                span = (int(before[0]), int(before[1]))
        self.spans[machine] = span
        self._add(machine, 1)

    def _add(self, machine: int, sign: int) -> None:
        start, end = self.spans[machine]
        if start < end:
            self._load[start:end] += sign * self._speed[machine] / (end - start)
