"""Tiny models whose longrope has a border at 40 tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.greedy import prompt

BORDER = 40
SIZES = {"num_hidden_layers": 3, "max_position_embeddings": 2048}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": BORDER,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + place for place in range(8)],
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": BORDER, "rope_parameters": LONGROPE},
    "phimoe": {"rope_parameters": LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.4}},
    "llama": {"rope_parameters": LONGROPE},
}
"""Of these, Llama's `generate` keeps the cache that it has when a text becomes long, and the others fill it anew."""


def given(ids: torch.Tensor, new: int) -> dict[str, Any]:
    return {
        "attention_mask": ((ids != 0).cumsum(-1) > 0).long(), "max_new_tokens": new, "do_sample": False,
        "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip


def padded(*lengths: int, seed: int = 0, width: int = 0) -> torch.Tensor:
    """Rows of these lengths, padded at the left to the longest, or to `width`."""
    width = max(width, *lengths)
    rows = [[0] * (width - length) + prompt(1, length, seed + row)[0].tolist() for row, length in enumerate(lengths)]
    return torch.tensor(rows)
