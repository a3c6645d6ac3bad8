"""Four bits for a weight: NF4 (QLoRA, Dettmers et al., NeurIPS 2023, section 3), a scale for every 64 weights."""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import torch

from ...models.quantisation import NF4_BLOCK
from .matrix import QuantisedMatrix, TensorKind, bitsandbytes, pieces

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

    The kernel reads 32 rows side by side: byte 2r (2r + 1) of 32 has the first (second) of two neighbouring weights of
    row r + 16 in its high and of row r in its low half. `weight` uint8 [out, in / 2], `scale` bfloat16 [in / 64, out].
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
