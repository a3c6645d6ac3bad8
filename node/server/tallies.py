"""What a server counts for whoever watches it: plain numbers, which the thread that does the work writes without a
lock, and another one may read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import trio

from ...protocols.ids import Span

SECONDS: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

State = Literal["loading", "online", "draining", "paused"]
STATES: Final[tuple[State, ...]] = ("loading", "online", "draining", "paused")


class ChangeSignal:
    """Says to the one task that waits that something has changed."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Returns when it was set since the last time."""
        await self._event.wait()
        self._event = trio.Event()


class Distribution:
    """How often a value was within which bounds.

    Attributes:
        bounds: upper bounds of the buckets; the last bucket has none.
        buckets: how many values were in each, and in none before it.
        total: the sum of all values.
    """

    __slots__ = ("bounds", "buckets", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(eq=False)
class StepTallies:
    """Of steps of sessions of one kind (decode steps, or prefills) that were computed; `tokens` of all rows.

    Attributes:
        queue: seconds from arrival to the turn in which a step began.
        compute: seconds on the device; decode steps that are computed together take the time of their batch each.
    """

    steps: int = 0
    tokens: int = 0
    queue: Distribution = field(default_factory=lambda: Distribution(SECONDS))
    compute: Distribution = field(default_factory=lambda: Distribution(SECONDS))

    def add(self, tokens: int, queue_seconds: float, compute_seconds: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.queue.add(queue_seconds)
        self.compute.add(compute_seconds)


@dataclass(frozen=True)
class Serving:
    """What a server serves now. Cache in tokens, `steps_per_second` as announced; `waiting`: requests for cache;
    `experts`: how many these blocks have used, each once in a pass, and how many were not in memory."""

    model: str
    num_blocks: int
    span: Span
    state: State
    dtype: str
    quantisation: str
    device: str
    sessions: int
    batch_streams: int
    cache_capacity: int
    cache_free: int
    waiting: int
    queue_depth: int
    steps_per_second: float
    experts: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ServedSession:
    """A session that is over. Times in seconds since 1970, durations in seconds.

    Attributes:
        steps, tokens: that were computed; `tokens` of one row.
        queue, compute: sums over the steps.
        refusal: why it was ended by the server, by the name of the protocol's error code; "" if it was not.
    """

    nonce: bytes
    span: Span
    begun: float
    ended: float
    batch: int
    steps: int
    tokens: int
    queue: float
    compute: float
    refusal: str = ""


@dataclass(eq=False)
class ServerTallies:
    """What a server has done since it started, whatever blocks it held.

    Attributes:
        batch_rows: rows of the decode batches.
        refusals: of sessions and steps, by the name of the protocol's error code.
        batches, batch_tokens: of training, by "forward" and "backward".
        serving: gives what is served now; None while nothing is.
        on_session: is called with each session that is over, for traces.
    """

    decode: StepTallies = field(default_factory=StepTallies)
    prefill: StepTallies = field(default_factory=StepTallies)
    batch_rows: Distribution = field(default_factory=lambda: Distribution(ROWS))
    sessions_opened: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    batch_tokens: Counter[str] = field(default_factory=Counter)
    block_changes: int = 0
    serving: Callable[[], Serving] | None = None
    on_session: Callable[[ServedSession], None] | None = None
