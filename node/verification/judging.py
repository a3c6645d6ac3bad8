"""Whether an answer is right: what was claimed against what a recomputation gives. Pure functions of tensors.

Honest servers differ in the last bits: batches, kernels, devices and dtypes change the order of sums. So a claim is
judged by its distance from the truth, token by token, against a tolerance that was measured on honest servers of the
same dtype, quantisation and kinds of devices. Two distances are looked at: that of the worst token, which finds what
was wrong at one place, and the root mean square over all, which finds what is a little wrong everywhere.

Petals (NeurIPS 2023, appendix H) leaves open what "incorrect outputs" are; this is our answer to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from ...protocols.training import LORA_PARTS, PROMPTS
from .tolerances import Kind, Tolerance, find_tolerance

Result = Literal["ok", "faulty", "inconclusive"]

BEYOND: Final = 1e9
"""The distance of what is no number at all, and the largest that is told: JSON knows no infinity."""
_LEAST_SHARE: Final = 0.05
"""A token whose truth is below this share of the median token's counts as if it had so much: where next to nothing is
right, next to nothing too much is no fault. Gradients have many such tokens."""
_KEPT: Final = {PROMPTS: "deep prompts", LORA_PARTS[0]: "LoRA's A", LORA_PARTS[1]: "LoRA's B"}
"""By how its name ends, what a kept tensor is to people."""


@dataclass(frozen=True)
class Distance:
    """How far a claim is from the truth, relative to the truth.

    `worst` is that of the worst token and `mean` the root mean square over all `tokens`.
    """

    worst: float
    mean: float
    tokens: int


@dataclass(frozen=True)
class Judgement:
    """`error` and `tolerance` are those that decided, in units of the truth's root mean square."""

    result: Result
    reason: str
    error: float
    tolerance: float


def distance(claimed: torch.Tensor, truth: torch.Tensor) -> Distance:
    """Relative distance of float tensors of one shape [rows, tokens, hidden], of any dtype and device.

    Raises:
        ValueError: the shapes differ, or there are no values.
    """
    if claimed.shape != truth.shape or not truth.numel():
        raise ValueError(f"a claim of shape {tuple(claimed.shape)} is compared with {tuple(truth.shape)}")
    right = truth.detach().to("cpu", torch.float64).reshape(-1, truth.shape[-1])
    wrong = claimed.detach().to("cpu", torch.float64).reshape(-1, truth.shape[-1]) - right
    return relative_distance(wrong.norm(dim=1), right.norm(dim=1))


def relative_distance(errors: torch.Tensor, sizes: torch.Tensor) -> Distance:
    """From the norms per token of the difference and of the truth."""
    if not bool(torch.isfinite(errors).all()):
        return Distance(BEYOND, BEYOND, len(errors))
    present = sizes[sizes > 0]
    least = _LEAST_SHARE * float(present.median()) if len(present) else 0.0
    relative = errors / sizes.clamp(min=max(least, torch.finfo(torch.float64).tiny))
    worst, mean = float(relative.max()), float(relative.square().mean().sqrt())
    return Distance(min(worst, BEYOND), min(mean, BEYOND), len(errors))


def kept_distances(claimed: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> dict[str, Distance]:
    """How far gradients of what a server kept for a work are from the truth, by what they are gradients of.

    Such a gradient is a sum over tokens, so each tensor counts as one value, or each block's part of deep prompts.
    Those of a kind have much the same size: the one that is next to nothing is held to a share of the others', as the
    tokens of an answer are.

    Args:
        claimed, truth: under the names that kept tensors have on the wire, float tensors of equal shapes.

    Raises:
        ValueError: names or shapes differ.
    """
    if {name: each.shape for name, each in claimed.items()} != {name: each.shape for name, each in truth.items()}:
        raise ValueError("gradients of other tensors than were kept")
    norms: dict[str, list[tuple[float, float]]] = {}
    for name, each in truth.items():
        parts = len(each) if name == PROMPTS else 1
        right = each.detach().to("cpu", torch.float64).reshape(parts, -1)
        wrong = claimed[name].detach().to("cpu", torch.float64).reshape(parts, -1) - right
        group = norms.setdefault(_KEPT[name.rpartition(".")[2]], [])
        group += zip(wrong.norm(dim=1).tolist(), right.norm(dim=1).tolist(), strict=True)
    return {
        what: relative_distance(*torch.tensor(pairs, dtype=torch.float64).unbind(1)) for what, pairs in norms.items()
    }


def judge(claimed: torch.Tensor, truth: torch.Tensor, tolerance: Tolerance | None) -> Judgement:
    """Whether `claimed`, what a server answered, can be an honest version of `truth`, what a recomputation gave.

    Args:
        claimed, truth: float [rows, tokens, hidden]; outputs, or gradients with respect to the inputs.
        tolerance: what honest servers of that dtype, quantisation and kind of device reach; None if nobody measured.
    """
    if claimed.shape != truth.shape:
        reason = f"its answer has the shape {tuple(claimed.shape)} instead of {tuple(truth.shape)}"
        return Judgement("faulty", reason, BEYOND, 0.0)
    return judge_distance(distance(claimed, truth), tolerance)


def judge_answer(
    kind: Kind, claimed: torch.Tensor, truth: torch.Tensor, counts: torch.Tensor | None = None
) -> Judgement:
    """As `judge`, by the tolerance that the shipped table has for this kind of answer.

    Args:
        counts: bool [rows, tokens], the tokens that are no padding; None for all. Padding says nothing of a server.
    """
    if counts is not None and claimed.shape == truth.shape and bool(counts.any()):
        claimed, truth = claimed[counts].unsqueeze(0), truth[counts].unsqueeze(0)
    return judge(claimed, truth, find_tolerance(kind))


def judge_kept(found: Mapping[str, Distance], tolerance: Tolerance | None) -> list[Judgement]:
    """As `judge`, from what `kept_distances` has found: one for each kind of tensor."""
    return [judge_distance(each, tolerance, f"its gradient of {what}") for what, each in found.items()]


def worst_judgement(judged: Sequence[Judgement]) -> Judgement:
    """The one that counts: one that is faulty, else one that is inconclusive; of those the nearest to its tolerance, or
    the farthest beyond."""
    order = ("ok", "inconclusive", "faulty")
    return max(judged, key=lambda each: (order.index(each.result), each.error / (each.tolerance or 1.0)))


def judge_distance(found: Distance, tolerance: Tolerance | None, what: str = "its answer") -> Judgement:
    """As `judge`, from a distance that is known or estimated."""
    if tolerance is None:
        reason = "nobody has measured how much honest servers of this kind differ"
        return Judgement("inconclusive", reason, found.mean, 0.0)
    for error, limit, where in (
        (found.mean, tolerance.faulty_mean, "over all tokens"),
        (found.worst, tolerance.faulty_worst, "at its worst token"),
    ):
        if not error <= limit:
            reason = f"{what} is off by {error:.2g} {where}; honest servers stay below {limit:.2g}"
            return Judgement("faulty", reason, error, limit)
    for error, limit, where in (
        (found.mean, tolerance.ok_mean, "over all tokens"),
        (found.worst, tolerance.ok_worst, "at its worst token"),
    ):
        if error > limit:
            reason = f"{what} is off by {error:.2g} {where}: more than the usual {limit:.2g}, too little to be sure"
            return Judgement("inconclusive", reason, error, limit)
    return Judgement("ok", f"{what} is right within tolerance", found.worst, tolerance.ok_worst)
