"""What a request costs on a server and between two, and what blocks held by several servers yield.

The one cost model of routes (client), placement (server) and plans for a fleet. Times in seconds, arrays over servers.
Servers announce what they like, so every time is bounded here. A liar can make itself attractive, but no sum of such
times breaks anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...protocols.framing import wire_nbytes

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class CostAssumptions:
    """What the cost of a route assumes where nothing is measured, and bounds of what servers announce."""

    max_seconds: float = 600.0  # No single time is taken for longer (NaN neither), nor for less than zero
    min_block_seconds: float = 1e-5  # No server is believed to compute a block in less
    max_queue_depth: int = 1000
    load_per_waiting: float = 0.2
    """Each waiting step makes a step so much longer: measured 0.1 to 0.24 with 3 to 15 others, run as one ragged
    batch."""
    handling_seconds: float = 0.001
    """What a step takes at each server beside computing and the round trip: hashes, a receipt, the way between threads.
    Measured 0.8 to 1.3 ms."""
    auto_error: float = 1e-3
    """The largest relative rounding error of a token's hidden states for which `auto` takes a codec: float16's, unless
    values are too large or too small for it."""
    least_gain: float = 0.1
    """Part of a request's time that a codec has to save, of a decode step or of a prompt of `prompt_tokens`."""
    prompt_tokens: int = 256
    chunk_seconds: float = 0.003
    """What a step of a prompt takes at each server beside computing and the way, and the client for each server: as
    `handling_seconds`, with more bytes to hash, encrypt and copy."""
    used_seconds: float = 30.0  # by which a server of one chain of a batch is dearer for the next one
    behind: float = 20.0
    """Times the best chain's time for which a chain is left out: its micro-batch would hold up all the others."""


COST: Final = CostAssumptions()


@dataclass(frozen=True)
class EstimateRule:
    """How observations become an estimate.

    Attributes:
        newest: weight of the newest one. With a fifth, ten answers are nine tenths of what is known. So a server that
            became slow is known to be so.
        most: times the estimate for which one observation counts at most. A server that stood still for a moment does
            not make the next silence longer by the same.
        least: seconds that always count in full: the noise of a busy machine is as long.
    """

    newest: float = 0.2
    most: float = 4.0
    least: float = 0.01


@dataclass
class Estimate:
    """What something takes or brings, mostly in seconds, by what was seen: a mean and a mean deviation that forget, as
    the timer of RFC 6298, section 2, has them.

    Attributes:
        value: the mean; 0 before anything was seen.
        deviation: the mean distance from it.
        count: observations so far.
    """

    rule: EstimateRule = field(default_factory=EstimateRule)
    value: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def note(self, seen: float) -> float:
        """Learns from an observation; returns the mean then."""
        self.count += 1
        if self.count == 1:
            self.value, self.deviation = seen, seen / 2
            return seen
        rule = self.rule
        seen = min(seen, max(rule.most * self.value, rule.least))
        self.deviation += 2 * rule.newest * (abs(seen - self.value) - self.deviation)
        self.value += rule.newest * (seen - self.value)
        return self.value


class LineEstimate:
    """What something takes by its size, in seconds: a straight line by least squares. Old observations count less, and
    one for no more than `most` times what was expected."""

    def __init__(self, kept: float = 0.97, most: float = 4.0) -> None:
        """`kept`: what an observation counts after the next one, of what it counted before."""
        self._kept, self._most = kept, most
        self._count = self._sizes = self._seconds = self._squares = self._products = 0.0

    @property
    def is_known(self) -> bool:
        return self._count > 0

    @property
    def means(self) -> tuple[float, float]:
        """Of the sizes, and of the seconds. Only after a first observation, as all that follows."""
        return self._sizes / self._count, self._seconds / self._count

    def note(self, size: int, seconds: float) -> None:
        """Something of this size took so long."""
        if self.is_known:
            mean_size, mean = self.means
            seconds = min(seconds, self._most * max(self.of(size), mean * size / mean_size))
        self._count = self._kept * self._count + 1
        self._sizes = self._kept * self._sizes + size
        self._seconds = self._kept * self._seconds + seconds
        self._squares = self._kept * self._squares + size**2
        self._products = self._kept * self._products + size * seconds

    def slope(self, unknown: float = 0.0) -> float:
        """Seconds of one more, not less than none; `unknown` as long as all had one size."""
        mean_size, mean = self.means
        spread = self._squares / self._count - mean_size**2
        known = spread > 1e-9 * mean_size**2
        return max(0.0, (self._products / self._count - mean_size * mean) / spread) if known else unknown

    def of(self, size: int) -> float:
        """Far from what was seen the line may go below zero: it is cut off there."""
        mean_size, mean = self.means
        return max(mean + self.slope() * (size - mean_size), 0.05 * mean)


