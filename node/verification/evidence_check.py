"""Checks evidence with one's own weights: the answer that a server signed is recomputed and compared.

The evidence's statement about the server's device is the accuser's, so it does not count: what the server announces
does. Where that is not known, it is the widest tolerance measured for the dtype and quantisation that it signed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from ...crypto.evidence import ExchangedTensors, NotProven
from ...protocols.framing import TensorError
from ...protocols.ids import Span
from ...protocols.inference import Refusal
from ...protocols.tensors import decode, decode_answer
from ..blocks.config import deepstack, read_config
from ..errors import BadInput, PetalnodeError
from ..models import ModelFolder, compute_manifest
from ..models.progress import Progress, no_progress
from ..trust.bundle import Bundle
from ..trust.receipt_log import LoggedBatch
from ..trust.statement import SelfProven, SessionClaim, check_statement
from .judging import no_padding
from .observed import Observed, observed_batch, step_of
from .recomputation import SessionQuestion
from .verdicts import Judge, Verdict

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """`proven`: the accused server is at fault; `inconclusive`: undecided. Else the evidence is refuted.

    `error` and `tolerance` are 0 where nothing was recomputed. `signed`: the accused has signed the answer that this is
    about, so that the outcome says something of it. `exchanged`: it is refuted by its tensors, which the
    accuser has not signed; who sent them is to blame. `one_bit`: as `Judgement` has it.
    """

    proven: bool
    reason: str
    error: float = 0.0
    tolerance: float = 0.0
    inconclusive: bool = False
    exchanged: bool = False
    signed: bool = False
    one_bit: bool = False


def wanted_blocks(bundle: Bundle) -> Span | None:
    """The blocks whose weights are needed to check the evidence; None for none."""
    try:
        shown = check_statement(bundle)
    except NotProven:
        return None
    return None if isinstance(shown, SelfProven) else Span(*shown.receipt.span)


def check_evidence(
    bundle: Bundle,
    folder: ModelFolder | None,
    *,
    device: str = "cpu",
    server_device: str = "",
    progress: Progress = no_progress,
) -> Outcome:
    """Whether the evidence proves a fault. Takes as long as the recomputation: call it in a worker thread.

    Args:
        folder: the whole model; None is enough for faults that prove themselves.
        device: where to recompute.
        server_device: the kind of device that the accused itself announces, if that is known. One that nobody has
            measured proves nothing.

    Raises:
        BadInput: weights are needed, and `folder` is None or another model.
        ModelError, MachineError: as `Recomputation.answer`.
    """
    try:
        shown = check_statement(bundle)
        if isinstance(shown, SelfProven):
            return Outcome(True, shown.reason, signed=True)
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
        judged = _judge(shown, folder, device, server_device, progress)
    except NotProven as error:
        return Outcome(False, str(error), exchanged=isinstance(error, ExchangedTensors))
    proven, undecided = (judged.verdict == verdict for verdict in ("faulty", "inconclusive"))
    measured = judged.error or 0.0, judged.tolerance or 0.0
    return Outcome(proven, judged.reason, *measured, undecided, signed=True, one_bit=judged.one_bit)


def _judge(
    claim: SessionClaim | LoggedBatch, folder: ModelFolder, device: str, server_device: str, progress: Progress
) -> Verdict:
    """
    Raises:
        NotProven: no server takes what was asked.
        PetalnodeError: as `Recomputation.answer`.
    """
    start, end = claim.receipt.span
    width, leaving = folder.boundaries.width(start), folder.boundaries.width(end)
    if isinstance(claim, LoggedBatch):
        tensors = claim.asked.message.tensors  # hidden states, and a gradient
        asked = list(zip(tensors, ({width}, {leaving}), strict=False))
    else:
        features = width * (1 + deepstack(read_config(folder.path)))
        asked = [(tensor, {width, features}) for _, tensor, _ in claim.steps]
    beyond = not start < end <= folder.num_blocks or folder.boundaries.refusal(Span(start, end))
    if beyond or any(tensor.shape[-1] not in widths for tensor, widths in asked):
        size = f"{folder.num_blocks} blocks of width {width}"
        raise NotProven(f"no server takes what was asked of a model with {size}")
    try:
        seen = observed_batch(claim) if isinstance(claim, LoggedBatch) else _observed_session(claim)
    except (TensorError, Refusal, ValueError) as error:
        raise NotProven(f"it cannot be recomputed: {error}") from None
    try:
        judge = Judge(folder.path, device, coarser=False, progress=progress)
        return judge.verdicts([replace(seen, device=server_device)])[0]
    except PetalnodeError:
        raise
    except Exception as error:
        # Strangers chose what is computed, so the failure may be their doing as well as this machine's.
        log.warning("evidence cannot be recomputed", exc_info=error)
        return Verdict("", seen.span, "inconclusive", f"it cannot be recomputed here: {error}", 0.0, 0.0)


def _observed_session(claim: SessionClaim) -> Observed:
    """With the answer to the last step only."""
    steps = []
    for step, tensor, payload in claim.steps:
        hidden = decode(tensor, payload)
        if not bool(torch.isfinite(hidden).all()):
            raise NotProven("what was asked holds NaN or infinity, which no server takes")
        steps.append(step_of(step, hidden))
    receipt, last = claim.receipt, claim.steps[-1][1]
    span = Span(*receipt.span)
    question = SessionQuestion(span, tuple(steps), claim.terms.left_padding)
    output, terms = decode_answer(last, claim.output), claim.terms
    counts = no_padding(terms.left_padding, terms.batch, claim.steps[-1][0].position, output.shape[1])
    return Observed("", span, receipt.dtype, receipt.quantisation, question, (output,), codec=last.codec, counts=counts)
