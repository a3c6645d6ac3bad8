"""Placing servers by steepest descent on the blocks' missing throughput: what the node's plan is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from petalnode.node.placement.joining import weakest_window
from petalnode.node.placement.observed import PlacedServer, coverage, swarm_throughput
from petalnode.protocols.ids import Span

MOST_STEPS = 60
SETTLING_ROUNDS = 10


def costs(load: NDArray[np.float64], speeds: NDArray[np.float64], lengths: NDArray[np.intp], wanted: float) -> NDArray:
    """Sum over blocks of max(0, wanted - throughput)^2 with each server put at each start: float [rows, blocks].

    `load` float [rows, blocks] is the throughput without it; infinite where it would not fit.
    """
    rows, blocks = load.shape
    before = np.maximum(wanted - load, 0.0) ** 2
    change = np.zeros((rows, blocks + 1))
    np.cumsum(np.maximum(wanted - load - speeds[:, None], 0.0) ** 2 - before, axis=1, out=change[:, 1:])
    ends = np.arange(blocks) + lengths[:, None]
    sums = np.take_along_axis(change, np.minimum(ends, blocks), axis=1) - change[:, :-1]
    return np.where(ends <= blocks, before.sum(axis=1, keepdims=True) + sums, np.inf)


def best_span(holders: Sequence[PlacedServer], num_blocks: int, speed: float, count: int, wanted: float) -> Span:
    """Where a newcomer leaves the least squared deficit."""
    load = coverage(holders, num_blocks) if holders else np.zeros(num_blocks)
    start = int(costs(load[None], np.array([speed]), np.array([count], np.intp), wanted).argmin())
    return Span(start, start + count)


def descent(holders: Sequence[PlacedServer], num_blocks: int, wanted: float) -> Iterator[tuple[str, Span, float]]:
    """One move after the other: peer id, new span, the swarm's throughput then. The deficit falls most per block."""
    now = list(holders)
    able = np.array([holder.movable for holder in now])
    speeds = np.array([holder.throughput for holder in now])
    lengths = np.array([len(holder.span) for holder in now], np.intp)
    places = np.arange(num_blocks)
    for _ in range(MOST_STEPS):
        starts = np.array([holder.span.start for holder in now])[:, None]
        own = (places >= starts) & (places < starts + lengths[:, None])
        load = coverage(now, num_blocks)
        present = float((np.maximum(wanted - load, 0.0) ** 2).sum())
        gain = (present - costs(load - own * speeds[:, None], speeds, lengths, wanted)) / lengths[:, None]
        gain[~able] = -np.inf
        row, start = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[row, start] <= 1e-9 * max(present, 1.0):
            return
        span = Span(int(start), int(start) + int(lengths[row]))
        now[row] = replace(now[row], span=span)
        yield now[row].peer_id, span, swarm_throughput(now, num_blocks)


def moves_to(
    servers: Sequence[PlacedServer], index: int, num_blocks: int, p: float, order: Sequence[int]
) -> Span | None:
    """Where the server at `index` moves by Petals' own rule (NeurIPS 2023, appendix D), None if it stays.

    It moves if, after it and then all others (in `order`, round after round until nobody wants to move) went where
    equation 1 puts them, the swarm's throughput is higher by the share `p`.
    """
    spans = [server.span for server in servers]
    load = coverage(servers, num_blocks)
    before = float(load.min())

    def settle(number: int) -> bool:
        span, speed = spans[number], servers[number].throughput
        load[span.start : span.end] -= speed
        # What is left of a sum of floats whose parts have all gone again is no coverage.
        load[np.abs(load) < 1e-9] = 0.0
        spans[number] = weakest_window(load, len(span))
        load[spans[number].start : spans[number].end] += speed
        return spans[number] != span

    if not settle(index):
        return None
    target = spans[index]
    for _ in range(SETTLING_ROUNDS):
        moved = [settle(other) for other in order if other != index]
        if not any(moved):
            break
    after = coverage(
        [replace(server, span=span) for server, span in zip(servers, spans, strict=True)], num_blocks
    ).min()
    return target if after > before * (1 + p) else None
