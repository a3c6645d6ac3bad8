"""Targets that read evidence of answers: what an attacker says of a server that is its own, and signs."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from safetensors import SafetensorError

from petalnode.crypto.evidence import NotProven
from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.crypto.receipts import NO_RECEIPT
from petalnode.node.trust.bundle import BadBundle, Bundle
from petalnode.node.trust.receipt_log import LoggedBatch
from petalnode.node.trust.statement import SessionClaim, check_statement
from petalnode.node.verification.evidence_check import _observed_session
from petalnode.node.verification.observed import observed_batch
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import TensorError
from petalnode.protocols.inference import Refusal, hash_of_step, receipt_from_wire, receipt_to_wire, root_of, sha256
from petalnode.protocols.training import BACKWARD, NOTHING_KEPT, hash_of_batch, hash_of_keep, hash_of_payloads
from tests.fuzz import corpus
from tests.fuzz.corpus import ATTACKER, EPOCH, NOW_MS
from tests.fuzz.harness import Target, parser
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import parsed

_WIDTH: Final = 8


def _payload(rows: int, tokens: int) -> bytes:
    return np.linspace(-1, 1, rows * tokens * _WIDTH, dtype=np.float32).tobytes()


def _evidence() -> wire.Evidence:
    return wire.Evidence(version=1, accused=peer_id_to_bytes(ATTACKER.peer_id), kind="answer", time_ms=NOW_MS)


@cache
def _session() -> tuple[bytes, dict[str, bytes]]:
    evidence = _evidence()
    evidence.opening.CopyFrom(corpus.opening())
    evidence.session_epoch = EPOCH
    payloads = {}
    for number, (position, tokens, reorder) in enumerate([(0, 3, []), (3, 1, [1, 0]), (2, 1, [])]):
        payloads[f"input.{number}"] = _payload(2, tokens)
        groups = [2, 1, 0] * 2 if not number else []
        step = wire.Step(sequence=number + 1, position=position, reorder=reorder, route_epoch=1, groups=groups)
        tensor = corpus.tensor(2, tokens, _WIDTH, nbytes=len(payloads[f"input.{number}"]))
        receipt = receipt_to_wire(corpus.receipt(sequence=number + 1, adapter=b""))
        evidence.steps.append(wire.EvidenceStep(receipt=receipt, step=step, tensor=tensor))
    payloads["output"] = _payload(2, 1)
    return evidence.SerializeToString(), payloads


@cache
def _batch() -> tuple[bytes, dict[str, bytes]]:
    evidence = _evidence()
    prompts = corpus.tensor(6, 1, 2, _WIDTH, nbytes=6 * 2 * _WIDTH * 4)
    tensor = corpus.tensor(2, 3, _WIDTH, nbytes=len(_payload(2, 3)))
    work = wire.BatchRequest(sequence=1, tensors=[tensor, tensor], mask=b"\xff", positions=range(6), kept=1)
    receipt = receipt_to_wire(corpus.receipt(previous_receipt=NO_RECEIPT, adapter=b""))
    evidence.work.CopyFrom(wire.EvidenceBatch(protocol=BACKWARD.id, receipt=receipt, work=work))
    evidence.work.keep.CopyFrom(wire.Keep(number=1, names=["prompts"], tensors=[prompts]))
    states, kept = _payload(2, 3), bytes(6 * 2 * _WIDTH * 4)
    return evidence.SerializeToString(), {
        "input.0": states,
        "input.1": states,
        "kept.0": kept,
        "output.0": states,
        "output.1": kept,
    }


def _sign_session(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
    """The chain of receipts that goes with whatever the steps are now."""
    first = receipt_from_wire(evidence.steps[0].receipt)
    previous = root_of(evidence.opening, first.client, evidence.session_epoch)
    for number, step in enumerate(evidence.steps):
        step.payload_hash = sha256(payloads.get(f"input.{number}", b""))
        receipt = corpus.changed(
            receipt_from_wire(step.receipt),
            ATTACKER,
            request_hash=hash_of_step(step.step, step.tensor, step.payload_hash),
            reply_hash=sha256(payloads.get("output", b"")),
            previous_receipt=previous,
        )
        step.receipt.CopyFrom(receipt_to_wire(receipt))
        previous = receipt.hash()


def _sign_batch(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
    work, keep = evidence.work, evidence.work.keep
    count = 2 if work.protocol == BACKWARD.id else 1
    work.input_hash = hash_of_payloads(payloads.get(f"input.{number}", b"") for number in range(count))
    work.kept_hash = hash_of_payloads(payloads.get(f"kept.{number}", b"") for number in range(len(keep.tensors)))
    kept = hash_of_keep(keep, work.kept_hash) if work.HasField("keep") else NOTHING_KEPT
    answers = 1 + (len(keep.tensors) if count == 2 else 0)
    outputs = [payloads.get(f"output.{number}", b"") for number in range(answers)]
    receipt = corpus.changed(
        receipt_from_wire(work.receipt),
        ATTACKER,
        request_hash=hash_of_batch(work.protocol, work.work, work.input_hash, kept),
        reply_hash=hash_of_payloads(outputs),
    )
    work.receipt.CopyFrom(receipt_to_wire(receipt))


def _answers(mutator: Mutator) -> bytes:
    statement, payloads = mutator.random.choice((_session(), _batch()))
    changed = dict(payloads)
    if mutator.chance(0.3):
        name = mutator.random.choice(list(changed))
        changed[name] = mutator.bytes(changed[name])
    whole = wire.Evidence.FromString(statement)
    evidence = parsed(wire.Evidence, mutator.message(whole)) or whole
    if mutator.chance(0.85):
        try:
            (_sign_batch if evidence.HasField("work") else _sign_session)(evidence, changed)
        except (ValueError, IndexError, OverflowError):
            pass  # it is none that could be signed
    bundle = corpus.accused(evidence.SerializeToString(), changed)
    try:
        return bundle.to_bytes()
    except SafetensorError:
        return bundle.statement  # longer than the header of any file may be


def _read(data: bytes) -> None:
    shown = check_statement(Bundle.from_bytes(data))
    try:
        if isinstance(shown, SessionClaim):
            _observed_session(shown)
        elif isinstance(shown, LoggedBatch):
            observed_batch(shown)
    except (TensorError, Refusal, ValueError):  # as `check_evidence` has it
        pass


TARGETS: Final[tuple[Target, ...]] = (parser("evidence of answers", 8, _answers, _read, BadBundle, NotProven),)
