"""What a machine has for its peers, and what is given back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.network.kad_store import ENTRY_BYTES, MAX_VALUE, Value, ValueStore
from petalnode.node.network.transport import memory
from petalnode.node.network.transport.memory import (
    Budgets,
    Heap,
    HeapUse,
    budgets_of,
    own_budgets,
    own_heap,
    worth_trimming,
)

pytestmark = pytest.mark.virtual_time

MIB, GIB = 1 << 20, 1 << 30


def together(budgets: Budgets) -> int:
    return budgets.ungranted + budgets.unread + budgets.received + budgets.view + budgets.values


def test_laptop_and_large_server_have_what_suits_them() -> None:
    assert budgets_of(GIB) == Budgets(16 * MIB, 48 * MIB, 24 * MIB, 64 * MIB, 32 * MIB, 4 * MIB)
    assert budgets_of(4 * GIB) == Budgets(16 * MIB, 48 * MIB, 24 * MIB, 64 * MIB, 64 * MIB, 4 * MIB)
    assert budgets_of(32 * GIB) == Budgets(64 * MIB, 256 * MIB, 128 * MIB, 128 * MIB, 160 * MIB, 16 * MIB)
    assert budgets_of(512 * GIB) == Budgets(128 * MIB, GIB, GIB // 2, GIB, 160 * MIB, 16 * MIB)


@given(st.integers(1, 1 << 45), st.integers(1, 1 << 45))
def test_more_memory_is_never_less_for_peers(one: int, other: int) -> None:
    less, more = (vars(budgets_of(size)) for size in sorted((one, other)))
    assert all(less[name] <= more[name] for name in less)


@given(st.integers(4 * GIB, 1 << 45))
def test_peers_have_tenth_of_memory_at_most(size: int) -> None:
    assert together(budgets_of(size)) <= size / 10


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own_budgets.cache_clear()
    try:
        monkeypatch.setattr(memory, "group_limits", lambda: [(0, 300 * GIB), (GIB, 2 * GIB)])
        assert own_budgets() == budgets_of(2 * GIB)
    finally:
        own_budgets.cache_clear()


def test_unreturnable_memory_is_not_tried_again() -> None:
    last = HeapUse(0, 90 * MIB, 100 * MIB)
    assert worth_trimming(HeapUse(32 * MIB, 90 * MIB, 132 * MIB), last, last.resident, 15.0)
    assert not worth_trimming(HeapUse(32 * MIB - 1, 90 * MIB, 500 * MIB), last, last.resident, 15.0)
    assert not worth_trimming(HeapUse(500 * MIB, 90 * MIB, 132 * MIB - 1), last, last.resident, 15.0)


@pytest.mark.parametrize(("used", "resident"), [(94, 100), (86, 100), (90, 104), (90, 96)])
def test_memory_between_a_bursts_bytes_is_returned(used: int, resident: int) -> None:
    last = HeapUse(0, 90 * MIB, 100 * MIB)
    use = HeapUse(4 * MIB, used * MIB, resident * MIB)
    assert worth_trimming(use, last, last.resident, 30.0)
    assert not worth_trimming(use, last, last.resident, 29.9)
    assert not worth_trimming(replace(use, kept=4 * MIB - 1), last, last.resident, 30.0)
    assert not worth_trimming(HeapUse(500 * MIB, last.used + 1, last.resident + 1), last, last.resident, 1e9)


class Bursts:
    """A heap that keeps what bursts took until it is trimmed, and a part of it then."""

    def __init__(self) -> None:
        self.resident, self.kept, self.trims = 100 * MIB, 0, 0
        self.used = 50 * MIB

    def use(self) -> HeapUse:
        return HeapUse(self.kept, self.used, self.resident)

    def burst(self, size: int) -> None:
        self.resident += size
        self.kept += size

    def trim(self) -> None:
        self.trims += 1
        self.resident -= 7 * self.kept // 8
        self.kept //= 8


async def test_burst_is_given_back_within_minute_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(call):  # a thread would let the clock jump
        return call()

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    heap = Bursts()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Heap.give_back, cast(Any, heap))
        await trio.sleep(60)
        assert heap.trims == 0
        for number, size in ((1, 320), (2, 300)):
            heap.burst(size * MIB)
            await trio.sleep(60)
            assert heap.trims == number
        await trio.sleep(600)
        assert heap.trims == 2
        nursery.cancel_scope.cancel()


async def test_long_bursts_returned_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shrinks when that is freed, as far as pages between what is still there can go by themselves."""

    async def at_once(call):
        return call()

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    heap = Bursts()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Heap.give_back, cast(Any, heap))
        await trio.sleep(1)
        heap.used += 80 * MIB
        heap.resident += 80 * MIB
        heap.burst(40 * MIB)
        await trio.sleep(20)
        assert heap.trims == 1
        heap.used -= 80 * MIB
        heap.resident -= 50 * MIB
        heap.kept += 30 * MIB
        await trio.sleep(60)
        assert heap.trims == 2 and heap.resident < 110 * MIB
        await trio.sleep(600)
        assert heap.trims == 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("library", [None, SimpleNamespace()])
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    def found(name: str) -> object:
        if library is None:
            raise OSError(f"no {name}")
        return library

    monkeypatch.setattr(memory.ctypes, "CDLL", found)
    assert own_heap() is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_process_gives_back_what_it_freed() -> None:
    """One of its own: how much of a test run's heap is free, and where, depends on the tests before."""
    program = """
from petalnode.node.network.transport.memory import own_heap
heap = own_heap()
taken = [bytes(50_000) for _ in range(2000)]
last = bytes(50_000)
assert heap.use().resident > 95 << 20
del taken
kept = heap.use()
heap.trim()
assert kept.kept > 80 << 20, kept
assert heap.use().resident <= kept.resident - kept.kept // 2, (kept, heap.use())
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    heap = memory.own_heap()
    assert heap is not None and heap.use().kept >= 0 and heap.use().resident > MIB
    heap.trim()


def test_groups_are_read_where_there_are_none(tmp_path: Path) -> None:
    assert memory.group_limits(tmp_path, tmp_path / "none") == []


def test_kept_values_have_room_by_machine_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own_budgets.cache_clear()
    try:
        monkeypatch.setattr(memory, "group_limits", lambda: [(GIB, GIB)])
        kept, value = ValueStore(lambda: 0.0), Value(bytes(MAX_VALUE), 1.0)
        for number in range(600):
            kept.put(f"k{number}", value, f"11.0.{number % 200}.1")
        assert len(kept) == 4 * MIB // (MAX_VALUE + ENTRY_BYTES)
    finally:
        own_budgets.cache_clear()
