"""On the compute thread, passes and calls leave room for who generates, and for who asks for less."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.node.blocks.passes import PassGenerator
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.server import accounts, compute_thread, steps
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import Refusal
from tests.patience import eventually
from tests.tiny_models import NUM_BLOCKS, save_tiny
from tests.unit.computing import computing, step, terms

PART = 0.03
"""Seconds of a part of a pass."""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load_span(save_tiny("llama", tmp_path_factory.mktemp("model") / "llama"), Span(0, NUM_BLOCKS))


class Clock:
    """The thread's time, in which all computes at once; `sleep` and what the thread waits for have it pass."""

    def __init__(self) -> None:
        self._now = time.perf_counter()

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, request = Clock(), compute_thread._PassRequest

    class Jumping(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            try:
                return super().get(block and timeout is None)
            except Empty:
                clock.sleep(timeout + 1e-6 if timeout else 0.0)  # or what is left of it is too little to add
                raise

    for module in (compute_thread, steps):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(steps.CoreTime, "_waited", lambda _: 0.0)
    monkeypatch.setattr(compute_thread, "SimpleQueue", Jumping)
    # Its default is the clock that was there at the import.
    monkeypatch.setattr(compute_thread, "_PassRequest", lambda **of: request(arrived=clock.perf_counter(), **of))
    return clock


def parts(count: int, clock: Clock, log: list[str] | None = None, name: str = "pass") -> PassGenerator[str]:
    """A pass of several parts, which end with the name."""
    for part in range(count):
        if part:
            yield
        clock.sleep(PART)
        if log is not None:
            log.append(name)
    return name


@asynccontextmanager
async def held(compute: ComputeThread, peer: str | None = None) -> AsyncIterator[trio.Nursery]:
    """Until the block ends, the thread does something of `peer`; what the block's tasks ask for waits."""
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go.wait(60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(compute.call, hold, peer)
        await trio.to_thread.run_sync(begun.wait)
        yield nursery
        await trio.testing.wait_all_tasks_blocked()
        go.set()


async def test_pass_rests_equally_long_while_somebody_generates(blocks: BlockSpan, clock: Clock) -> None:
    async with computing(blocks) as compute:
        session = await compute.open(terms(60))
        await compute.step(session, step(0, 2))
        await compute.step(session, step(2))
        done = await compute.run_pass(parts(4, clock))
        assert done.value == "pass" and done.compute_seconds == pytest.approx(4 * PART)
        assert done.queue_seconds == pytest.approx(3 * PART, abs=1e-4)


async def test_passes_and_calls_wait_for_nothing_alone(blocks: BlockSpan, clock: Clock) -> None:
    """Though it was backlogged, and had much of the device."""
    async with computing(blocks) as compute:
        compute.steps.accounts.note_given_up(("far", "far"))
        compute.steps.accounts.note_other(("far", "far"), 1e6, clock.perf_counter())
        assert compute.steps.accounts.rest(clock.perf_counter()) == 0.0
        done = await compute.run_pass(parts(3, clock), peer="far")
        assert (done.value, done.queue_seconds) == ("pass", pytest.approx(0.0, abs=1e-4))
        assert await compute.call(lambda: 7, "far") == 7


@pytest.mark.parametrize("kind", ["call", "pass"])
async def test_who_is_backlogged_rests_and_is_served_later(kind: str, blocks: BlockSpan, clock: Clock) -> None:
    """Of two peers "heavy" is backlogged and has to rest, and "light" asks after it."""
    order: list[str] = []
    async with computing(blocks) as compute:
        accounts = compute.steps.accounts
        session = await compute.open(terms(10), "light")
        await compute.step(session, step(0))
        begun = clock.perf_counter()
        accounts.note_given_up(("heavy", "heavy"))
        accounts.note_other(("heavy", "heavy"), 0.3, begun)
        assert accounts.rest(begun) == 0.3
        async with held(compute) as nursery:
            for peer in ("heavy", "light"):
                if kind == "call":
                    nursery.start_soon(compute.call, partial(order.append, peer), peer)
                else:
                    nursery.start_soon(partial(compute.run_pass, parts(2, clock, order, peer), peer=peer))
                await trio.testing.wait_all_tasks_blocked()
        assert order == (["light", "heavy"] if kind == "call" else ["light", "light", "heavy", "heavy"])
        assert clock.perf_counter() - begun >= 0.3


@pytest.mark.parametrize("kind", ["call", "pass", "pass after a part"])
async def test_the_thread_rests_too(
    kind: str, blocks: BlockSpan, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again at calls and passes that have to wait when they have waited, and not again and again."""
    looks: list[bool] = []
    resting, begun = True, clock.perf_counter()

    def rests(*_: Any) -> float:
        looks.append(resting)
        return 600.0 if resting else 0.0

    async with computing(blocks) as compute:
        if kind == "pass after a part":
            monkeypatch.setattr(compute.steps, "pass_wait", rests)
        else:
            next_of = compute.steps.accounts.next_of
            monkeypatch.setattr(compute.steps.accounts, "next_of", lambda *of: None if resting else next_of(*of))
            monkeypatch.setattr(compute.steps.accounts, "rest", rests)
        async with trio.open_nursery() as nursery:
            if kind == "call":
                nursery.start_soon(compute.call, lambda: None, "heavy")
            else:
                nursery.start_soon(compute.run_pass, parts(2, clock))
            await eventually(lambda: len(looks) > 20, "the thread has looked")
            assert clock.perf_counter() - begun >= 600.0 * 10
            resting = False
            await compute.call(lambda: None)


async def test_calls_error_is_raised_where_asked(blocks: BlockSpan) -> None:
    async with computing(blocks) as compute:
        for peer in (None, "peer"):
            with pytest.raises(ZeroDivisionError):
                await compute.call(lambda: 1 // 0, peer)
        assert await compute.call(lambda: 7) == 7 and compute.depth == 0


async def test_who_had_more_by_calls_is_behind(blocks: BlockSpan, clock: Clock) -> None:
    order: list[str] = []

    def work(peer: str, seconds: float) -> None:
        clock.sleep(seconds)
        order.append(peer)

    async with computing(blocks) as compute, held(compute) as nursery:
        for peer, seconds in (("more", 0.1), ("more", 0.1), ("less", 0.001), ("less", 0.001)):
            nursery.start_soon(compute.call, partial(work, peer, seconds), peer)
            await trio.testing.wait_all_tasks_blocked()
    assert order == ["more", "less", "less", "more"]


async def test_who_has_work_whenever_turn_begins_is_backlogged(
    blocks: BlockSpan, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though none of it is left when the turn ends."""
    monkeypatch.setattr(accounts, "BACKLOG", replace(accounts.BACKLOG, lately=0.01))
    async with computing(blocks) as compute:
        compute.steps.accounts.note_decode({"light": 1}, 0.001, clock.perf_counter())
        await compute.run_pass(parts(1, clock), peer="heavy")
        assert await compute.call(lambda: compute.steps.accounts.behind(clock.perf_counter())) == {"heavy"}


async def test_peers_calls_take_turns_and_own_come_first(blocks: BlockSpan, clock: Clock) -> None:
    order: list[str] = []
    async with computing(blocks) as compute, held(compute, "one") as nursery:

        def call(name: str, peer: str | None) -> None:
            nursery.start_soon(compute.call, lambda: (clock.sleep(0.001), order.append(name)), peer)

        for number in range(3):
            call(f"one {number}", "one")
        call("two", "two")
        await trio.testing.wait_all_tasks_blocked()
        call("own", None)
        await trio.testing.wait_all_tasks_blocked()
        assert compute.depth == 6
        clock.sleep(1.0)
    assert order[:2] == ["own", "two"] and sorted(order[2:]) == ["one 0", "one 1", "one 2"]


@dataclass(frozen=True)
class Client:
    lost: trio.Event

    async def wait_lost(self) -> None:
        await self.lost.wait()


async def test_abandoned_step_leaves_the_session_as_before(blocks: BlockSpan) -> None:
    async with computing(blocks) as compute:
        session, other = [await compute.open(terms(20)) for _ in range(2)]
        for one in (session, other):
            await compute.step(one, step(0, 2))
        lost = trio.Event()
        async with held(compute) as nursery:

            async def ask() -> None:
                with pytest.raises(Refusal, match="ended"):
                    await compute.step(session, step(2, 4), None, Client(lost))

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            lost.set()
        assert session.cache.length == 2 and compute.depth == 0
        expected = await compute.step(other, step(2, 4), None, Client(trio.Event()))
        assert (await compute.step(session, step(2, 4))).payload == expected.payload
