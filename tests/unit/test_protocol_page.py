"""docs/protocol.md says enough: the test vectors come out of code that follows that page alone."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import base58
import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from transformers import CONFIG_MAPPING

from petalnode.node.models.manifest import _LEFT_OUT, canonical_architecture
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.tensors import encode as encode_tensor

DOCS = Path(__file__).parents[2] / "docs"
VECTORS: dict[str, Any] = json.loads((DOCS / "receipt-vectors.json").read_text())
MESSAGES: dict[str, Any] = json.loads((DOCS / "message-vectors.json").read_text())

TYPES_OF_ENDS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    *("granite", "granitemoe", "gemma", "gemma2"),
)


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


def test_announcement() -> None:
    vector = {name: bytes.fromhex(text) for name, text in MESSAGES["announcement"].items()}
    signed = wire.SignedAnnouncement.FromString(vector["signed"])
    assert (signed.announcement, signed.signature) == (vector["announcement"], vector["signature"])
    check_signature(SERVER, "petalnode/announcement/1", signed.announcement, signed.signature.hex())
    assert wire.Announcement.FromString(signed.announcement).peer_id == base58.b58decode(SERVER)


def test_model_version() -> None:
    model, digests = MESSAGES["model"], []
    for part in model["parts"]:
        tree = wire.PartTree.FromString(bytes.fromhex(part["tree"]))
        tensors = [[one.name, one.dtype, list(one.shape), one.nbytes] for one in tree.tensors]
        digests.append(digest("petalnode/model/part/2", [tree.form, tensors, tree.pieces]))
        assert digests[-1].hex() == part["digest"] and tensors == sorted(tensors)
    embeddings, *blocks, head = digests
    config = model["config"].encode()
    assert digest("petalnode/model/1", [config, embeddings, blocks, head]).hex() == model["version"]
    manifest = wire.Manifest.FromString(bytes.fromhex(model["manifest"]))
    assert (manifest.config, manifest.embeddings, list(manifest.blocks), manifest.head) == (
        config,
        embeddings,
        blocks,
        head,
    )
    pieces = wire.PartTree.FromString(bytes.fromhex(model["parts"][0]["tree"])).pieces
    last = hashlib.sha256(bytes.fromhex(model["embeddings"]["last"])).digest()
    assert pieces == bytes.fromhex(model["embeddings"]["first piece"]) + last


def test_prefix_names() -> None:
    vector, domain = MESSAGES["prefix"], "petalnode/prefix/1"
    version, adapter, salt = (bytes.fromhex(vector[name]) for name in ("model_version", "adapter", "salt"))
    terms = [version, vector["span"], vector["batch"], [], vector["codec"], vector["dtype"], adapter, salt]
    name = digest(domain, terms)
    assert name.hex() == vector["root"]
    payload, tokens = bytes.fromhex(vector["payload"]), vector["tokens"]
    size = len(payload) // (2 * tokens)
    hashes = [
        hashlib.sha256(b"".join(payload[(row * tokens + at) * size :][:size] for row in range(2))).digest()
        for at in range(tokens)
    ]
    for block, expected in enumerate(vector["names"]):
        name = digest(domain, [name, b"".join(hashes[32 * block : 32 * block + 32])])
        assert name.hex() == expected
    assert len(vector["names"]) == tokens // 32
    assert digest(domain, ["long factors", hashes[0]]).hex() == vector["with long factors"]
    of_first = [tokens * row_and_axis for row_and_axis in range(3 * 2)]
    assert digest(domain, ["positions", of_first, hashes[0]]).hex() == vector["with positions 0 to 389"]
    whole = digest(domain, ["tokens", *hashes[1:4]])
    for at in range(5):
        positions, numbers = [at + tokens * row for row in range(6)], list(bytes.fromhex(vector["groups"])[at::tokens])
        in_group = digest(domain, ["group", [], numbers, whole, hashes[at]])
        assert (in_group if 0 < at < 4 else hashes[at]).hex() == vector["with groups"][at]
        placed = digest(domain, ["positions", positions, hashes[at]])
        in_group = digest(domain, ["group", positions, numbers, whole, hashes[at]])
        assert (in_group if 0 < at < 4 else placed).hex() == vector["with groups and positions"][at]


def test_step_says_how_its_tokens_lie() -> None:
    vector = MESSAGES["laid out step"]
    step = wire.Step.FromString(bytes.fromhex(vector["step"]))
    payload = hashlib.sha256(b"".join(struct.pack("<f", number) for number in range(24))).digest()
    said = ["long factors", "positions", list(step.positions), "groups", list(step.groups)]
    fields = [step.sequence, step.position, [], step.route_epoch, [1, 3, 8], "float32", "none", payload, b"", []]
    assert digest("petalnode/request/1", [*fields, *said]).hex() == vector["hash"]


def test_adapter() -> None:
    vector = MESSAGES["adapter"]
    of_block: dict[int, list[Any]] = {}
    for tensor in vector["tensors"]:
        entry = [tensor["name"], tensor["shape"], tensor["dtype"], bytes.fromhex(tensor["sha256"])]
        of_block.setdefault(int(tensor["name"].partition(".")[0]), []).append(entry)
    blocks = [[number, digest("petalnode/adapter-block/1", [sorted(of_block[number])])] for number in sorted(of_block)]
    assert [[number, hash_.hex()] for number, hash_ in blocks] == vector["blocks"]
    assert digest("petalnode/adapter/1", [blocks]).hex() == vector["hash"]


CREDITS = {
    "credit": ("issuer", "issuer, holder, points, deposit, deposit_until_ms, sequence, time_ms"),
    "credit-query": ("holder", "issuer, holder, time_ms"),
    "credit-transfer": ("spender", "issuer, spender, recipient, points, sequence, until_ms"),
    "credit-deposit": ("server", "issuer, server, points, until_ms, sequence"),
}


@pytest.mark.parametrize("name", CREDITS)
def test_credits(name: str) -> None:
    (signer, names), vector, domain = CREDITS[name], MESSAGES["credits"][name], f"petalnode/{name}/1"
    message = canonical(domain, [vector[field] for field in names.split(", ")])
    assert message.hex() == vector["canonical"]
    check_signature(vector[signer], domain, message, vector["signature"])
    assert digest(domain, [message, bytes.fromhex(vector["signature"])]).hex() == vector["hash"]


def test_clearing() -> None:
    vector, domain = MESSAGES["credits"]["credit-clearing"], "petalnode/credit-clearing/1"
    transfer = bytes.fromhex(MESSAGES["credits"]["credit-transfer"]["hash"])
    message = canonical(domain, [transfer, vector["time_ms"]])
    check_signature(VALIDATOR, domain, message, vector["signature"])


def framed(name: str, kind: Any, among: Any = None) -> tuple[list[Any], list[bytes]]:
    """The headers and payloads of messages as they stand on the stream; among servers they are of another kind."""
    frames, payloads = [], []
    for said in MESSAGES[name]:
        data, size, shift = bytes.fromhex(said["bytes"]), 0, 0
        while True:
            size |= (data[0] & 127) << shift
            more, data, shift = data[0] >> 7, data[1:], shift + 7
            if not more:
                break
        is_among = among is not None and "client" not in (said["from"], said["to"])
        frames.append((among if is_among else kind).FromString(data[:size]))
        payloads.append(data[size:])
        assert [tensor.nbytes for tensor in frames[-1].tensors] == ([len(payloads[-1])] if payloads[-1] else [])
        assert frames[-1].WhichOneof("body") == said["message"]
    return frames, payloads


def checked_receipt(server: str, opened: Any, granted: Any, step: Any, sent: Any, given: bytes, reply: Any) -> bytes:
    """Checks the receipt of a session's first step; its hash. `sent` is the tensor, `given` its payload."""
    receipt, span = reply.receipt, [opened.span.start, opened.span.end]
    root = [CLIENT, opened.nonce, granted.session_epoch, opened.model_version, span, opened.batch, []]
    root = digest("petalnode/session/1", [*root, opened.codec, opened.activation_dtype, opened.adapter, b""])
    form = [list(sent.shape), sent.dtype, sent.codec, hashlib.sha256(given).digest(), step.previous_receipt]
    targets = [[target.peer_id, target.nonce, target.sequence] for target in step.targets]
    asked = digest("petalnode/request/1", [step.sequence, step.position, [], step.route_epoch, *form, targets])
    assert receipt.request_hash == asked and receipt.previous_receipt == root
    terms = [1, opened.model_version, span, granted.dtype, granted.quantisation, CLIENT, opened.nonce]
    hashes = [asked, receipt.reply_hash, root, step.previous_receipt, receipt.time_ms, b""]
    message = canonical("petalnode/receipt/1", [*terms, granted.session_epoch, step.sequence, *hashes])
    check_signature(server, "petalnode/receipt/1", message, receipt.signature.hex())
    assert reply.position == step.position + sent.shape[1]
    return digest("petalnode/receipt/1", [message, receipt.signature])


