"""Who holds which blocks, and how fast: what placement decides from. Pure; no clock, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...protocols.ids import Span
from .planning.throughput import throughput_bound

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Holder:
    """A server as placement sees it.

    `span` is where it is, or where it goes if it has said so; `throughput`, above 0, the decode steps a second that it
    adds to each of its blocks; `movable` false for one that stays where it is, because a person said so or because it
    loads; `toll` weighs the blocks that it reloads, 1 where that is quick and drops no caches.
    """

    peer_id: str
    span: Span
    throughput: float
    movable: bool = True
    toll: float = 1.0


def coverage(holders: Sequence[Holder], num_blocks: int) -> Floats:
    """The throughput of every block, float [num_blocks]: the sum over those that hold it; 0 in a gap."""
    starts = np.array([holder.span.start for holder in holders], np.intp)
    ends = np.array([holder.span.end for holder in holders], np.intp)
    speeds = np.array([holder.throughput for holder in holders], float)
    steps, counts = np.zeros(num_blocks + 1), np.zeros(num_blocks + 1, np.intp)
    np.add.at(steps, starts, speeds)
    np.subtract.at(steps, ends, speeds)
    np.add.at(counts, starts, 1)
    np.subtract.at(counts, ends, 1)
    return np.where(np.cumsum(counts[:-1]) > 0, np.cumsum(steps[:-1]), 0.0)


def swarm_throughput(holders: Sequence[Holder], num_blocks: int) -> float:
    """Decode steps a second of the whole swarm: those of its slowest block (Petals, appendix D)."""
    return float(coverage(holders, num_blocks).min())


def upper_bound(holders: Sequence[Holder], num_blocks: int) -> float:
    """Decode steps a second that no placement of these servers exceeds: the largest z with
    sum over servers of min(throughput, z) x blocks >= z x num_blocks.
    """
    blocks = np.array([len(holder.span) for holder in holders], np.intp)
    if blocks.sum() < num_blocks:
        return 0.0
    speeds = np.array([holder.throughput for holder in holders], float)
    return throughput_bound(blocks, 1 / (speeds * blocks), num_blocks)


def gaps(holders: Sequence[Holder], num_blocks: int) -> tuple[Span, ...]:
    """The stretches of blocks that nobody holds."""
    empty = np.concatenate([[False], coverage(holders, num_blocks) <= 0, [False]])
    edges = np.flatnonzero(empty[1:] != empty[:-1])
    return tuple(Span(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))
