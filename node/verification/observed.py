"""What one server was asked and what it answered, as tensors: the input of the judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...protocols import wire_pb2
from ...protocols.framing import INT8_BLOCK
from ...protocols.ids import Span
from ...protocols.inference import layout_of
from ...protocols.tensors import decode, decode_answer
from ...protocols.training import BatchTerms, MicroBatch
from ..blocks.batch_request import unpack_keep, unpack_request
from ..trust.receipt_log import LoggedBatch, SessionLog
from .recomputation import Question, RecordedStep, SessionQuestion
from .tolerances import Kind, Pass


@dataclass(frozen=True)
class Observed:
    """One server's part of a session, or of one pass of a batch.

    Attributes:
        peer_id, span: the server, and the blocks that were asked.
        dtype, quantisation: what it declares to compute with.
        device: the kind of its device, "" if it announces none.
        question: what it was asked.
        claimed: its answer to every step; of a pass, the output or the gradient of the hidden states.
        kept: of a backward pass, the gradients of kept tensors, by their names.
        counts: bool [rows, tokens], which of the last tokens are judged: those that are no padding; None for all.
        codec: how its answers were encoded.
        source: the receipts, for evidence.
    """

    peer_id: str
    span: Span
    dtype: str
    quantisation: str
    question: Question
    claimed: tuple[torch.Tensor, ...]
    device: str = ""
    codec: str = "none"
    source: SessionLog | LoggedBatch | None = None
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)
    counts: torch.Tensor | None = None

    def judged(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is judged of float [rows, tokens, hidden]."""
        if self.counts is None or hidden.shape[1] < self.counts.shape[1]:
            return hidden
        return hidden[:, -self.counts.shape[1] :][self.counts].unsqueeze(0)

    @property
    def arrives_by_token(self) -> bool:
        """Whether what a codec makes of a token does not depend on those beside it."""
        return self.codec != "int8-block64" or self.claimed[0].shape[-1] % INT8_BLOCK == 0

    @property
    def direction(self) -> Pass:
        if isinstance(self.question, SessionQuestion) or self.question.gradient is None:
            return "forward"
        return "backward"

    def kind(self, own_device: str) -> Kind:
        """The kind of answer, by which its tolerance is found, if it is recomputed on `own_device`."""
        own = torch.device(own_device).type
        return Kind(self.dtype, self.quantisation, self.direction, len(self.span), self.codec, self.device, own)


def step_of(asked: wire_pb2.Step, hidden: torch.Tensor) -> RecordedStep:
    """What a server was asked, with these hidden states."""
    return RecordedStep(asked.position, hidden, tuple(asked.reorder), asked.long_factors, layout_of(asked))


def observed_session(log: SessionLog, device: str = "") -> Observed | None:
    """A server's part of a session, from a client's receipts.

    None if the log does not go back to the beginning, or the session began with kept tokens. Also if it had an adapter,
    whose weights it does not hold.

    Raises:
        TensorError: bytes that are no tensor; no checked log holds such.
    """
    if log.opening is None or not log.complete or log.granted is None or log.granted.prefix_tokens:
        return None
    steps: list[RecordedStep] = []
    claimed: list[torch.Tensor] = []
    receipt = None
    for entry in log.entries:
        if entry.step is None or entry.asked is None or entry.input is None or entry.output is None:
            break
        receipt = entry.receipt
        hidden, asked = decode(entry.asked, entry.input), entry.step
        steps.append(step_of(asked, hidden))
        claimed.append(decode_answer(entry.asked, entry.output))
    if receipt is None or receipt.adapter:
        return None
    span = Span(*receipt.span)
    return Observed(
        log.peer_id,
        span,
        receipt.dtype,
        receipt.quantisation,
        SessionQuestion(span, tuple(steps), tuple(log.opening.left_padding)),
        tuple(claimed),
        device,
        log.opening.codec,
        log,
    )


def observed_batch(logged: LoggedBatch, device: str = "") -> Observed:
    """A server's part of a batch, from a client's receipts.

    Raises:
        Refusal: values that a server would not have taken.
        TensorError: bytes that are no tensor; no checked log holds such.
    """
    receipt, asked = logged.receipt, logged.asked
    span = Span(*receipt.span)
    wire = asked.message.tensors[0]
    terms = BatchTerms(receipt.model_version, span, wire.codec, wire.dtype, receipt.nonce)
    kept = None if asked.kept is None else unpack_keep(asked.kept.keep, list(map(bytearray, asked.kept.payloads)))
    copied = MicroBatch(asked.message, tuple(map(bytearray, asked.payloads)), kept)
    request = unpack_request(logged.protocol, terms, copied)
    gradients = {}
    if kept is not None and request.batch.gradient is not None:
        others = zip(kept.keep.names, kept.keep.tensors, logged.outputs[1:], strict=True)
        gradients = {name: decode(described, payload) for name, described, payload in others}
    return Observed(
        logged.peer_id,
        span,
        receipt.dtype,
        receipt.quantisation,
        request.batch,
        (decode_answer(wire, logged.outputs[0]),),
        device,
        wire.codec,
        logged,
        gradients,
        request.batch.mask if request.batch.mask is not None and bool(request.batch.mask.any()) else None,
    )
