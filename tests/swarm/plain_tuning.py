"""Prompt tuning written out on a whole model of transformers, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tests.tiny_models import NUM_BLOCKS

TOLERANCE = 1e-4


class PlainTuning(nn.Module):
    """Soft prompts in place of the embeddings of the first tokens, deep prompts added in front of each block."""

    def __init__(self, model: Any, prompts: torch.Tensor, deep: torch.Tensor | None = None) -> None:
        super().__init__()
        self.prompt_embeddings = nn.Parameter(prompts.detach().clone())
        self.deep_prompts = None if deep is None else nn.Parameter(deep.detach().clone())
        self._model = [model]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        model = self._model[0]
        rows, count = len(input_ids), len(self.prompt_embeddings)
        ids = torch.cat([torch.ones(rows, count, dtype=torch.long), input_ids], dim=1)
        if attention_mask is not None:
            attention_mask = torch.cat([torch.ones(rows, count, dtype=torch.long), attention_mask], dim=1)
        if labels is not None and labels.shape == input_ids.shape:
            labels = torch.cat([torch.full((rows, count), -100), labels], dim=1)
        with ExitStack() as hooks:
            hooks.callback(model.get_input_embeddings().register_forward_hook(self._put).remove)
            if self.deep_prompts is not None:
                for block, prompt in zip(blocks_of(model), self.deep_prompts, strict=True):
                    hooks.callback(block.register_forward_pre_hook(_adding(prompt), with_kwargs=True).remove)
            return model(ids, attention_mask=attention_mask, labels=labels, use_cache=False)

    def _put(self, module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        count = len(self.prompt_embeddings)
        return torch.cat([self.prompt_embeddings.expand(len(embedded), -1, -1), embedded[:, count:]], dim=1)


def close(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert got is not None and expected is not None and got.shape == expected.shape
    difference = float((got - expected).detach().abs().max() / expected.detach().abs().max())
    assert difference <= TOLERANCE, f"differs by {difference:.2g}"


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == NUM_BLOCKS)


def _adding(prompt: torch.Tensor) -> Callable[[nn.Module, Any, Any], Any]:
    def add(block: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = torch.cat([hidden[:, : len(prompt)] + prompt, hidden[:, len(prompt) :]], dim=1)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    return add
