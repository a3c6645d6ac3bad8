"""What a training probe lets servers keep: deep prompts or low-rank changes, as they are somewhere in a fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

import torch

from ...protocols.training import LORA_PARTS, PROMPTS, LoraName
from ..client.api.lora import is_target, usual_targets
from ..errors import BadInput
from .probe_plan import Kind

_PREFIXES: Final = (4, 8, 16)
_RANKS: Final = (4, 8, 16)
_LEARNT: Final = (0.0, 0.3, 1.0)
"""How far a training is. Each begins with deep prompts, or LoRA's B, of zero."""
_PROMPT_SIZE: Final = 0.05
_LORA_SIZE: Final = 0.02


def drawn_kept(
    kind: Kind, linears: Sequence[Mapping[str, tuple[int, int]]], hidden_size: int, random: Random, tokens: int
) -> dict[str, torch.Tensor]:
    """float32 tensors for all blocks of the model, under the names that kept tensors have on the wire.

    None for a kind of training in which servers keep nothing, and of a model whose usual targets are not known.

    Args:
        linears: per block, (values in, values out) of its linear layers, by their paths in it.
        hidden_size: values per token between blocks.
        tokens: of a row; a prefix may be as long.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(31))
    learnt = random.choice(_LEARNT)
    if kind == "deep-prompt":
        shape = (len(linears), 1, min(random.choice(_PREFIXES), tokens), hidden_size)
        return {PROMPTS: learnt * _PROMPT_SIZE * torch.randn(shape, generator=generator)}
    if kind != "lora":
        return {}
    try:
        targets = usual_targets(linears[0])
    except BadInput:
        return {}
    rank = random.choice(_RANKS)
    kept: dict[str, torch.Tensor] = {}
    for block, layers in enumerate(linears):
        for path, (width, out) in layers.items():
            if is_target(path, targets):
                a, b = (str(LoraName(block, path, part)) for part in LORA_PARTS)
                # As peft begins: kaiming_uniform_ with a = sqrt(5) is uniform within 1/sqrt(width).
                kept[a] = (2 * torch.rand((rank, width), generator=generator) - 1) / math.sqrt(width)
                kept[b] = learnt * _LORA_SIZE * torch.randn((out, rank), generator=generator)
    return kept
