"""Evidence as a file (bundle): everything that a third party needs to check a server's fault.

A bundle is a `.safetensors` file. Its tensors, all of type U8, are payloads as they stood on the wire; its metadata has
one entry, a serialised and signed `wire.Evidence` in base64. The accuser's signature only says who brings the evidence:
what proves the fault are the server's signatures.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError, Message

from ...crypto.canonical import digest
from ...crypto.evidence import ACCUSATION_DOMAIN, is_accusation_signed
from ...crypto.identity import Identity, make_private_folder, peer_id_from_bytes, peer_id_to_bytes, write_private
from ...crypto.receipts import Receipt
from ...crypto.safetensors_header import LENGTH_BYTES, SafetensorsHeader, header_limits, parse_header
from ...crypto.statement import now_ms
from ...protocols import wire_pb2 as wire
from ...protocols.delimited import parse_message
from ...protocols.inference import receipt_to_wire, sha256
from ...protocols.training import hash_of_payloads
from ..errors import BadInput
from .receipt_log import LoggedBatch, SessionLog


@dataclass(frozen=True)
class BundleLimits:
    """What evidence may have, checked before any of it is read."""

    max_bytes: int = 256 << 20  # Bytes of a file
    max_statement: int = 8 << 20  # Bytes of the evidence without the tensors
    max_tensors: int = 20_000
    max_fields: int = 20 * max_tensors
    """Of the evidence, as `parse_message` counts them: 8 of each step, and up to 5 of each server it is pushed to."""
    max_signed_fields: int = 16


BUNDLE: Final = BundleLimits()
_METADATA: Final = "petalnode_evidence"
_VERSION: Final = 1
KINDS: Final = ("equivocation", "pledge", "answer")


class BadBundle(BadInput):
    """No evidence at all: it cannot be read, or is not signed by who it says."""


@dataclass(frozen=True)
class Bundle:
    """Evidence that can be read; whether it proves anything is another matter (`check_statement`).

    `statement` is the serialised `wire.Evidence` that the `accuser` signed; `payloads` are tensors by name.
    """

    statement: bytes
    accuser: str
    signature: bytes
    payloads: Mapping[str, bytes]

    @cached_property
    def evidence(self) -> wire.Evidence:
        return parse_message(wire.Evidence, self.statement, most=BUNDLE.max_fields)

    @property
    def accused(self) -> str:
        return peer_id_from_bytes(self.evidence.accused)

    @cached_property
    def id(self) -> bytes:
        """32 bytes that name the evidence: a hash of the statement."""
        return digest(ACCUSATION_DOMAIN, self.statement)

    @property
    def fault(self) -> bytes:
        """Names the fault by what the server signed, whoever brings the evidence, and of whatever part of a session."""
        evidence = self.evidence
        if evidence.kind != "answer":  # both receipts, in any order; of a pledge, the one that broke it
            signed = list(evidence.receipts if evidence.kind == "equivocation" else evidence.receipts[-1:])
        elif evidence.HasField("work"):
            signed = [evidence.work.receipt]
        else:
            signed = [step.receipt for step in evidence.steps[-1:]]
        return digest("petalnode/fault/1", self.accused, sorted(receipt.signature for receipt in signed))

    @property
    def nbytes(self) -> int:
        """Of the statement and the tensors: a file has a little more."""
        return len(self.statement) + sum(map(len, self.payloads.values()))

    @cached_property
    def last_receipt(self) -> wire.Receipt | None:
        """The receipt whose signature completed the fault; None if there is no receipt. Not checked."""
        evidence = self.evidence
        if evidence.kind != "answer":
            return max(evidence.receipts, key=lambda receipt: receipt.time_ms, default=None)
        if evidence.HasField("work"):
            return evidence.work.receipt
        return evidence.steps[-1].receipt if evidence.steps else None

    def to_bytes(self) -> bytes:
        """The file."""
        signed = wire.SignedEvidence(
            evidence=self.statement, accuser=peer_id_to_bytes(self.accuser), signature=self.signature
        )
        header: dict[str, object] = {
            "__metadata__": {_METADATA: base64.b64encode(signed.SerializeToString(deterministic=True)).decode()}
        }
        end = 0
        for name, payload in self.payloads.items():
            offsets = [end, end := end + len(payload)]
            header[name] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        return b"".join((len(text).to_bytes(LENGTH_BYTES, "little"), text, *self.payloads.values()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Bundle:
        """Parses a file from an untrusted source.

        Raises:
            BadBundle: with the reason.
        """
        if len(data) > BUNDLE.max_bytes:
            raise BadBundle(f"{len(data) >> 20} MiB are more than evidence may have ({BUNDLE.max_bytes >> 20} MiB)")
        try:
            header, begin = _header(data)
            signed = parse_message(wire.SignedEvidence, _statement(header), most=BUNDLE.max_signed_fields)
            accuser = peer_id_from_bytes(signed.accuser)
            if len(signed.evidence) > BUNDLE.max_statement or len(header.tensors) > BUNDLE.max_tensors:
                raise ValueError("the evidence is too long")
            payloads = {name: data[begin + said.start : begin + said.end] for name, said in header.tensors.items()}
            bundle = cls(signed.evidence, accuser, signed.signature, payloads)
            _ = bundle.accused
        except (DecodeError, ValueError) as error:
            raise BadBundle(f"this is no evidence: {error}") from None
        if bundle.evidence.version != _VERSION or bundle.evidence.kind not in KINDS:
            raise BadBundle(
                f"evidence of kind {bundle.evidence.kind!r}, version {bundle.evidence.version}, is not known here; "
                "a newer petalnode may know it"
            )
        if not is_accusation_signed(accuser, bundle.statement, bundle.signature):
            raise BadBundle(f"the evidence is not signed by {accuser}, who is said to bring it")
        return bundle

    def save(self, path: Path) -> None:
        """Writes a file that others on this machine cannot read: the tensors may hold what somebody wrote to a model.

        Raises:
            OSError: it cannot be written.
        """
        make_private_folder(path.parent)
        write_private(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Raises BadBundle if the file cannot be read, or is no evidence."""
        try:
            if path.stat().st_size > BUNDLE.max_bytes:
                raise BadBundle(f"{path} has more than {BUNDLE.max_bytes >> 20} MiB: that is no evidence")
            data = path.read_bytes()
        except OSError as error:
            raise BadBundle(f"cannot read the evidence {path}: {error.strerror}") from None
        try:
            return cls.from_bytes(data)
        except BadBundle as error:
            raise BadBundle(f"{path}: {error}") from None


