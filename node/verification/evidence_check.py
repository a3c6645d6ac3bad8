"""Checks evidence with one's own weights: the answer that a server signed is recomputed and compared.

The evidence's statement about the server's device is the accuser's, so the widest tolerance applies that was measured
for the dtype and quantisation that the server signed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...crypto.evidence import NotProven
from ...protocols.framing import TensorError
from ...protocols.ids import BACKWARD, Span
from ...protocols.inference import Refusal
from ...protocols.tensors import decode
from ...protocols.training import BatchTerms
from ..blocks.batch_job import gradient_of, unpack_keep, unpack_request
from ..errors import BadInput
from ..models import ModelFolder, compute_manifest
from ..models.progress import Progress, no_progress
from ..trust.bundle import Bundle
from ..trust.statement import BatchClaim, SelfProven, SessionClaim, check_statement
from .judging import Judgement, judge_answer, judge_kept, kept_distances, worst_judgement
from .recomputation import PassAnswer, PassQuestion, Recomputation, SessionAnswer, SessionQuestion, Step
from .tolerances import Kind, find_tolerance


@dataclass(frozen=True)
class Outcome:
    """`proven`: the accused server is at fault; `inconclusive`: undecided. Else the evidence is refuted.

    `error` and `tolerance` are 0 where nothing was recomputed.
    """

    proven: bool
    reason: str
    error: float = 0.0
    tolerance: float = 0.0
    inconclusive: bool = False


def wanted_blocks(bundle: Bundle) -> Span | None:
    """The blocks whose weights are needed to check the evidence; None for none."""
    try:
        shown = check_statement(bundle)
    except NotProven:
        return None
    return None if isinstance(shown, SelfProven) else Span(*shown.receipt.span)


def check_evidence(
    bundle: Bundle, folder: ModelFolder | None, *, device: str = "cpu", progress: Progress = no_progress
) -> Outcome:
    """Whether the evidence proves a fault. Takes as long as the recomputation: call it in a worker thread.

    Args:
        folder: the whole model; None is enough for faults that prove themselves.

    Raises:
        BadInput: weights are needed, and `folder` is None or another model.
        ModelError, MachineError: as `Recomputation.answer`.
    """
    try:
        shown = check_statement(bundle)
        if isinstance(shown, SelfProven):
            return Outcome(True, shown.reason)
        if folder is None:
            raise BadInput(
                f"this evidence can be checked only with the weights of model version "
                f"{shown.receipt.model_version.hex()[:12]}: name the model"
            )
        if shown.receipt.adapter:
            return Outcome(
                False, "the session used an adapter, whose weights are not part of the evidence", inconclusive=True
            )
        version = compute_manifest(folder, progress).version
        if version != shown.receipt.model_version:
            raise BadInput(
                f"this evidence is about model version {shown.receipt.model_version.hex()[:12]}; {folder.path} is "
                f"{version.hex()[:12]}: name the model that it is about"
            )
        judge_it = _judge_session if isinstance(shown, SessionClaim) else _judge_batch
        try:
            judged = judge_it(shown, folder, device, progress)  # type: ignore[arg-type]
        except (TensorError, Refusal, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            raise NotProven(f"it cannot be recomputed: {error}") from None
    except NotProven as error:
        return Outcome(False, str(error))
    result = judged.result
    return Outcome(result == "faulty", judged.reason, judged.error, judged.tolerance, result == "inconclusive")


def _kind(claim: SessionClaim | BatchClaim, direction: str, codec: str, device: str) -> Kind:
    receipt = claim.receipt
    return Kind(
        receipt.dtype,
        receipt.quantisation,
        "backward" if direction == BACKWARD else "forward",
        receipt.span[1] - receipt.span[0],
        codec,
        server_device="",
        own_device=torch.device(device).type,
    )


def _judge_session(claim: SessionClaim, folder: ModelFolder, device: str, progress: Progress) -> Judgement:
    steps = [
        Step(step.position, _finite(decode(tensor, payload)), tuple(step.reorder))
        for step, tensor, payload in claim.steps
    ]
    question = SessionQuestion(Span(*claim.receipt.span), tuple(steps), claim.terms.left_padding)
    (answer,) = _recomputation(claim, folder, device, progress).answer([question])
    assert isinstance(answer, SessionAnswer)
    step, tensor, _ = claim.steps[-1]
    claimed = decode(tensor, claim.output)
    padding = torch.tensor(claim.terms.left_padding or [0] * claim.terms.batch).unsqueeze(1)
    counts = torch.arange(step.position, step.position + claimed.shape[1]) >= padding
    kind = _kind(claim, "", tensor.codec, device)
    return judge_answer(kind, claimed, answer.outputs[-1], counts)


def _judge_batch(claim: BatchClaim, folder: ModelFolder, device: str, progress: Progress) -> Judgement:
    described = [claim.request.tensors[0]]
    kept = None
    if claim.keep is not None:
        kept = unpack_keep(claim.keep, list(map(bytearray, claim.kept)))
        described += claim.keep.tensors
    tensor = described[0]
    terms = BatchTerms(claim.receipt.model_version, Span(*claim.receipt.span), tensor.codec, tensor.dtype, b"")
    job = unpack_request(claim.protocol, terms, claim.request, list(map(bytearray, claim.inputs)), kept)
    (answer,) = _recomputation(claim, folder, device, progress).answer([PassQuestion(job.batch, job.gradient)])
    assert isinstance(answer, PassAnswer)
    claimed = [decode(header, payload) for header, payload in zip(described, claim.outputs, strict=False)]
    kind = _kind(claim, claim.protocol, tensor.codec, device)
    if answer.gradients is None:
        assert answer.output is not None
        return judge_answer(kind, claimed[0], answer.output, job.batch.mask)
    names = claim.keep.names if claim.keep is not None else ()
    found = kept_distances(
        dict(zip(names, claimed[1:], strict=True)), {name: gradient_of(answer.gradients, name) for name in names}
    )
    hidden = judge_answer(kind, claimed[0], answer.gradients.hidden, job.batch.mask)
    return worst_judgement([hidden, *judge_kept(found, find_tolerance(kind))])


def _recomputation(
    claim: SessionClaim | BatchClaim, folder: ModelFolder, device: str, progress: Progress
) -> Recomputation:
    return Recomputation(folder.path, claim.receipt.dtype, claim.receipt.quantisation, device, progress)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise NotProven("what was asked holds NaN or infinity, which no server takes")
    return tensor