CODEC_SECONDS: Final = {"none": 0.0, "float16": 0.2e-9, "bfloat16": 0.2e-9, "int8-block64": 2e-9}
"""Seconds per value that encoding and decoding again take; measured by benchmarks/wire.py on one thread, rounded up."""
_AUTO_CODECS: Final = ("float16", "bfloat16", "int8-block64")  # the most exact first


@dataclass(frozen=True)
class WireCost:
    """What requests cost at one server of a chain. Seconds: `step` and `token` are computing, of a decode step and of a
    token of a prompt. `per_byte` is beyond the round trip, None where it was never measured."""

    step: float
    token: float
    round_trip: float
    per_byte: float | None


def choose_codec(chain: Sequence[WireCost], dtype: str, values: int, errors: Mapping[str, float]) -> str:
    """The codec that pays on a chain: "none" where no bandwidth was measured, or no codec saves `COST.least_gain`.

    Args:
        values: of one token's hidden states; `dtype` is theirs.
        errors: the worst relative error that each codec makes of a token's hidden states, measured between this model's
            blocks. A codec that is not in it, or errs by more than `COST.auto_error`, is not taken.
    """
    chosen = "none"
    for codec in _AUTO_CODECS:
        if errors.get(codec, np.inf) <= COST.auto_error and _saves(chain, dtype, values, chosen, codec):
            chosen = codec
    return chosen


def _saves(chain: Sequence[WireCost], dtype: str, values: int, codec: str, instead: str) -> bool:
    """Whether `instead` saves `COST.least_gain` of a decode step or of a prompt."""
    for tokens in (1, COST.prompt_tokens):
        before, after = (_chain_seconds(chain, dtype, tokens * values, tokens, one) for one in (codec, instead))
        if after < (1 - COST.least_gain) * before:
            return True
    return False


def _chain_seconds(chain: Sequence[WireCost], dtype: str, values: int, tokens: int, codec: str) -> float:
    nbytes = wire_nbytes((values,), dtype, codec)
    computing = sum(hop.step if tokens == 1 else hop.token * tokens for hop in chain)
    way = sum(hop.round_trip + 2 * nbytes * (hop.per_byte or 0.0) for hop in chain)
    return computing + way + 2 * len(chain) * values * CODEC_SECONDS[codec]


@dataclass(frozen=True)
class StageCost(WireCost):
    """The same of a server through which a prompt passes in several steps.

    pushed: the server before it sends it its output; else the client does. in_flight: bytes of steps that it takes
    before it has answered them, 0: one step at a time. credits: the same in steps.
    """

    pushed: bool = False
    in_flight: int = 0
    credits: int = 1


CHUNK_TOKENS: Final = (32, 64, 128, 256, 512)
"""Rows times positions of the steps of a prompt. Servers compute no more than 256 between two turns of others."""


def chunk_tokens(tokens: int, token_bytes: int, chain: Sequence[StageCost]) -> int:
    """Into steps of how many tokens to cut a prompt of `tokens`, each of `token_bytes`. All of it has passed the chain
    soonest then. The smaller, the sooner all servers are at work. But each step's costs are paid more often.
    """
    return min(CHUNK_TOKENS, key=lambda size: (prefill_seconds(tokens, size, token_bytes, chain), -size))


