from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.node.blocks.kernels import choice
from petalnode.node.blocks.kernels.choice import Known, sample_of
from petalnode.node.blocks.kernels.library import library, usable_threads
from petalnode.node.blocks.span import Loading, load, load_span
from petalnode.node.server.lifecycle.pausing import Pause
from petalnode.node.server.lifecycle.speed import (
    BlockSpeed,
    LiveSpeed,
    SpanSpeed,
    SpeedKey,
    cpu_name,
    keep_speed,
    keep_trial,
    measure_speed,
    recall_speed,
    recall_trial,
)
from petalnode.node.swarm.cost import COST
from petalnode.node.testing.memory_network import run_autojumping
from petalnode.protocols.ids import Span
from tests.noted_blocks import NotedBlocks
from tests.noted_calls import calls_of
from tests.tiny_models import save_tiny

KEY = SpeedKey(b"v" * 32, "auto", "none", "some processor", 4)
SPEED = BlockSpeed(0.002, 0.0001, 1e-8)
DAY = 24 * 3600.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path))
    return tmp_path


def test_measurement_is_kept_for_its_machine_and_form() -> None:
    assert recall_speed(KEY) is None
    keep_speed(KEY, SPEED)
    assert recall_speed(KEY) == SPEED
    for other in (
        replace(KEY, model_version=b"w" * 32),
        replace(KEY, dtype="float32"),
        replace(KEY, quantisation="int8"),
        replace(KEY, hardware="another"),
        replace(KEY, threads=1),
    ):
        assert recall_speed(other) is None
    keep_speed(KEY, BlockSpeed(1.0, 2.0))
    assert recall_speed(KEY) == BlockSpeed(1.0, 2.0)
    assert cpu_name()


def test_what_is_old_is_measured_anew() -> None:
    keep_speed(KEY, SPEED, now=1e9)
    assert recall_speed(KEY, now=1e9 + 29 * DAY) == SPEED
    assert recall_speed(KEY, now=1e9 + 31 * DAY) is None
    assert recall_speed(KEY, now=1e9 - 1) is None  # the clock was set back


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "speeds": {}}', '{"format": 2, "speeds": {"a": [1, 2, 3]}}']
)
def test_a_damaged_file_is_as_good_as_none(cache: Path, text: str) -> None:
    (cache / "speeds.json").write_text(text)
    assert recall_speed(KEY) is None
    keep_speed(KEY, SPEED)
    assert recall_speed(KEY) == SPEED


def test_the_file_does_not_grow_for_ever(cache: Path) -> None:
    for number in range(230):
        keep_speed(replace(KEY, threads=number), SPEED, now=1e9 + number)
    assert recall_speed(replace(KEY, threads=229), now=1e9 + 230) == SPEED
    assert recall_speed(replace(KEY, threads=0), now=1e9 + 230) is None
    assert sorted(file.name for file in cache.iterdir()) == ["speeds.json"]


def test_what_killed_processes_left_is_removed(cache: Path) -> None:
    left, being_written = cache / "left.tmp", cache / "being-written.tmp"
    left.touch()
    being_written.touch()
    os.utime(left, (1e9, 1e9))
    keep_speed(KEY, SPEED)
    assert not left.exists() and being_written.exists()


def test_usual_outcome_of_trials_is_kept() -> None:
    usual = Known({"a", "b"}, True, usable_threads())
    keep_trial(KEY, usual, now=1e9)
    assert recall_trial(KEY, now=1e9 + 29 * DAY) == usual
    for key, now in ((KEY, 1e9 + 31 * DAY), (KEY, 1e9 - 1), (replace(KEY, hardware="another"), 1e9)):
        assert recall_trial(key, now=now) == Known()
    for unusual in (Known({"c"}, True, 0), Known({"c"}, False, usable_threads())):
        keep_trial(KEY, unusual, now=1e9)
        assert recall_trial(KEY, now=1e9) == usual


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": [1]}', '{"a": ["x", []]}', '{"a": [1, 2]}'])
def test_damaged_file_of_trials_is_none(cache: Path, text: str) -> None:
    (cache / "trials.json").write_text(text)
    assert recall_trial(KEY) == Known()
    keep_trial(KEY, Known({"a"}, True, usable_threads()))
    assert recall_trial(KEY).kinds == {"a"}


@pytest.mark.skipif(library() is None, reason="the kernels are not built (make setup, with a C compiler)")
def test_what_earlier_runs_found_out_is_not_tried(tmp_path: Path) -> None:
    folder, known = save_tiny("llama", tmp_path / "model"), Known()
    load(folder, Span(0, 2), Loading("cpu", "float32", "none", "native", known=known))
    keep_trial(KEY, replace(known, threads=usable_threads()))
    for key, more in ((KEY, False), (replace(KEY, hardware="another"), True)):
        with calls_of(choice._difference) as tried:
            blocks = load(folder, Span(1, 4), Loading("cpu", "float32", "none", "native", known=recall_trial(key)))
        assert blocks.supports_ragged and blocks.step is not None and bool(tried) is more


