"""On the compute thread a chat's steps go before anybody's training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import trio
import trio.testing

from petalnode.node.blocks.passes import Batch, PassGenerator, SpanPasses
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.server import compute_thread
from petalnode.node.server.compute_thread import ComputeThread, PassResult
from petalnode.node.server.gathering import Gathering
from petalnode.node.server.steps import ComputeSession
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import Refusal
from tests.noted_blocks import NotedBlocks
from tests.patience import eventually
from tests.tiny_models import HIDDEN, NUM_BLOCKS, save_tiny
from tests.unit.computing import ALL, TIMEOUT, computing, step, terms


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    return load_span(save_tiny("llama", tmp_path_factory.mktemp("model") / "llama"), ALL)


class Watched:
    """A pass that notes when it pauses, and lets the trio thread do something at some of its pauses."""

    def __init__(self, log: list[str], passing: PassGenerator[Any], name: str = "pass") -> None:
        self._log = log
        self._passing = passing
        self._name = name
        self.at_pause: dict[int, Any] = {}

    def run(self) -> PassGenerator[Any]:
        pauses = 0
        try:
            while True:
                next(self._passing)
                self._log.append(f"{self._name} {pauses}")
                if pauses in self.at_pause:
                    trio.from_thread.run(self._do, self.at_pause[pauses], trio_token=self._token)
                pauses += 1
                yield
        except StopIteration as end:
            self._log.append(f"{self._name} done")
            return end.value
        except GeneratorExit:
            self._log.append(f"{self._name} given up")
            raise

    async def _do(self, what: Callable[[], object]) -> None:
        what()
        await trio.testing.wait_all_tasks_blocked()  # whatever it started waits for the compute thread by now

    def bind(self) -> Watched:
        self._token = trio.lowlevel.current_trio_token()
        return self


def backward(blocks: BlockSpan) -> PassGenerator[Any]:
    hidden, gradient = torch.randn(2, 2, 20, HIDDEN, generator=torch.Generator().manual_seed(0))
    return SpanPasses(blocks, 1 << 40).backward(Batch(ALL, hidden), gradient)


async def test_step_runs_at_next_pause_of_pass(blocks: BlockSpan) -> None:
    log: list[str] = []
    noted: Any = NotedBlocks(blocks)
    async with computing(noted) as compute:
        session = await compute.open(terms(300))
        await compute.step(session, step(0, 2))
        noted.before = lambda _, tokens: log.append(f"prefill {tokens}" if tokens > 1 else "step")
        watched = Watched(log, backward(blocks)).bind()
        async with trio.open_nursery() as nursery:

            def ask(position: int, tokens: int = 1) -> Callable[[], None]:
                return lambda: nursery.start_soon(compute.step, session, step(position, tokens))

            watched.at_pause = {1: ask(2), 4: ask(3), 6: ask(4, 280)}
            await compute.run_pass(watched.run())
    expected = []
    for pause in range(2 * NUM_BLOCKS - 1):
        expected.append(f"pass {pause}")
        expected += {1: ["step"], 4: ["step"], 6: ["prefill 256", "prefill 24"]}.get(pause, [])
    assert log == [*expected, "pass done"]


async def test_passes_run_one_after_the_other(blocks: BlockSpan) -> None:
    """Also where the second one is that of a peer who has had less."""
    log: list[str] = []
    async with computing(blocks) as compute:
        first, second = (Watched(log, backward(blocks), name).bind() for name in ("a", "b"))
        async with trio.open_nursery() as nursery:
            first.at_pause = {0: lambda: nursery.start_soon(partial(compute.run_pass, second.run(), peer="b"))}
            await compute.run_pass(first.run(), peer="a")
    assert log.index("a done") < log.index("b 0")


async def test_pass_has_its_own_result_however_late(blocks: BlockSpan) -> None:
    done: dict[str, PassResult[str]] = {}
    ended = threading.Event()

    def passing(name: str) -> PassGenerator[str]:
        yield
        if name == "second":
            ended.set()
        return name

    async with computing(blocks) as compute:

        async def run(name: str) -> None:
            done[name] = await compute.run_pass(passing(name))

        async with trio.open_nursery() as nursery:
            for name in ("first", "second"):
                nursery.start_soon(run, name)
            while not ended.is_set():
                await trio.lowlevel.checkpoint()
                ended.wait(0.01)  # this loop stands still meanwhile
    assert {name: result.value for name, result in done.items()} == {"first": "first", "second": "second"}


async def test_device_does_part_of_a_pass_before_steps(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(compute_thread, "synchronise", lambda device: log.append(f"all of {device.type} is done"))
    async with computing(blocks) as compute:
        await compute.run_pass(Watched(log, backward(blocks)).bind().run())
    assert log[:4] == ["pass 0", "all of cpu is done", "pass 1", "all of cpu is done"]


async def test_the_thread_is_gone_when_stop_returns(blocks: BlockSpan) -> None:
    compute, log = ComputeThread(blocks), list[str]()
    compute.start()

    def slow() -> None:
        time.sleep(0.1)
        log.append("done")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(compute.call, slow)
        await trio.testing.wait_all_tasks_blocked()
        await compute.stop()
        assert log == ["done"]
        nursery.cancel_scope.cancel()


async def test_second_half_of_pass_goes_before_others(blocks: BlockSpan) -> None:
    log: list[str] = []
    async with computing(blocks) as compute:
        first, second, third = (Watched(log, backward(blocks), name).bind() for name in ("a", "b", "c"))
        async with trio.open_nursery() as nursery:

            def resume() -> None:
                for waiting in (second, third):
                    nursery.start_soon(partial(compute.run_pass, waiting.run(), resumed=True))

            first.at_pause = {2: resume}
            await compute.run_pass(first.run())
    ends = [log.index(f"{each} done") for each in "abc"]
    assert ends[0] > max(ends[1:]) > 0  # "a" gave way, and went on where it was
    assert [line for line in log if line.startswith("a")] == [f"a {pause}" for pause in range(11)] + ["a done"]


async def test_unawaited_pass_ends_at_its_next_pause(blocks: BlockSpan) -> None:
    log: list[str] = []
    async with computing(blocks) as compute:
        with trio.CancelScope() as scope:
            watched = Watched(log, backward(blocks)).bind()
            watched.at_pause = {2: scope.cancel}
            await compute.run_pass(watched.run())
        await compute.call(lambda: log.append("call"))
        passed: PassResult[Any] = await compute.run_pass(backward(blocks))
        assert passed.value.hidden.shape == (2, 20, HIDDEN) and passed.compute_seconds > 0
        assert compute.depth == 0
    assert "pass done" not in log and log.count("pass given up") == 1


async def test_failing_pass_is_refused_and_the_next_runs(blocks: BlockSpan) -> None:
    def failing() -> PassGenerator[None]:
        yield
        raise RuntimeError("no such thing")

    def too_large() -> PassGenerator[None]:
        yield
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with computing(blocks) as compute:
        for passing, code in ((failing(), wire.ERROR_INTERNAL), (too_large(), wire.ERROR_BUSY)):
            with pytest.raises(Refusal) as caught:
                await compute.run_pass(passing)
            assert caught.value.code == code
        await compute.run_pass(backward(blocks))


async def test_step_of_session_is_same_beside_pass(blocks: BlockSpan) -> None:
    async def alone(compute: ComputeThread, session: ComputeSession) -> list[bytes]:
        return [(await compute.step(session, step(position))).payload for position in range(3)]

    async with computing(blocks) as compute:
        expected = await alone(compute, await compute.open(terms(10)))
        session = await compute.open(terms(10))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.run_pass, backward(blocks))
            assert await alone(compute, session) == expected


class NotedQueue(SimpleQueue[Any]):
    """Tells for how long the last look at it may wait; None: without end."""

    waits: float | None = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.waits = timeout if block else 0.0
        return super().get(block, timeout)


async def test_nothing_is_done_while_nobody_asks(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "SimpleQueue", NotedQueue)
    async with computing(blocks) as compute:
        session = await compute.open(terms(10), "peer", paid=True)
        assert (session.peer, session.paid) == ("peer", True)
        await eventually(lambda: compute._queue.waits is None, "the thread waits without end")


@dataclass(frozen=True)
class Check:
    check: Callable[[], object]


async def test_a_check_runs_while_the_blocks_compute(blocks: BlockSpan) -> None:
    checked = threading.Event()
    noted: Any = NotedBlocks(blocks)

    def wait(*_: object) -> None:
        assert checked.wait(TIMEOUT)

    async with computing(noted) as compute:
        session = await compute.open(terms(20))
        await compute.step(session, step(0, 2))
        noted.before = wait
        assert (await compute.step(session, step(2), Check(checked.set))).position == 3
        assert compute.depth == 0


async def test_check_takes_no_time_of_earlier_waiters(blocks: BlockSpan) -> None:
    checked, go = threading.Event(), threading.Event()
    async with computing(blocks) as compute:
        session = await compute.open(terms(20))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.call, partial(go.wait, TIMEOUT))
            nursery.start_soon(compute.step, session, step(0), Check(checked.set))
            await trio.testing.wait_all_tasks_blocked()
            assert not checked.is_set()
            go.set()
        assert checked.is_set()


@pytest.mark.parametrize("tokens", [1, 4])
async def test_what_check_refuses_leaves_session_as_it_was(tokens: int, blocks: BlockSpan) -> None:
    def refuse() -> None:
        raise Refusal(wire.ERROR_BAD_REQUEST, "no")

    async with computing(blocks) as compute:
        left_alone, session = [await compute.open(terms(20)) for _ in range(2)]
        for one in (left_alone, session):
            await compute.step(one, step(0, 2))
        with pytest.raises(Refusal, match="no"):
            await compute.step(session, step(2, tokens), Check(refuse))
        assert session.cache.length == 2
        expected = await compute.step(left_alone, step(2))
        assert (await compute.step(session, step(2))).payload == expected.payload


async def test_checks_refusal_precedes_an_unusable_payload(blocks: BlockSpan) -> None:
    def refuse() -> None:
        raise Refusal(wire.ERROR_BAD_REQUEST, "no")

    async with computing(blocks) as compute:
        session = await compute.open(terms(20))
        wrong = replace(step(0), payload_hash=b"x" * 32)
        with pytest.raises(Refusal, match="no"):
            await compute.step(session, wrong, Check(refuse))
        with pytest.raises(Refusal, match="pusher's receipt"):
            await compute.step(session, wrong, Check(lambda: None))


def gather(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """No batch begins before this number of steps waits."""
    monkeypatch.setattr(Gathering, "time", lambda _, waiting, *rest: 0.0 if len(waiting) >= steps else 2 * TIMEOUT)


async def test_batch_that_waits_for_a_step_begins_then(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    noted: Any = NotedBlocks(blocks, before=lambda caches, _: batches.append(len(caches)))
    async with computing(noted) as compute:
        sessions = [await compute.open(terms(20)) for _ in range(3)]
        gather(monkeypatch, 3)
        async with trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(compute.step, session, step(0))
                await compute.call(lambda: None)  # calls do not wait for the batch
    assert batches == [3]


async def test_waiting_batch_takes_no_time_from_calls(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    looks: list[int] = []

    def time(_: object, waiting: Sequence[object], *rest: object) -> float:
        looks.append(len(waiting))
        return 0.0 if len(waiting) == 2 else 2 * TIMEOUT

    monkeypatch.setattr(Gathering, "time", time)
    async with computing(blocks) as compute:
        sessions = [await compute.open(terms(20)) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.step, sessions[0], step(0))
            await eventually(lambda: looks, "the thread has looked at the step")
            await trio.sleep(0.3)
            assert looks[-1] == 1 and len(looks) < 10
            go = threading.Event()
            nursery.start_soon(compute.call, partial(go.wait, TIMEOUT))
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as calls:
                for peer in ("one", "two"):
                    calls.start_soon(compute.call, partial(done.append, peer), peer)
                await trio.testing.wait_all_tasks_blocked()
                go.set()
            assert sorted(done) == ["one", "two"]
            nursery.start_soon(compute.step, sessions[1], step(0))


async def test_closed_sessions_waiting_step_has_its_answer(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    async with computing(blocks) as compute:
        session = await compute.open(terms(20))
        gather(monkeypatch, 2)

        async def ask() -> None:
            with pytest.raises(Refusal, match="ended"):
                await compute.step(session, step(0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await compute.call(lambda: None)
            compute.close(session)
        await compute.call(lambda: None)


async def test_the_thread_ends_while_a_batch_waits(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    async with computing(blocks) as compute:
        session = await compute.open(terms(20))
        gather(monkeypatch, 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.step, session, step(0))
            await compute.call(lambda: None)
            await compute.stop()
            nursery.cancel_scope.cancel()
