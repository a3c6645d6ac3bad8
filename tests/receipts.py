"""A receipt, and who was part of it."""

from __future__ import annotations

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import NO_RECEIPT, Receipt
from petalnode.protocols.ids import PROTOCOL_VERSION

SERVER = Identity.from_seed(bytes(range(32)))
CLIENT = Identity.from_seed(bytes(range(1, 33)))
OTHER = Identity.from_seed(bytes(range(2, 34)))

RECEIPT = Receipt(
    protocol_version=PROTOCOL_VERSION,
    model_version=b"m" * 32,
    span=(3, 9),
    dtype="bfloat16",
    quantisation="none",
    client=CLIENT.peer_id,
    nonce=b"n" * 16,
    session_epoch=b"e" * 16,
    sequence=7,
    request_hash=b"q" * 32,
    reply_hash=b"r" * 32,
    previous_receipt=NO_RECEIPT,
    upstream_receipt=b"",
    time_ms=1_700_000_000_000,
).signed(SERVER)
