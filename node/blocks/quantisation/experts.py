"""A mixture of experts with quantised matrices.

Experts are one parameter of three dimensions for all of them, which bitsandbytes leaves as it is. Here each expert is a
matrix of its own, and only those that a token was sent to are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .matrix import QuantisedMatrix


def stacks(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters that hold the experts' matrices; none if this is no such module.

    What is looked for is transformers' interface for experts (`use_experts_implementation`), which says how they are to
    be multiplied.
    """
    if not (hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    shapes = [getattr(getattr(module, name, None), "shape", ()) for name in names]
    return names if all(len(shape) == 3 and not any(size % 2 for size in shape[1:]) for shape in shapes) else ()


class QuantisedExperts(nn.Module):
    """In the place of `original`, whose gate it uses and whose biases and norms it takes over.

    Args:
        matrices: for each of `stacks(original)`, the experts' matrices in order.
    """

    def __init__(self, original: nn.Module, matrices: Mapping[str, Sequence[QuantisedMatrix]]) -> None:
        super().__init__()
        self.up, self.down = (tuple(matrices[name]) for name in stacks(original))
        self.names = stacks(original)
        for name, parameter in original.named_parameters(recurse=False):
            if name not in self.names:
                self.register_parameter(name, parameter)
        for name, child in original.named_children():
            self.add_module(name, child)
        # Not as a module of this one: what transformers does to experts' parameters would not find them.
        self.original: tuple[Any] = (original,)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden: float [tokens, hidden size].
            chosen: int [tokens, k], the experts of each token.
            shares: float [tokens, k], what each of them counts.
        """
        tokens, each = chosen.shape
        flat = chosen.reshape(-1)
        outputs, places = [], []
        for expert in flat.unique().tolist():
            place = (flat == expert).nonzero().squeeze(1)
            outputs.append(self._one(expert, hidden[place // each]))
            places.append(place)
        output = torch.cat(outputs)[torch.cat(places).argsort()] * shares.reshape(-1, 1)
        return output.view(tokens, each, -1).sum(1).to(hidden.dtype)

    def _one(self, expert: int, values: torch.Tensor) -> torch.Tensor:
        """What one expert makes of its tokens [tokens, hidden size]."""
        original = self.original[0]
        inner = self._with_bias(self.up[expert].multiply(values), self.names[0], expert)
        inner = original._apply_gate(inner) if original.has_gate else original.act_fn(inner)
        output = self._with_bias(self.down[expert].multiply(inner), self.names[1], expert)
        if not getattr(original, "has_post_expert_norm", False):
            return output
        normed: torch.Tensor = self.get_submodule("post_expert_norm")(output)
        return normed

    def _with_bias(self, values: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        bias = self._parameters.get(f"{name}_bias")
        return values if bias is None else values + bias[expert]
