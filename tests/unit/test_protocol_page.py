"""docs/protocol.md says enough: the test vectors come out of code that follows that page alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import base58
import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from petalnode.node.models.manifest import _LEFT_OUT, canonical_architecture
from petalnode.protocols.tensors import encode as encode_tensor

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs/receipt-vectors.json").read_text())


def encode(value: Any) -> bytes:
    if isinstance(value, bytes):
        return b"b" + len(value).to_bytes(8, "big") + value
    if isinstance(value, str):
        return b"s" + len(value.encode()).to_bytes(8, "big") + value.encode()
    if isinstance(value, int):
        return b"i" + value.to_bytes(16, "big", signed=True)
    return b"l" + len(value).to_bytes(8, "big") + b"".join(map(encode, value))


def canonical(domain: str, fields: list[Any]) -> bytes:
    return b"petalnode/canonical/1\0" + encode(domain) + encode(fields)


def digest(domain: str, fields: list[Any]) -> bytes:
    return hashlib.sha256(canonical(domain, fields)).digest()


def check_signature(peer_id: str, domain: str, message: bytes, signature: str) -> None:
    data = base58.b58decode(peer_id)
    assert data[:6].hex() == "002408011220"
    Ed25519PublicKey.from_public_bytes(data[6:]).verify(bytes.fromhex(signature), canonical(domain, [message]))


def fields_of(name: str, names: str) -> list[Any]:
    """The fields of a vector in the order of the page; which of them are text, the page says."""
    vector, texts = VECTORS[name], ("server", "dtype", "quantisation", "holder", "client", "codec")
    return [
        bytes.fromhex(vector[field]) if isinstance(vector[field], str) and field not in texts else vector[field]
        for field in names.split(", ")
    ]


SERVER, CLIENT, VALIDATOR = (key["peer_id"] for key in VECTORS["keys"])
RECEIPT = (
    "protocol_version, model_version, span, dtype, quantisation, client, nonce, session_epoch, sequence, request_hash,"
    " reply_hash, previous_receipt, upstream_receipt, time_ms, adapter"
)
PLEDGE = "server, model_version, span, dtype, quantisation, deposit, from_ms, until_ms, holder, voucher"


def test_receipt() -> None:
    receipt, domain = VECTORS["receipt"], "petalnode/receipt/1"
    message = canonical(domain, fields_of("receipt", RECEIPT))
    assert message.hex() == receipt["canonical"]
    check_signature(SERVER, domain, message, receipt["signature"])
    hash_ = digest(domain, [message, bytes.fromhex(receipt["signature"])])
    assert hash_.hex() == receipt["hash"]
    check_signature(CLIENT, "petalnode/countersignature/1", hash_, receipt["countersignature"])
    with pytest.raises(InvalidSignature):
        check_signature(CLIENT, domain, message, receipt["signature"])


def test_pledge() -> None:
    pledge, domain = VECTORS["pledge"], "petalnode/pledge/1"
    message = canonical(domain, fields_of("pledge", PLEDGE))
    assert message.hex() == pledge["canonical"]
    check_signature(SERVER, domain, message, pledge["signature"])
    assert digest(domain, [message, bytes.fromhex(pledge["signature"])]).hex() == pledge["hash"]
    voucher = canonical("petalnode/deposit/1", [SERVER, pledge["deposit"], pledge["until_ms"]])
    check_signature(VALIDATOR, "petalnode/deposit/1", voucher, pledge["voucher"])


def test_session_root_and_request() -> None:
    terms = "client, nonce, session_epoch, model_version, span, batch, left_padding, codec, dtype, adapter, pledge"
    assert digest("petalnode/session/1", fields_of("session", terms)).hex() == VECTORS["session"]["root"]
    request = VECTORS["request"]
    assert hashlib.sha256(bytes.fromhex(request["payload"])).hexdigest() == request["payload_hash"]
    names = "sequence, position, reorder, route_epoch, shape, dtype, codec, payload_hash, upstream_receipt"
    targets = [[bytes.fromhex(peer), bytes.fromhex(nonce), number] for peer, nonce, number in request["targets"]]
    assert digest("petalnode/request/1", [*fields_of("request", names), targets]).hex() == request["hash"]
    assert VECTORS["receipt"]["previous_receipt"] == VECTORS["session"]["root"]


def test_batch_request() -> None:
    batch, tensor = VECTORS["work"], [[2, 1, 8], "float32", "none"]
    payloads, kept = ([bytes.fromhex(payload) for payload in part["payloads"]] for part in (batch, batch["keep"]))
    kept_hash = digest("petalnode/keep/1", [["prompts"], [tensor], hashlib.sha256(b"".join(kept)).digest()])
    assert kept_hash.hex() == batch["keep"]["hash"]
    fields = [batch["protocol"], batch["sequence"], [tensor, tensor], bytes.fromhex(batch["mask"]), batch["positions"]]
    request = digest("petalnode/work/1", [*fields, hashlib.sha256(b"".join(payloads)).digest(), kept_hash])
    assert request.hex() == batch["hash"]


@pytest.mark.parametrize("count", [1, 64, 100])
def test_int8_block64(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    _, payload = encode_tensor(values, "int8-block64")
    scales, quantised = b"", b""
    for start in range(0, count, 64):
        block = values[start : start + 64]
        scale = (block.abs().max() / 127).half()
        scales += scale.numpy().astype("<f2").tobytes()
        quantised += (block / scale.float()).round().clamp(-127, 127).to(torch.int8).numpy().tobytes()
    assert payload == scales + quantised


def test_the_page_names_all_fields_of_a_configuration_that_are_left_out() -> None:
    page = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
    listed = re.search(r"leaves\s+out, at the top [^:]*:\s+([^.]*)\.", page)
    assert listed is not None
    config = dict.fromkeys(re.findall(r"`(\w+)`", listed[1]), 1)
    assert len(config) > 60
    assert canonical_architecture(config | {"hidden_size": 8}) == b'{"hidden_size":8}'
    assert config.keys() == _LEFT_OUT
