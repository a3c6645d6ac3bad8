"""The auditor's side of `/petalnode/receipts/1`: takes a random sample of the receipts that clients share."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from ...crypto.receipts import Receipt, is_countersigned
from ...protocols import wire_pb2 as wire
from ...protocols.evidence import EVIDENCE_SIZES, RECEIPTS, EvidenceStream, receive_bundle
from ...protocols.framing import ProtocolError
from ...protocols.inference import Refusal, receipt_from_wire
from ..network.shares import ShareCount
from ..network.transport.places import Places
from ..swarm.swarm import Swarm
from ..trust.bundle import BadBundle, Bundle
from ..trust.evidence_message import is_answer_recent


@dataclass(frozen=True)
class AuditLimits:
    """How many receipts clients may show, and how long they may take."""

    offer_timeout: float = 30.0
    piece_timeout: float = 30.0
    calls_per_minute: int = 12  # Of one client
    sample: int = 2  # Receipts that are taken of a call
    max_calls: int = 8  # At once, of all clients
    max_pending: int = 32  # Bundles that wait to be judged
    max_pending_bytes: int = 256 << 20


AUDITS: Final = AuditLimits()


@dataclass(frozen=True)
class Audit:
    """A receipt that a client shares; the bundle has the request and the answer that the server signed.

    Only the countersignature was checked; `check_evidence` says whether it proves a fault.
    """

    client: str
    receipt: Receipt
    bundle: Bundle


def choose(receipts: Sequence[Receipt], model_version: bytes, count: int) -> list[int]:
    """The indices of `count` receipts at random, of those of this version."""
    usable = [number for number, receipt in enumerate(receipts) if receipt.model_version == model_version]
    return random.sample(usable, min(count, len(usable)))


class ReceiptAuditService:
    """Handles `/petalnode/receipts/1` on a swarm that listens; `next` gives one audit after the other.

    Those of the model version that can be judged here.
    """

    def __init__(self, swarm: Swarm, model_version: bytes) -> None:
        self._model_version = model_version
        self._calls = ShareCount(math.inf, seconds=60.0)
        self._swarm = swarm
        self._places = Places(AUDITS.max_calls)
        self._bytes = 0
        self._send, self._receive = trio.open_memory_channel[Audit](AUDITS.max_pending)
        swarm.set_handler(RECEIPTS, self._serve)

    async def next(self) -> Audit:
        """Waits for the next audit."""
        audit = await self._receive.receive()
        self._bytes -= _size(audit)
        return audit

    async def _serve(self, stream: EvidenceStream) -> None:
        frame, _ = await stream.receive(timeout=AUDITS.offer_timeout)
        if frame.WhichOneof("body") != "offer":
            raise ProtocolError(f"{stream.peer_id} offers no receipts", stream.peer_id)
        if self._calls.add(stream.peer_id, most=AUDITS.calls_per_minute, now=trio.current_time()):
            with self._places.take(stream.peer_id, self._swarm.host.origin_of(stream.peer_id)) as place:
                if place is not None:
                    await self._take(stream, frame.offer)
        await stream.send(wire.EvidenceFrame(close=wire.Close()), timeout=AUDITS.piece_timeout)

    async def _take(self, stream: EvidenceStream, offer: wire.Offer) -> None:
        try:
            receipts = [receipt_from_wire(receipt) for receipt in offer.receipts[: EVIDENCE_SIZES.max_offer]]
        except ValueError as error:
            raise ProtocolError(f"{stream.peer_id} offers what is no receipt: {error}", stream.peer_id) from None
        signatures = offer.countersignatures
        for number in choose(receipts, self._model_version, AUDITS.sample):
            receipt = receipts[number]
            if (
                receipt.client != stream.peer_id
                or number >= len(signatures)
                or not is_countersigned(receipt, signatures[number])
            ):
                raise ProtocolError(f"{stream.peer_id} offers a receipt that it does not stand by", stream.peer_id)
            await stream.send(wire.EvidenceFrame(pick=wire.Pick(number=number)), timeout=AUDITS.piece_timeout)
            try:
                data = await receive_bundle(stream, limit=EVIDENCE_SIZES.max_shared, timeout=AUDITS.piece_timeout)
                bundle = await trio.to_thread.run_sync(Bundle.from_bytes, data)
            except Refusal:
                continue
            except BadBundle as error:
                raise ProtocolError(f"{stream.peer_id} shows nonsense: {error}", stream.peer_id) from None
            self._put(Audit(stream.peer_id, receipt, bundle), stream.peer_id)

    def _put(self, audit: Audit, peer_id: str) -> None:
        if _signature_of(audit.bundle) != audit.receipt.signature or audit.bundle.accuser != peer_id:
            raise ProtocolError(f"{peer_id} shows something else than was picked", peer_id)
        # Old receipts would have a server punished again and again for what it did once.
        if not is_answer_recent(audit.bundle, time.time()) or self._bytes + _size(audit) > AUDITS.max_pending_bytes:
            return
        try:
            self._send.send_nowait(audit)
        except trio.WouldBlock:
            return
        self._bytes += _size(audit)


def _signature_of(bundle: Bundle) -> bytes:
    """The signature of the receipt that a bundle is about."""
    evidence = bundle.evidence
    if evidence.HasField("work"):
        return evidence.work.receipt.signature
    return evidence.steps[-1].receipt.signature if evidence.steps else b""


def _size(audit: Audit) -> int:
    return audit.bundle.nbytes
