"""Which tokens attention looks at, where an index chooses them (DeepSeek Sparse Attention, arXiv 2512.02556)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SHOW_ALL: Final = frozenset({"DeepseekV4HCACompressor"})
"""What shows all of its entries to a token that comes alone."""


class _FirstOfTies(TorchFunctionMode):
    """Within it, of equal values `topk` takes the first ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, count = args
        values, indices = scores.sort(descending=True, stable=True, **(kwargs or {}))
        return torch.return_types.topk((values[..., :count], indices[..., :count]))


def settle_choices(model: nn.Module) -> None:
    """In the blocks of `model` a token looks at the same ones from now on, however a prompt is cut.

    Of tokens with equal scores the first ones are taken. A score is 0 where the key of a token suits no head of the
    index: with few heads many are. Which of them torch takes depends on how many tokens stand behind, masked ones
    included. Where entries stand for several tokens (DeepSeek-V4), a token that comes alone looks at those that it
    would see among others. In a row with left padding transformers shows it more.
    """
    indexers: list[Any] = [module for module in model.modules() if hasattr(module, "index_topk")]
    for indexer in indexers:
        indexer.forward = functools.partial(_settled, indexer.forward)
    compressors: list[Any] = [module for module in model.modules() if type(module).__name__ in _SHOW_ALL]
    for compressor in compressors:
        compressor.forward = functools.partial(_as_of_several, compressor.forward)


def _settled(forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    with _FirstOfTies():
        return forward(*args, **kwargs)


def _as_of_several(
    forward: Callable[..., Any], hidden: torch.Tensor, query: torch.Tensor, positions: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    alone = positions.shape[1] == 1
    entries, bias = forward(hidden, query, positions.expand(-1, 2) if alone else positions, *rest)
    return entries, bias[:, :, :1] if alone and bias is not None else bias
