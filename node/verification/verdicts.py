"""The judge: recomputes what servers answered, block by block, and gives a verdict on every answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from ...protocols.ids import Span
from ...protocols.tensors import decode, encode
from ..errors import BadInput, MachineError, ModelError, PetalnodeError, SwarmError
from ..models import ModelFolder
from ..models.progress import Progress, no_progress
from ..models.quantisation import EXACT, is_exact, within_tolerance
from .judging import (
    COARSER,
    JUDGING,
    Distance,
    Judgement,
    Result,
    Spread,
    distance,
    judge_bits,
    judge_distance,
    judge_kept,
    judge_steady,
    kept_distances,
    share_of,
    spread_of,
    worst_judgement,
)
from .observed import Observed
from .recomputation import Answer, Recomputation, SessionAnswer, SessionQuestion, joined, kept_gradients
from .tolerances import Kind, Tolerance, find_tolerance, noise_of

_SEVERITY: Final[tuple[Result, ...]] = ("ok", "inconclusive", "faulty")


@dataclass(frozen=True)
class Verdict:
    """Of one server: what `petalnode validate --json` prints.

    `error` and `tolerance` are those that decided, relative to the recomputed answer. `kind` says by what it was found:
    "forward" or "backward" by a probe, "receipts" by an audit, "" if the server could not be asked. `requests` were
    recomputed for it. `evidence` is the file by which others can check it. `one_bit`: as `Judgement` has it.
    """

    peer_id: str
    blocks: Span
    verdict: Result
    reason: str
    error: float | None
    tolerance: float | None
    kind: str = ""
    requests: int = 0
    evidence: Path | None = None
    one_bit: bool = False

    def fields(self) -> dict[str, Any]:
        """The fields of the JSON object."""
        return {
            "peer_id": self.peer_id,
            "blocks": [self.blocks.start, self.blocks.end],
            "verdict": self.verdict,
            "reason": self.reason,
            "error": _finite(self.error),
            "tolerance": _finite(self.tolerance),
            "kind": self.kind,
            "requests": self.requests,
            "evidence": None if self.evidence is None else str(self.evidence),
        }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return None if value is None else min(value, 1e30)


@dataclass(frozen=True)
class Compared:
    """An observation and its recomputation.

    Attributes:
        recomputed: float [rows, tokens, hidden], what is judged of all answers of the observation.
        others: what coarser weights give, by the quantisation, where these were tried.
        kept: distances of the gradients of kept tensors, from `kept_distances`.
        tolerance: for answers of this kind; None if nobody measured it.
        perturbed: the same as `recomputed` with noise, where the answer looks faulty; None where it does not.
        kept_perturbed: how far the gradients of kept tensors with noise are from those without.
        exact: the verdict by equality, of answers recomputed to the bit, or that on an answer that could not be; the
            rest is not looked into then.
    """

    observed: Observed
    recomputed: torch.Tensor
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: Mapping[str, Distance] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    perturbed: tuple[torch.Tensor, ...] | None = None
    kept_perturbed: tuple[Mapping[str, Distance], ...] = ()
    exact: Judgement | None = None

    @cached_property
    def claimed(self) -> torch.Tensor:
        return self.observed.judged(torch.cat(self.observed.claimed, dim=1))

    @cached_property
    def spread(self) -> Spread | None:
        if self.perturbed is None or self.claimed.shape != self.recomputed.shape:
            return None
        return spread_of(self.recomputed, self.perturbed, self.observed.codec)

    @cached_property
    def steady(self) -> torch.Tensor | None:
        """bool [rows, tokens]: those that do not depend on roundings; None where that was not looked into."""
        if self.spread is None or self.tolerance is None:
            return None
        return self.spread.steady(self.tolerance).reshape(self.claimed.shape[:2])

    @cached_property
    def found(self) -> Distance:
        """The distance of all answers together."""
        return _far(self.claimed, self.recomputed, self.observed.codec)

    @property
    def steps(self) -> tuple[Distance, ...]:
        """The distance of each answer, in which tokens that depend on roundings count as right."""
        claimed = self.claimed
        if self.steady is not None:
            claimed = torch.where(self.steady.unsqueeze(-1), claimed, self.recomputed)
        sizes = [answer.shape[1] for answer in self.observed.claimed]
        parts = zip(torch.split(claimed, sizes, dim=1), torch.split(self.recomputed, sizes, dim=1), strict=True)
        return tuple(_far(answer, part, self.observed.codec) for answer, part in parts)


def _far(claimed: torch.Tensor, recomputed: torch.Tensor, codec: str) -> Distance:
    if claimed.shape != recomputed.shape:
        return Distance(float("inf"), float("inf"), 0)
    return distance(claimed, recomputed, codec)


class Judge:
    """Recomputes and compares. Runs in a worker thread, one call at a time.

    Args:
        folder: the model with all weights of the judged blocks, or one that has them while they are held.
        device: where to recompute.
        coarser: whether to look for weights of fewer bits than declared.
    """

    def __init__(
        self, folder: Path | ModelFolder, device: str = "cpu", *, coarser: bool = True, progress: Progress = no_progress
    ) -> None:
        self._folder = folder
        self.device = device
        self._coarser = coarser
        self._progress = progress

    def compare(self, observed: Sequence[Observed]) -> list[Compared]:
        """Every observation with its recomputation, in order.

        Raises:
            PetalnodeError: the model's weights are not here, or this machine cannot compute with them.
        """
        answers: dict[int, Answer] = {}
        to_the_bit: set[int] = set()
        unchecked: dict[int, str] = {}
        for (dtype, quantisation), indices in _grouped(observed).items():
            try:
                answers.update(self._recompute(observed, indices, dtype, quantisation))
                to_the_bit.update(indices if is_exact(quantisation) else ())
            except ModelError:  # of the weights that are here
                raise
            except (SwarmError, BadInput) as error:  # BadInput: it announces what is not known here
                unchecked.update(dict.fromkeys(indices, f"it cannot be recomputed: {error}"))
            except MachineError as error:
                if not is_exact(quantisation):
                    raise
                unchecked.update(dict.fromkeys(indices, f"it announces {EXACT}, which cannot be checked here: {error}"))
        found = [
            _compared(seen, answers[index], self.device, index in to_the_bit)
            if index in answers
            else _undecided(seen, unchecked[index])
            for index, seen in enumerate(observed)
        ]
        if self._coarser:
            self._try_coarser(observed, found)
        suspects = [
            index for index, one in enumerate(found) if one.exact is None and self.verdict(one).verdict == "faulty"
        ]
        for indices in _alike([observed[index].kind(self.device) for index in suspects], suspects):
            try:
                self._add_noise(found, answers, indices)
            except SwarmError as error:
                for index in indices:
                    found[index] = _undecided(observed[index], f"it cannot be recomputed: {error}")
        return found

    def _try_coarser(self, observed: Sequence[Observed], found: list[Compared]) -> None:
        """Adds what coarser weights give to the answers that may be theirs."""
        suspects = [
            index
            for index, one in enumerate(found)
            if one.exact is None and JUDGING.suspicious <= one.found.mean < float("inf")
        ]
        coarser = {index: COARSER.get(within_tolerance(observed[index].quantisation), ()) for index in suspects}
        kinds = dict.fromkeys((observed[index].dtype, other) for index in suspects for other in coarser[index])
        for dtype, quantisation in kinds:
            indices = [index for index in suspects if observed[index].dtype == dtype and quantisation in coarser[index]]
            try:
                others = self._recompute(observed, indices, dtype, quantisation)
            except PetalnodeError:
                continue  # this model cannot be held so
            for index, other in others.items():
                found[index] = replace(
                    found[index], others={**found[index].others, quantisation: observed[index].judged(joined(other))}
                )

    def _add_noise(self, found: list[Compared], answers: Mapping[int, Answer], indices: Sequence[int]) -> None:
        """Adds what noise makes of answers of one kind: before anybody is called faulty."""
        kind = found[indices[0]].observed.kind(self.device)
        recomputation = self._recomputation(kind.dtype, within_tolerance(kind.quantisation))
        every = recomputation.perturbed([found[index].observed.question for index in indices], noise_of(kind))
        for index, noisy in zip(indices, every, strict=True):
            seen = found[index].observed
            right = kept_gradients(answers[index], seen.kept)
            kept = tuple(kept_distances(kept_gradients(one, seen.kept), right) for one in noisy) if right else ()
            perturbed = tuple(seen.judged(joined(one)) for one in noisy)
            found[index] = replace(found[index], perturbed=perturbed, kept_perturbed=kept)

    def _recompute(
        self, observed: Sequence[Observed], indices: Sequence[int], dtype: str, quantisation: str
    ) -> dict[int, Answer]:
        answers = self._recomputation(dtype, quantisation).answer([observed[index].question for index in indices])
        return dict(zip(indices, answers, strict=True))

    def _recomputation(self, dtype: str, quantisation: str) -> Recomputation:
        device = "cpu" if is_exact(quantisation) else self.device
        return Recomputation(self._folder, dtype, quantisation, device, self._progress)

    def verdicts(self, observed: Sequence[Observed]) -> list[Verdict]:
        """On every observation, in order. Raises as `compare`."""
        return [self.verdict(compared) for compared in self.compare(observed)]

    def verdict(self, compared: Compared) -> Verdict:
        seen, judged = compared.observed, compared.exact
        if judged is not None:
            told = judged.result, judged.reason, judged.error, judged.tolerance
            requests = len(seen.claimed)
            return Verdict(seen.peer_id, seen.span, *told, seen.direction, requests, one_bit=judged.one_bit)
        tolerance = compared.tolerance
        what = "its answer" if seen.direction == "forward" else "its gradient"
        hidden, spread = judge_distance(compared.found, tolerance, what), compared.spread
        if hidden.result == "faulty" and tolerance is not None and spread is not None:
            hidden = judge_steady(compared.claimed, compared.recomputed, tolerance, spread, what)
        judged = worst_judgement([hidden, *judge_kept(compared.kept, tolerance, compared.kept_perturbed)])
        result, reason, error, limit = judged.result, judged.reason, judged.error, judged.tolerance
        for name, other in compared.others.items():
            if tolerance is not None and _is_substitution(compared, other):
                share = share_of(compared.claimed, compared.recomputed, other)
                result, error = "faulty", compared.found.mean
                declared = f"{seen.dtype} weights" if seen.quantisation == "none" else f"{seen.quantisation} weights"
                reason = (
                    f"{what} is what {name} weights give ({share.share:.2f} of the way), and it declared {declared}"
                )
                break
        return Verdict(seen.peer_id, seen.span, result, reason, error, limit, seen.direction, len(seen.claimed))


def _is_substitution(compared: Compared, other: torch.Tensor) -> bool:
    """Whether the claim is what coarser weights give, at tokens that do not depend on roundings. Noise must not make
    the same of the answer."""
    claimed, right = compared.claimed, compared.recomputed
    steady = compared.steady
    if steady is None:
        return share_of(claimed, right, other).is_substitution
    if not bool(steady.any()):
        return False
    answers = [claimed, *(compared.perturbed or ())]
    first, *noisy = (share_of(answer[steady], right[steady], other[steady]).is_substitution for answer in answers)
    return first and not any(noisy)


def _compared(observed: Observed, answer: Answer, device: str, to_the_bit: bool) -> Compared:
    right = kept_gradients(answer, observed.kept)
    kept = kept_distances(observed.kept, right) if right else {}
    recomputed = observed.judged(joined(answer))
    exact = None
    if to_the_bit and isinstance(answer, SessionAnswer) and observed.arrives_by_token:
        arrived = [decode(*encode(output, observed.codec)) for output in answer.outputs]
        claimed = torch.cat(observed.claimed, dim=1)
        exact = judge_bits(claimed, torch.cat(arrived, dim=1)[:, -claimed.shape[1] :])
    return Compared(observed, recomputed, kept=kept, tolerance=find_tolerance(observed.kind(device)), exact=exact)


def _undecided(observed: Observed, why: str) -> Compared:
    claimed = observed.judged(torch.cat(observed.claimed, dim=1))
    return Compared(observed, claimed, exact=Judgement("inconclusive", why, 0.0, 0.0))


def worst_of(verdicts: Iterable[Verdict], blocks: Span) -> Verdict:
    """The worst of several verdicts on one server, over all `blocks` that it holds."""
    several = list(verdicts)
    worst = max(several, key=lambda one: (_SEVERITY.index(one.verdict), (one.error or 0.0) / (one.tolerance or 1.0)))
    return replace(worst, blocks=blocks, requests=sum(verdict.requests for verdict in several))


def _grouped(observed: Sequence[Observed]) -> dict[tuple[str, str], list[int]]:
    """Indices by what the servers computed with: (dtype, quantisation). Of exact servers, sessions alone are exact."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, seen in enumerate(observed):
        session = isinstance(seen.question, SessionQuestion)
        kind = seen.quantisation if session else within_tolerance(seen.quantisation)
        groups.setdefault((seen.dtype, kind), []).append(index)
    return groups


def _alike(kinds: Sequence[Kind], indices: Sequence[int]) -> list[list[int]]:
    """The indices in groups of one kind each."""
    groups: dict[Kind, list[int]] = {}
    for kind, index in zip(kinds, indices, strict=True):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())
