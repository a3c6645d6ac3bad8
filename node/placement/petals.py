"""Petals' own rule (NeurIPS 2023, appendix D), the baseline: where a server goes, and when it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...protocols.ids import Span
from .holder import Floats, Holder, coverage

_SETTLING_ROUNDS = 10


def weakest_window(throughput: Floats, count: int) -> Span:
    """The span of `count` blocks whose sorted throughputs come first in lexicographic order: equation 1.

    `throughput` is float [blocks]. So gaps come first and the weakest blocks next; ties go to the lowest start.
    """
    count = min(count, len(throughput))
    values, last = throughput.tolist(), len(throughput) - count
    # The least of all comes first, so only windows with a block that has it are in question.
    lowest = np.flatnonzero(throughput == throughput.min()).tolist()
    starts = {start for low in lowest for start in range(max(low - count + 1, 0), min(low, last) + 1)}
    start = min(sorted(starts), key=lambda start: sorted(values[start : start + count]))
    return Span(start, start + count)


def joining_span(holders: Sequence[Holder], num_blocks: int, count: int) -> Span:
    """Where equation 1 puts a newcomer that holds `count` blocks."""
    return weakest_window(coverage(holders, num_blocks), count)


def moves_to(holders: Sequence[Holder], index: int, num_blocks: int, p: float, order: Sequence[int]) -> Span | None:
    """Where the server at `index` moves, None if it stays.

    It moves if, after it and then all others (in `order`, round after round until nobody wants to move) went where
    equation 1 puts them, the swarm's throughput is higher by the share `p`.
    """
    spans = [holder.span for holder in holders]
    load = coverage(holders, num_blocks)
    before = float(load.min())

    def settle(each: int) -> bool:
        span, speed = spans[each], holders[each].throughput
        load[span.start : span.end] -= speed
        # What is left of a sum of floats whose parts have all gone again is no coverage.
        load[np.abs(load) < 1e-9] = 0.0
        spans[each] = weakest_window(load, len(span))
        load[spans[each].start : spans[each].end] += speed
        return spans[each] != span

    if not settle(index):
        return None
    target = spans[index]
    for _ in range(_SETTLING_ROUNDS):
        moved = [settle(each) for each in order if each != index]
        if not any(moved):
            break
    after = coverage(
        [replace(holder, span=span) for holder, span in zip(holders, spans, strict=True)], num_blocks
    ).min()
    return target if after > before * (1 + p) else None