def test_weights_are_handed_on() -> None:
    """What is held, a tree by which the manifest's digest follows, and a piece whose hash is in the tree."""
    frames, payloads = framed("weights", wire.WeightsFrame)
    assert [said["from"] for said in MESSAGES["weights"]] == ["asker", "holder"] * 3
    asked, offer, tree = frames[0].query, frames[1].offer, frames[3].tree
    assert asked.model_version.hex() == MESSAGES["model"]["version"]
    assert [number for number in range(8) if offer.parts[0] >> number & 1] == [0, 1, 2]
    tensors = [[one.name, one.dtype, list(one.shape), one.nbytes] for one in tree.tensors]
    found = digest("petalnode/model/part/2", [tree.form, tensors, tree.pieces])
    assert found == wire.Manifest.FromString(bytes.fromhex(MESSAGES["model"]["manifest"])).embeddings
    piece = frames[4].piece_query.piece
    assert hashlib.sha256(payloads[5]).digest() == tree.pieces[32 * piece : 32 * piece + 32]


def test_a_session_from_open_to_close() -> None:
    """Each message as it stands on the stream, and the receipt of its only step."""
    frames, payloads = framed("session", wire.InferenceFrame)
    opened, granted, step, reply = frames[0].open, frames[1].granted, frames[2].step, frames[3].reply
    checked_receipt(SERVER, opened, granted, step, frames[2].tensors[0], payloads[2], reply)
    assert reply.receipt.reply_hash == hashlib.sha256(payloads[3]).digest()


