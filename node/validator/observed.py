"""What one server was asked and what it answered, as tensors: what probes and audits hand to the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...protocols.ids import Span
from ...protocols.tensors import decode
from ..client.history import Input
from ..client.server_session import Chunk
from .tolerances import Pass
from .truth import Question, SessionQuestion, Step


@dataclass(frozen=True)
class Observed:
    """One server's part of a conversation, or of one pass of a batch.

    Attributes:
        peer_id, span: who, and which blocks were asked.
        dtype, quantisation: what it says that it computes with.
        device: the kind of its device, "" if it does not say.
        question: what it was asked.
        claimed: what it answered, per step; of a pass, the output or the gradient of the hidden states.
        codec: under which it answered.
    """

    peer_id: str
    span: Span
    dtype: str
    quantisation: str
    question: Question
    claimed: tuple[torch.Tensor, ...]
    device: str = ""
    codec: str = "none"

    @property
    def direction(self) -> Pass:
        if isinstance(self.question, SessionQuestion) or self.question.gradient is None:
            return "forward"
        return "backward"

    @property
    def requests(self) -> int:
        return len(self.claimed)


def session_question(span: Span, inputs: Sequence[Input], left_padding: tuple[int, ...] = ()) -> SessionQuestion:
    """What a server was asked in a session whose inputs a client has kept."""
    steps = (Step(each.position, decode(each.chunk.tensor, each.chunk.payload), each.reorder) for each in inputs)
    return SessionQuestion(span, tuple(steps), left_padding)


def tensors_of(chunks: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
    return tuple(decode(chunk.tensor, chunk.payload) for chunk in chunks)
