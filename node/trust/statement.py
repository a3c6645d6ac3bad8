"""Checks what evidence proves by signatures, chains of receipts and hashes alone. Needs no weights and no torch.

Every check here is of the server's own signatures. What the accuser adds (its measurements, the time) decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...crypto.evidence import (
    ExchangedTensors,
    NotProven,
    check_chain,
    check_equivocation,
    check_pledge_broken,
)
from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.framing import wire_nbytes
from ...protocols.ids import Span
from ...protocols.inference import (
    MAX_LENGTH,
    Refusal,
    SessionTerms,
    check_hidden_states,
    check_position,
    hash_of_step,
    pledge_from_wire,
    receipt_from_wire,
    root_of,
    sha256,
    terms_of,
)
from ...protocols.prefix import BLOCK_TOKENS, PrefixNames, token_digests
from ...protocols.training import (
    BACKWARD,
    FORWARD,
    NOTHING_KEPT,
    KeptSet,
    LoraName,
    MicroBatch,
    check_kept,
    check_prompts,
    check_request,
    hash_of_batch,
    hash_of_keep,
    hash_of_payloads,
)
from .bundle import Bundle, needed
from .receipt_log import LoggedBatch


@dataclass(frozen=True)
class SelfProven:
    """The signatures alone prove the fault."""

    reason: str


@dataclass(frozen=True)
class SessionClaim:
    """The server did answer the last of `steps` with `output`; whether that is right has to be recomputed.

    `steps` are those that the answer depends on, with the header and bytes of their tensors; before them what had
    entered, in an earlier session, for tokens that were not computed again.
    """

    receipt: Receipt
    terms: SessionTerms
    steps: tuple[tuple[wire.Step, wire.Tensor, bytes], ...]
    output: bytes


CheckedEvidence = SelfProven | SessionClaim | LoggedBatch
"""A batch is evidence that the server did answer it so; whether that is right has to be recomputed."""


def check_statement(bundle: Bundle) -> CheckedEvidence:
    """What the server's signatures prove.

    Raises:
        NotProven: something does not belong together, or is not signed by the accused; `ExchangedTensors` if that may
            be the fault of who sent the tensors.
    """
    evidence, accused = bundle.evidence, bundle.accused
    try:
        if evidence.kind == "equivocation":
            if len(evidence.receipts) != 2:
                raise NotProven("two receipts are wanted")
            return SelfProven(check_equivocation(accused, *map(receipt_from_wire, evidence.receipts)))
        if evidence.kind == "pledge":
            receipts = [receipt_from_wire(receipt) for receipt in evidence.receipts]
            if not receipts:
                raise NotProven("there is no receipt")
            pledge = pledge_from_wire(evidence.pledge)
            return SelfProven(check_pledge_broken(accused, pledge, _root(evidence, receipts[0]), receipts))
        if evidence.HasField("work"):
            return _batch(bundle)
        return _session(bundle)
    except Refusal as refusal:
        raise NotProven(f"no server takes such a request: {refusal.message}") from None
    except ValueError as error:
        raise NotProven(f"it contradicts itself: {error}") from None


def _root(evidence: wire.Evidence, first: Receipt) -> bytes:
    pledge = pledge_from_wire(evidence.pledge).hash() if evidence.HasField("pledge") else b""
    return root_of(evidence.opening, first.client, evidence.session_epoch, pledge, evidence.prefix_tokens)


def _session(bundle: Bundle) -> SessionClaim:
    evidence = bundle.evidence
    if not evidence.steps:
        raise NotProven("there is no receipt")
    receipts = [receipt_from_wire(step.receipt) for step in evidence.steps]
    last = receipts[-1]
    check_chain(bundle.accused, _root(evidence, receipts[0]), receipts)
    terms = terms_of(evidence.opening)
    if (last.model_version, Span(*last.span)) != (terms.model_version, terms.span):
        raise NotProven("the receipt is for other blocks than the session was opened for")
    # Which steps are needed follows from the headers of all of them: each header is checked, of undone steps as well.
    wanted = frozenset(needed([step.step for step in evidence.steps]))
    length, steps = _prefix(bundle, terms)
    for number, (entry, receipt) in enumerate(zip(evidence.steps, receipts, strict=True)):
        check_position(entry.step, check_hidden_states(entry.tensor, terms), terms, length)
        length = entry.step.position + entry.tensor.shape[1]
        _check_request(entry, receipt)
        if number in wanted:
            steps.append((entry.step, entry.tensor, _input_of(bundle, number)))
        elif not entry.payload_hash:
            raise NotProven(f"it does not show what the server was asked in step {receipt.sequence}, which was undone")
    output = _payload(bundle, "output")
    if sha256(output) != last.reply_hash:
        raise ExchangedTensors("the answer is not the one that the server signed")
    return SessionClaim(last, terms, tuple(steps), output)


def _prefix(bundle: Bundle, terms: SessionTerms) -> tuple[int, list[tuple[wire.Step, wire.Tensor, bytes]]]:
    """The tokens that the session began with, and as steps what had entered for them: the name of the last block, which
    the server has signed with its first receipt, is that of these tensors."""
    granted, names = bundle.evidence.prefix_tokens, [PrefixNames(terms.prefix_root) for _ in (False, True)]
    steps: list[tuple[wire.Step, wire.Tensor, bytes]] = []
    length = 0
    for number, tensor in enumerate(bundle.evidence.prefix):
        step, payload = wire.Step(position=length), _payload(bundle, f"prefix.{number}")
        check_position(step, check_hidden_states(tensor, terms), terms, length)
        if len(payload) != wire_nbytes(tensor.shape, tensor.dtype, tensor.codec):
            raise ExchangedTensors("what the session began with is of another size than the statement has it")
        for long_factors, named in enumerate(names):
            named.append(token_digests(payload, terms.batch, tensor.shape[1], long_factors=bool(long_factors)))
        length += tensor.shape[1]
        steps.append((step, tensor, payload))
    if length != granted:
        raise NotProven(f"it shows {length} of the {granted} tokens that the session began with")
    if not granted:
        return 0, []
    signed = list(terms.prefix[granted // BLOCK_TOKENS - 1 :][:1])
    fitting = [bool(long_factors) for long_factors, named in enumerate(names) if named.names[-1:] == signed]
    if not fitting:
        raise ExchangedTensors("what the session began with is not what the server signed")
    for step, _, _ in steps:
        step.long_factors = fitting[0]
    return granted, steps


def _check_request(entry: wire.EvidenceStep, receipt: Receipt) -> None:
    """Whether the server signed that it was asked this step; not, if the statement does not name its payload."""
    asked = entry.payload_hash
    if asked and hash_of_step(entry.step, entry.tensor, asked) != receipt.request_hash:
        raise NotProven(f"step {receipt.sequence} is not what the server's receipt says that it was asked")


def _input_of(bundle: Bundle, number: int) -> bytes:
    """The payload of a step that was checked, or is checked here because the statement does not name its payload."""
    entry = bundle.evidence.steps[number]
    payload = _payload(bundle, f"input.{number}")
    if hash_of_step(entry.step, entry.tensor, sha256(payload)) != entry.receipt.request_hash:
        sequence = entry.receipt.sequence
        raise ExchangedTensors(f"step {sequence} is not what the server's receipt says that it was asked")
    return payload


def _batch(bundle: Bundle) -> LoggedBatch:
    evidence = bundle.evidence.work
    receipt = receipt_from_wire(evidence.receipt)
    if not receipt.is_signed_by(bundle.accused):
        raise NotProven(f"the receipt is not signed by {bundle.accused}")
    if evidence.protocol not in (FORWARD.id, BACKWARD.id):
        raise NotProven(f"{evidence.protocol!r} is no pass")
    work = evidence.work
    keep = evidence.keep if evidence.HasField("keep") else None
    check_request(work, evidence.protocol == BACKWARD.id, None, MAX_LENGTH)
    if keep is not None:
        shape, span = work.tensors[0].shape, Span(*receipt.span)
        for name, kept_shape in check_kept(keep, span, shape[2]).items():
            lora = LoraName.parse(name)
            if lora is None or lora.block not in span or len(kept_shape) != 2 or not all(kept_shape):
                raise NotProven(f"a tensor {name[:100]!r} of shape {kept_shape} in blocks {span}")
        check_prompts(keep, shape)
    if evidence.input_hash:
        kept_hash = NOTHING_KEPT if keep is None else hash_of_keep(keep, evidence.kept_hash)
        if hash_of_batch(evidence.protocol, work, evidence.input_hash, kept_hash) != receipt.request_hash:
            raise NotProven("the batch request is not what the server's receipt says that it was asked")
    inputs = tuple(_payload(bundle, f"input.{number}") for number in range(len(work.tensors)))
    kept = tuple(_payload(bundle, f"kept.{number}") for number in range(len(keep.tensors) if keep else 0))
    asked = MicroBatch(work, inputs, None if keep is None else KeptSet.of(keep, kept))
    if asked.hash(evidence.protocol) != receipt.request_hash:
        raise ExchangedTensors("the batch request is not what the server's receipt says that it was asked")
    answers = 1 + (len(kept) if evidence.protocol == BACKWARD.id else 0)
    outputs = tuple(_payload(bundle, f"output.{number}") for number in range(answers))
    if hash_of_payloads(outputs) != receipt.reply_hash:
        raise ExchangedTensors("the answer is not the one that the server signed")
    return LoggedBatch(bundle.accused, evidence.protocol, receipt, asked, outputs)


def _payload(bundle: Bundle, name: str) -> bytes:
    found = bundle.payloads.get(name)
    if found is None:
        raise ExchangedTensors(f"the tensor {name} is missing")
    return found
