from __future__ import annotations

from dataclasses import fields, replace

import pytest

from petalnode.crypto.receipts import Receipt, StepRequest
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import receipt_from_wire, receipt_to_wire
from tests.receipts import CLIENT, OTHER, RECEIPT, SERVER

CHANGED: dict[str, object] = {
    "protocol_version": 2,
    "model_version": b"n" * 32,
    "span": (3, 10),
    "dtype": "float32",
    "quantisation": "int8",
    "client": OTHER.peer_id,
    "nonce": b"o" * 16,
    "session_epoch": b"f" * 16,
    "sequence": 8,
    "request_hash": b"p" * 32,
    "reply_hash": b"s" * 32,
    "previous_receipt": b"p" * 32,
    "upstream_receipt": b"u" * 32,
    "time_ms": 1_700_000_000_001,
    "adapter": b"a" * 32,
}


def test_every_field_is_tried() -> None:
    assert set(CHANGED) | {"signature"} == {field.name for field in fields(Receipt)}


def test_the_signature_is_the_server_s() -> None:
    assert RECEIPT.is_signed_by(SERVER.peer_id)
    assert not RECEIPT.is_signed_by(CLIENT.peer_id)
    assert not replace(RECEIPT, signature=b"").is_signed_by(SERVER.peer_id)
    assert not replace(RECEIPT, signature=bytes(64)).is_signed_by(SERVER.peer_id)
    assert not RECEIPT.is_signed_by("not a peer id")


@pytest.mark.parametrize("name", CHANGED)
def test_the_signature_covers(name: str) -> None:
    changed = replace(RECEIPT, **{name: CHANGED[name]})  # type: ignore[arg-type]
    assert not changed.is_signed_by(SERVER.peer_id)
    assert changed.hash() != RECEIPT.hash()


def test_fields_do_not_flow_into_each_other() -> None:
    moved = replace(RECEIPT, nonce=b"n" * 15, session_epoch=b"n" + b"e" * 16)
    assert moved.canonical_bytes() != RECEIPT.canonical_bytes()


def test_the_hash_covers_the_signature() -> None:
    assert RECEIPT.signed(SERVER).hash() == RECEIPT.hash()
    assert RECEIPT.signed(OTHER).hash() != RECEIPT.hash()


def test_a_receipt_survives_the_wire() -> None:
    data = receipt_to_wire(RECEIPT).SerializeToString()
    back = receipt_from_wire(wire.Receipt.FromString(data))
    assert back == RECEIPT and back.is_signed_by(SERVER.peer_id) and back.hash() == RECEIPT.hash()


@pytest.mark.parametrize("client", [b"", b"\x00", bytes(range(38))])
def test_a_client_that_is_no_peer_is_refused(client: bytes) -> None:
    message = receipt_to_wire(RECEIPT)
    message.client = client
    with pytest.raises(ValueError, match=r".+"):
        receipt_from_wire(message)


REQUEST: dict[str, object] = {
    "sequence": 1,
    "position": 2,
    "reorder": (1, 0),
    "route_epoch": 3,
    "shape": (2, 5, 64),
    "dtype": "float32",
    "codec": "none",
    "payload_hash": b"p" * 32,
    "upstream_receipt": b"",
    "targets": ((b"t" * 38, b"n" * 16, 5),),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence", 2), ("position", 1), ("reorder", ()), ("reorder", (0, 1)), ("route_epoch", 4),
        ("shape", (5, 2, 64)), ("targets", ()), ("targets", ((b"t" * 38, b"n" * 16, 6),)),
        ("dtype", "float16"), ("codec", "float16"), ("payload_hash", b"q" * 32), ("upstream_receipt", b"u" * 32),
    ],
)  # fmt: skip
def test_the_request_hash_covers(name: str, value: object) -> None:
    assert StepRequest(**REQUEST | {name: value}).hash() != StepRequest(**REQUEST).hash()  # type: ignore[arg-type]
