"""Weight matrices that are held quantised, and linear layers over them.

The numbers are bitsandbytes' own; its modules are not used: they repack their 4-bit weights in the first forward pass
that needs no gradient, and give silently wrong gradients from then on. Here a matrix has one layout for its life, and
the gradient with respect to its input is always taken with the dequantised values.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any, Self, TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear

from ...errors import MachineError

# Of dequantised weights at a time: on a CPU they stay in its cache, elsewhere a call has to be worth its launch.
_PIECE_BYTES = 2 << 20
_DEVICE_PIECE_BYTES = 128 << 20
_PIECE_ROWS = 64  # pieces begin at multiples of this, where every layout can be cut


TensorKind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


class QuantisedMatrix(ABC):
    """A weight matrix of a linear layer, frozen: quantised weights, and the scales of rows or of runs of weights.

    Attributes:
        shape: (values out, values in).
    """

    shape: tuple[int, int]

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight = weight
        self._scale = scale

    @classmethod
    @abstractmethod
    def quantise(cls, weight: torch.Tensor) -> Self:
        """From float [out, in], on its device. Needs memory for a few megabytes beside the result."""

    @staticmethod
    @abstractmethod
    def kinds(shape: tuple[int, int]) -> tuple[TensorKind, TensorKind]:
        """Dtypes and shapes of the weight and the scale of a matrix of this shape."""

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], device: torch.device) -> Self:
        """From what `tensors` gave.

        Raises:
            ValueError, KeyError: they are not those of such a matrix.
        """
        weight, scale = tensors["weight"], tensors["scale"]
        if tuple((tensor.dtype, tuple(tensor.shape)) for tensor in (weight, scale)) != cls.kinds(shape):
            raise ValueError(f"no {cls.__name__.removesuffix('Matrix').lower()} matrix of {shape}")
        return cls(weight.to(device), scale.to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that the matrix is, to be kept on a disk."""
        return {"weight": self._weight, "scale": self._scale}

    @abstractmethod
    def rows(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows `start` .. `end` - 1, dequantised; `start` is a multiple of 64."""

    @abstractmethod
    def product(self, values: torch.Tensor) -> torch.Tensor:
        """Float [rows, in] times the transpose of this: [rows, out] of the same dtype. Takes no part in autograd."""

    def multiply(self, values: torch.Tensor) -> torch.Tensor:
        """Float [..., in] times the transpose of this: [..., out]. Gradients flow through it to `values`."""
        if torch.is_grad_enabled() and values.requires_grad:
            product: torch.Tensor = _Product.apply(values, self)  # type: ignore[no-untyped-call]
            return product
        return self._of_any_shape(values)

    def _of_any_shape(self, values: torch.Tensor) -> torch.Tensor:
        return self.product(values.reshape(-1, self.shape[1])).view(*values.shape[:-1], self.shape[0])

    def product_in_pieces(self, values: torch.Tensor) -> torch.Tensor:
        """`product` by torch alone, for processors for which bitsandbytes has nothing quicker."""
        parts = [linear(values, self.rows(start, end, values.dtype)) for start, end in pieces(self.shape, values)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def transposed_product(self, gradient: torch.Tensor) -> torch.Tensor:
        """Float [rows, out] times this: [rows, in] of the same dtype."""
        total = gradient.new_zeros(gradient.shape[0], self.shape[1], dtype=torch.float32)
        for start, end in pieces(self.shape, gradient):
            total += gradient[:, start:end] @ self.rows(start, end, gradient.dtype)
        return total.to(gradient.dtype)

    def error(self, weight: torch.Tensor) -> float:
        """How far this is from the matrix that it was made of, relative; NaN if either holds NaN."""
        missed = meant = 0.0
        for start, end in pieces(self.shape, weight):
            part = weight[start:end].float()
            missed += float((self.rows(start, end, torch.float32) - part).square().sum())
            meant += float(part.square().sum())
        return (missed / meant) ** 0.5 if meant else missed


def pieces(shape: tuple[int, int], like: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(first row, row behind the last) of parts of a matrix of `shape` that are dequantised at a time, or quantised."""
    out, into = shape
    nbytes = _PIECE_BYTES if like.device.type == "cpu" else _DEVICE_PIECE_BYTES
    rows = max(1, nbytes // (into * like.dtype.itemsize * _PIECE_ROWS)) * _PIECE_ROWS
    return ((start, min(start + rows, out)) for start in range(0, out, rows))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, matrix: QuantisedMatrix) -> torch.Tensor:
        ctx.matrix = matrix
        return matrix._of_any_shape(values).clone()  # no view of anything: some models add to it in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        matrix: QuantisedMatrix = ctx.matrix
        entered = matrix.transposed_product(gradient.reshape(-1, matrix.shape[0]))
        return entered.view(*gradient.shape[:-1], matrix.shape[1]), None


class QuantisedLinear(nn.Module):
    """In the place of an `nn.Linear`, or of a module that computes what one computes.

    The matrix is neither parameter nor buffer: transformers, which fills the rest of the model, must not touch it.
    `weight` can be asked for its dtype, shape and nothing else.
    """

    def __init__(self, matrix: QuantisedMatrix, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self.out_features, self.in_features = matrix.shape
        self.weight = torch.empty(matrix.shape, dtype=dtype, device="meta")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.matrix.multiply(input)
        return output if self.bias is None else output + self.bias


@cache
def bitsandbytes() -> ModuleType:
    """The library, imported when it is first needed.

    It compiles its fallbacks with torch's compiler, whose import alone takes more than a second and 45 MB and which
    nothing here uses; and it warns that a package of other kernels is missing. Both are spared.

    Raises:
        MachineError: it is not installed.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    compiler = torch.compile
    torch.compile = _not_compiled
    try:
        import bitsandbytes as library
    except ImportError as error:
        raise MachineError(
            f"--quant needs bitsandbytes, which cannot be used here ({error}): install it (pip install bitsandbytes), "
            "or serve with --quant none"
        ) from error
    finally:
        torch.compile = compiler
    return library


def _not_compiled(model: Any = None, **options: object) -> Any:
    return (lambda function: function) if model is None else model
