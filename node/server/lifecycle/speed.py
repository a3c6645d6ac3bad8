"""How fast this machine computes a block and sends a byte. That is measured, and kept from run to run in a small JSON
file in petalnode's cache. What the steps of sessions really take corrects it."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import time
from collections import deque
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from ....crypto.canonical import digest
from ...models.cache_dir import cache_dir, keep_json
from ...network.shares import middle
from ...swarm.cost import COST
from ..tallies import ChangeSignal

if TYPE_CHECKING:
    from ...blocks.kernels.choice import Known
    from ...blocks.span import BlockSpan
    from ..compute_thread import ComputeThread
    from ..requests.service import RequestService
    from .pausing import Pause

_FILE: Final = "speeds.json"
_DOMAIN: Final = "petalnode/speed/1"


@dataclass(frozen=True)
class SpeedPolicy:
    """How the speed of a block is measured, kept and corrected."""

    format: int = 2
    kept: int = 200
    old_seconds: float = 30 * 24 * 3600.0  # Seconds after which it is measured anew: other programs, dust in the fan
    steps_seconds: float = 0.3  # Steps go on for so long: other work on the machine must not be taken for the span's
    prefill_tokens: int = 64
    prefills: int = 2
    samples: int = 64
    enough: int = 16
    long: int = 32  # Tokens at once from which a pass says how fast a long prefill is
    notable: float = 0.1  # Smaller differences are noise, and not announced


SPEED: Final = SpeedPolicy()
_LIBRARIES: Final = ("torch", "transformers", "petalnode")
_LEAST_STEPS, _MOST_STEPS = 5, 30
_FIRST_CORRECTION, _CORRECT_INTERVAL = 5.0, 30.0
"""Seconds after which steps correct what is announced: soon at first, when nobody knows better than an earlier run."""
_RECALLED_IDLE, _FIRST_IDLE, _NEXT_IDLE = 5.0, 60.0, 600.0
"""Of a speed that an earlier run has left, perhaps beside other work, or that was measured just now; and from then on:
seconds in which nobody has used a server, after which it measures itself anew. Nobody will use one that says that it
is slow. Steps of real sessions know better what they take than the best of some that it makes by itself."""


@dataclass(frozen=True)
class BlockSpeed:
    """Seconds for one block: of a decode step of one row, and of a token of a long prefill. Seconds for a byte into
    this machine and out of it, 0 if that was not measured."""

    step_seconds: float
    token_seconds: float
    byte_seconds: float = 0.0


@dataclass(frozen=True)
class SpeedKey:
    """All that decides how fast a block is. `hardware` names the device, `threads` those that compute on a CPU."""

    model_version: bytes
    dtype: str
    quantisation: str
    hardware: str
    threads: int

    def name(self) -> str:
        libraries = " ".join(f"{library} {version(library)}" for library in _LIBRARIES)
        return digest(_DOMAIN, *astuple(self), libraries).hex()[:32]


def cpu_name() -> str:
    """What kind of processor this is, and how many cores."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} x{os.cpu_count()}"


