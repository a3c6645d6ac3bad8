"""Steps of blocks with gated delta rules, beside their matrices and beside blocks of Llama.

    python benchmarks/hybrid_step.py [--shapes 0.8B 4B] [--quant none int8] [--tokens 6] [--blocks 1] [--apart|--torch]
        [--accepted 3] [--replay]

Blocks with random weights in float32, one thread: of Qwen3.5's shapes with a gated delta rule, every fourth with
attention, and of Llama with the same sizes. A decode step through `BlockSpan.decode`, the blocks' matrices alone, and a
step of `--tokens` (drafts that are checked) take turns; medians of the processor time of this thread. `times one` is
what a step of `--tokens` takes of a decode step. With `--apart` or `--torch` the hybrid alone: transformers' blocks
call the kernels for each product, convolution and delta rule; with `--torch`, torch computes the last two.
With `--accepted`, all but so many tokens of each step of `--tokens` are undone behind it, so that the next one has to
begin at the last of these; with `--replay`, blocks compute these once more for that, as those that keep no inputs do.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from plain import quiet_torch
from transformers import AutoConfig, AutoModelForCausalLM

from petalnode.node.blocks import span as blocks
from petalnode.node.blocks.caches.states import StateRing
from petalnode.node.blocks.quantisation.matrix import QuantisedLinear
from petalnode.protocols.ids import Span

SHAPES: Final = {"0.8B": (1024, 3584, 8, 2, 16), "4B": (2560, 9216, 16, 4, 32)}
"""Hidden size, width of the MLP, heads, heads of keys and values, heads of the delta rule's values."""
KINDS: Final = ("qwen3_5_text", "llama")
STEPS: Final = 60


def save(kind: str, shape: str, count: int, folder: Path) -> None:
    hidden, width, heads, kv_heads, delta_heads = SHAPES[shape]
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": width, "num_attention_heads": heads}
    sizes |= {"head_dim": 256, "num_key_value_heads": kv_heads}
    if kind != "llama":
        sizes |= {
            "linear_num_value_heads": delta_heads,
            "linear_num_key_heads": 16,
            "layer_types": ["full_attention" if block % 4 == 3 else "linear_attention" for block in range(count)],
        }
    config = AutoConfig.for_model(kind, vocab_size=128, num_hidden_layers=count, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measured(folder: Path, quant: str, count: int, tokens: int, accepted: int) -> tuple[float, float, float]:
    """Milliseconds of a step, of its matrices, and of a step of `tokens`, of which `accepted` stay."""
    kernels = "auto" if quant == "none" else "native"
    span = blocks.load_span(folder, Span(0, count), dtype="float32", quantisation=quant, kernels=kernels)
    cache, drafted = span.make_cache(1, 64 + STEPS), span.make_cache(1, 64 + STEPS * tokens)
    hidden = span.stack.width()
    for one in (cache, drafted):
        span.forward(torch.randn(1, 64, hidden), one)
    modules = (module for block in span.stack.blocks for module in block.modules())
    matrices = [module for module in modules if isinstance(module, (torch.nn.Linear, QuantisedLinear))]
    inputs = [torch.randn(1, 1, matrix.in_features) for matrix in matrices]
    times = []
    with torch.inference_mode():
        for _ in range(STEPS):
            token, several = torch.randn(1, 1, hidden), torch.randn(1, tokens, hidden)
            clock = [time.thread_time()]
            span.decode([(token, cache)])
            clock.append(time.thread_time())
            for matrix, given in zip(matrices, inputs, strict=True):
                matrix(given)
            clock.append(time.thread_time())
            span.forward(several, drafted)
            drafted.rollback(drafted.length - tokens + accepted)
            clock.append(time.thread_time())
            times.append([after - before for before, after in pairwise(clock)])
    step, alone, checked = (1000 * statistics.median(column) for column in zip(*times[10:], strict=True))
    return step, alone, checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--quant", nargs="+", choices=("none", "int8", "nf4"), default=["none", "int8"])
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--accepted", type=int)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--apart", action="store_true", help="no step of theirs is one call of the kernels")
    parser.add_argument("--torch", action="store_true", help="which computes convolutions and delta rules, too")
    asked = parser.parse_args()
    quiet_torch()
    torch.manual_seed(0)
    if asked.replay:
        patch.object(StateRing, "rewound", 0).start()
    if asked.apart or asked.torch:
        patch.object(blocks, "find_step", lambda *_, **__: None).start()
    if asked.torch:
        patch.object(blocks, "use_recurrent_kernels", lambda *_: None).start()
    print(f"| shape | weights | block | step, matrices alone, ms | the rest | {asked.tokens} tokens, ms | times one |")
    print("|---|---|---|---|---|---|---|")
    for shape in asked.shapes:
        for quant in asked.quant:
            for kind in KINDS[: 1 if asked.apart or asked.torch else 2]:
                with tempfile.TemporaryDirectory() as folder:
                    save(kind, shape, asked.blocks, Path(folder))
                    accepted = asked.accepted or asked.tokens
                    step, alone, several = measured(Path(folder), quant, asked.blocks, asked.tokens, accepted)
                told = (
                    f"{step:.1f}, {alone:.1f} | {100 * (1 - alone / step):.0f} % | {several:.1f} | {several / step:.2f}"
                )
                print(f"| {shape} | {quant} | {kind} | {told} |", flush=True)


if __name__ == "__main__":
    main()
