"""A whole model in plain transformers, opened up between its embeddings and its head."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from petalnode.node.blocks.caches.chosen_tokens import settle_choices
from petalnode.node.blocks.stack import closed, written_ids
from petalnode.node.models.folder import open_folder
from tests.tiny_models import NUM_BLOCKS, load_whole


@dataclass
class Whole:
    """Runs the model as transformers' `generate` does and sees what enters its first block and leaves its last."""

    folder: Path
    dtype: torch.dtype | None = None
    entered: list[torch.Tensor] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = load_whole(self.folder, self.dtype)
        self.boundaries, self._per_block = open_folder(self.folder, "tiny").boundaries, None
        decoder: Any = self.model.base_model
        settle_choices(decoder)
        if self.boundaries.per_block:
            made = decoder.project_per_layer_inputs
            decoder.project_per_layer_inputs = lambda *args: self._note(made(*args))
        blocks = next(m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == NUM_BLOCKS)
        blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        blocks[-1].register_forward_hook(self._leave)

    def _note(self, per_block: torch.Tensor) -> torch.Tensor:
        self._per_block = per_block.flatten(2)
        return per_block

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        ahead = hidden if self.boundaries.carried else self._per_block
        if self.boundaries.ids:
            ids = kwargs["ple_input_ids"] if "ple_input_ids" in kwargs else kwargs["input_ids"]
            ahead = written_ids(ids, hidden.dtype)
        self.entered.append(closed(self.boundaries, hidden, ahead))

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self.left.append(closed(self.boundaries, output if isinstance(output, torch.Tensor) else output[0], None))

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @torch.no_grad()
    def step(
        self, ids: torch.Tensor, cache: DynamicCache | None, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What entered the first block, what left the last, and the logits of the tokens `ids`.

        Args:
            ids: [batch, new tokens].
            mask: [batch, all tokens], 0 at left padding.
        """
        extra: dict[str, Any] = {}
        if mask is not None:
            extra["attention_mask"] = mask
            if "position_ids" in inspect.signature(self.model.forward).parameters:
                positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
                extra["position_ids"] = positions[:, -ids.shape[1] :]
        self.entered.clear()
        self.left.clear()
        logits = self.model(ids, past_key_values=cache, use_cache=cache is not None, **extra).logits
        return self.entered[0], self.left[0], logits


whole_of = cache(Whole)
"""That of a folder, loaded once."""
