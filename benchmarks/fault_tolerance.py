"""Generation speed while stages fail at random: table 1 and figure 3 of Petals (NeurIPS 2023, section 4.1).

    python benchmarks/fault_tolerance.py [--json] [--tokens 128 512 1024] [--rates 0 1e-4 1e-3 1e-2 5e-2]

Four stages in real server processes on loopback, each stage on two servers, one compute thread each; one sequence, one
token a step, embeddings and logits left out, as in the paper. A failure rate p means that any set of activations that
is sent to a stage fails with probability p: the answer is lost, and with it that stage's session and cache. The
failures are made on the client's streams, between the product and the network: replayed activations fail as well.

    ours         the sessions of this project
    cache-less   the whole prefix is computed again for every token; timed at some lengths, summed over all
    restart      caches, and generation begins anew after a failure. Stopped at ten times our time; not even begun
                 where the failures drawn beforehand ask for more steps than fit into that

Speeds are tokens per second; shares are of the same algorithm's speed at the first rate given. Ours are of eight
sequences of 128 tokens, two of 512 or one of 1024; those of all rates run side by side, a step of each in turn, so that
all see the same noise. A `recovery` is what a step with a failure takes longer than the median one. The outputs of all
rates are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from chain import h512, spans_of
from local_swarm import local_swarm
from plain import quiet_torch
from rich.console import Console
from rich.table import Table

from petalnode import AutoDistributedModelForCausalLM
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError, StreamClosed
from petalnode.protocols.inference import INFERENCE

STAGES = 4
HIDDEN = 512
TOKENS_PER_FIGURE = 1024
STOPPED_AT = 10
LENGTHS_TIMED = 12
TOLERANCE = 1e-3


class Failures:
    """Makes stages fail, with probability `rate` at every answer of one."""

    def __init__(self, swarm: Any, seed: int) -> None:
        self.rate = 0.0
        self.count = 0
        self._random = random.Random(seed)
        connect = swarm.new_stream

        async def new_stream(peer_id: str, protocol: Any, **options: Any) -> Any:
            stream = await connect(peer_id, protocol, **options)
            return _FailingStream(stream, self) if protocol == INFERENCE else stream

        swarm.new_stream = new_stream

    def due(self) -> bool:
        failed = self._random.random() < self.rate
        self.count += failed
        return failed


class _FailingStream:
    def __init__(self, stream: Any, failures: Failures) -> None:
        self._stream = stream
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self, **options: Any) -> tuple[wire.InferenceFrame, list[bytes]]:
        frame, payloads = await self._stream.receive(**options)
        if frame.WhichOneof("body") == "reply" and self._failures.due():
            try:
                # A stream that just ends may be taken up again; a session that was closed is lost.
                await self._stream.send(wire.InferenceFrame(close=wire.Close()), timeout=1.0)
                await self._stream.close()
            except PeerError:
                pass
            raise StreamClosed("the benchmark reset this stage", self._stream.peer_id)
        return frame, payloads


@dataclass
class Figure:
    """One cell of the table. `tokens_per_second` is None where the algorithm did not finish."""

    algorithm: str
    tokens: int
    rate: float
    tokens_per_second: float | None
    share: float | None = None
    failures: int = 0
    recovery_ms: float | None = None


class Benchmark:
    def __init__(self, model: Any, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._failures = Failures(model._runtime.value.swarm, seed)
        self._hidden = torch.randn(1, 2048, HIDDEN, generator=torch.Generator().manual_seed(seed))

    def ours(self, tokens: int, rates: Sequence[float]) -> list[Figure]:
        steps: dict[float, list[float]] = {rate: [] for rate in rates}
        disturbed: dict[float, list[float]] = {rate: [] for rate in rates}
        failures = dict.fromkeys(rates, 0)
        for _ in range(max(1, TOKENS_PER_FIGURE // tokens)):
            outputs: dict[float, list[torch.Tensor]] = {rate: [] for rate in rates}
            with ExitStack() as stack:
                sessions = {
                    rate: stack.enter_context(self._model.inference_session(max_length=tokens)) for rate in rates
                }
                for position, rate in itertools.product(range(tokens), rates):
                    self._failures.rate, self._failures.count = rate, 0
                    begun = time.perf_counter()
                    outputs[rate].append(sessions[rate].step(self._at(position)))
                    seconds = time.perf_counter() - begun
                    self._failures.rate = 0.0
                    steps[rate].append(seconds)
                    failures[rate] += self._failures.count
                    if self._failures.count:
                        disturbed[rate].append(seconds)
            expected = torch.cat(outputs[rates[0]], dim=1)
            for rate in rates[1:]:
                difference = (torch.cat(outputs[rate], dim=1) - expected).abs().max()
                assert difference <= TOLERANCE, "recovery has changed what comes out"
        figures = []
        for rate in rates:
            figure = Figure("ours", tokens, rate, len(steps[rate]) / sum(steps[rate]), failures=failures[rate])
            if disturbed[rate]:
                usual = statistics.median(steps[rate]) * len(disturbed[rate])
                figure.recovery_ms = 1000 * (sum(disturbed[rate]) - usual) / failures[rate]
            figures.append(figure)
        return figures

    def cache_less(self, tokens: int, rate: float) -> Figure:
        lengths = sorted({1 + round(index * (tokens - 1) / (LENGTHS_TIMED - 1)) for index in range(LENGTHS_TIMED)})
        self._failures.rate, self._failures.count = rate, 0
        times = []
        for length in lengths:
            begun = time.perf_counter()
            self._model.remote_blocks(self._hidden[:, :length])
            times.append(time.perf_counter() - begun)
        self._failures.rate = 0.0
        seconds = times[0]
        for (start, end), (first, last) in zip(itertools.pairwise(lengths), itertools.pairwise(times), strict=True):
            seconds += (end - start) * (first + last) / 2
        return Figure("cache-less", tokens, rate, tokens / seconds, failures=self._failures.count)

    def restart(self, tokens: int, rate: float, step_seconds: float, limit: float) -> Figure:
        attempts = attempts_of(tokens, rate, random.Random(self._seed), most=round(limit / step_seconds))
        figure = Figure("restart", tokens, rate, None, failures=len(attempts) - 1)
        if attempts[-1] < tokens:
            return figure
        begun = time.perf_counter()
        for steps in attempts:
            with self._model.inference_session(max_length=tokens) as session:
                for position in range(steps):
                    session.step(self._at(position))
            if time.perf_counter() - begun > limit:
                return figure
        figure.tokens_per_second = tokens / (time.perf_counter() - begun)
        return figure

    def _at(self, position: int) -> torch.Tensor:
        return self._hidden[:, position : position + 1]


def attempts_of(tokens: int, rate: float, rng: random.Random, most: int) -> list[int]:
    """Steps of each attempt until one has all `tokens`, or all have taken more than `most` steps."""
    attempts = []
    while sum(attempts) <= most:
        steps = 0
        while steps < tokens and all(rng.random() >= rate for _ in range(STAGES)):
            steps += 1
        # The step that fails is one too, up to the stage that does.
        attempts.append(steps if steps == tokens else steps + 1)
        if steps == tokens:
            return attempts
    return [*attempts, 0]


def run(
    folder: Path, lengths: Sequence[int], rates: Sequence[float], algorithms: Sequence[str], seed: int
) -> list[Figure]:
    figures: list[Figure] = []

    def add(figure: Figure) -> Figure:
        first = next(
            (done for done in figures if (done.algorithm, done.tokens) == (figure.algorithm, figure.tokens)), figure
        )
        if figure.tokens_per_second is not None and first.tokens_per_second is not None:
            figure.share = figure.tokens_per_second / first.tokens_per_second
        figures.append(figure)
        speed = "did not finish" if figure.tokens_per_second is None else f"{figure.tokens_per_second:.2f} tokens/s"
        share = "" if figure.share is None else f", {figure.share:.0%}"
        recovery = "" if figure.recovery_ms is None else f", {figure.recovery_ms:.0f} ms each"
        print(
            f"{figure.algorithm}, {figure.tokens} tokens, rate {figure.rate:g}: {speed}{share}, "
            f"{figure.failures} failures{recovery}",
            file=sys.stderr,
        )
        return figure

    with local_swarm(str(folder), spans_of(8, STAGES) * 2) as servers:
        addrs = servers[0].ready["addrs"]
        with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=addrs) as model:
            benchmark = Benchmark(model, seed)
            benchmark.ours(16, [0.0])
            for tokens in lengths:
                for ours in benchmark.ours(tokens, rates):
                    add(ours)
                    assert ours.tokens_per_second is not None
                    if "restart" in algorithms:
                        free = next(
                            figure for figure in figures if (figure.algorithm, figure.tokens) == ("ours", tokens)
                        )
                        assert free.tokens_per_second is not None
                        limit = STOPPED_AT * tokens / ours.tokens_per_second
                        add(benchmark.restart(tokens, ours.rate, 1 / free.tokens_per_second, limit))
                    if "cache-less" in algorithms:
                        add(benchmark.cache_less(tokens, ours.rate))
    return figures


def show(figures: Sequence[Figure], lengths: Sequence[int], rates: Sequence[float]) -> None:
    for tokens in lengths:
        table = Table(title=f"{tokens} tokens: tokens/s (share of the same without failures)")
        table.add_column("failure rate")
        for rate in rates:
            table.add_column(f"{rate:g}", justify="right")
        for algorithm in ("restart", "cache-less", "ours"):
            cells = [figure for figure in figures if (figure.algorithm, figure.tokens) == (algorithm, tokens)]
            if cells:
                table.add_row(
                    algorithm,
                    *(
                        "-"
                        if cell.tokens_per_second is None
                        else f"{cell.tokens_per_second:.2f} ({cell.share or 0:.0%})"
                        for cell in cells
                    ),
                )
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 1024])
    parser.add_argument("--rates", nargs="+", type=float, default=[0, 1e-4, 1e-3, 1e-2, 5e-2])
    parser.add_argument(
        "--algorithms", nargs="+", choices=["ours", "cache-less", "restart"], default=["ours", "cache-less", "restart"]
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    quiet_torch()
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        folder = h512(Path(scratch) / "h512")
        figures = run(folder, options.tokens, options.rates, options.algorithms, options.seed)
    if options.json:
        print(json.dumps({"fault_tolerance": [asdict(figure) for figure in figures]}))
    else:
        show(figures, options.tokens, options.rates)


if __name__ == "__main__":
    main()
