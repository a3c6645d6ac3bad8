"""Test vectors, with which another implementation of receipts can be checked.

`python -m tests.unit.test_vectors > docs/receipt-vectors.json` makes the file anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from petalnode.crypto.canonical import canonical, digest
from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import Receipt, SessionRoot, StepRequest, countersign
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import BACKWARD
from petalnode.protocols.inference import sha256
from petalnode.protocols.training import hash_of_batch, hash_of_keep, hash_of_payloads
from tests.statements import pledge_of, terms_of

FILE = Path(__file__).parents[2] / "docs" / "receipt-vectors.json"
SERVER, CLIENT, VALIDATOR = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))


def vectors() -> dict[str, Any]:
    payload, answer = bytes(range(64)), bytes(range(64, 128))
    pledge = pledge_of(
        SERVER, VALIDATOR, span=(3, 9), quantisation="int8", from_ms=1_700_000_000_000, until_ms=1_700_086_400_000
    )
    terms = terms_of(CLIENT, pledge, (4, 6))
    request: dict[str, Any] = {
        "sequence": 1,
        "position": 0,
        "reorder": (1, 0),
        "route_epoch": 7,
        "shape": (2, 1, 8),
        "dtype": "float32",
        "codec": "none",
        "payload_hash": sha256(payload),
        "upstream_receipt": b"",
        "targets": ((b"p" * 38, b"t" * 16, 5),),
    }
    receipt = Receipt(
        protocol_version=1,
        model_version=b"m" * 32,
        span=(4, 6),
        dtype="bfloat16",
        quantisation="int8",
        client=CLIENT.peer_id,
        nonce=b"n" * 16,
        session_epoch=b"e" * 16,
        sequence=1,
        request_hash=StepRequest(**request).hash(),
        reply_hash=sha256(answer),
        previous_receipt=SessionRoot(**terms).hash(),
        upstream_receipt=b"",
        time_ms=1_700_000_000_500,
    ).signed(SERVER)
    tensor = wire.Tensor(shape=[2, 1, 8], dtype="float32", codec="none", nbytes=64)
    keep = wire.Keep(number=1, names=["prompts"], tensors=[tensor])
    kept = hash_of_keep(keep, hash_of_payloads([payload]))
    work = wire.BatchRequest(sequence=2, tensors=[tensor, tensor], mask=b"\xc0", positions=[0, 1], kept=1)
    return {
        "note": "bytes are in hexadecimal; what they mean is in docs/protocol.md and crypto/",
        "keys": [{"seed": identity.seed, "peer_id": identity.peer_id} for identity in (SERVER, CLIENT, VALIDATOR)],
        "canonical": {
            "domain": "petalnode/example",
            "fields": [["int", -1], ["str", "ä"], ["bytes", b"\0"], ["list", [["int", 2], ["list", []]]]],
            "bytes": canonical("petalnode/example", -1, "ä", b"\0", [2, []]),
            "sha256": digest("petalnode/example", -1, "ä", b"\0", [2, []]),
        },
        "pledge": {**asdict(pledge), "canonical": pledge.canonical_bytes(), "hash": pledge.hash()},
        "session": {**terms, "root": SessionRoot(**terms).hash()},
        "request": {**request, "payload": payload, "hash": StepRequest(**request).hash()},
        "receipt": {
            **asdict(receipt),
            "answer": answer,
            "canonical": receipt.canonical_bytes(),
            "hash": receipt.hash(),
            "countersignature": countersign(CLIENT, receipt),
        },
        "work": {
            "protocol": BACKWARD,
            "payloads": [payload, answer],
            "keep": {"names": ["prompts"], "payloads": [payload], "hash": kept},
            "mask": b"\xc0",
            "positions": [0, 1],
            "sequence": 2,
            "hash": hash_of_batch(BACKWARD, work, hash_of_payloads([payload, answer]), kept),
        },
    }


def to_text(value: dict[str, Any]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return value

    return json.dumps(plain(value), indent=1, ensure_ascii=False) + "\n"


def test_receipts_mean_what_they_meant() -> None:
    """A change here is a change of the protocol: whoever runs an older version does not understand it any more."""
    assert FILE.read_text() == to_text(vectors())


if __name__ == "__main__":
    print(to_text(vectors()), end="")
