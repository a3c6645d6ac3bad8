from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.errors import SwarmError
from petalnode.node.placement.planning.plans import most_throughput
from petalnode.node.swarm.cost import throughput_bound


def slowest_block(spans: list[tuple[int, int]], seconds: np.ndarray, blocks: int) -> float:
    load = np.zeros(blocks)
    for (start, end), block_seconds in zip(spans, seconds, strict=True):
        if start < end:
            load[start:end] += 1 / (block_seconds * (end - start))
    return float(load.min())


def best_of_all(capacity: list[int], seconds: np.ndarray, blocks: int) -> float:
    """By looking at every placement."""
    choices = [
        [(start, start + size) for size in range(1, most + 1) for start in range(blocks - size + 1)] or [(0, 0)]
        for most in capacity
    ]
    return max(slowest_block(list(spans), seconds, blocks) for spans in itertools.product(*choices))


machines = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.5, 1.0, 1.1, 3.0])), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(machines, st.integers(1, 4))
def test_placement_is_feasible_without_gap_and_below_bound(pairs: list[tuple[int, float]], blocks: int) -> None:
    capacity, seconds = [most for most, _ in pairs], np.array([block_seconds for _, block_seconds in pairs])
    room = np.array(capacity)
    if np.minimum(room, blocks).sum() < blocks:
        with pytest.raises(SwarmError, match=f"of {blocks} blocks"):
            most_throughput(room, seconds, blocks)
        return
    found = most_throughput(room, seconds, blocks)
    spans = [(0, 0) if span is None else (span.start, span.end) for span in found.spans]
    for most, (start, end) in zip(capacity, spans, strict=True):
        assert 0 <= start <= end <= blocks and end - start <= most
    assert found.tokens_per_second == pytest.approx(slowest_block(spans, seconds, blocks))
    best = best_of_all([min(most, blocks) for most in capacity], seconds, blocks)
    assert 0 < found.tokens_per_second <= best * (1 + 1e-9) <= found.bound * (1 + 1e-6)
    assert found == most_throughput(room, seconds, blocks)


def test_it_is_near_the_best_of_all() -> None:
    chance = np.random.default_rng(1)
    shares = []
    for _ in range(12):
        capacity, seconds = chance.integers(1, 4, 4), chance.uniform(0.5, 2.0, 4)
        if capacity.sum() >= 4:
            found = most_throughput(capacity, seconds, 4)
            shares.append(found.tokens_per_second / best_of_all(capacity.tolist(), seconds, 4))
    assert min(shares) > 0.8 and sum(shares) / len(shares) > 0.97


@pytest.mark.parametrize("seed", range(5))
def test_just_enough_room_leaves_no_gap(seed: int) -> None:
    chance = np.random.default_rng(seed)
    capacity = chance.integers(1, 9, 12)
    found = most_throughput(capacity, chance.uniform(0.5, 2.0, 12), int(capacity.sum()))
    assert found.tokens_per_second > 0


def test_no_block_is_left_out_nor_machine_idle() -> None:
    chance = np.random.default_rng(0)
    capacity, seconds = chance.integers(1, 12, 60), chance.uniform(0.01, 0.1, 60)
    found = most_throughput(capacity, seconds, 48)
    assert None not in found.spans
    assert 0.9 * found.bound < found.tokens_per_second <= found.bound


def test_bound_counts_no_more_than_what_is_needed() -> None:
    # A thousand times faster, but with room for one block of two: the other block sets the pace.
    assert throughput_bound(np.array([1, 1]), np.array([0.001, 1.0]), 2) == pytest.approx(1.0)
    assert throughput_bound(np.array([2, 2]), np.array([0.5, 1.0]), 2) == pytest.approx(1.5)