def test_a_step_is_pushed_to_next_server() -> None:
    """What the first server signed as its output is what the second one signed as its input."""
    frames, payloads = framed("pushed step", wire.InferenceFrame, wire.PushFrame)
    (one, granted, other, also_granted), step, push = frames[:4], frames[4].step, frames[5].push
    first, last, sent = frames[6].reply, frames[7].reply, frames[4].tensors[0]
    hashed = checked_receipt(SERVER, one.open, granted.granted, step, sent, payloads[4], first)
    given = other.open, also_granted.granted, push.step, frames[5].tensors[0], payloads[5], last
    checked_receipt(VALIDATOR, *given)
    assert first.receipt.reply_hash == hashlib.sha256(payloads[5]).digest() and payloads[5] == payloads[6]
    assert last.receipt.reply_hash == hashlib.sha256(payloads[7]).digest()
    assert push.step.previous_receipt == hashed and push.receipt == first.receipt == last.upstream
    assert push.client == base58.b58decode(CLIENT) and push.nonce == other.open.nonce == step.targets[0].nonce
    assert push.step.sequence == step.targets[0].sequence and not push.step.targets
    assert one.open.downstream == step.targets[0].peer_id == base58.b58decode(VALIDATOR)
    assert other.open.upstream == base58.b58decode(SERVER)
    assert first.handed_on and last.pushed and push.step.route_epoch == step.route_epoch == other.open.route_epoch


def test_evidence() -> None:
    vector = MESSAGES["evidence"]
    statement = bytes.fromhex(vector["statement"])
    assert digest("petalnode/evidence/1", [statement]).hex() == vector["id"]
    check_signature(vector["accuser"], "petalnode/evidence/1", statement, vector["signature"])
    first, second = wire.Evidence.FromString(statement).receipts
    assert first.request_hash == second.request_hash and first.reply_hash != second.reply_hash


@pytest.mark.parametrize("vector", MESSAGES["codecs"], ids=[vector["codec"] for vector in MESSAGES["codecs"]])
def test_codecs(vector: dict[str, Any]) -> None:
    """What a payload means, in float32."""
    (count,), payload = vector["shape"], bytes.fromhex(vector["payload"])
    if vector["codec"] == "int8-block64":
        blocks = -(-count // 64)
        scales = torch.frombuffer(bytearray(payload[: 2 * blocks]), dtype=torch.float16).float()
        quantised = torch.frombuffer(bytearray(payload[2 * blocks :]), dtype=torch.int8).float()
        means = quantised * scales.repeat_interleave(64)[:count]
    else:
        dtype = {"none": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[vector["codec"]]
        means = torch.frombuffer(bytearray(payload), dtype=dtype).float()
    assert means.numpy().astype("<f4").tobytes().hex() == vector["means"]


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


def test_page_names_all_fields_left_out() -> None:
    page = (DOCS / "protocol.md").read_text()
    listed = re.search(r"leaves\s+out, at the top [^:]*:\s+([^.]*)\.", page)
    assert listed is not None
    config = dict.fromkeys(re.findall(r"`(\w+)`", listed[1]), 1)
    assert len(config) > 60
    assert canonical_architecture(config | {"hidden_size": 8}) == b'{"hidden_size":8}'
    assert config.keys() == _LEFT_OUT


@pytest.mark.parametrize("kind", TYPES_OF_ENDS)
def test_page_says_what_configuration_leaves_out(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    assert config.rms_norm_eps == (1e-5 if kind == "mixtral" else 1e-6)
    assert config.tie_word_embeddings == (kind in ("smollm3", "gemma", "gemma2"))
    assert getattr(config, "final_logit_softcapping", None) == (30 if kind == "gemma2" else None)
    assert getattr(config, "embedding_multiplier", 1) == getattr(config, "logits_scaling", 1) == 1