def _header(data: bytes) -> tuple[SafetensorsHeader, int]:
    """The header of a bundle, and where the tensors begin. Raises ValueError if it is none."""
    size = int.from_bytes(data[:LENGTH_BYTES], "little")
    begin = LENGTH_BYTES + size
    if not 2 <= size <= len(data) - LENGTH_BYTES:
        raise ValueError("it is no safetensors file")
    # A statement is written with four letters for three bytes.
    header = parse_header(
        data[LENGTH_BYTES:begin],
        header_limits(BUNDLE.max_statement * 3 // 2 + 128 * (BUNDLE.max_tensors + 1), BUNDLE.max_tensors),
    )
    if header.end != len(data) - begin or any(said.dtype != "U8" for said in header.tensors.values()):
        raise ValueError("its tensors are not U8, or do not end with it")
    return header, begin


def _statement(header: SafetensorsHeader) -> bytes:
    text = header.metadata.get(_METADATA)
    if text is None:
        raise ValueError("it is a safetensors file without evidence in it")
    return base64.b64decode(text, validate=True)


# --- making bundles


@dataclass(frozen=True)
class Measurement:
    """What the accuser measured, and the kind of device that the server announced; for information only."""

    error: float = 0.0
    tolerance: float = 0.0
    server_device: str = ""


def equivocation_bundle(accuser: Identity, accused: str, first: Receipt, second: Receipt) -> Bundle:
    """Evidence of two receipts that contradict each other."""
    evidence = _evidence("equivocation", accused)
    evidence.receipts.extend([receipt_to_wire(first), receipt_to_wire(second)])
    return _signed(accuser, evidence, {})


def session_bundle(accuser: Identity, log: SessionLog, index: int, measured: Measurement | None = None) -> Bundle:
    """Evidence of the answer to step `index` (from 0) of a session, and of what led to it.

    Raises:
        ValueError: the log does not go back to the beginning, or the tensors were not kept, or are too large.
    """
    if not log.complete:
        raise ValueError("not all of the session's receipts are here")
    evidence = _evidence("answer", log.peer_id, measured)
    if log.opening is None or log.granted is None:
        raise ValueError("it is not known here how the session was opened")
    evidence.opening.CopyFrom(log.opening)
    evidence.session_epoch = log.granted.session_epoch
    if log.granted.HasField("pledge"):
        evidence.pledge.CopyFrom(log.granted.pledge)
    entries = [log.entries[number] for number in range(index + 1)]
    payloads: dict[str, bytes] = {}
    evidence.prefix_tokens = log.granted.prefix_tokens
    if evidence.prefix_tokens and not log.prefix:
        raise ValueError("the tensors that the session began with were not kept")
    for number, (tensor, payload) in enumerate(log.prefix):
        evidence.prefix.append(tensor)
        payloads[f"prefix.{number}"] = bytes(payload)
    for number in needed([_known(entry.step) for entry in entries]):
        payloads[f"input.{number}"] = _kept(entries[number].input)
    payloads["output"] = _kept(entries[-1].output)
    for entry in entries:
        receipt, payload_hash = receipt_to_wire(entry.receipt), sha256(_kept(entry.input))
        evidence.steps.append(
            wire.EvidenceStep(receipt=receipt, step=entry.step, tensor=entry.asked, payload_hash=payload_hash)
        )
    return _signed(accuser, evidence, payloads)


def batch_bundle(accuser: Identity, batch: LoggedBatch, measured: Measurement | None = None) -> Bundle:
    """Evidence of the reply to one batch request.

    Raises:
        ValueError: it is too large.
    """
    evidence = _evidence("answer", batch.peer_id, measured)
    asked, kept = batch.asked, batch.asked.kept
    keep, held = (None, ()) if kept is None else (kept.keep, kept.payloads)
    evidence.work.CopyFrom(
        wire.EvidenceBatch(
            protocol=batch.protocol,
            receipt=receipt_to_wire(batch.receipt),
            work=asked.message,
            keep=keep,
            input_hash=hash_of_payloads(asked.payloads),
            kept_hash=hash_of_payloads(held),
        )
    )
    if batch.pledge is not None:
        evidence.pledge.CopyFrom(batch.pledge)
    payloads: dict[str, bytes] = {}
    for name, parts in (("input", asked.payloads), ("kept", held), ("output", batch.outputs)):
        payloads |= {f"{name}.{number}": bytes(part) for number, part in enumerate(parts)}
    return _signed(accuser, evidence, payloads)


def resigned(bundle: Bundle, accuser: Identity, measured: Measurement | None = None) -> Bundle:
    """The same evidence signed by another accuser: an auditor that has recomputed what a client shared."""
    evidence = wire.Evidence()
    evidence.CopyFrom(bundle.evidence)
    measured = measured or Measurement()
    evidence.error, evidence.tolerance = measured.error, measured.tolerance
    evidence.server_device = measured.server_device
    evidence.time_ms = now_ms()
    return _signed(accuser, evidence, bundle.payloads)


def needed(steps: Sequence[wire.Step]) -> list[int]:
    """The numbers of the steps whose tensors are needed to recompute the last one: those that no rollback has undone.

    A step whose rows changed places is always needed, and so is what came before it: no rollback undoes that.
    """
    kept: list[int] = []
    for number, step in enumerate(steps):
        while kept and steps[kept[-1]].position >= step.position and not steps[kept[-1]].reorder:
            kept.pop()
        kept.append(number)
    return kept


def _evidence(kind: str, accused: str, measured: Measurement | None = None) -> wire.Evidence:
    measured = measured or Measurement()
    return wire.Evidence(
        version=_VERSION,
        accused=peer_id_to_bytes(accused),
        kind=kind,
        error=measured.error,
        tolerance=measured.tolerance,
        server_device=measured.server_device,
        time_ms=now_ms(),
    )


def _known(step: wire.Step | None) -> wire.Step:
    if step is None:
        raise ValueError("not all of the session's steps are here")
    return step


def _kept(payload: bytes | bytearray | None) -> bytes:
    if payload is None:
        raise ValueError("the tensors of the session were not kept")
    return bytes(payload)


def _signed(accuser: Identity, evidence: Message, payloads: Mapping[str, bytes]) -> Bundle:
    statement = evidence.SerializeToString(deterministic=True)
    if (
        len(statement) > BUNDLE.max_statement
        or sum(map(len, payloads.values())) > BUNDLE.max_bytes - 2 * BUNDLE.max_statement
    ):
        raise ValueError("this is more than evidence may have")
    return Bundle(statement, accuser.peer_id, accuser.sign(ACCUSATION_DOMAIN, statement), payloads)
