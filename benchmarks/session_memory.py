"""What a session of 1,000 tokens and one of 100,000 take of a server, for blocks of the shapes of well-known models.

Reserved is what `SpanCache.nbytes` counts, of which `serve` makes cache tokens; resident is what the process has more
of after keys, values and states were put there, in steps of 2,048 tokens. Nothing is computed. Of short sessions
resident says little: memory of the row before is given back meanwhile.
"""

from __future__ import annotations

import argparse
import json

import psutil
import torch

from petalnode.node.blocks.cache import BlockCacheSpec, SpanCache
from petalnode.node.blocks.caches.form import CacheForm
from petalnode.node.blocks.caches.pages import lets_go
from petalnode.node.blocks.caches.states import StateSpec
from petalnode.protocols.inference import STEP_TOKENS

CPU = torch.device("cpu")
_CONV = StateSpec("conv", 0, (8192, 4), torch.bfloat16)
_DELTA = BlockCacheSpec(0, 0, 0, None, (_CONV, StateSpec("recurrent", 0, (32, 128, 128), torch.float32)))
_MAMBA = BlockCacheSpec(0, 0, 0, None, (_CONV, StateSpec("recurrent", 0, (128, 64, 128), torch.float32)))
_WINDOW = BlockCacheSpec(4, 256, 256, 1024, (), lets_go(CPU))
_SPARSE = BlockCacheSpec(1, 512, 0, 128, (), lets_go(CPU), 0, (128, 32))
_HEAVY = BlockCacheSpec(1, 512, 0, 128, (), lets_go(CPU), 0, (4,))
SHAPES = {
    "qwen3_5: 3 delta, 1 attention": [_DELTA] * 3 + [BlockCacheSpec(2, 256, 256, None)],
    "qwen3_5: 3 delta": [_DELTA] * 3,
    "nemotron_h: 12 mamba, 2 attention, 12 MLP": [_MAMBA] * 12 + [BlockCacheSpec(8, 128, 128, None)] * 2,
    "gemma3: 5 window, 1 attention": [_WINDOW] * 5 + [BlockCacheSpec(4, 256, 256, None)],
    "gemma3: 5 window": [_WINDOW] * 5,
    "deepseek_v4: 3 sparse, 3 heavy": [_SPARSE, _HEAVY] * 3,
    "llama: 6 attention": [BlockCacheSpec(8, 128, 128, None)] * 6,
}
"""Blocks of Qwen3.6-35B-A3B, Nemotron-H-8B, Gemma 3 4B, DeepSeek-V4-Flash (without its states) and Llama 3.1 8B."""


def taken(specs: list[BlockCacheSpec], tokens: int) -> tuple[int, int]:
    """Bytes that a session reserves, and that it has in memory at its end."""
    before = psutil.Process().memory_info().rss
    cache = SpanCache(specs, 1, tokens, CacheForm("auto", torch.bfloat16), CPU)
    while cache.length < tokens:
        step = min(STEP_TOKENS, tokens - cache.length)
        cache.begin_step(step)
        with cache.replaying():
            for block, spec in enumerate(specs):
                if spec.heads:
                    kept = torch.ones(1, spec.heads, step, spec.key_dim, dtype=torch.bfloat16)
                    cache.write(block, kept, kept)
                for kind, part in enumerate(spec.entries):
                    cache.write_entries(block, kind, torch.ones(1, step // 4, 4 * part), 4)
                for state in spec.states if cache.states is not None else ():
                    cache.states.put((block, state.kind, state.index), torch.ones(1, *state.shape, dtype=state.dtype))
        cache.advance(step, torch.ones(1, step, 1))
    return cache.nbytes, psutil.Process().memory_info().rss - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = {}
    for name, specs in SHAPES.items():
        rows[name] = {tokens: [round(size / 2**20) for size in taken(specs, tokens)] for tokens in (1000, 100_000)}
    if options.json:
        print(json.dumps(rows))
        return
    print("| blocks | 1,000 tokens: reserved, resident, MiB | 100,000 tokens |\n|---|---|---|")
    for name, (short, long) in ((name, row.values()) for name, row in rows.items()):
        print(f"| {name} | {short[0]}, {short[1]} | {long[0]:,}, {long[1]:,} |")


if __name__ == "__main__":
    main()
