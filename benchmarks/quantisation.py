"""What quantisation saves and costs on this machine: memory and start of a server, decode steps and prefill.

    python benchmarks/quantisation.py [--json] [--model smollm2] [--blocks 0:30] [--dtype auto] [--rounds 5]

Servers are real processes with one compute thread. The first start of each quantises the blocks, the second finds
them on the disk. Speeds are of the blocks alone, in this process with one thread, in turns, so that all see the same
noise: processor time, the best of the rounds, as a ratio to unquantised blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from local_swarm import local_swarm
from plain import quiet_torch
from rich.console import Console
from rich.table import Table

from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import resolve
from petalnode.protocols.ids import Span

KINDS = ("none", "int8", "nf4")
STEPS = 8
PREFILL = 256
ROWS = 8


def start(folder: Path, span: Span, quantisation: str, dtype: str) -> dict[str, float]:
    """Seconds and processor seconds until a server is ready, its resident memory in MiB, of that what is mapped from
    files.
    """
    with local_swarm(str(folder), [(span.start, span.end)], "--quant", quantisation, "--dtype", dtype) as (server,):
        memory = server.memory()
        used = psutil.Process(server.process.pid).cpu_times()
        return {
            "ready_seconds": server.ready_seconds,
            "ready_processor_seconds": used.user + used.system,
            "rss_mib": memory["rss"] / 2**20,
            "rss_file_mib": memory["file"] / 2**20,
        }


@torch.inference_mode()
def seconds(blocks: BlockSpan) -> dict[str, float]:
    """Of one decode step of one row, of one of `ROWS` rows, and of a prefill of `PREFILL` tokens."""
    found = {}
    for name, rows, tokens in (("decode", 1, 1), ("decode_8_rows", ROWS, 1), ("prefill", 1, PREFILL)):
        cache = blocks.make_cache(rows, 2 * PREFILL)
        hidden = torch.randn(rows, max(tokens, 32), blocks.hidden_size, generator=torch.Generator().manual_seed(0))
        if tokens == 1:
            blocks.forward(hidden, cache)
        times = []
        for _ in range(STEPS if tokens == 1 else 1):
            begun = time.thread_time()
            if tokens == 1:
                blocks.decode([(hidden[:, :1], cache)])
            else:
                blocks.forward(hidden, cache)
            times.append(time.thread_time() - begun)
        cache.free()
        found[name] = min(times)
    return found


def run(folder: Path, span: Span, dtype: str, rounds: int) -> list[dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {kind: {"quantisation": kind} for kind in KINDS}
    for kind in KINDS:
        for which in ("first_start", "second_start"):
            print(f"a server of {kind} blocks, {which.replace('_', ' ')} ...", file=sys.stderr)
            results[kind][which] = start(folder, span, kind, dtype)
    blocks = {kind: load_span(folder, span, dtype=dtype, quantisation=kind) for kind in KINDS}
    best: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            for name, value in seconds(blocks[kind]).items():
                best[kind][name] = min(value, best[kind].get(name, value))
    for kind in KINDS:
        results[kind]["seconds"] = best[kind]
        results[kind]["speed_ratio"] = {name: best["none"][name] / value for name, value in best[kind].items()}
    return list(results.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--blocks", default="0:30")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    quiet_torch()
    folder = resolve(options.model, need="all").path
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as cache:
        os.environ["PETALNODE_CACHE"] = cache  # so that there is a first start
        results = run(folder, Span.parse(options.blocks), options.dtype, options.rounds)
    if options.json:
        print(json.dumps({"quantisation": {"model": options.model, "blocks": options.blocks, "results": results}}))
    else:
        show(results)


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="quantised blocks")
    columns = ("blocks", "first start", "second", "of processor", "RSS MiB", "mapped", "decode ms", "ratio")
    for column in (*columns, "8 rows", "prefill"):
        table.add_column(column, justify="right")
    for result in results:
        ratios = result["speed_ratio"]
        table.add_row(
            result["quantisation"],
            f"{result['first_start']['ready_seconds']:.1f} s",
            f"{result['second_start']['ready_seconds']:.1f} s",
            " / ".join(f"{result[which]['ready_processor_seconds']:.1f}" for which in ("first_start", "second_start")),
            f"{result['second_start']['rss_mib']:.0f}",
            f"{result['second_start']['rss_file_mib']:.0f}",
            f"{1000 * result['seconds']['decode']:.1f}",
            *(f"{ratios[name]:.2f}" for name in ("decode", "decode_8_rows", "prefill")),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
