from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.errors import MachineError
from petalnode.node.server.placement import (
    MAX_CACHE_TOKENS,
    MIN_CACHE_TOKENS,
    Held,
    blocks_that_fit,
    cache_tokens_that_fit,
    most_needed,
)
from petalnode.protocols.ids import Span

BLOCKS = 8
held = st.builds(
    lambda start, length, speed: Held(Span(start, start + length), speed),
    st.integers(0, BLOCKS - 1),
    st.integers(1, BLOCKS),
    st.sampled_from([0.5, 1.0, 2.0, 7.0]),
)


def throughput(servers: list[Held]) -> list[float]:
    return [sum(each.throughput for each in servers if block in each.span) for block in range(BLOCKS)]


@given(st.lists(held, max_size=6), st.integers(1, BLOCKS + 3))
def test_the_window_has_the_weakest_blocks(servers: list[Held], count: int) -> None:
    chosen = most_needed(servers, BLOCKS, count)
    assert len(chosen) == min(count, BLOCKS) and Span(0, BLOCKS).covers(chosen)
    before = throughput(servers)
    windows = [sorted(before[start : start + len(chosen)]) for start in range(BLOCKS - len(chosen) + 1)]
    assert sorted(before[chosen.start : chosen.end]) == min(windows)
    assert chosen.start == windows.index(min(windows))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_servers_that_join_one_by_one_close_every_gap(sizes: list[int]) -> None:
    servers: list[Held] = []
    for size in sizes:
        uncovered = throughput(servers).count(0.0)
        servers.append(Held(most_needed(servers, BLOCKS, size), 1.0))
        assert throughput(servers).count(0.0) < uncovered or uncovered == 0


def test_a_gap_comes_first() -> None:
    assert most_needed([Held(Span(0, 3), 9.0), Held(Span(5, 8), 9.0)], BLOCKS, 2) == Span(3, 5)
    assert most_needed([Held(Span(0, 8), 1.0), Held(Span(0, 6), 1.0)], BLOCKS, 2) == Span(6, 8)
    assert most_needed([], BLOCKS, 3) == Span(0, 3)


def test_blocks_that_fit_into_memory() -> None:
    assert blocks_that_fit(1000, 100, 30) == 6
    assert blocks_that_fit(1 << 40, 100, 30) == 30
    with pytest.raises(MachineError, match="one block"):
        blocks_that_fit(100, 100, 30)


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 24))
def test_the_cache_has_bounds(free: int, per_token: int) -> None:
    assert MIN_CACHE_TOKENS <= cache_tokens_that_fit(free, per_token) <= MAX_CACHE_TOKENS
