"""Prompts of a tiny model, and what it says to them greedily."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny_models import VOCABULARY


def prompt(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """What a plain model or one of a swarm says greedily. `options` are those of its `generate`; without a mask, no row
    is padded."""
    options.setdefault("attention_mask", torch.ones_like(ids))
    options.setdefault("max_new_tokens", 8)
    out: torch.Tensor = model.generate(ids, pad_token_id=0, do_sample=False, **options)
    return out
