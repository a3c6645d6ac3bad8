"""Rows of values rounded to eight bits.

Each block of 32 values becomes whole multiples, -127 to 127, of its largest magnitude / 127. So does GGUF's Q8_0, with
a float16 scale. With weights of 4 and 8 bits they make sums of whole numbers, which the kernels add up quickly and
every processor alike (`kernels/bytes.h`); all other ways multiply the values that these numbers stand for.
"""

from __future__ import annotations

from typing import Any, Final

import torch

ROUNDED_TOGETHER: Final = 32
"""Values of a row that share a scale."""
_LEAST: Final = 1e-30
"""Blocks of nothing larger become zeros: 127 divided by it has to be finite."""


def rounded(values: torch.Tensor) -> torch.Tensor:
    """float32 [..., in], rounded: the values that the whole numbers stand for. A block with a value that is not finite
    becomes NaN. To the bit what `round_block` of the compiled kernels (`kernels/products.h`) gives."""
    into = values.shape[-1]
    missing = -into % ROUNDED_TOGETHER
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    blocks = padded.reshape(*values.shape[:-1], -1, ROUNDED_TOGETHER)
    most = blocks.abs().amax(-1, keepdim=True)
    most = torch.where(most <= torch.finfo(torch.float32).max, most, torch.nan)
    found = most > _LEAST
    codes = (blocks * torch.where(found, 127.0 / most, 0.0)).round_()
    codes = torch.where(found, codes, 0.0)
    scaled = codes * torch.where(found, most / 127.0, 0.0 * most)
    return scaled.reshape(padded.shape)[..., :into]


class Rounded(torch.autograd.Function):
    """`rounded`, through which gradients pass as if it changed nothing."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return rounded(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
