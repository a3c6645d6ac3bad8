"""How keys and values are held in the memory of a session's cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...models.quantisation import CACHE_BLOCK, CacheDtype, key_bytes

_LEAST = 1e-30  # blocks of nothing larger become zeros in eight bits: no scale is subnormal, which may count as zero


@dataclass(frozen=True)
class CacheForm:
    """How keys and values of dtype `computed` are held.

    auto: as they are. bfloat16: rounded to the nearest, ties to even. int8: each `CACHE_BLOCK` values of a key or value
    as whole multiples, -127 to 127, of a bfloat16 scale. The scale is their largest magnitude / 127, rounded up: as in
    GGUF's Q8_0, with a scale that has float32's range. What they stand for is exact in float32. The compiled kernels
    (`hold_key` and `open_keys` in `kernels/`) give the same bits. A block with a value that is not finite becomes NaN.
    """

    held: CacheDtype
    computed: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the memory."""
        if self.held == "int8":
            return torch.uint8
        return torch.bfloat16 if self.held == "bfloat16" else self.computed

    def width(self, dim: int) -> int:
        """Elements of the memory that a key or value of `dim` values takes."""
        return key_bytes(self.held, dim, self.computed.itemsize) // self.dtype.itemsize

    def put(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Holds `values` [..., dim] in `into` [..., width]."""
        if self.held != "int8":
            into.copy_(values)
            return
        dim = values.shape[-1]
        padded = torch.nn.functional.pad(values.float(), (0, -dim % CACHE_BLOCK))
        blocks = padded.view(*values.shape[:-1], -(-dim // CACHE_BLOCK), CACHE_BLOCK)
        most = blocks.abs().amax(-1)
        finite = most <= torch.finfo(torch.float32).max
        scales = torch.where(finite & (most > _LEAST), most / 127.0, 0.0)
        scales = ((scales.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        codes = torch.where(scales.unsqueeze(-1) > 0, blocks / scales.unsqueeze(-1), 0.0).round_()
        scales = torch.where(finite, scales, torch.nan)
        into[..., :dim].view(torch.int8).copy_(codes.flatten(-2)[..., :dim])
        into[..., dim + dim % 2 :].view(torch.bfloat16).copy_(scales)

    def opened(self, held: torch.Tensor, dim: int) -> torch.Tensor:
        """The values [..., dim] that `held` [..., width] stands for, in the dtype that is computed in."""
        if self.held != "int8":
            return held.to(self.computed)
        codes = held[..., :dim].view(torch.int8).to(torch.float32)
        scales = held[..., dim + dim % 2 :].view(torch.bfloat16).to(torch.float32)
        if dim % CACHE_BLOCK:
            return (codes * scales.repeat_interleave(CACHE_BLOCK, -1)[..., :dim]).to(self.computed)
        blocks = codes.view(*scales.shape, CACHE_BLOCK) * scales.unsqueeze(-1)
        return blocks.view(codes.shape).to(self.computed)
