"""Limits of bytes per second: how much passes, who passes next, and what need not wait."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.network.shares import TokenBucket
from petalnode.node.network.transport.bandwidth import Throttle, turn_size

pytestmark = pytest.mark.virtual_time

RATE = 1_000_000


@given(
    st.integers(1_000, 10**9),
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10**7), st.booleans()), min_size=1, max_size=50),
)
async def test_no_more_passes_than_rate_and_burst(rate, asked):
    """Whoever waits as long as it is told passes no faster than the rate in the long run."""
    bucket, begun, passed, largest = TokenBucket(rate, rate / 4), trio.current_time(), 0, 0
    for pause, size, urgent in asked:
        await trio.sleep(pause)
        await trio.sleep(bucket.delay(-rate / 4 if urgent else 0.0))
        bucket.take_ahead(size)
        passed, largest = passed + size, max(largest, size)
    assert passed <= rate * (trio.current_time() - begun + 1) + largest + 1


async def test_transfer_takes_as_long_as_limit_says():
    throttle = Throttle(RATE)
    for _ in range(100):
        await throttle.turn("one")
        throttle.spend(100_000)
    assert 8 < trio.current_time() < 10.5


@pytest.mark.parametrize("urgent", [False, True])
async def test_each_key_has_its_turn_beside_many(urgent):
    throttle, passed = Throttle(RATE), Counter()

    async def flood(key):
        while True:
            await throttle.turn(key, urgent=urgent)
            throttle.spend(50_000)
            passed[key] += 1

    with trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(flood, "greedy")
            nursery.start_soon(flood, "modest")
    assert abs(passed["greedy"] - passed["modest"]) < 0.15 * passed["greedy"]


async def test_what_is_urgent_does_not_wait_behind_rest():
    throttle, waits = Throttle(RATE), []

    async def flood():
        while True:
            await throttle.turn("bulk")
            throttle.spend(turn_size(RATE))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(flood)
        await trio.sleep(2)
        for _ in range(50):
            start = trio.current_time()
            await throttle.turn("small", urgent=True)
            throttle.spend(1000)
            waits.append(trio.current_time() - start)
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert max(waits) == 0


async def test_a_flood_of_urgent_ones_is_limited_too():
    throttle = Throttle(RATE)
    for _ in range(1000):
        await throttle.turn("small", urgent=True)
        throttle.spend(10_000)
    assert trio.current_time() > 8


async def test_urgent_ones_do_not_starve_the_rest():
    throttle, passed = Throttle(RATE), Counter()

    async def flood(key, urgent):
        while True:
            await throttle.turn(key, urgent=urgent)
            throttle.spend(10_000)
            passed[key] += 1

    with trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(flood, "small", True)
            nursery.start_soon(flood, "large", False)
    assert passed["large"] > 20
    assert passed["small"] > 10 * passed["large"]


async def test_who_gives_up_waiting_holds_up_nobody():
    throttle, order = Throttle(RATE), []
    throttle.spend(2 * RATE)

    async def wait(key):
        await throttle.turn(key)
        order.append(key)

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as impatient:
                for key in ("a", "b", "b"):
                    impatient.start_soon(wait, key)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(wait, "c")
                await trio.sleep_forever()
    assert order == ["c"]
    assert trio.current_time() < 3
