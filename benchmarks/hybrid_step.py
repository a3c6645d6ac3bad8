"""What of a decode step of one block with a gated delta rule is not its matrices: what a compiled step could save.

    python benchmarks/hybrid_step.py [--shapes 0.8B 4B] [--quant none int8]

Blocks of Qwen3.5's shapes with random weights in float32, one thread. A step through `BlockSpan.decode` and the block's
matrices alone take turns; medians of the processor time of this thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from petalnode.node.blocks.quantisation.matrix import QuantisedLinear
from petalnode.node.blocks.span import load_span
from petalnode.protocols.ids import Span

SHAPES: Final = {"0.8B": (1024, 3584, 8, 2, 16), "4B": (2560, 9216, 16, 4, 32)}
"""Hidden size, width of the MLP, heads, heads of keys and values, heads of the delta rule's values."""
STEPS: Final = 60


def save(shape: str, folder: Path) -> None:
    hidden, width, heads, kv_heads, delta_heads = SHAPES[shape]
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_attention_heads": heads, "head_dim": 256}
    delta = {"linear_num_value_heads": delta_heads, "linear_num_key_heads": 16, "layer_types": ["linear_attention"]}
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=128, num_hidden_layers=1, num_key_value_heads=kv_heads, **sizes, **delta
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measured(folder: Path, quant: str) -> tuple[float, float]:
    """Milliseconds of a step, and of its matrices."""
    kernels = "auto" if quant == "none" else "native"
    span = load_span(folder, Span(0, 1), dtype="float32", quantisation=quant, kernels=kernels)
    cache = span.make_cache(1, 600)
    hidden = span.stack.width()
    span.forward(torch.randn(1, 64, hidden), cache)
    matrices = [m for m in span.stack.blocks[0].modules() if isinstance(m, (torch.nn.Linear, QuantisedLinear))]
    inputs = [torch.randn(1, 1, matrix.in_features) for matrix in matrices]
    times = []
    with torch.inference_mode():
        for _ in range(STEPS):
            token = torch.randn(1, 1, hidden)
            begun = time.thread_time()
            span.decode([(token, cache)])
            between = time.thread_time()
            for matrix, given in zip(matrices, inputs, strict=True):
                matrix(given)
            times.append((between - begun, time.thread_time() - between))
    step, alone = (1000 * statistics.median(column) for column in zip(*times[10:], strict=True))
    return step, alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--quant", nargs="+", choices=("none", "int8"), default=["none", "int8"])
    asked = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| shape | weights | step, matrices alone, ms | the rest |\n|---|---|---|---|")
    for shape in asked.shapes:
        with tempfile.TemporaryDirectory() as folder:
            save(shape, Path(folder))
            for quant in asked.quant:
                step, alone = measured(Path(folder), quant)
                print(f"| {shape} | {quant} | {step:.1f}, {alone:.1f} | {100 * (1 - alone / step):.0f} % |", flush=True)


if __name__ == "__main__":
    main()
