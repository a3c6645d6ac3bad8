"""What a span computed to the bit (`serve --exact`) costs beside today's default, in pairs that take turns.

    python benchmarks/exact.py [--json] [MODEL ...] [--pairs 20] [--threads N]

MODEL: folder, .gguf file or alias; by default smollm2. Both are loaded on a CPU as `serve` does, with weights as the
checkpoint has them. Steps of one and of eight sessions that hold 128 tokens, and a prompt of 256; and what a validator
takes to recompute a session of 32 tokens and 96 steps, the weights from the disk. `ratio` is the median of the exact
one's time over the other's in the same pair, with the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from cpu import HELD, PROMPT, fill, timed, use_threads

from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import resolve
from petalnode.node.models.quantisation import Numerics
from petalnode.node.verification.recomputation import Recomputation, RecordedStep, SessionQuestion
from petalnode.protocols.ids import Span

FIRST: Final = 32
CHECK: Final = f"check of {HELD}"


def works(blocks: BlockSpan) -> dict[str, Callable[[], object]]:
    """What is timed, each as often as one likes."""
    hidden = torch.randn(1, PROMPT, blocks.hidden_size, generator=torch.Generator().manual_seed(0))
    prompted = blocks.make_cache(1, PROMPT)
    found: dict[str, Callable[[], object]] = {}
    for count in (1, 8):
        caches = [blocks.make_cache(1, HELD + 1) for _ in range(count)]
        for cache in caches:
            fill(cache, HELD)
        found[f"{count} session{'s' * (count > 1)}"] = lambda caches=caches: _step(blocks, hidden, caches)
    found[f"prompt of {PROMPT}"] = lambda: (blocks.forward(hidden, prompted), prompted.rollback(0))
    return found


def check(folder: Path, blocks: BlockSpan) -> Callable[[], object]:
    """What a validator computes of a session that such a server has had."""
    hidden = torch.randn(1, HELD, blocks.hidden_size, generator=torch.Generator().manual_seed(0))
    parts = torch.split(hidden, [FIRST, *[1] * (HELD - FIRST)], dim=1)
    steps = [RecordedStep(position, part) for position, part in zip((0, *range(FIRST, HELD)), parts, strict=True)]
    truth = Recomputation(folder, str(blocks.dtype).removeprefix("torch."), blocks.quantisation)
    return lambda: truth.answer([SessionQuestion(blocks.span, tuple(steps))])


def _step(blocks: BlockSpan, hidden: torch.Tensor, caches: list[Any]) -> None:
    blocks.decode([(hidden[:, index : index + 1], cache) for index, cache in enumerate(caches)])
    for cache in caches:
        cache.rollback(HELD)


@torch.inference_mode()
def compare(name: str, pairs: int, threads: int) -> dict[str, Any]:
    folder = resolve(name)
    kinds = {"default": "none", "exact": str(Numerics(exact=True))}
    spans = {
        kind: load_span(
            folder.path,
            Span(0, folder.num_blocks),
            device="cpu",
            dtype="float32" if kind == "exact" else "auto",
            quantisation=quantisation,
            kernels="native" if kind == "exact" else "auto",
        )
        for kind, quantisation in kinds.items()
    }
    for blocks in spans.values():
        use_threads(blocks, threads)
    timings = {kind: works(blocks) for kind, blocks in spans.items()}
    for kind, blocks in spans.items():
        timings[kind][CHECK] = check(folder.path, blocks)
    found: dict[str, Any] = {"model": folder.name, "dtype": str(spans["default"].dtype), "threads": threads}
    for what in timings["default"]:
        count = {"1 session": 3 * pairs, CHECK: min(4, pairs)}.get(what, pairs)
        for kind in kinds:
            timings[kind][what]()
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(count):
            for kind in sorted(kinds, reverse=bool(number % 2)):
                taken[kind].append(timed(timings[kind][what])[0])
        ratios = [exact / usual for exact, usual in zip(taken["exact"], taken["default"], strict=True)]
        found[what] = {
            **{kind: round(min(times), 2) for kind, times in taken.items()},
            "ratio": [round(part, 3) for part in statistics.quantiles(ratios, n=4)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in options.models:
        found = compare(name, options.pairs, options.threads)
        if options.json:
            print(json.dumps(found | {"load": os.getloadavg()[0]}))
            continue
        print(f"{found['model']}, {found['dtype']}, {found['threads']} threads, load {os.getloadavg()[0]:.1f}")
        for what, row in list(found.items())[3:]:
            quartiles = "{1} ({0} to {2})".format(*row["ratio"])
            print(f"  {what:14} default {row['default']} ms, exact {row['exact']} ms, ratio {quartiles}")


if __name__ == "__main__":
    main()
