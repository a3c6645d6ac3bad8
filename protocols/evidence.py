"""`/petalnode/receipts/1` and `/petalnode/evidence/1`: bundles of evidence, and receipts for auditors.

A bundle's bytes travel in pieces. So nobody reads more than a piece of what is too large or too late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import trio

from . import wire_pb2 as wire
from .framing import MessageStream, ProtocolError, StreamTimeout
from .ids import StreamProtocol
from .inference import Refusal, bad_request

PIECE_BYTES: Final = 1 << 20
RECEIPTS: Final = StreamProtocol(
    "/petalnode/receipts/1", wire.EvidenceFrame, max_header=256 * 1024, max_payload=PIECE_BYTES
)
EVIDENCE: Final = replace(RECEIPTS, id="/petalnode/evidence/1")


@dataclass(frozen=True)
class EvidenceSizes:
    """The sizes of messages about evidence and receipts."""

    max_offer: int = 256
    """Receipts that a client offers at once."""
    max_shared: int = 64 << 20
    """Bytes of a bundle that is sent from node to node. Larger ones have to be handed over as files."""
    min_rate: int = 128 << 10
    """Bytes a second at which a bundle has to come, from its first piece on."""


EVIDENCE_SIZES: Final = EvidenceSizes()
EvidenceStream = MessageStream[wire.EvidenceFrame]


async def send_bundle(stream: EvidenceStream, data: bytes, *, timeout: float) -> None:
    """Sends a bundle; `timeout` is for each piece.

    Raises:
        PeerError: as `MessageStream.send`.
    """
    await stream.send(wire.EvidenceFrame(sending=wire.Sending(nbytes=len(data))), timeout=timeout)
    view = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        frame = wire.EvidenceFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=len(piece))])
        await stream.send(frame, [piece], timeout=timeout)


async def receive_bundle(stream: EvidenceStream, *, limit: int, timeout: float) -> bytes:
    """The bytes of a bundle that was asked for, of at most `limit` bytes.

    The sender may fall `timeout` seconds behind `EVIDENCE_SIZES.min_rate`, and no more at any time. So the whole takes
    at most `timeout` + `limit` / `EVIDENCE_SIZES.min_rate` seconds after its size was announced. That has `timeout`
    seconds.

    Raises:
        PeerError: as `MessageStream.receive`, it comes too slowly, or something else came.
        Refusal: the sender's own Error.
    """
    frame, _ = await stream.receive(timeout=timeout)
    if frame.WhichOneof("body") == "error":
        raise Refusal.from_wire(frame.error)
    size = frame.sending.nbytes
    if frame.WhichOneof("body") != "sending" or not 0 < size <= limit:
        raise ProtocolError(f"{stream.peer_id} sends no bundle of at most {limit} bytes", stream.peer_id)
    data = bytearray()
    begun = trio.current_time()
    while len(data) < size:
        with trio.move_on_at(begun + timeout + len(data) / EVIDENCE_SIZES.min_rate) as patience:
            frame, payloads = await stream.receive(timeout=None)
        if patience.cancelled_caught:
            raise StreamTimeout(
                f"{stream.peer_id} sends a bundle more slowly than {EVIDENCE_SIZES.min_rate >> 10} KiB a second",
                stream.peer_id,
            )
        if frame.WhichOneof("body") != "piece" or len(payloads) != 1 or not payloads[0]:
            raise ProtocolError(f"{stream.peer_id} ended a bundle before its end", stream.peer_id)
        data += payloads[0]
    if len(data) != size:
        raise ProtocolError(f"{stream.peer_id} sent more than it said", stream.peer_id)
    return bytes(data)


def check_pick(frame: wire.EvidenceFrame, offered: int) -> int | None:
    """The number that an auditor picks; None if it wants no more.

    Raises:
        Refusal: something else, or a number that was not offered.
    """
    body = frame.WhichOneof("body")
    if body == "close":
        return None
    if body != "pick" or frame.pick.number >= offered:
        raise bad_request(f"an auditor picks one of {offered} receipts, or closes; not {body}")
    return frame.pick.number