def test_large_blocks_are_measured_by_few_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of 8B took a minute of the processor for it, and as long to see that the kernels are quicker."""
    blocks = load_span(save_tiny("llama", tmp_path / "model"), Span(1, 4), dtype="float32", device="cpu")
    assert sample_of(blocks) == Span(1, 4)
    monkeypatch.setattr(choice, "_SAMPLE_BYTES", blocks.weight_bytes // 3 + 1)
    assert sample_of(blocks) == Span(1, 3)
    monkeypatch.setattr(choice, "_SAMPLE_BYTES", 1)
    noted: Any = NotedBlocks(blocks)
    assert measure_speed(noted).step_seconds > 0
    assert [(cache.first, len(cache.specs)) for cache in noted.made] == [(0, 1)]


def test_live_steps_correct_announcements_but_for_trifles() -> None:
    live = LiveSpeed(0.010, 0.001)
    for _ in range(64):
        live.note_decode(1, 1.0, 0.011)
    assert not live.correct() and live.step_seconds == 0.010
    for _ in range(64):
        live.note_decode(1, 1.0, 0.020)
    assert live.correct() and live.step_seconds == pytest.approx(0.020)
    assert not live.correct()


def test_live_prefills_correct_what_is_announced_of_them() -> None:
    live = LiveSpeed(0.010, 0.001)
    for _ in range(32):
        live.note_prefill(8, 1.0, 1.0)  # too short to say anything
        live.note_prefill(100, 0.5, 0.1)
    assert live.correct()
    assert (live.step_seconds, live.token_seconds) == (0.010, pytest.approx(0.002))


def test_new_measurement_counts_if_notably_other() -> None:
    live = LiveSpeed(0.010, 0.001)
    assert not live.measured(0.0105, 0.00105)
    assert live.measured(0.0105, 0.002) and (live.step_seconds, live.token_seconds) == (0.010, 0.002)
    assert live.measured(0.002, 0.002) and live.step_seconds == 0.002


def test_old_steps_do_not_undo_new_measurements() -> None:
    live = LiveSpeed(0.010, 0.001)
    for _ in range(64):
        live.note_decode(1, 1.0, 0.020)
    assert live.was_used() and not live.was_used()
    assert live.correct() and live.measured(0.010, 0.001)
    assert not live.correct() and live.step_seconds == 0.010


def test_few_steps_or_few_slow_ones_correct_nothing() -> None:
    live = LiveSpeed(0.010, 0.001)
    for _ in range(15):
        live.note_decode(1, 1.0, 0.5)
    assert not live.correct()
    for _ in range(40):
        live.note_decode(1, 1.0, 0.010)
    assert not live.correct()


def test_steps_count_by_their_rows_and_span() -> None:
    live = LiveSpeed(0.010, 0.001)
    for _ in range(32):
        live.note_decode(6, 1.0, 0.010 * (1 + 5 * COST.load_per_waiting))
        live.note_decode(1, 0.25, 0.0025)
        live.note_decode(1, 0.0, 1.0)
    assert not live.correct()


# --- when


class Machine:
    """Stands for the thread that computes a span of two blocks: what it is asked to measure is `found`."""

    def __init__(self, found: BlockSpeed) -> None:
        self.blocks = SimpleNamespace(span=range(2))
        self.depth = 0
        self.found = found
        self.measured: list[float] = []

    async def call(self, measure: Callable[[], BlockSpeed]) -> BlockSpeed:
        self.measured.append(trio.current_time())
        return self.found


SLOW = BlockSpeed(0.02, 0.001, 1e-8)


def announced_after(seconds: float, *, earlier: BlockSpeed | None, steps: int = 0) -> tuple[BlockSpeed, list[float]]:
    """A block's speed as it is announced so long after the start of a server of `SPEED`, and when that was measured."""
    machine: Any = Machine(SPEED)
    idle: Any = SimpleNamespace(sessions=0)
    if earlier is not None:
        keep_speed(KEY, earlier)

    async def serve() -> SpanSpeed:
        speed = await SpanSpeed.measured(machine, KEY, None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(speed.keep_corrected)
            nursery.start_soon(speed.measure_when_idle, idle, Pause())
            for _ in range(steps):
                speed.live.note_decode(1, 1.0, 2 * SPEED.step_seconds)
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        return speed

    live = run_autojumping(serve).live
    return BlockSpeed(live.step_seconds / 2, live.token_seconds / 2, 1e-8), machine.measured


def test_earlier_speed_is_announced_and_remeasured() -> None:
    assert announced_after(1, earlier=SLOW) == (SLOW, [])
    found, measured = announced_after(10, earlier=SLOW)
    assert found == SPEED and len(measured) == 1
    assert recall_speed(KEY) == SPEED


def test_fresh_speed_is_not_measured_again() -> None:
    found, measured = announced_after(10, earlier=None)
    assert found == SPEED and len(measured) == 1


def test_steps_correct_speed_of_earlier_run_within_seconds() -> None:
    found, measured = announced_after(10, earlier=SLOW, steps=16)
    assert found == replace(SLOW, step_seconds=SPEED.step_seconds) and not measured
