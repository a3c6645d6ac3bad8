"""Eight bits for a weight: LLM.int8() (Dettmers et al., NeurIPS 2022), a scale for each row."""

from __future__ import annotations

from functools import cache
from typing import Self

import torch

from .matrix import QuantisedMatrix, TensorKind, bitsandbytes, pieces

_LOW_STEPS = 254.0  # what rounding leaves is within half a step: 127 parts of it on either side


class Int8Matrix(QuantisedMatrix):
    """Row r is `weight[r] * scale[r] / 127`; weight int8 [out, in], scale float32 [out].

    Where bytes are multiplied quickly (AVX-512, CUDA), inputs are rounded to sixteen bits, each row for itself, and
    multiplied as two halves of eight. Eight bits alone, which the paper then mends for outliers, cost SmolLM2 4 % of
    perplexity (1.7 % mended) instead of 0.3 %. The sums are whole numbers: a row's result does not depend on the rows
    beside it, and hardly on the device.
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
        high, low, steps = _halves(values.float())
        if len(values) == 1:  # for which alone the weights are not brought into another order first
            upper, lower = self._times(high), self._times(low)
        else:
            upper, lower = self._times(torch.cat([high, low])).chunk(2)
        return upper.float().add_(lower, alpha=1 / _LOW_STEPS).mul_(steps * self._step).to(values.dtype)

    def _times(self, integers: torch.Tensor) -> torch.Tensor:
        """Int8 [rows, in] times the transpose of the weights: int32."""
        if integers.is_cuda:
            sums: torch.Tensor = bitsandbytes().functional.int8_linear_matmul(integers, self._weight)
            return sums
        return torch._int_mm(integers, self._weight.t())  # what that comes to on a CPU, without its overhead


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 [rows, in] as `(high + low / 254) * steps`: int8, int8 and float32 [rows, 1]."""
    steps = values.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).div_(127.0)
    scaled = values / steps
    high = scaled.round()
    low = scaled.sub_(high).mul_(_LOW_STEPS).round_()
    return high.to(torch.int8), low.to(torch.int8), steps


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    return (weight.shape[0], weight.shape[1])


@cache
def _multiplies_bytes() -> bool:
    """Whether torch's product of bytes is quick on this CPU, as bitsandbytes decides it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
