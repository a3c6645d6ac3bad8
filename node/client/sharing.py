"""Shows receipts, and what they are for, to the auditors that a person has named. Nobody else ever sees any.

Only so can a server be caught that is honest to strangers: it cannot know which of its answers are looked at later. Who
audits sees the hidden states, and from those of the first blocks the text can be recovered: name auditors that may read
along. The client calls, so that it works from behind NAT, and no server can tell who shares.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from ...crypto.receipts import Receipt, countersign
from ...protocols import wire_pb2 as wire
from ...protocols.evidence import EVIDENCE_SIZES, RECEIPTS, EvidenceStream, check_pick, send_bundle
from ...protocols.framing import PeerError
from ...protocols.ids import Span
from ...protocols.inference import Refusal, receipt_to_wire
from ..network.addresses import parse_peer
from ..swarm.swarm import Swarm
from ..trust.bundle import Bundle, batch_bundle, session_bundle
from ..trust.receipt_log import LoggedBatch, ReceiptArchive, SessionLog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharingPolicy:
    """How a client lets auditors check its receipts, in seconds."""

    interval: float = 20.0  # Between two calls at one auditor, more or less: a random time
    open_timeout: float = 10.0
    pick_timeout: float = 120.0  # The auditor may be computing
    piece_timeout: float = 30.0
    most_picks: int = 16  # That a client answers in one call
    last_call: float = 5.0  # Seconds for a client that ends to be audited


SHARING: Final = SharingPolicy()


@dataclass(frozen=True)
class Shown:
    """An answer that an auditor may pick: step `index` of a session, or a batch request."""

    receipt: Receipt
    source: SessionLog | LoggedBatch
    index: int = 0


def auditable(archive: ReceiptArchive, blocks: Span | None = None) -> list[Shown]:
    """Every answer for which all is here that its recomputation needs; of servers within `blocks` only, if given."""
    found = [
        Shown(entry.receipt, log, index)
        for log in archive.sessions
        if log.complete and log.nbytes
        for index, entry in enumerate(log.entries)
        if entry.output is not None
    ]
    found += [Shown(batch.receipt, batch) for batch in archive.batches]
    return [shown for shown in found if blocks is None or blocks.covers(Span(*shown.receipt.span))]


async def share_receipts(
    swarm: Swarm, archive: ReceiptArchive, auditors: Sequence[str], blocks: Span | None = None
) -> None:
    """Calls each of `auditors`, multiaddrs with /p2p, again and again, while there is something new to show; only of
    servers within `blocks`, if given. When it is cancelled it calls once more. Never raises for anything that an
    auditor does."""
    async with trio.open_nursery() as nursery:
        for auditor in auditors:
            nursery.start_soon(_keep_calling, swarm, archive, auditor, blocks)


async def _keep_calling(swarm: Swarm, archive: ReceiptArchive, auditor: str, blocks: Span | None) -> None:
    seen: set[bytes] = set()
    try:
        while True:
            await trio.sleep(random.uniform(0.5, 1.5) * SHARING.interval)
            await _call(swarm, archive, auditor, seen, blocks)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(SHARING.last_call):
            await _call(swarm, archive, auditor, seen, blocks)


async def _call(swarm: Swarm, archive: ReceiptArchive, auditor: str, seen: set[bytes], blocks: Span | None) -> None:
    fresh = [shown for shown in auditable(archive, blocks) if shown.receipt.signature not in seen]
    if not fresh:
        return
    offered = random.sample(fresh, min(len(fresh), EVIDENCE_SIZES.max_offer))
    peer_id, addr = parse_peer(auditor)
    swarm.host.remember(peer_id, [addr])
    try:
        async with swarm.open_stream(peer_id, RECEIPTS, timeout=SHARING.open_timeout) as stream:
            await _show(swarm, stream, offered)
    except PeerError as error:
        log.info("the auditor %s cannot be shown receipts: %s", peer_id, error)
        return
    except Refusal as refusal:
        log.info("the auditor %s asks for nonsense: %s", peer_id, refusal)
    seen.update(shown.receipt.signature for shown in fresh)
    present = {shown.receipt.signature for shown in auditable(archive)}
    seen &= present


async def _show(swarm: Swarm, stream: EvidenceStream, offered: Sequence[Shown]) -> None:
    offer = wire.Offer(
        receipts=[receipt_to_wire(shown.receipt) for shown in offered],
        countersignatures=[countersign(swarm.identity, shown.receipt) for shown in offered],
    )
    await stream.send(wire.EvidenceFrame(offer=offer), timeout=SHARING.piece_timeout)
    for _ in range(SHARING.most_picks):
        frame, _ = await stream.receive(timeout=SHARING.pick_timeout)
        number = check_pick(frame, len(offered))
        if number is None:
            return
        data = await trio.to_thread.run_sync(_packed, swarm, offered[number])
        if data is None:
            error = wire.Error(code=wire.ERROR_NOT_FOUND, message="this is not here any more, or is too large")
            await stream.send(wire.EvidenceFrame(error=error), timeout=SHARING.piece_timeout)
        else:
            await send_bundle(stream, data, timeout=SHARING.piece_timeout)


def _packed(swarm: Swarm, shown: Shown) -> bytes | None:
    bundle: Bundle | None = None
    with suppress(ValueError, IndexError):  # its tensors may just have been forgotten
        if isinstance(shown.source, LoggedBatch):
            bundle = batch_bundle(swarm.identity, shown.source)
        else:
            bundle = session_bundle(swarm.identity, shown.source, shown.index)
    data = bundle.to_bytes() if bundle is not None else b""
    return data if 0 < len(data) <= EVIDENCE_SIZES.max_shared else None