def cpu_threads() -> int:
    """That compute on a CPU, as far as the environment says."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else os.cpu_count() or 1


def measure_speed(blocks: BlockSpan) -> BlockSpeed:
    """Runs short prefills and a few decode steps of the first blocks of each device. Call it on the thread that owns
    these. The speed is that of the average block.

    The best of several, because whatever else the machine was doing is not the span's cost.
    """
    found = [(len(part.span) / len(blocks.span), _measured(part)) for part in blocks.parts]
    steps = sum(share * speed.step_seconds for share, speed in found)
    return BlockSpeed(steps, sum(share * speed.token_seconds for share, speed in found))


def _measured(blocks: BlockSpan) -> BlockSpeed:
    """The same of one device."""
    import torch  # 2 s: whoever only asks what was measured before does without

    from ...blocks.kernels.choice import sample_of
    from ..steps import synchronise

    most = max(1, min(_MOST_STEPS, blocks.max_positions // 4))
    tokens = max(1, min(SPEED.prefill_tokens, blocks.max_positions - most - 1))
    part = sample_of(blocks)
    cache = blocks.make_cache(1, tokens + most + 1, part=part)
    try:
        hidden = torch.zeros(1, tokens, blocks.stack.width(), dtype=blocks.dtype, device=blocks.device)
        blocks.forward(hidden[:, :1], cache)  # the first call allocates and warms up
        prefills = []
        for _ in range(SPEED.prefills):
            cache.rollback(0)
            begun = time.perf_counter()
            blocks.forward(hidden, cache)
            synchronise(blocks.device)
            prefills.append(time.perf_counter() - begun)
        steps: list[float] = []
        while len(steps) < most and (len(steps) < _LEAST_STEPS or sum(steps) < SPEED.steps_seconds):
            begun = time.perf_counter()
            blocks.decode([(hidden[:, :1], cache)])
            synchronise(blocks.device)
            steps.append(time.perf_counter() - begun)
        count = len(part)
        return BlockSpeed(min(steps) / count, min(prefills) / tokens / count)
    finally:
        cache.free()


def recall_speed(key: SpeedKey, now: float | None = None) -> BlockSpeed | None:
    """What was measured with this key, if it is not too old. `now` in seconds since 1970."""
    entry = _load().get(key.name())
    if entry is None or not 0 <= (time.time() if now is None else now) - entry[0] < SPEED.old_seconds:
        return None
    return BlockSpeed(*entry[1:])


def keep_speed(key: SpeedKey, speed: BlockSpeed, now: float | None = None) -> None:
    """Keeps what was measured. That it cannot be written is no error: it is measured again then."""
    entries = _load()
    entries[key.name()] = time.time() if now is None else now, *astuple(speed)
    latest = sorted(entries.items(), key=lambda entry: entry[1])[-SPEED.kept :]
    keep_json(cache_dir() / _FILE, {"format": SPEED.format, "speeds": dict(latest)})


def recall_trial(key: SpeedKey, now: float | None = None) -> Known:
    """What an earlier run found out about the blocks of `key`, if it is not too old."""
    from ...blocks.kernels.choice import Known
    from ...blocks.kernels.library import usable_threads

    when, kinds = _trials().get(key.name(), (-math.inf, set[str]()))
    recent = 0 <= (time.time() if now is None else now) - when < SPEED.old_seconds
    return Known(kinds, True, usable_threads()) if recent else Known()


def keep_trial(key: SpeedKey, known: Known, now: float | None = None) -> None:
    """Keeps the usual outcome. Any other may come of other work on the machine, and is found out anew."""
    entries = _trials()
    if known.is_usual and entries.get(key.name(), (0.0, set[str]()))[1] != known.kinds:
        entries[key.name()] = time.time() if now is None else now, known.kinds
        latest = sorted(entries.items(), key=lambda entry: entry[1][0])[-SPEED.kept :]
        keep_json(_trial_file(), {name: [when, sorted(kinds)] for name, (when, kinds) in latest})


def _trial_file() -> Path:
    return cache_dir() / "trials.json"


def _trials() -> dict[str, tuple[float, set[str]]]:
    """When it was found out, and about which kinds of blocks, by the names of keys."""
    try:
        stored = json.loads(_trial_file().read_bytes())
        return {name: (float(when), set(map(str, kinds))) for name, (when, kinds) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _load() -> dict[str, tuple[float, ...]]:
    """When it was measured, and the fields of a `BlockSpeed`, by the names of their keys."""
    try:
        stored = json.loads((cache_dir() / _FILE).read_bytes())
        if stored["format"] != SPEED.format:
            return {}
        found = {name: tuple(map(float, entry)) for name, entry in stored["speeds"].items()}
        return {name: entry for name, entry in found.items() if _is_usable(entry)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_usable(entry: tuple[float, ...]) -> bool:
    return len(entry) == 4 and all(map(math.isfinite, entry)) and min(entry[1:3]) > 0 and entry[3] >= 0


class LiveSpeed:
    """The middle one of the last steps, once there are enough. The notes may come from another thread.

    No `Estimate`: what a server announces must not follow single steps that were quick or slow, as a mean does.

    Attributes:
        step_seconds: a decode step of one row through the whole span, as it is announced.
        token_seconds: a token of a long prefill through the whole span.
    """

    def __init__(self, step_seconds: float, token_seconds: float) -> None:
        self.step_seconds, self.token_seconds = step_seconds, token_seconds
        self._steps: deque[float] = deque(maxlen=SPEED.samples)
        self._tokens: deque[float] = deque(maxlen=SPEED.samples)
        self._used = False

    def note_decode(self, rows: int, share: float, seconds: float) -> None:
        """A decode step of `rows` rows at once through `share` of the span, on average, took `seconds`."""
        self._used = True
        if share > 0:
            self._steps.append(seconds / share / (1 + COST.load_per_waiting * (rows - 1)))

    def note_prefill(self, tokens: int, share: float, seconds: float) -> None:
        """`tokens` tokens (of all rows) at once through `share` of the span took `seconds`."""
        if share > 0 and tokens >= SPEED.long:
            self._tokens.append(seconds / share / tokens)

    def correct(self) -> bool:
        """Takes over what was noted; whether that is worth announcing."""
        return self._take(_usual(self._steps), _usual(self._tokens))

    def was_used(self) -> bool:
        """Whether there were steps since this was last asked: then a measurement would know less than they do."""
        used, self._used = self._used, False
        return used

    def measured(self, step_seconds: float, token_seconds: float) -> bool:
        """Takes over what was measured anew, in place of steps of long ago; whether that is worth announcing."""
        self._steps.clear()
        self._tokens.clear()
        return self._take(step_seconds, token_seconds)

    def _take(self, step_seconds: float | None, token_seconds: float | None) -> bool:
        step, token = _corrected(self.step_seconds, step_seconds), _corrected(self.token_seconds, token_seconds)
        if (step, token) == (self.step_seconds, self.token_seconds):
            return False
        self.step_seconds, self.token_seconds = step, token
        return True


def _usual(samples: deque[float]) -> float | None:
    """None if there are too few."""
    return middle(samples) if len(samples) >= SPEED.enough else None


def _corrected(said: float, found: float | None) -> float:
    """What was found if it is notably another, else what was said."""
    return found if found is not None and abs(found - said) >= SPEED.notable * said else said


class SpanSpeed:
    """The speed that a server announces for its span, corrected while it serves and kept for the next run.

    Attributes:
        live: the steps of sessions are noted here.
        byte_seconds: what a byte takes into this machine and out of it; 0 if that is not known, or not to be announced.
        changed: set when there is something new to announce; by whoever else knows of something, too.
    """

    def __init__(
        self, compute: ComputeThread, key: SpeedKey, speed: BlockSpeed, throughput: float | None, *, recalled: bool
    ) -> None:
        """`throughput`: what the owner wants announced, in decode steps per second; then nothing is corrected.
        `recalled`: `speed` is of an earlier run."""
        self.changed = ChangeSignal()
        self._compute = compute
        self._recalled = recalled
        self._key = key
        self._count = len(compute.blocks.span)
        self.byte_seconds = 0.0 if throughput else speed.byte_seconds
        step_seconds = 1 / throughput if throughput else speed.step_seconds * self._count
        self.live = LiveSpeed(step_seconds, speed.token_seconds * self._count)

    @classmethod
    async def measured(cls, compute: ComputeThread, key: SpeedKey, throughput: float | None) -> SpanSpeed:
        """What was measured in an earlier run, else now."""
        known = await trio.to_thread.run_sync(recall_speed, key)
        speed = known if known is not None else await compute.call(lambda: measure_speed(compute.blocks))
        if speed != known:
            await trio.to_thread.run_sync(keep_speed, key, speed)
        return cls(compute, key, speed, throughput, recalled=known is not None)

    async def keep_corrected(self) -> None:
        """Takes over what steps really take, now and then."""
        pause = _FIRST_CORRECTION
        while True:
            await trio.sleep(pause)
            pause = min(2 * pause, _CORRECT_INTERVAL)
            if self.live.correct():
                await self._keep()

    async def measure_when_idle(self, service: RequestService, pausing: Pause) -> None:
        """Measures anew when nobody has used the server for a while."""
        pause = _RECALLED_IDLE if self._recalled else _FIRST_IDLE
        while True:
            await trio.sleep(pause * random.uniform(0.8, 1.2))
            pause = _NEXT_IDLE
            if not (self.live.was_used() or service.sessions or self._compute.depth or pausing.wanted):
                speed = await self._compute.call(lambda: measure_speed(self._compute.blocks))
                if self.live.measured(speed.step_seconds * self._count, speed.token_seconds * self._count):
                    await self._keep()

    async def network_measured(self, byte_seconds: float) -> None:
        self.byte_seconds = byte_seconds
        await self._keep()

    async def _keep(self) -> None:
        step, token = self.live.step_seconds / self._count, self.live.token_seconds / self._count
        speed = BlockSpeed(step, token, self.byte_seconds)
        await trio.to_thread.run_sync(keep_speed, self._key, speed)
        self.changed.set()
