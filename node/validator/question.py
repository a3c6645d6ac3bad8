"""What a server was asked and what it answered, without the wire: everything that a recomputation needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...protocols.ids import Span
from .judging import Judgement, judge
from .tolerances import Pass, find_tolerance


@dataclass(frozen=True)
class Question:
    """One pass through a span.

    Attributes:
        model_version: 32 bytes.
        span: the blocks that were asked, not all that the server holds.
        dtype, quantisation: what the server says that it computed in.
        hidden: float [rows, tokens, hidden]: everything that the cache held and then what was asked. Tokens before the
            last `asked` are those of earlier steps, after rollbacks and with their rows where a reorder put them.
        asked: how many tokens of each row were answered.
        left_padding: per row, how many of its first tokens are padding; empty for none. Inference only.
        gradient: float [rows, tokens, hidden] with respect to the output, for a backward pass; else None.
        mask: bool or int [rows, tokens], 1 for tokens that count; None for all. Passes without a cache only.
        positions: int [rows, tokens]; None: each row counts from 0. Passes without a cache only.
        kept: deep prompts and LoRA weights by their names on the wire (`protocols/training.py`).
        codec: under which the answer came.
    """

    model_version: bytes
    span: Span
    dtype: str
    quantisation: str
    hidden: torch.Tensor
    asked: int
    left_padding: tuple[int, ...] = ()
    gradient: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)
    codec: str = "none"

    @property
    def direction(self) -> Pass:
        return "forward" if self.gradient is None else "backward"


def judge_answer(
    question: Question,
    claimed: torch.Tensor,
    truth: torch.Tensor,
    *,
    server_device: str = "cpu",
    own_device: str = "cpu",
) -> Judgement:
    """Judges `claimed`, what the server answered, by `truth`, what a recomputation of `question` gave.

    Both float [rows, asked, hidden]: the output, or for a backward pass the gradient of the hidden states. Padding says
    nothing of a server and is left out.
    """
    tolerance = find_tolerance(
        question.dtype,
        question.quantisation,
        server_device=server_device,
        own_device=own_device,
        direction=question.direction,
        blocks=len(question.span),
        codec=question.codec,
    )
    if claimed.shape == truth.shape:
        counts = _counting(question)
        if counts is not None and bool(counts.any()):
            claimed, truth = claimed[counts].unsqueeze(0), truth[counts].unsqueeze(0)
    return judge(claimed, truth, tolerance)


def _counting(question: Question) -> torch.Tensor | None:
    """bool [rows, asked]: the tokens that are not padding; None for all."""
    if question.mask is not None:
        return question.mask.bool()[:, -question.asked :]
    if not any(question.left_padding):
        return None
    places = torch.arange(question.hidden.shape[1]) >= torch.tensor(question.left_padding).unsqueeze(1)
    return places[:, -question.asked :]
