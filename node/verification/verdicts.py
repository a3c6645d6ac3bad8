"""From what servers answered to verdicts: recomputes everything, block by block, and judges each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from ...protocols.ids import Span
from ..blocks.batch_job import gradient_of
from ..errors import PetalnodeError
from ..models.progress import Progress, no_progress
from .judging import Distance, Result, distance, judge_distance, judge_kept, kept_distances, worst_judgement
from .observed import Observed
from .recomputation import Answer, Recomputation, SessionAnswer
from .substitution import COARSER, SUSPICIOUS, share_of
from .tolerances import Calibration, Kind, find_tolerance

_WORSE: Final[dict[Result, int]] = {"ok": 0, "inconclusive": 1, "faulty": 2}


@dataclass(frozen=True)
class Verdict:
    """Of one server: what `petalnode validate --json` prints.

    `error` and `tolerance` are those that decided, relative to the truth's size. `kind` says by what it was found:
    "forward" or "backward" by a probe, "receipts" by what a client has shown, or "" if nothing could be asked.
    `requests` were recomputed for it. `evidence` is the file by which others can check it.
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

    def fields(self) -> dict[str, Any]:
        """As the contract has them."""
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
    """JSON knows no infinity; 1e30 is as wrong."""
    return None if value is None else min(value, 1e30)


@dataclass(frozen=True)
class Compared:
    """An observation beside the truth.

    Attributes:
        truth: float [rows, tokens, hidden], all answers behind each other.
        others: what coarser weights give, by their name, where these were looked at.
        kept: how far the gradients of what the server kept are off, as `kept_distances` has it.
    """

    observed: Observed
    truth: torch.Tensor
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: Mapping[str, Distance] = field(default_factory=dict)

    @cached_property
    def claimed(self) -> torch.Tensor:
        return torch.cat(self.observed.claimed, dim=1)

    @cached_property
    def found(self) -> Distance:
        """Of all answers together."""
        return _far(self.claimed, self.truth)

    @property
    def steps(self) -> tuple[Distance, ...]:
        """Of each answer."""
        parts = self.truth.split([each.shape[1] for each in self.observed.claimed], dim=1)
        return tuple(_far(claimed, part) for claimed, part in zip(self.observed.claimed, parts, strict=True))

    def rows(self) -> list[Compared]:
        """Each row as if it had come alone. What it was asked is not cut; what all rows share is left out."""
        return [
            Compared(
                replace(self.observed, claimed=tuple(each[row : row + 1] for each in self.observed.claimed)),
                self.truth[row : row + 1],
                {name: other[row : row + 1] for name, other in self.others.items()},
            )
            for row in range(len(self.truth))
        ]


def _far(claimed: torch.Tensor, truth: torch.Tensor) -> Distance:
    return distance(claimed, truth) if claimed.shape == truth.shape else Distance(float("inf"), float("inf"), 0)


class Judge:
    """Recomputes and compares; belongs into a worker thread, one call at a time.

    Args:
        folder: the model with all weights of the blocks that are judged.
        device: where to recompute.
        table: tolerances; by default those of this package.
        suspicion: mean error from which on coarser weights are looked for.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        progress: Progress = no_progress,
        table: Sequence[Calibration] | None = None,
        suspicion: float = SUSPICIOUS,
    ) -> None:
        self._folder = folder
        self.device = device
        self._progress = progress
        self._table = table
        self._suspicion = suspicion

    def judge(self, observed: Sequence[Observed]) -> list[Verdict]:
        """A verdict for each observation, in order.

        Raises:
            PetalnodeError: the model's weights are not here, or this machine cannot compute with them.
        """
        return [self.verdict(each) for each in self.compare(observed)]

    def compare(self, observed: Sequence[Observed]) -> list[Compared]:
        """How far each observation is from the truth."""
        truths: dict[int, Answer] = {}
        for (dtype, quantisation), indices in _grouped(observed, lambda each: (each.dtype, each.quantisation)).items():
            truths.update(self._truths(observed, indices, dtype, quantisation))
        found = [_compared(each, truths[index]) for index, each in enumerate(observed)]
        suspects = [index for index, each in enumerate(found) if self._suspicion <= each.found.mean < float("inf")]
        for dtype, quantisation in dict.fromkeys(
            (observed[index].dtype, other) for index in suspects for other in COARSER[observed[index].quantisation]
        ):
            indices = [
                index
                for index in suspects
                if observed[index].dtype == dtype and quantisation in COARSER[observed[index].quantisation]
            ]
            try:
                others = self._truths(observed, indices, dtype, quantisation)
            except PetalnodeError:
                continue  # nobody holds this model in such weights, then
            for index, other in others.items():
                found[index] = replace(found[index], others={**found[index].others, quantisation: _joined(other)})
        return found

    def _truths(
        self, observed: Sequence[Observed], indices: Sequence[int], dtype: str, quantisation: str
    ) -> dict[int, Answer]:
        truth = Recomputation(self._folder, dtype, quantisation, self.device, self._progress)
        answers = truth.answer([observed[index].question for index in indices])
        return dict(zip(indices, answers, strict=True))

    def verdict(self, compared: Compared) -> Verdict:
        each = compared.observed
        tolerance = find_tolerance(
            Kind(
                each.dtype,
                each.quantisation,
                each.direction,
                len(each.span),
                each.codec,
                each.device,
                torch.device(self.device).type,
            ),
            self._table,
        )
        what = "its answer" if each.direction == "forward" else "its gradient"
        judged = worst_judgement(
            [judge_distance(compared.found, tolerance, what), *judge_kept(compared.kept, tolerance)]
        )
        result, reason, error, limit = judged.result, judged.reason, judged.error, judged.tolerance
        for name, other in compared.others.items():
            share = share_of(compared.claimed, compared.truth, other)
            if tolerance is not None and share.is_substitution:
                result, error = "faulty", compared.found.mean
                declared = f"{each.dtype} weights" if each.quantisation == "none" else f"{each.quantisation} weights"
                reason = (
                    f"{what} is what {name} weights give ({share.share:.2f} of the way), and it declared {declared}"
                )
                break
        return Verdict(each.peer_id, each.span, result, reason, error, limit, each.direction, each.requests)


def _compared(observed: Observed, answer: Answer) -> Compared:
    kept: Mapping[str, Distance] = {}
    if not isinstance(answer, SessionAnswer) and answer.gradients is not None:
        truth = {name: gradient_of(answer.gradients, name) for name in observed.kept}
        kept = kept_distances(observed.kept, truth)
    return Compared(observed, _joined(answer), kept=kept)


def _joined(answer: Answer) -> torch.Tensor:
    if isinstance(answer, SessionAnswer):
        return torch.cat(answer.outputs, dim=1)
    if answer.gradients is not None:
        return answer.gradients.hidden
    assert answer.output is not None
    return answer.output


def worst_of(verdicts: Iterable[Verdict], blocks: Span) -> Verdict:
    """One verdict of one server: the worst of several, over all `blocks` that it holds."""
    several = list(verdicts)
    worst = max(several, key=lambda each: (_WORSE[each.verdict], (each.error or 0.0) / (each.tolerance or 1.0)))
    return replace(worst, blocks=blocks, requests=sum(each.requests for each in several))


def _grouped(observed: Sequence[Observed], key: Callable[[Observed], Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, each in enumerate(observed):
        groups.setdefault(key(each), []).append(index)
    return groups
