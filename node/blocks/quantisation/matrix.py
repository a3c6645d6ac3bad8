"""Weight matrices that are held quantised, and linear layers over them.

The numbers are bitsandbytes' own; its modules are not used: they repack their 4-bit weights in the first forward pass
that needs no gradient. From then on gradients are silently wrong. Here a matrix has one layout for its life. The
gradient with respect to its input is always taken with the dequantised values.

Eight bits for a weight: LLM.int8() (Dettmers et al., NeurIPS 2022), a scale for each row. Four bits: NF4 (QLoRA,
Dettmers et al., NeurIPS 2023, section 3), a scale for every 64 weights.
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
from ...models.quantisation import NF4_BLOCK

# Of dequantised weights at a time: on a CPU they stay in its cache, elsewhere a call has to be worth its launch.
_PIECE_BYTES = 2 << 20
_DEVICE_PIECE_BYTES = 128 << 20
_PIECE_ROWS = 64  # pieces begin at multiples of this, where every layout can be cut

TensorKind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]

LOW_STEPS = 254.0  # what rounding leaves is within half a step: 127 parts of it on either side


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
    def quantise(cls, weight: torch.Tensor) -> Self:
        """From float [out, in], on its device. Needs memory for a few megabytes beside the result."""
        raise NotImplementedError("such a matrix is made of what it holds exactly")

    @staticmethod
    def kinds(shape: tuple[int, int]) -> tuple[TensorKind, TensorKind]:
        """Dtypes and shapes of the weight and the scale of a matrix of this shape, if these follow from it."""
        raise NotImplementedError("such a matrix has other tensors")

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
    """(first row, row behind the last) of parts of a matrix of `shape` that are quantised or dequantised at a time."""
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

    It compiles its fallbacks with torch's compiler, which nothing here uses. Its import alone takes more than a second
    and 45 MB; and it warns that a package of other kernels is missing. Both are spared.

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


class Int8Matrix(QuantisedMatrix):
    """Row r is `weight[r] * scale[r] / 127`; weight int8 [out, in], scale float32 [out].

    Where bytes are multiplied quickly (AVX-512, CUDA), inputs are rounded to sixteen bits, each row for itself. They
    are multiplied as two halves of eight. Eight bits alone, which the paper then mends for outliers, cost SmolLM2 4 %
    of perplexity (1.7 % mended) instead of 0.3 %. The sums are whole numbers: a row's result does not depend on the
    rows beside it, and hardly on the device.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(weight, scale)
        self.shape = _shape(weight)
        self._step = scale / 127.0

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> Self:
        library = bitsandbytes().functional
        integers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        precision = torch.float16 if weight.is_cuda else torch.float32
        for start, end in pieces(_shape(weight), weight):
            rows = slice(start, end)
            integers[rows], scale[rows], _ = library.int8_vectorwise_quant(weight[rows].to(precision).contiguous())
        integers[scale == 0] = 0  # a row of zeros divides by zero
        return cls(integers, scale)

    @staticmethod
    def kinds(shape: tuple[int, int]) -> tuple[TensorKind, TensorKind]:
        return (torch.int8, shape), (torch.float32, shape[:1])

    def rows(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        return (self._weight[start:end] * self._step[start:end, None]).to(dtype)

    def product(self, values: torch.Tensor) -> torch.Tensor:
        if not (values.is_cuda or _multiplies_bytes()):
            return self.product_in_pieces(values)
        high, low, steps = halves(values.float())
        if len(values) == 1:  # for which alone the weights are not brought into another order first
            upper, lower = self._times(high), self._times(low)
        else:
            upper, lower = self._times(torch.cat([high, low])).chunk(2)
        return upper.float().add_(lower, alpha=1 / LOW_STEPS).mul_(steps * self._step).to(values.dtype)

    def _times(self, integers: torch.Tensor) -> torch.Tensor:
        """Int8 [rows, in] times the transpose of the weights: int32."""
        if integers.is_cuda:
            sums: torch.Tensor = bitsandbytes().functional.int8_linear_matmul(integers, self._weight)
            return sums
        return torch._int_mm(integers, self._weight.t())  # what that comes to on a CPU, without its overhead


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 [rows, in] as `(high + low / 254) * steps`: int8, int8 and float32 [rows, 1]."""
    steps = values.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).div_(127.0)
    scaled = values / steps
    high = scaled.round()
    low = scaled.sub_(high).mul_(LOW_STEPS).round_()
    return high.to(torch.int8), low.to(torch.int8), steps


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    return (weight.shape[0], weight.shape[1])


@cache
def _multiplies_bytes() -> bool:
    """Whether torch's product of bytes is quick on this CPU, as bitsandbytes decides it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


_KERNEL_ROWS = 32  # of the matrix that bitsandbytes' CPU kernel reads side by side


class Nf4Matrix(QuantisedMatrix):
    """Weights as they are in bitsandbytes: two to a byte, row after row, the first in the high half.

    `weight` uint8 [out, in / 2], `scale` float32 [out * in / 64, rounded up], over the flattened matrix.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(weight, scale)
        self.shape = (weight.shape[0], weight.shape[1] * 2)

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> Self:
        library = bitsandbytes().functional
        out, into = weight.shape
        codes, scales = [], []
        for start, end in pieces((out, into), weight):
            piece = weight[start:end].contiguous()
            code, state = library.quantize_4bit(piece, blocksize=NF4_BLOCK, quant_type="nf4")
            codes.append(code.reshape(-1))
            scales.append(state.absmax)
        return cls(torch.cat(codes).view(out, into // 2), torch.cat(scales))

    @staticmethod
    def kinds(shape: tuple[int, int]) -> tuple[TensorKind, TensorKind]:
        out, into = shape
        return (torch.uint8, (out, into // 2)), (torch.float32, (-(-out * into // NF4_BLOCK),))

    def rows(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        into = self.shape[1]
        scale = self._scale[start * into // NF4_BLOCK : -(-end * into // NF4_BLOCK)]
        return _dequantised(self._weight[start:end], scale, (end - start, into), dtype)

    def product(self, values: torch.Tensor) -> torch.Tensor:
        if not values.is_cuda:
            return self.product_in_pieces(values)
        with torch.no_grad():
            state = _state(self._scale, self.shape, values.dtype)
            output: torch.Tensor = bitsandbytes().matmul_4bit(values, self._weight.view(-1, 1), state)
        return output


class PackedNf4Matrix(QuantisedMatrix):
    """The same for bitsandbytes' CPU kernel, which computes in bfloat16 (AVX-512 BF16).

    The kernel reads 32 rows side by side: byte 2r (2r + 1) of 32 has the first (second) of two neighbouring weights:
    row r + 16 in its high half, row r in its low half. `weight` uint8 [out, in / 2], `scale` bfloat16 [in / 64, out].
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(weight, scale)
        self.shape = (weight.shape[0], weight.shape[1] * 2)
        self._code = _code(scale.device)

    @staticmethod
    def suits(shape: tuple[int, int]) -> bool:
        """Whether the kernel is there and takes matrices of this shape."""
        return shape[0] % _KERNEL_ROWS == 0 and shape[1] % NF4_BLOCK == 0 and _kernel_works()

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> Self:
        out, into = weight.shape
        plain = Nf4Matrix.quantise(weight).tensors()
        scale = plain["scale"].view(out, into // NF4_BLOCK).t().to(torch.bfloat16).contiguous()
        return cls(_packed(plain["weight"]), scale)

    @staticmethod
    def kinds(shape: tuple[int, int]) -> tuple[TensorKind, TensorKind]:
        out, into = shape
        return (torch.uint8, (out, into // 2)), (torch.bfloat16, (into // NF4_BLOCK, out))

    def rows(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        return _dequantised(
            _unpacked(self._weight[start:end]),
            self._scale[:, start:end].t().float().reshape(-1),
            (end - start, self.shape[1]),
            dtype,
        )

    def product(self, values: torch.Tensor) -> torch.Tensor:
        multiply = torch.ops.bitsandbytes.gemv_4bit.default
        output: torch.Tensor = multiply(values, self._weight, self.shape, self._scale, self._code, NF4_BLOCK)
        return output


def nf4_kind(shape: tuple[int, int], device: torch.device) -> type[Nf4Matrix] | type[PackedNf4Matrix]:
    """The layout that is the quickest to compute with on this machine."""
    return PackedNf4Matrix if device.type == "cpu" and PackedNf4Matrix.suits(shape) else Nf4Matrix


def nf4_layout(device: torch.device) -> str:
    """The name of the layout that `nf4_kind` chooses on this machine, for file names."""
    return "nf4packed" if device.type == "cpu" and _kernel_works() else "nf4"


def _state(scale: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    return bitsandbytes().functional.QuantState(
        scale,
        shape=torch.Size(shape),
        code=_code(scale.device),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


@cache
def _code(device: torch.device) -> torch.Tensor:
    """The sixteen values."""
    values: torch.Tensor = bitsandbytes().functional.get_4bit_type("nf4", device=device)
    return values


def _dequantised(weight: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    # As one block of weights in each row: where a row ends inside a block, the CPU kernel takes wrong scales.
    count = shape[0] * shape[1]
    flat = (count // NF4_BLOCK, NF4_BLOCK) if count % NF4_BLOCK == 0 else (1, count)
    values: torch.Tensor = bitsandbytes().functional.dequantize_4bit(weight.reshape(-1, 1), _state(scale, flat, dtype))
    return values.view(shape)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """[out, in / 2] with neighbours of a row in each byte -> the same bytes in the kernel's order."""
    out, half = codes.shape
    block = codes.view(-1, _KERNEL_ROWS, half).transpose(1, 2)  # [out / 32, in / 2, 32]
    low, high = block.chunk(2, 2)
    return torch.stack([high & 0xF0 | low >> 4, (high & 0x0F) << 4 | low & 0x0F], 3).view(out, half)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """What `_packed` was given."""
    out, half = packed.shape
    first, second = packed.view(-1, half, _KERNEL_ROWS // 2, 2).unbind(3)
    block = torch.cat([(first & 0x0F) << 4 | second & 0x0F, first & 0xF0 | second >> 4], 2)
    return block.transpose(1, 2).reshape(out, half)


@cache
def _kernel_works() -> bool:
    """Whether the kernel is there and reads this order of bytes: tried out, because it is not documented."""
    library = bitsandbytes().functional
    if not library.has_avx512bf16():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * _KERNEL_ROWS, 2 * NF4_BLOCK, generator=generator)
    values = torch.randn(3, 2 * NF4_BLOCK, generator=generator)
    matrix = PackedNf4Matrix.quantise(weight)
    expected = values @ Nf4Matrix.quantise(weight).rows(0, len(weight), torch.float32).t()
    return bool((matrix.product(values) - expected).norm() <= 0.02 * expected.norm())
