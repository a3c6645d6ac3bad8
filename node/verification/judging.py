"""Whether an answer is right: a server's claim against a recomputation. Pure functions of tensors.

Honest servers differ in the last bits: batches, kernels, devices and dtypes change the order of sums. So a claim is
judged by its distance from the recomputed answer, token by token. The tolerance was measured on honest servers of the
same dtype, quantisation and kinds of devices. Two distances count. That of the worst token finds errors at one place,
the root mean square over all tokens small errors everywhere.

Weights of fewer bits than declared are found by direction. An honest bfloat16 server is off by about as much as one
that secretly holds int8 weights. But the latter is off towards what int8 weights give, which a validator can compute.
The error is projected on that direction over all values of all tokens (a matched filter). This finds weights that were
quantised as petalnode does it; others may escape.

Who chooses the question can make it one that roundings decide: two experts that suit a token equally well, values that
cancel, values that one processor takes for zero. So nobody is called faulty before the answer was recomputed with noise
of the size that was calibrated (`Recomputation.perturbed`): tokens which that changes by as much as a fault do not
count. For the others the error has to exceed what the noise makes.

Servers of the exact kind (docs/exact.md) do not differ at all: for them `judge_bits` compares bits.

Petals (NeurIPS 2023, appendix H) leaves open what "incorrect outputs" are; this is our answer to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from ...protocols.tensors import decode, encode, largest
from ...protocols.training import LORA_PARTS, PROMPTS
from .tolerances import Tolerance

Result = Literal["ok", "faulty", "inconclusive"]


@dataclass(frozen=True)
class JudgingLimits:
    """From what error on an answer is faulty, by how the errors are spread."""

    beyond: float = 1e9  # The distance of NaN and infinity, and the largest that is reported: JSON has no infinity
    least_share: float = 0.05
    """A token whose recomputed norm is below this share of the median token's counts as if it had that norm: where
    next to nothing is right, an error of next to nothing is no fault. Gradients have many such tokens."""
    travels: float = 0.9
    """Of the largest value that a codec carries: above, one honest server's answer is finite and another's is not."""
    squared: float = 1e18  # The square of a larger value is not finite in float32, in which blocks take norms
    unsteady: float = 1.5
    """What the noise changes of a token is multiplied by this before it is compared with what proves a fault."""
    suspicious: float = 1e-3
    """Mean relative error below which no coarser weights can be the cause: int8 weights make ten times as much."""
    share_faulty: float = 0.75
    """Of the way to the coarser weights' answer. Honest servers stay below a half even if rounding is all there is: two
    answers that are rounded independently have half of their difference in common with a third."""
    rest_faulty: float = 1.5  # How far the claim may be from the coarser weights' answer, as a multiple of that way
    least_values: int = 512  # With fewer values the share is not significant


JUDGING: Final = JudgingLimits()
_KEPT: Final = {PROMPTS: "deep prompts", LORA_PARTS[0]: "LoRA's A", LORA_PARTS[1]: "LoRA's B"}
"""By the last part of its name, what messages call a kept tensor."""


COARSER: Final = {"none": ("int8", "nf4"), "int8": ("nf4",), "nf4": ()}
"""Per declared quantisation, the coarser ones that a server might hold instead. With int8 activations there is no
direction to look for: which way a value is rounded follows from last bits, and after some blocks an error has any."""


@dataclass(frozen=True)
class Distance:
    """How far a claim is from the recomputed answer, relative to the latter: `worst` of a single token, and `mean`, the
    root mean square over all `tokens`. `known` is false, and the distance 0, if the recomputed answer is not finite or
    too large to travel: then an honest server has no finite answer either."""

    worst: float
    mean: float
    tokens: int
    known: bool = True


@dataclass(frozen=True)
class Judgement:
    """`error` and `tolerance` are those that decided, relative to the recomputed answer. `one_bit`: nothing else of it
    is wrong, and all of it had to be right."""

    result: Result
    reason: str
    error: float
    tolerance: float
    one_bit: bool = False


def distance(claimed: torch.Tensor, recomputed: torch.Tensor, codec: str = "none") -> Distance:
    """Relative distance of float tensors of one shape [rows, tokens, hidden], of any dtype and device.

    `codec` is that under which the claim travelled.

    Raises:
        ValueError: the shapes differ, or there are no values.
    """
    if claimed.shape != recomputed.shape or not recomputed.numel():
        raise ValueError(f"a claim of shape {tuple(claimed.shape)} is compared with {tuple(recomputed.shape)}")
    if not float(recomputed.detach().abs().max()) <= min(
        JUDGING.travels * largest(codec, recomputed.dtype), JUDGING.squared
    ):
        return Distance(0.0, 0.0, recomputed.numel() // recomputed.shape[-1], known=False)
    return _overall(token_errors(claimed, recomputed))


def token_errors(claimed: torch.Tensor, recomputed: torch.Tensor) -> torch.Tensor:
    """Of float [rows, tokens, hidden], float64 [rows x tokens]: the relative error of each token; infinite or NaN where
    a value is not finite."""
    right = recomputed.detach().to("cpu", torch.float64).reshape(-1, recomputed.shape[-1])
    wrong = claimed.detach().to("cpu", torch.float64).reshape(-1, recomputed.shape[-1]) - right
    return _relative(wrong.norm(dim=1), right.norm(dim=1))


def relative_distance(errors: torch.Tensor, sizes: torch.Tensor) -> Distance:
    """From the norms per token of the difference and of the recomputed answer."""
    if not bool(torch.isfinite(sizes).all()):
        return Distance(0.0, 0.0, len(sizes), known=False)
    return _overall(_relative(errors, sizes))


def _relative(errors: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    present = sizes[sizes > 0]
    least = JUDGING.least_share * float(present.median()) if len(present) else 0.0
    return errors / sizes.clamp(min=max(least, torch.finfo(torch.float64).tiny))


def _overall(relative: torch.Tensor) -> Distance:
    if not bool(torch.isfinite(relative).all()):
        return Distance(JUDGING.beyond, JUDGING.beyond, len(relative))
    worst, mean = float(relative.max()), float(relative.square().mean().sqrt())
    return Distance(min(worst, JUDGING.beyond), min(mean, JUDGING.beyond), len(relative))


def kept_distances(claimed: Mapping[str, torch.Tensor], recomputed: Mapping[str, torch.Tensor]) -> dict[str, Distance]:
    """How far gradients of kept tensors are from the recomputed ones, by what they are gradients of.

    Such a gradient is a sum over tokens. So each tensor counts as one value, or each block's part of deep prompts. As
    with tokens, one that is next to nothing is held to a share of the others' norms.

    Args:
        claimed, recomputed: float tensors of equal shapes, under the names that kept tensors have on the wire.

    Raises:
        ValueError: names or shapes differ.
    """
    shapes, expected = ({name: one.shape for name, one in some.items()} for some in (claimed, recomputed))
    if shapes != expected:
        raise ValueError("gradients of other tensors than were kept")
    norms: dict[str, list[tuple[float, float]]] = {}
    for name, tensor in recomputed.items():
        parts = len(tensor) if name == PROMPTS else 1
        right = tensor.detach().to("cpu", torch.float64).reshape(parts, -1)
        wrong = claimed[name].detach().to("cpu", torch.float64).reshape(parts, -1) - right
        group = norms.setdefault(_KEPT[name.rpartition(".")[2]], [])
        group += zip(wrong.norm(dim=1).tolist(), right.norm(dim=1).tolist(), strict=True)
    return {
        what: relative_distance(*torch.tensor(pairs, dtype=torch.float64).unbind(1)) for what, pairs in norms.items()
    }


def no_padding(left_padding: Sequence[int], rows: int, first: int, tokens: int) -> torch.Tensor:
    """bool [rows, tokens]: those of the tokens from position `first` on that are no padding; all, if all are."""
    padding = torch.tensor(left_padding or [0] * rows).unsqueeze(1)
    counts = torch.arange(first, first + tokens) >= padding
    return counts if bool(counts.any()) else torch.ones_like(counts)


@dataclass(frozen=True)
class Spread:
    """How much noise changes the answer to one question at most, relative to it, float64 [tokens]. A tie is decided
    otherwise in some of the recomputations only, so their mean says little."""

    most: torch.Tensor

    def steady(self, tolerance: Tolerance) -> torch.Tensor:
        """bool [tokens]: those that noise does not change by as much as proves a fault."""
        return JUDGING.unsteady * self.most <= tolerance.faulty_worst


def spread_of(recomputed: torch.Tensor, perturbed: Sequence[torch.Tensor], codec: str = "none") -> Spread:
    """From the answer and the same with noise, float [rows, tokens, hidden]. What a codec makes of it counts too."""
    changes = [token_errors(answer, recomputed) for answer in perturbed]
    seen = torch.stack(changes).nan_to_num(JUDGING.beyond, posinf=JUDGING.beyond)
    most = seen.amax(0)
    if codec != "none":
        most = torch.maximum(most, token_errors(decode(*encode(recomputed, codec)), recomputed))
    return Spread(most)


def judge_steady(
    claimed: torch.Tensor, recomputed: torch.Tensor, tolerance: Tolerance, spread: Spread, what: str = "its answer"
) -> Judgement:
    """Of an answer that is off by more than the tolerance; never "ok".

    Tokens that noise changes by as much as a fault do not count. Of the others, the mean error has to be beyond the
    mean change; it is below what proves a fault at one token. So no question hides a larger error of all tokens.
    """
    errors = token_errors(claimed, recomputed)
    steady = spread.steady(tolerance)
    if not bool(steady.any()):
        reason = f"{what} depends on roundings at every token, so its error proves nothing"
        return Judgement("inconclusive", reason, _overall(errors).mean, tolerance.faulty_mean)
    allowed = max(tolerance.faulty_mean, float(spread.most[steady].square().mean().sqrt()))
    judged = judge_distance(_overall(errors[steady]), replace(tolerance, faulty_mean=allowed), what)
    if judged.result == "faulty":
        return judged
    reason = f"{what} is off only where it depends on roundings, by {_overall(errors).worst:.2g}"
    return Judgement("inconclusive", reason, _overall(errors).mean, allowed)


def judge_kept(
    found: Mapping[str, Distance], tolerance: Tolerance | None, perturbed: Sequence[Mapping[str, Distance]] = ()
) -> list[Judgement]:
    """From the result of `kept_distances`: one judgement for each kind of tensor. `perturbed`: how far the
    recomputed gradients with noise are from those without."""
    judged = []
    for what, far in found.items():
        one = judge_distance(far, tolerance, f"its gradient of {what}")
        most = max((noisy[what].worst for noisy in perturbed), default=0.0)
        mean = max((noisy[what].mean for noisy in perturbed), default=0.0)
        if one.result == "faulty" and tolerance is not None:
            unsteady = JUDGING.unsteady * most > tolerance.faulty_worst
            if unsteady or (far.worst <= tolerance.faulty_worst and far.mean <= mean):
                reason = f"its gradient of {what} is off by {far.mean:.2g}, and depends on roundings by {mean:.2g}"
                one = Judgement("inconclusive", reason, far.mean, max(mean, tolerance.faulty_mean))
        judged.append(one)
    return judged


def worst_judgement(judged: Sequence[Judgement]) -> Judgement:
    """A faulty one, else an inconclusive one, else any; of those the one with the largest share of its tolerance."""
    order = ("ok", "inconclusive", "faulty")
    return max(judged, key=lambda one: (order.index(one.result), one.error / (one.tolerance or 1.0)))


def judge_distance(found: Distance, tolerance: Tolerance | None, what: str = "its answer") -> Judgement:
    """Whether an honest server can be so far off; the tolerance is None where nobody measured it. `what` is what the
    reason says was judged."""
    if tolerance is None:
        reason = "nobody has measured how much honest servers of this kind differ"
        return Judgement("inconclusive", reason, found.mean, 0.0)
    if not found.known:
        return Judgement("inconclusive", "the right answer is not finite, or too large to travel", 0.0, 0.0)
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


def judge_bits(claimed: torch.Tensor, recomputed: torch.Tensor) -> Judgement:
    """Whether an exact answer, float [rows, tokens, hidden] as it arrived, has every bit of the right one; never
    inconclusive."""
    if claimed.shape != recomputed.shape or claimed.dtype != recomputed.dtype:
        return Judgement("faulty", f"its answer has shape {tuple(claimed.shape)}", JUDGING.beyond, 0.0)
    given, right = (tensor.contiguous().view(torch.uint8) for tensor in (claimed, recomputed))
    if torch.equal(given, right):
        return Judgement("ok", "its answer is right to the bit", 0.0, 0.0)
    off = (given != right).view(*claimed.shape, -1).any(-1)
    found = f"{int(off.sum())} of {off.numel()} values, first at token {int(off.any(-1).any(0).nonzero()[0])}"
    reason = f"its answer differs in {found}, and it announces that it is exact to the bit"
    one_bit = sum(byte.bit_count() for byte in (given ^ right)[given != right][:2].tolist()) == 1
    if one_bit:
        reason += "; it is one bit, so the memory of that machine may be faulty"
    return Judgement("faulty", reason, _overall(token_errors(claimed, recomputed)).worst, 0.0, one_bit)


@dataclass(frozen=True)
class Share:
    """`share`: where the claim is between the recomputed answer (0) and what coarser weights give (1).

    `rest` is its distance from the latter, `size` the distance between the two, relative to the recomputed answer;
    `values` how many values were compared.
    """

    share: float
    rest: float
    size: float
    values: int

    @property
    def is_substitution(self) -> bool:
        near = (
            self.rest <= JUDGING.rest_faulty * self.size
            and JUDGING.share_faulty <= self.share <= 2 - JUDGING.share_faulty
        )
        return near and self.values >= JUDGING.least_values


def share_of(claimed: torch.Tensor, recomputed: torch.Tensor, other: torch.Tensor) -> Share:
    """
    Args:
        claimed, recomputed, other: float [..., hidden] of one shape: the claim, what the declared weights give, and
            what the coarser weights give.

    Raises:
        ValueError: the shapes differ, or there are no values.
    """
    if not claimed.shape == recomputed.shape == other.shape or not recomputed.numel():
        raise ValueError(f"{tuple(claimed.shape)}, {tuple(recomputed.shape)} and {tuple(other.shape)} are not compared")
    right = recomputed.double().flatten(0, -2)
    # Relative to its own norm, as in distances: else one large token decides.
    scale = right.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    error = (claimed.double().flatten(0, -2) - right) / scale
    towards = (other.double().flatten(0, -2) - right) / scale
    square = float(towards.square().sum())
    share = float((error * towards).sum()) / square if square else 0.0
    rest = float((error - towards).square().sum())
    return Share(share, (rest / len(right)) ** 0.5, (square / len(right)) ** 0.5, recomputed.numel())
