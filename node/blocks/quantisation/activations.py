"""Activations of eight bits: what linear layers multiply is rounded first, each row for itself.

The layers are those that quantisation takes, but for experts. Changes by LoRA get what entered; gradients are those of
layers that do not round. How a row is rounded: `rounding.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..kernels.tiles import TiledMatrix
from .matrix import QuantisedLinear
from .rounding import Rounded, rounded
from .slots import matrix_slots


def layers_that_round(blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The linear layers whose inputs are rounded, as (block, path): before other modules take their places."""
    found = []
    for block in blocks:
        paths = [name for name, module in block.named_modules() if isinstance(module, QuantisedLinear)]
        paths += [slot.module for slot in matrix_slots(block) if slot.expert is None]
        found += [(block, path) for path in paths]
    return found


def round_inputs(layers: Iterable[tuple[nn.Module, str]]) -> None:
    """Has these layers round what they multiply. Their hooks still see what entered."""
    for block, path in layers:
        layer: Any = block.get_submodule(path)
        layer.rounds_inputs = True
        if isinstance(layer, QuantisedLinear) and isinstance(layer.matrix, TiledMatrix):
            layer.matrix.round_rows()
        else:
            layer.forward = _rounding(layer.forward)


def _rounding(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def multiply(input: torch.Tensor) -> torch.Tensor:
        differentiated = torch.is_grad_enabled() and input.requires_grad
        given: torch.Tensor = Rounded.apply(input) if differentiated else rounded(input)  # type: ignore[no-untyped-call]
        return forward(given)

    return multiply
