"""Spans with and without the compiled kernels, and conversations with both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.kernels import library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.blocks.span_adapter import SpanAdapter
from petalnode.protocols.ids import Span
from petalnode.protocols.training import LORA_PARTS, LoraName
from tests.tiny_models import _SPECS, HIDDEN, save_tiny

needs_kernels = pytest.mark.skipif(
    library.library() is None, reason="the kernels are not built (make setup, with a C compiler)"
)
SPAN = Span(1, 4)
KNOWN = (
    "llama", "mistral", "qwen2", "qwen2_sliding", "qwen3", "phi3", "phi3_partial", "gemma2", "gemma3", "gpt2",
    "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "dots1", "qwen3_5", "qwen3_next",
    "olmo2", "olmo_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "axk1",
)  # fmt: skip
ROUTED = {
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    "dots1": {"first_k_dense_replace": 2, "norm_topk_prob": False},
}
"""With DeepSeek's router: groups, a bias that only chooses, shares that add up or do not; an expert for all tokens."""
LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
    "deepseek_v3": {"n_shared_experts": 1, "attention_bias": True, "norm_topk_prob": False},
    "glm4_moe_lite": {"n_shared_experts": 1, "rms_norm_eps": 1e-3},
    "youtu": {"rope_interleave": False},
    "axk1": {"n_shared_experts": 1, "n_group": 4, "topk_group": 2},
}
"""With attention over latents: pairs are turned in all three ways, queries have a lower rank or not."""
_RANKS = {
    "kv_lora_rank": 48, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}


def pair(folder: Path, span: Span = SPAN, quantisation: str = "none") -> tuple[BlockSpan, BlockSpan]:
    """The same blocks by torch and by the kernels."""
    options = {"dtype": "float32", "device": "cpu", "quantisation": quantisation}
    return load_span(folder, span, **options), load_span(folder, span, kernels="native", **options)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny model of `save_tiny`, or of a family that is close to one of these."""
    if name == "phi3_partial":
        return save_tiny(
            "phi3", folder, num_attention_heads=2, num_key_value_heads=1, partial_rotary_factor=0.5, dtype=dtype
        )
    if name in ROUTED:
        return save_tiny(name, folder, n_group=2, topk_group=1, dtype=dtype, **ROUTED[name])
    if name == "qwen3_moe" or name in LATENTS:
        fields = {**_SPECS["qwen3"][1], **FEW_EXPERTS, "norm_topk_prob": False}
        if name in LATENTS:
            fields = {**_SPECS["deepseek_v3"][1], **_RANKS, **LATENTS[name]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_SPECS, name, (name, fields))
            return save_tiny(name, folder, dtype=dtype)
    return save_tiny(name, folder, dtype=dtype)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


Script = list[torch.Tensor]


def conversation(blocks: BlockSpan, *, part: Span | None = None) -> Script:
    """Sessions of different lengths, rows and padding; steps together, a rollback, a reorder, steps again."""
    said: Script = []
    sessions: list[SpanCache] = []
    for seed, (batch, length, padding) in enumerate(((1, 21, None), (3, 5, [3, 0, 1]), (2, 12, None))):
        cache = blocks.make_cache(batch, 40, padding, part)
        said.append(blocks.forward(values(batch, length, seed=seed), cache))
        sessions.append(cache)

    def together(seed: int) -> None:
        said.extend(blocks.decode([(values(c.batch, 1, seed=seed + i), c) for i, c in enumerate(sessions)]))

    together(10)
    together(20)
    sessions[0].rollback(19)
    sessions[1].reorder([2, 2, 0])
    sessions[2].reorder([1, 0])
    together(30)
    sessions[1].rollback(2)
    together(40)
    return said


def lora(blocks: BlockSpan, layers: tuple[str, ...], seed: int, rank: int = 5) -> SpanAdapter:
    tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for block in range(blocks.span.start, blocks.span.end):
        for path in layers:
            into, out = blocks.linears[block][path]
            name = LoraName(block, path, LORA_PARTS[0])
            tensors[str(name)] = torch.randn(rank, into, generator=generator) * 0.2
            tensors[str(replace(name, part=LORA_PARTS[1]))] = torch.randn(out, rank, generator=generator) * 0.2
    return blocks.make_adapter(tensors)
