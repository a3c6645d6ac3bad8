"""The judge: recomputes what servers answered, block by block, and gives a verdict on every answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from ...protocols.ids import Span
from ..blocks.batch_job import gradient_of
from ..errors import PetalnodeError
from .judging import (
    COARSER,
    SUSPICIOUS,
    Distance,
    Result,
    distance,
    judge_distance,
    judge_kept,
    kept_distances,
    share_of,
    worst_judgement,
)
from .observed import Observed
from .recomputation import Answer, Recomputation, SessionAnswer
from .tolerances import find_tolerance

_SEVERITY: Final[tuple[Result, ...]] = ("ok", "inconclusive", "faulty")


@dataclass(frozen=True)
class Verdict:
    """Of one server: what `petalnode validate --json` prints.

    `error` and `tolerance` are those that decided, relative to the recomputed answer. `kind` says by what it was found:
    "forward" or "backward" by a probe, "receipts" by an audit, "" if the server could not be asked. `requests` were
    recomputed for it. `evidence` is the file by which others can check it.
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
        recomputed: float [rows, tokens, hidden], all answers of the observation in one.
        others: what coarser weights give, by the quantisation, where these were tried.
        kept: distances of the gradients of kept tensors, from `kept_distances`.
    """

    observed: Observed
    recomputed: torch.Tensor
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: Mapping[str, Distance] = field(default_factory=dict)

    @cached_property
    def claimed(self) -> torch.Tensor:
        return torch.cat(self.observed.claimed, dim=1)

    @cached_property
    def found(self) -> Distance:
        """The distance of all answers together."""
        return _far(self.claimed, self.recomputed, self.observed.codec)

    @property
    def steps(self) -> tuple[Distance, ...]:
        """The distance of each answer."""
        parts = torch.split(self.recomputed, [answer.shape[1] for answer in self.observed.claimed], dim=1)
        return tuple(
            _far(claimed, part, self.observed.codec) for claimed, part in zip(self.observed.claimed, parts, strict=True)
        )


def _far(claimed: torch.Tensor, recomputed: torch.Tensor, codec: str) -> Distance:
    if claimed.shape != recomputed.shape:
        return Distance(float("inf"), float("inf"), 0)
    return distance(claimed, recomputed, codec)


class Judge:
    """Recomputes and compares. Runs in a worker thread, one call at a time.

    Args:
        folder: the model with all weights of the blocks that are judged.
        device: where to recompute.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._folder = folder
        self.device = device

    def compare(self, observed: Sequence[Observed]) -> list[Compared]:
        """Every observation with its recomputation, in order.

        Raises:
            PetalnodeError: the model's weights are not here, or this machine cannot compute with them.
        """
        answers: dict[int, Answer] = {}
        for (dtype, quantisation), indices in _grouped(observed).items():
            answers.update(self._recompute(observed, indices, dtype, quantisation))
        found = [_compared(seen, answers[index]) for index, seen in enumerate(observed)]
        suspects = [index for index, one in enumerate(found) if SUSPICIOUS <= one.found.mean < float("inf")]
        for dtype, quantisation in dict.fromkeys(
            (observed[index].dtype, other) for index in suspects for other in COARSER[observed[index].quantisation]
        ):
            indices = [
                index
                for index in suspects
                if observed[index].dtype == dtype and quantisation in COARSER[observed[index].quantisation]
            ]
            try:
                others = self._recompute(observed, indices, dtype, quantisation)
            except PetalnodeError:
                continue  # this model cannot be held so
            for index, other in others.items():
                found[index] = replace(found[index], others={**found[index].others, quantisation: _joined(other)})
        return found

    def _recompute(
        self, observed: Sequence[Observed], indices: Sequence[int], dtype: str, quantisation: str
    ) -> dict[int, Answer]:
        recomputation = Recomputation(self._folder, dtype, quantisation, self.device)
        answers = recomputation.answer([observed[index].question for index in indices])
        return dict(zip(indices, answers, strict=True))

    def verdict(self, compared: Compared) -> Verdict:
        seen = compared.observed
        tolerance = find_tolerance(seen.kind(self.device))
        what = "its answer" if seen.direction == "forward" else "its gradient"
        judged = worst_judgement(
            [judge_distance(compared.found, tolerance, what), *judge_kept(compared.kept, tolerance)]
        )
        result, reason, error, limit = judged.result, judged.reason, judged.error, judged.tolerance
        for name, other in compared.others.items():
            share = share_of(compared.claimed, compared.recomputed, other)
            if tolerance is not None and share.is_substitution:
                result, error = "faulty", compared.found.mean
                declared = f"{seen.dtype} weights" if seen.quantisation == "none" else f"{seen.quantisation} weights"
                reason = (
                    f"{what} is what {name} weights give ({share.share:.2f} of the way), and it declared {declared}"
                )
                break
        return Verdict(seen.peer_id, seen.span, result, reason, error, limit, seen.direction, len(seen.claimed))


def _compared(observed: Observed, answer: Answer) -> Compared:
    kept: Mapping[str, Distance] = {}
    if not isinstance(answer, SessionAnswer) and answer.gradients is not None:
        recomputed = {name: gradient_of(answer.gradients, name) for name in observed.kept}
        kept = kept_distances(observed.kept, recomputed)
    return Compared(observed, _joined(answer), kept=kept)


def _joined(answer: Answer) -> torch.Tensor:
    if isinstance(answer, SessionAnswer):
        return torch.cat(answer.outputs, dim=1)
    if answer.gradients is not None:
        return answer.gradients.hidden
    assert answer.output is not None
    return answer.output


def worst_of(verdicts: Iterable[Verdict], blocks: Span) -> Verdict:
    """The worst of several verdicts on one server, over all `blocks` that it holds."""
    several = list(verdicts)
    worst = max(several, key=lambda one: (_SEVERITY.index(one.verdict), (one.error or 0.0) / (one.tolerance or 1.0)))
    return replace(worst, blocks=blocks, requests=sum(verdict.requests for verdict in several))


def _grouped(observed: Sequence[Observed]) -> dict[tuple[str, str], list[int]]:
    """Indices by what the servers computed with: (dtype, quantisation)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, seen in enumerate(observed):
        groups.setdefault((seen.dtype, seen.quantisation), []).append(index)
    return groups
