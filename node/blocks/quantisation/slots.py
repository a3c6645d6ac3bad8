"""Which matrices of a block are quantised, and how they are put in."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..kernels.library import Library, Range
from .matrix import QuantisedLinear, QuantisedMatrix

_SAME_AS_LINEAR: Final = frozenset({"Linear", "Conv1D", "FalconLinear"})
"""Classes that multiply with their weight and add their bias, and do nothing else."""
_ASKED_AHEAD: Final = 4
"""Experts whose weights are read from the disk while another one is multiplied."""


@dataclass(frozen=True)
class MatrixSlot:
    """One matrix of a block.

    Attributes:
        parameter: the name in the block of the parameter that it is, or is a part of.
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


def expert_stacks(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters that hold the experts' matrices; none if this is no such module.

    What is looked for is transformers' interface for experts (`use_experts_implementation`), which says how they are to
    be multiplied.
    """
    if not (hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    shapes = [getattr(getattr(module, name, None), "shape", ()) for name in names]
    return names if all(len(shape) == 3 and not any(size % 2 for size in shape[1:]) for shape in shapes) else ()


def matrix_slots(block: nn.Module) -> list[MatrixSlot]:
    """The linear layers of attention and MLP, and the experts. Routers, which choose experts, stay as they are."""
    found = []
    for name, module in block.named_modules():
        if type(module).__name__ in _SAME_AS_LINEAR and isinstance(module, (nn.Linear, Conv1D)):
            slot = _slot(f"{name}.weight", None, module.weight.shape, isinstance(module, Conv1D))
            if not _is_router(name) and slot.shape[1] % 2 == 0:  # nf4 puts two to a byte
                found.append(slot)
        else:
            for stack in expert_stacks(module):
                experts, *shape = getattr(module, stack).shape
                transposed = bool(module.is_transposed)
                found += [_slot(f"{name}.{stack}", expert, shape, transposed) for expert in range(experts)]
    return found


def quantised_share(block: nn.Module) -> tuple[int, int]:
    """(weights of a block that are quantised, all of its weights)."""
    return (
        sum(slot.shape[0] * slot.shape[1] for slot in matrix_slots(block)),
        sum(parameter.numel() for parameter in block.parameters()),
    )


def put_matrices(block: nn.Module, matrices: Mapping[MatrixSlot, QuantisedMatrix], dtype: torch.dtype) -> None:
    """Replaces the modules of all `matrix_slots(block)` by quantised ones with these matrices."""
    together: dict[str, dict[str, list[QuantisedMatrix]]] = defaultdict(lambda: defaultdict(list))
    for slot, matrix in matrices.items():
        together[slot.module][slot.parameter.rpartition(".")[2]].append(matrix)
    for name, of_module in together.items():
        parent, _, last = name.rpartition(".")
        owner = block.get_submodule(parent)
        old = getattr(owner, last)
        if expert_stacks(old):
            setattr(owner, last, QuantisedExperts(old, of_module))
        else:
            setattr(owner, last, QuantisedLinear(of_module["weight"][0], old.bias, dtype))


def _slot(parameter: str, expert: int | None, shape: torch.Size | list[int], transposed: bool) -> MatrixSlot:
    first, second = shape
    return MatrixSlot(parameter, expert, (second, first) if transposed else (first, second), transposed)


def _is_router(name: str) -> bool:
    return any(part == "gate" or part.endswith("_gate") or "router" in part for part in name.split("."))


class QuantisedExperts(nn.Module):
    """A mixture of experts with quantised matrices, which uses the gate, biases and norms of `original`.

    Each expert is a matrix of its own, and only those that a token was sent to are multiplied: transformers has one
    parameter of three dimensions for all of them, which bitsandbytes leaves as it is.

    Args:
        matrices: for each of `expert_stacks(original)`, the experts' matrices in order.

    Attributes:
        counts: as `struct step` of kernels.c has them, int64: experts, once for each pass in which one was used; those
            of them that were not all in memory.
        ranges: where the experts' weights stand in mapped files, `each` for an expert; None where they are in memory.
    """

    def __init__(self, original: nn.Module, matrices: Mapping[str, Sequence[QuantisedMatrix]]) -> None:
        super().__init__()
        self.counts = (ctypes.c_int64 * 2)()
        self.ranges: Any = None
        self.each = 0
        self._library: Library | None = None
        self.up, self.down = (tuple(matrices[name]) for name in expert_stacks(original))
        self.names = expert_stacks(original)
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
        tokens, per_token = chosen.shape
        flat = chosen.reshape(-1)
        outputs, positions = [], []
        experts: list[int] = flat.unique().tolist()  # type: ignore[no-untyped-call]
        self.counts[0] += len(experts)
        for expert in experts[:_ASKED_AHEAD]:
            self._ask_for(expert)
        for place, expert in enumerate(experts):
            for later in experts[place + _ASKED_AHEAD : place + _ASKED_AHEAD + 1]:
                self._ask_for(later)
            position = (flat == expert).nonzero().squeeze(1)
            outputs.append(self._one(expert, hidden[position // per_token]))
            positions.append(position)
        output = torch.cat(outputs)[torch.cat(positions).argsort()] * shares.reshape(-1, 1)
        return output.view(tokens, per_token, -1).sum(1).to(hidden.dtype)

    @property
    def nbytes(self) -> int:
        """Of the experts' matrices."""
        return sum(tensor.nbytes for matrix in (*self.up, *self.down) for tensor in matrix.tensors().values())

    def leave_on_disk(self, found: Library) -> None:
        """Has the experts' weights, which are those of mapped files, read when they are needed."""
        parts = [
            (tensor.data_ptr(), tensor.nbytes)
            for expert in zip(self.up, self.down, strict=True)
            for matrix in expert
            for tensor in matrix.tensors().values()
        ]
        self.each = len(parts) // len(self.up)
        self.ranges = (Range * len(parts))(*(Range(*part) for part in parts))
        self._library = found

    def _ask_for(self, expert: int) -> None:
        """Has an expert's weights read, and does not wait for them."""
        if self._library is not None:
            first = ctypes.addressof(self.ranges) + expert * self.each * ctypes.sizeof(Range)
            self.counts[1] += self._library.functions.petalnode_ask_for(first, self.each)

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
