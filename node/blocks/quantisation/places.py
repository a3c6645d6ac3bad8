"""Which matrices of a block are quantised, and how they are put in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .experts import QuantisedExperts, stacks
from .matrix import QuantisedLinear, QuantisedMatrix

_SAME_AS_LINEAR: Final = frozenset({"Linear", "Conv1D", "FalconLinear"})
"""Classes that multiply with their weight and add their bias, and do nothing else."""


@dataclass(frozen=True)
class Place:
    """One matrix of a block.

    Attributes:
        parameter: what it is, or is a part of, by its name in the block.
        expert: which part, if the parameter is a stack of matrices.
        shape: (values out, values in).
        transposed: whether the parameter has it the other way round.
    """

    parameter: str
    expert: int | None
    shape: tuple[int, int]
    transposed: bool

    @property
    def name(self) -> str:
        return self.parameter if self.expert is None else f"{self.parameter}.{self.expert}"

    @property
    def module(self) -> str:
        """The name of the module that multiplies with it."""
        return self.parameter.rpartition(".")[0]

    def weight(self, block: nn.Module) -> torch.Tensor:
        """[out, in], a view of the block's parameter."""
        parameter = block.get_parameter(self.parameter).detach()
        matrix = parameter if self.expert is None else parameter[self.expert]
        return matrix.t() if self.transposed else matrix


def places(block: nn.Module) -> list[Place]:
    """The linear layers of attention and MLP, and the experts. Routers, which choose experts, stay as they are."""
    found = []
    for name, module in block.named_modules():
        if type(module).__name__ in _SAME_AS_LINEAR and isinstance(module, (nn.Linear, Conv1D)):
            place = _place(f"{name}.weight", None, module.weight.shape, isinstance(module, Conv1D))
            if not _is_router(name) and place.shape[1] % 2 == 0:  # nf4 puts two to a byte
                found.append(place)
        else:
            for stack in stacks(module):
                experts, *shape = getattr(module, stack).shape
                transposed = bool(module.is_transposed)
                found += [_place(f"{name}.{stack}", each, shape, transposed) for each in range(experts)]
    return found


def share(block: nn.Module) -> tuple[int, int]:
    """(weights of a block that are quantised, all of its weights)."""
    return (
        sum(place.shape[0] * place.shape[1] for place in places(block)),
        sum(parameter.numel() for parameter in block.parameters()),
    )


def put(block: nn.Module, matrices: Mapping[Place, QuantisedMatrix], dtype: torch.dtype) -> None:
    """Replaces the modules of all `places(block)` by quantised ones with these matrices."""
    together: dict[str, dict[str, list[QuantisedMatrix]]] = defaultdict(lambda: defaultdict(list))
    for place, matrix in matrices.items():
        together[place.module][place.parameter.rpartition(".")[2]].append(matrix)
    for name, of_module in together.items():
        parent, _, last = name.rpartition(".")
        owner = block.get_submodule(parent)
        old = getattr(owner, last)
        if stacks(old):
            setattr(owner, last, QuantisedExperts(old, of_module))
        else:
            setattr(owner, last, QuantisedLinear(of_module["weight"][0], old.bias, dtype))


def _place(parameter: str, expert: int | None, shape: torch.Size | list[int], transposed: bool) -> Place:
    first, second = shape
    return Place(parameter, expert, (second, first) if transposed else (first, second), transposed)


def _is_router(name: str) -> bool:
    return any(part == "gate" or part.endswith("_gate") or "router" in part for part in name.split("."))
