"""Tells coarser weights that pass for finer ones, where the tolerance for rounding is too wide to see them.

An honest bfloat16 server is off by about as much as one that secretly holds int8 weights. But the latter is off in a
known direction: towards what int8 weights give, which a validator can compute. So the error is projected on that
direction, over all values of all tokens: rounding has little part of it, a substitution has most of it (a matched
filter). It finds weights that were quantised as petalnode does it; others may escape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

COARSER: Final = {"none": ("int8", "nf4"), "int8": ("nf4",), "nf4": ()}
"""Per declared quantisation, what might be held instead."""
SUSPICIOUS: Final = 1e-3
"""Mean relative error below which nothing coarser can be behind it: int8 weights make ten times as much."""
SHARE_FAULTY: Final = 0.75
"""Of the way to the other weights' answer. Honest servers stay below a half even if rounding is all there is: two
truths that are rounded apart from each other have half of their difference in common with a third."""
REST_FAULTY: Final = 1.5
"""Times the way itself, that the claim may be off it: what is far from both is something else."""
_LEAST_VALUES: Final = 512
"""Below so many values chance has a say."""


@dataclass(frozen=True)
class Share:
    """`share`: how far the claim is on the way from the truth (0) to what the other weights give (1).

    `rest` is how far it is from the latter, and `size` how far apart those two are, relative to the truth; `values` how
    many there were.
    """

    share: float
    rest: float
    size: float
    values: int

    @property
    def is_substitution(self) -> bool:
        near = self.rest <= REST_FAULTY * self.size and SHARE_FAULTY <= self.share <= 2 - SHARE_FAULTY
        return near and self.values >= _LEAST_VALUES


def share_of(claimed: torch.Tensor, truth: torch.Tensor, other: torch.Tensor) -> Share:
    """
    Args:
        claimed, truth, other: float [..., hidden] of one shape: the answer, what the declared weights give, and what
            the other weights give.

    Raises:
        ValueError: the shapes differ, or there are no values.
    """
    if not claimed.shape == truth.shape == other.shape or not truth.numel():
        raise ValueError(f"{tuple(claimed.shape)}, {tuple(truth.shape)} and {tuple(other.shape)} are not compared")
    right = truth.double().flatten(0, -2)
    # Each token counts by its own size, as in distances: else one large token decides.
    scale = right.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    error = (claimed.double().flatten(0, -2) - right) / scale
    towards = (other.double().flatten(0, -2) - right) / scale
    square = float(towards.square().sum())
    share = float((error * towards).sum()) / square if square else 0.0
    rest = float((error - towards).square().sum())
    return Share(share, (rest / len(right)) ** 0.5, (square / len(right)) ** 0.5, truth.numel())
