"""Low-rank changes to the linear layers of a block (LoRA, Hu et al. 2021), as inputs that gradients are taken for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

Pair = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in] and B [out, rank], any factor included."""


def linear_shapes(block: nn.Module) -> dict[str, tuple[int, int]]:
    """(values in, values out) of every linear layer of a block, by its path there; quantised ones too."""
    shapes: dict[str, tuple[int, int]] = {}
    for path, module in block.named_modules():
        if isinstance(module, Conv1D):
            shapes[path] = (module.nx, module.nf)
        elif isinstance(getattr(module, "in_features", None), int) and next(module.children(), None) is None:
            shapes[path] = (int(module.in_features), int(module.out_features))
    return shapes


@contextmanager
def changed(block: nn.Module, pairs: Mapping[str, Pair]) -> Iterator[None]:
    """Within it, the layers of `block` at these paths return B A x more than their own."""
    with ExitStack() as hooks:
        for path, pair in pairs.items():
            hooks.callback(block.get_submodule(path).register_forward_hook(_adding(*pair)).remove)
        yield


def _adding(a: torch.Tensor, b: torch.Tensor) -> Any:
    def add(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        given = args[0]
        return output + linear(linear(given, a.to(given.dtype)), b.to(given.dtype)).to(output.dtype)

    return add
