"""Receipts, and who was part of them."""

from __future__ import annotations

from typing import Any

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import NO_RECEIPT, Receipt
from petalnode.crypto.statement import now_ms
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import PROTOCOL_VERSION
from petalnode.protocols.inference import hash_of_step, sha256

SERVER = Identity.from_seed(bytes(range(32)))
CLIENT = Identity.from_seed(bytes(range(1, 33)))
OTHER = Identity.from_seed(bytes(range(2, 34)))


def unsigned(**fields: Any) -> Receipt:
    """Of a session's first answer, in float32 and made now, unless `fields` say otherwise."""
    usual: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "model_version": b"m" * 32,
        "span": (0, 1),
        "dtype": "float32",
        "quantisation": "none",
        "client": CLIENT.peer_id,
        "nonce": b"n" * 16,
        "session_epoch": b"e" * 16,
        "sequence": 1,
        "request_hash": b"q" * 32,
        "reply_hash": b"r" * 32,
        "previous_receipt": NO_RECEIPT,
        "upstream_receipt": b"",
        "time_ms": now_ms(),
    }
    return Receipt(**usual | fields)


def of_answer(
    opening: wire.Open, client: str, epoch: bytes, step: wire.Step, asked: tuple[wire.Tensor, bytes], answer: bytes
) -> Receipt:
    """The same of the bytes of an `answer` to what was `asked` in the session of `client` that was opened so."""
    tensor, payload = asked
    return unsigned(
        model_version=opening.model_version,
        span=(opening.span.start, opening.span.end),
        client=client,
        nonce=opening.nonce,
        session_epoch=epoch,
        sequence=step.sequence,
        request_hash=hash_of_step(step, tensor, sha256(payload)),
        reply_hash=sha256(answer),
        upstream_receipt=step.previous_receipt,
    )


RECEIPT = unsigned(span=(3, 9), dtype="bfloat16", sequence=7, time_ms=1_700_000_000_000).signed(SERVER)
