"""What the forms of the attention cache cost and save: decode steps of long sessions, memory, error, perplexity.

    python benchmarks/caches.py [--json] [--model smollm2] [--held 128 1024 4096] [--rows 1] [--threads 1] [--rounds 3]
        [--kernels native] [--perplexity 2048]

A step of all blocks in float32, weights as the model has them, in sessions that hold a number of tokens. The forms take
turns; times are the best, of the wall clock and (in brackets) of the processor. `error` is the relative rms difference
of hidden states from float32 keys and values. Perplexity is that of English Wikipedia (see perplexity.py), token by
token in rows of 16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import perplexity
import torch
from cpu import Way, answer, fill, perplexity_by_steps, timed, use_threads
from plain import quiet_torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import resolve
from petalnode.node.models.quantisation import Numerics
from petalnode.protocols.ids import Span

FORMS = ("float32", "bfloat16", "int8")


@torch.inference_mode()
def measure(forms: dict[str, BlockSpan], options: argparse.Namespace) -> dict[str, Way]:
    ways = {form: Way(form, options.threads) for form in forms}
    for held in options.held:
        sessions: dict[str, list[SpanCache]] = {}
        for form, blocks in forms.items():
            sessions[form] = [blocks.make_cache(1, held + 1) for _ in range(options.rows)]
            for cache in sessions[form]:
                fill(cache, held)
        hidden = torch.randn(1, 1, forms[FORMS[0]].hidden_size, generator=torch.Generator().manual_seed(0))
        for number in range(options.rounds):
            print(f"{held} tokens: round {number + 1} of {options.rounds}", file=sys.stderr)
            for form, blocks in forms.items():
                use_threads(blocks, options.threads)
                steps = [(hidden, cache) for cache in sessions[form]]
                for _ in range(4):
                    ways[form].note(str(held), *timed(lambda b=blocks, s=steps: b.decode(s)))  # type: ignore[misc]
                    for cache in sessions[form]:
                        cache.rollback(held)
    return ways


def run(folder: Path, span: Span, options: argparse.Namespace) -> list[dict[str, Any]]:
    forms = {}
    for form in FORMS:
        print(f"loading with {form} keys and values", file=sys.stderr)
        numerics = str(Numerics(cache=form))
        forms[form] = load_span(
            folder, span, dtype="float32", device="cpu", quantisation=numerics, kernels=options.kernels
        )
    found = []
    truth = answer(forms[FORMS[0]])
    texts = []
    if options.perplexity:
        client = load_client(folder, device="cpu", dtype="float32")
        texts = perplexity.windows(folder, perplexity.wikipedia(), options.perplexity, options.perplexity // 16)
    for form, way in measure(forms, options).items():
        error = float((answer(forms[form]) - truth).norm() / truth.norm())
        row = {**way.as_json(), "error": error, "bytes_per_token": forms[form].cache_bytes_per_token}
        if texts:
            row["perplexity"] = perplexity_by_steps(client, forms[form], texts)
        found.append(row)
    return found


def show(rows: Sequence[dict[str, Any]], held: Sequence[int]) -> None:
    print(f"| keys and values | KiB a token | {' | '.join(f'{tokens} held' for tokens in held)} | error | perplexity |")
    print(f"|{'---|' * (len(held) + 4)}")
    for row in rows:
        times = [
            f"{row['milliseconds'][str(tokens)]:.3g} ({row['processor_milliseconds'][str(tokens)]:.3g})"
            for tokens in held
        ]
        rest = [f"{row['error']:.1e}", f"{row['perplexity']:.5g}" if "perplexity" in row else ""]
        cells = [row["way"], f"{row['bytes_per_token'] / 1024:.3g}", *times, *rest]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--held", type=int, nargs="*", default=[128, 1024, 4096], help="tokens of a session")
    parser.add_argument("--rows", type=int, default=1, help="sessions in a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", default="native", choices=["native", "torch"])
    parser.add_argument("--perplexity", type=int, default=2048, help="tokens of text, 0: none")
    options = parser.parse_args()
    quiet_torch(options.threads)
    model = resolve(options.model, need="all")
    rows = run(model.path, Span(0, model.num_blocks), options)
    if options.json:
        print(json.dumps({"caches": {"model": model.name, "rows": options.rows, "forms": rows}}))
    else:
        show(rows, options.held)


if __name__ == "__main__":
    main()