def prefill_seconds(tokens: int, size: int, token_bytes: int, chain: Sequence[StageCost]) -> float:
    """Seconds for a prompt of `tokens` tokens in steps of `size`.

    The first step passes all servers. Each further one is there as long after it as the slowest part of the way takes:
    a server's computing, a line, the client, which handles all answers, or waiting for what may be under way.
    """
    size = min(size, tokens)
    nbytes = size * token_bytes
    works = [float(one) for one in bounded([stage.step + stage.token * size + COST.chunk_seconds for stage in chain])]
    lines = [float(one) for one in bounded([nbytes * (stage.per_byte or 0.0) for stage in chain])]
    trips = [float(one) for one in bounded([stage.round_trip for stage in chain])]
    steps, period = -(-tokens // size) - 1, max(*works, *lines, len(chain) * COST.chunk_seconds)
    first, begun, most = trips[0] / 2 + lines[0], 0.0, 1
    rest = steps * period
    for index, stage in enumerate(chain):
        if index and stage.pushed:
            first += max(trips[index - 1 : index + 1]) / 2 + max(lines[index - 1 : index + 1])
        elif index:  # the answer comes to the client, which sends it on
            back = trips[index - 1] / 2 + lines[index - 1]
            rest = max(rest, steps // most * (first + back - begun) + steps % most * period)
            begun = first + back
            first = begun + trips[index] / 2 + lines[index]
        room = max(1, min(stage.credits, stage.in_flight // nbytes))
        most = min(most, room) if index and stage.pushed else room
        first += works[index]
    first += trips[-1] / 2 + lines[-1]
    return first + max(rest, steps // most * (first - begun) + steps % most * period)


def bounded(seconds: Sequence[float] | Floats) -> Floats:
    """Times within 0 .. MAX_SECONDS; what is no number is the longest."""
    values: Floats = np.nan_to_num(np.clip(np.asarray(seconds, float), 0.0, COST.max_seconds), nan=COST.max_seconds)
    return values


def one_way(round_trips: Sequence[float] | Floats) -> Floats:
    """Half of round trips between servers; what is no number was not measured, so it is infinite."""
    values = np.asarray(round_trips, float)
    return np.where(np.isfinite(values), np.clip(values, 0.0, COST.max_seconds) / 2, np.inf)


def span_seconds(
    step_seconds: Sequence[float],
    forward_tokens_per_second: Sequence[float],
    queue_depth: Sequence[float],
    tokens: int = 1,
) -> Floats:
    """What servers compute for a request of `tokens` tokens (all rows) through their whole spans, with those that wait.

    A decode step of one token takes `step_seconds`. More tokens at once take what a measured prefill (above 0) does,
    and never less than a step.
    """
    step = bounded(step_seconds)
    speed = np.array(forward_tokens_per_second, float)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        prefill = np.where(speed > 0, tokens / speed, tokens * step)
    waiting = np.clip(np.array(queue_depth, float), 0, COST.max_queue_depth)
    return bounded(bounded(np.maximum(step, prefill)) * (1 + COST.load_per_waiting * waiting))


def block_seconds(span: Floats, blocks: Sequence[int] | Floats) -> Floats:
    """What one block of a span takes."""
    seconds: Floats = np.maximum(span / np.asarray(blocks, float), COST.min_block_seconds)
    return seconds


def transfer_seconds(tokens: int, token_bytes: int, seconds_per_byte: Sequence[float]) -> Floats:
    """What the bytes of a request take into a server and out of it, beyond the round trip."""
    return bounded(2 * tokens * token_bytes * bounded(seconds_per_byte))


def steps_per_second(step_seconds: float) -> float:
    """A server's throughput, in decode steps of its whole span; one a second where nothing was measured."""
    return 1 / max(float(bounded([step_seconds])[0]), COST.min_block_seconds) if step_seconds else 1.0


def block_throughput(starts: Ints, ends: Ints, throughputs: Floats, num_blocks: int) -> tuple[Floats, Ints]:
    """Of every block, float and int [num_blocks]: the sum of the throughputs of the servers that hold it, and how many
    they are. Server n holds the blocks starts[n] .. ends[n] - 1; rounding may leave a rest where nobody is."""
    steps, counts = np.zeros(num_blocks + 1), np.zeros(num_blocks + 1, np.intp)
    np.add.at(steps, starts, throughputs)
    np.subtract.at(steps, ends, throughputs)
    np.add.at(counts, starts, 1)
    np.subtract.at(counts, ends, 1)
    return np.cumsum(steps[:-1]), np.cumsum(counts[:-1])


def throughput_bound(capacity: Ints, block_seconds: Floats, num_blocks: int) -> float:
    """The largest z with sum over machines of min(1 / s, z capacity) >= z blocks: what no placement exceeds.

    A machine computes at most 1 / s blocks a second. More than z of any one block is of no use.
    """
    speed = np.where(capacity > 0, 1 / np.maximum(block_seconds, 1e-12), 0.0)
    low, high = 0.0, float(speed.sum()) / num_blocks
    for _ in range(100):
        middle = (low + high) / 2
        # Machines of just enough room in all are no rounding error short of it.
        if np.minimum(speed, middle * capacity).sum() >= middle * num_blocks * (1 - 1e-12):
            low = middle
        else:
            high = middle
    return low if low < high else high
