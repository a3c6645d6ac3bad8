"""On the compute thread, passes and calls leave room for who generates, and for who asks for less."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.node.blocks.passes import PassGenerator
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.server import accounts
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import Refusal
from tests.tiny_models import NUM_BLOCKS, save_tiny
from tests.unit.computing import computing, step, terms

PART = 0.03
"""Seconds of a part of a pass."""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load_span(save_tiny("llama", tmp_path_factory.mktemp("model") / "llama"), Span(0, NUM_BLOCKS))


def parts(count: int, log: list[str] | None = None, name: str = "pass") -> PassGenerator[str]:
    """A pass of several parts, which end with the name."""
    for part in range(count):
        if part:
            yield
        time.sleep(PART)
        if log is not None:
            log.append(name)
    return name


def until(attempt: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[None]]:
    """Tries again where the machine stood still for as long as what is looked for lasts."""

    async def tried() -> None:
        for _ in range(20):
            if await attempt():
                return
        raise AssertionError("it never came to pass")

    return tried


async def test_pass_rests_equally_long_while_somebody_generates(blocks: BlockSpan) -> None:
    async with computing(blocks) as compute:
        session = await compute.open(terms(60))
        position = 0
        await compute.step(session, step(position, 2))

        async def attempt() -> bool:
            nonlocal position
            position = 2 if position == 0 else position + 1
            await compute.step(session, step(position))
            begun = time.perf_counter()
            done = await compute.run_pass(parts(4))
            assert done.value == "pass" and done.compute_seconds >= 4 * PART
            assert done.queue_seconds + done.compute_seconds <= time.perf_counter() - begun
            return done.queue_seconds >= 2.5 * PART

        await until(attempt)()


async def test_passes_and_calls_wait_for_nothing_alone(blocks: BlockSpan) -> None:
    """Though it was backlogged, and had much of the device."""
    async with computing(blocks) as compute:
        compute.steps.accounts.note_given_up(("far", "far"))
        compute.steps.accounts.note_other(("far", "far"), 1e6, time.perf_counter())
        assert compute.steps.accounts.rest(time.perf_counter()) == 0.0
        assert (await compute.run_pass(parts(3), peer="far")).value == "pass"
        assert await compute.call(lambda: 7, "far") == 7


async def beside_who_generates(compute: ComputeThread, ask: Callable[[str], Awaitable[Any]]) -> list[str]:
    """The order in which `ask` is done for two peers: "heavy", which is backlogged and has to rest for 0.3 s, and then
    "light", which asks after it."""
    order: list[str] = []
    accounts = compute.steps.accounts
    session = await compute.open(terms(10), "light")
    await compute.step(session, step(0))
    accounts.note_given_up(("heavy", "heavy"))
    accounts.note_other(("heavy", "heavy"), 0.3, time.perf_counter())
    assert accounts.rest(time.perf_counter()) <= 0.3

    async def asked(peer: str) -> None:
        await ask(peer)
        order.append(peer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked, "heavy")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(asked, "light")
    compute.close(session)
    return order


@pytest.mark.parametrize("kind", ["call", "pass"])
async def test_who_is_backlogged_rests_and_is_served_later(kind: str, blocks: BlockSpan) -> None:
    async with computing(blocks) as compute:

        async def ask(peer: str) -> None:
            if kind == "call":
                assert await compute.call(lambda: peer, peer) == peer
            else:
                assert (await compute.run_pass(parts(2, name=peer), peer=peer)).value == peer

        async def attempt() -> bool:
            return await beside_who_generates(compute, ask) == ["light", "heavy"]

        await until(attempt)()


@pytest.mark.parametrize("kind", ["call", "pass", "pass after a part"])
async def test_the_thread_rests_too(kind: str, blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks a few times at calls and passes that have to wait, and not again and again."""
    looks: list[bool] = []
    resting = True

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
                nursery.start_soon(compute.run_pass, parts(2))
            await compute.call(lambda: None)
            await trio.sleep(0.3)
            await compute.call(lambda: None)
            assert 0 < len(looks) < 10
            resting = False
            await compute.call(lambda: None)


async def test_calls_error_is_raised_where_asked(blocks: BlockSpan) -> None:
    async with computing(blocks) as compute:
        for peer in (None, "peer"):
            with pytest.raises(ZeroDivisionError):
                await compute.call(lambda: 1 // 0, peer)
        assert await compute.call(lambda: 7) == 7 and compute.depth == 0


async def test_who_had_more_by_calls_is_behind(blocks: BlockSpan) -> None:
    order: list[str] = []

    def work(peer: str, seconds: float) -> None:
        time.sleep(seconds)
        order.append(peer)

    async with computing(blocks) as compute:
        go = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.call, partial(go.wait, 60))
            for peer, seconds in (("more", 0.1), ("more", 0.1), ("less", 0.001), ("less", 0.001)):
                nursery.start_soon(compute.call, partial(work, peer, seconds), peer)
                await trio.testing.wait_all_tasks_blocked()
            go.set()
    assert order == ["more", "less", "less", "more"]


async def test_who_has_work_whenever_turn_begins_is_backlogged(
    blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though none of it is left when the turn ends."""
    monkeypatch.setattr(accounts, "BACKLOG", replace(accounts.BACKLOG, lately=0.01))
    async with computing(blocks) as compute:

        async def attempt() -> bool:
            compute.steps.accounts.note_decode({"light": 1}, 0.001, time.perf_counter())
            await compute.run_pass(parts(1), peer="heavy")
            behind: frozenset[str] = await compute.call(lambda: compute.steps.accounts.behind(time.perf_counter()))
            return behind == {"heavy"}

        await until(attempt)()


async def test_peers_calls_take_turns_and_own_come_first(blocks: BlockSpan) -> None:
    order: list[str] = []
    async with computing(blocks) as compute:
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert go.wait(60)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.call, hold, "one")
            await trio.to_thread.run_sync(held.wait)

            def call(name: str, peer: str | None) -> None:
                nursery.start_soon(compute.call, lambda: (time.sleep(0.001), order.append(name)), peer)

            for number in range(3):
                call(f"one {number}", "one")
            call("two", "two")
            await trio.testing.wait_all_tasks_blocked()
            call("own", None)
            await trio.testing.wait_all_tasks_blocked()
            assert compute.depth == 6
            go.set()
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
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert go.wait(60)

        lost = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.call, hold)
            await trio.to_thread.run_sync(held.wait)

            async def ask() -> None:
                with pytest.raises(Refusal, match="ended"):
                    await compute.step(session, step(2, 4), None, Client(lost))

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            lost.set()
            await trio.testing.wait_all_tasks_blocked()
            go.set()
        assert session.cache.length == 2 and compute.depth == 0
        expected = await compute.step(other, step(2, 4), None, Client(trio.Event()))
        assert (await compute.step(session, step(2, 4))).payload == expected.payload
