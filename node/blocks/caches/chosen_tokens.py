"""Which tokens attention looks at, where an index chooses them (DeepSeek Sparse Attention, arXiv 2512.02556)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _FirstOfTies(TorchFunctionMode):
    """Within it, of equal values `topk` takes the first ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, count = args
        values, indices = scores.sort(descending=True, stable=True, **(kwargs or {}))
        return torch.return_types.topk((values[..., :count], indices[..., :count]))


def take_first_of_ties(model: nn.Module) -> None:
    """Of tokens with equal scores, the blocks of `model` take the first from now on, however prompts are cut.

    A score is 0 where the key of a token suits no head of the index: with few heads many are. Which of them torch takes
    depends on how many tokens stand behind, even on those that are masked.
    """
    indexers: list[Any] = [module for module in model.modules() if hasattr(module, "index_topk")]
    for indexer in indexers:
        indexer.forward = functools.partial(_settled, indexer.forward)


def _settled(forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    with _FirstOfTies():
        return forward(*args, **kwargs)
