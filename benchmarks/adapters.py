"""What adapters cost a decode step: blocks of one server, sessions with and without LoRA, in one ragged batch.

    python benchmarks/adapters.py [--json] [--model smollm2] [--blocks 0:15] [--rank 8] [--rounds 30]

CPU time of one thread, fp32, 128 tokens of history in each session. The kinds take turns, and the best of the rounds
counts, since whatever else the machine does is no property of any of them. "all linear" changes every linear layer of
every block, "q, v" what is usual.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.blocks.span_adapter import SpanAdapter
from petalnode.node.models import resolve
from petalnode.protocols.ids import Span

HISTORY = 128
SESSIONS = 8
USUAL = ("q_proj", "v_proj")


def random_adapter(span: BlockSpan, rank: int, usual: bool, seed: int) -> SpanAdapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{block}.{path}.lora_{part}": 0.01 * torch.randn(shape, generator=generator)
        for block, layers in span.linears.items()
        for path, (width, out) in layers.items()
        if not usual or path.endswith(USUAL)
        for part, shape in (("A", (rank, width)), ("B", (out, rank)))
    }
    return span.make_adapter(tensors)


def measured(span: BlockSpan, kinds: dict[str, list[SpanAdapter | None]], rounds: int) -> dict[str, float]:
    """Milliseconds of a step of each kind, which is the adapters of its sessions."""
    runs: dict[str, Callable[[], None]] = {}
    for kind, adapters in kinds.items():
        hidden = torch.randn(len(adapters), 1, HISTORY + 1, span.hidden_size)
        caches = [span.make_cache(1, HISTORY + 1) for _ in adapters]
        for values, cache, adapter in zip(hidden, caches, adapters, strict=True):
            span.forward(values[:, :-1], cache, adapter)

        def run(hidden=hidden, caches=caches, adapters=adapters) -> None:  # type: ignore[no-untyped-def]
            span.decode([(values[:, -1:], cache) for values, cache in zip(hidden, caches, strict=True)], adapters)
            for cache in caches:
                cache.rollback(HISTORY)

        runs[kind] = run
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(rounds):
        for kind, run in runs.items():
            started = time.thread_time()
            run()
            best[kind] = min(best[kind], time.thread_time() - started)
    return {kind: round(1000 * seconds, 2) for kind, seconds in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--blocks", default="0:15")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    part = Span.parse(options.blocks)
    span = load_span(resolve(options.model, need=part).path, part, dtype="float32", device="cpu")
    usual = [random_adapter(span, options.rank, True, seed) for seed in range(SESSIONS)]
    every = [random_adapter(span, options.rank, False, seed) for seed in range(SESSIONS)]
    figures = {}
    for sessions in (1, SESSIONS):
        kinds: dict[str, list[SpanAdapter | None]] = {
            "no adapter": [None] * sessions,
            "one, q, v": [usual[0]] * sessions,
            "one, all linear": [every[0]] * sessions,
        }
        if sessions > 1:
            kinds["one of them has one, q, v"] = [usual[0], *[None] * (sessions - 1)]
            kinds["each its own, q, v"] = [*usual]
            kinds["each its own, all linear"] = [*every]
        figures[str(sessions)] = measured(span, kinds, options.rounds)
    if options.json:
        print(json.dumps({"model": options.model, "blocks": options.blocks, "rank": options.rank, "ms": figures}))
        return
    table = Table(title=f"{options.model} {options.blocks}, rank {options.rank}: ms per decode step")
    for column in ("sessions", "adapters", "ms", "more than none"):
        table.add_column(column)
    for sessions_text, by_kind in figures.items():
        for kind, milliseconds in by_kind.items():
            table.add_row(
                sessions_text, kind, f"{milliseconds:.2f}", f"{milliseconds / by_kind['no adapter'] - 1:+.0%}"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
