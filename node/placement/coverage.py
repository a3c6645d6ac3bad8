"""Servers with their spans and throughputs, and what they yield for every block: the input of placement. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...protocols.ids import Span
from ..swarm import cost
from ..swarm.cost import Floats


@dataclass(frozen=True)
class PlacedServer:
    """A server as placement sees it.

    `span` is the one that it hosts, or the next one that it has announced; `throughput`, above 0, the decode steps a
    second that it adds to each of its blocks; `movable` is false if its span was fixed by a person or is being loaded;
    `reload_weight` weighs the blocks that it would reload, 1 where that is quick and drops no caches.
    """

    peer_id: str
    span: Span
    throughput: float
    movable: bool = True
    reload_weight: float = 1.0


def coverage(servers: Sequence[PlacedServer], num_blocks: int) -> Floats:
    """The throughput of every block, float [num_blocks]: the sum over those that hold it; 0 in a gap."""
    throughput, holders = cost.block_throughput(
        np.array([server.span.start for server in servers], np.intp),
        np.array([server.span.end for server in servers], np.intp),
        np.array([server.throughput for server in servers], float),
        num_blocks,
    )
    return np.where(holders > 0, throughput, 0.0)


def swarm_throughput(servers: Sequence[PlacedServer], num_blocks: int) -> float:
    """Decode steps a second of the whole swarm: those of its slowest block (Petals, appendix D)."""
    return float(coverage(servers, num_blocks).min())


def upper_bound(servers: Sequence[PlacedServer], num_blocks: int) -> float:
    """Decode steps a second that no placement of these servers exceeds: the largest z with
    sum over servers of min(throughput, z) x blocks >= z x num_blocks.
    """
    blocks = np.array([len(server.span) for server in servers], np.intp)
    if blocks.sum() < num_blocks:
        return 0.0
    speeds = np.array([server.throughput for server in servers], float)
    return cost.throughput_bound(blocks, 1 / (speeds * blocks), num_blocks)


def gaps(servers: Sequence[PlacedServer], num_blocks: int) -> tuple[Span, ...]:
    """The stretches of blocks that nobody holds."""
    empty = np.concatenate([[False], coverage(servers, num_blocks) <= 0, [False]])
    edges = np.flatnonzero(empty[1:] != empty[:-1])
    return tuple(Span(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def describe_spans(spans: Sequence[Span]) -> str:
    """Spans of blocks for a person: "blocks 3:5, 7:9"."""
    return "blocks " + ", ".join(str(span) for span in spans)
