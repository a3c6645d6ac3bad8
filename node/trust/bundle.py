"""Evidence as a file (bundle): everything that a third party needs to check a server's fault.

A bundle is a `.safetensors` file. Its tensors, all of type U8, are payloads as they stood on the wire; its metadata has
one entry, a serialised and signed `wire.Evidence` in base64. The accuser's signature only says who brings the evidence:
what proves the fault are the server's signatures.
"""

from __future__ import annotations

import base64
import binascii
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
from ...crypto.statement import now_ms
from ...protocols import wire_pb2 as wire
from ...protocols.inference import receipt_to_wire, sha256
from ...protocols.training import hash_of_payloads
from ..errors import BadInput
from .receipt_log import LoggedBatch, SessionLog

MAX_BUNDLE: Final = 256 << 20
"""Bytes of a file."""
MAX_STATEMENT: Final = 8 << 20
"""Bytes of the evidence without the tensors."""
_METADATA: Final = "petalnode_evidence"
_VERSION: Final = 1
_MAX_TENSORS: Final = 20_000
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
        return wire.Evidence.FromString(self.statement)

    @property
    def accused(self) -> str:
        return peer_id_from_bytes(self.evidence.accused)

    @cached_property
    def id(self) -> bytes:
        """32 bytes that name the evidence: a hash of the statement."""
        return digest(ACCUSATION_DOMAIN, self.statement)

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
        import numpy as np
        from safetensors.numpy import save

        signed = wire.SignedEvidence(
            evidence=self.statement, accuser=peer_id_to_bytes(self.accuser), signature=self.signature
        )
        arrays = {name: np.frombuffer(data, np.uint8) for name, data in self.payloads.items()}
        metadata = {_METADATA: base64.b64encode(signed.SerializeToString(deterministic=True)).decode()}
        return bytes(save(arrays, metadata))

    @classmethod
    def from_bytes(cls, data: bytes) -> Bundle:
        """Parses a file from an untrusted source.

        Raises:
            BadBundle: with the reason.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if len(data) > MAX_BUNDLE:
            raise BadBundle(f"{len(data) >> 20} MiB are more than evidence may have ({MAX_BUNDLE >> 20} MiB)")
        try:
            signed = wire.SignedEvidence.FromString(_metadata(data))
            accuser = peer_id_from_bytes(signed.accuser)
            payloads = {name: array.tobytes() for name, array in load(data).items()}
            bundle = cls(signed.evidence, accuser, signed.signature, payloads)
            _ = bundle.accused
        except (DecodeError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadBundle(f"this is no evidence: {error}") from None
        if len(bundle.statement) > MAX_STATEMENT or len(payloads) > _MAX_TENSORS:
            raise BadBundle("the evidence is too long")
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
            if path.stat().st_size > MAX_BUNDLE:
                raise BadBundle(f"{path} has more than {MAX_BUNDLE >> 20} MiB: that is no evidence")
            data = path.read_bytes()
        except OSError as error:
            raise BadBundle(f"cannot read the evidence {path}: {error.strerror}") from None
        try:
            return cls.from_bytes(data)
        except BadBundle as error:
            raise BadBundle(f"{path}: {error}") from None


def _metadata(data: bytes) -> bytes:
    """Our entry of a safetensors file's header: 8 bytes of length, little-endian, then that much JSON."""
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= min(len(data) - 8, 2 * MAX_STATEMENT + 200 * _MAX_TENSORS):
        raise ValueError("it is no safetensors file")
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get(_METADATA) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ValueError("it is a safetensors file without evidence in it")  # noqa: TRY004
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


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
    """Evidence of the answer to step `index` of a session, counted in the log from 0, and all that led to it.

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
    receipt = receipt_to_wire(batch.receipt)
    evidence.work.CopyFrom(
        wire.EvidenceBatch(
            protocol=batch.protocol,
            receipt=receipt,
            work=batch.request,
            keep=batch.keep,
            input_hash=hash_of_payloads(batch.inputs),
            kept_hash=hash_of_payloads(batch.kept),
        )
    )
    if batch.pledge is not None:
        evidence.pledge.CopyFrom(batch.pledge)
    payloads: dict[str, bytes] = {}
    for name, parts in (("input", batch.inputs), ("kept", batch.kept), ("output", batch.outputs)):
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
    if len(statement) > MAX_STATEMENT or sum(map(len, payloads.values())) > MAX_BUNDLE - 2 * MAX_STATEMENT:
        raise ValueError("this is more than evidence may have")
    return Bundle(statement, accuser.peer_id, accuser.sign(ACCUSATION_DOMAIN, statement), payloads)
