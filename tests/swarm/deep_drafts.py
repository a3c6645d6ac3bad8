"""Drafts that depend on no clock."""

from __future__ import annotations

from typing import Any

import torch

from petalnode.node.client.generation.draft_model import FixedDrafts

DEEP = FixedDrafts(9, 6)
"""Of conversations: up to nine tokens that are looked up, in steps of three."""
GUESSED = FixedDrafts(0, 6)
"""Up to six tokens that a draft model guesses, in steps of two."""
CONSTANT: dict[str, Any] = {"num_assistant_tokens": 9, "num_assistant_tokens_schedule": "constant"}
"""The same for `generate`."""
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 10, **CONSTANT}


class Few:
    """A processor with which a random model repeats itself."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 5:9] += 20
        return scores
