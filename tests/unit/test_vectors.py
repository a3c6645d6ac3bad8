"""Test vectors, with which another implementation can be checked.

`python -m tests.unit.test_vectors receipt > docs/receipt-vectors.json` makes a file anew; so does `message`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.crypto.canonical import canonical, digest
from petalnode.crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer, sign_voucher
from petalnode.crypto.evidence import ACCUSATION_DOMAIN
from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.crypto.receipts import Receipt, SessionRoot, StepRequest, countersign
from petalnode.crypto.statement import Statement
from petalnode.node.models.manifest import Manifest, canonical_architecture
from petalnode.protocols import tensors
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.adapter import TensorDigest, hash_of_adapter, hash_of_block
from petalnode.protocols.announcement import Announcement, ServerState, sign_announcement
from petalnode.protocols.framing import varint
from petalnode.protocols.ids import Layout, Span
from petalnode.protocols.inference import hash_of_step, pushed_step, receipt_to_wire, root_of, sha256
from petalnode.protocols.prefix import PrefixNames, PrefixTerms, token_digests
from petalnode.protocols.training import BACKWARD, hash_of_batch, hash_of_keep, hash_of_payloads
from petalnode.protocols.weights import PIECE_BYTES, Tree, TreeEntry
from tests.receipts import of_answer, unsigned
from tests.statements import pledge_of, terms_of

DOCS = Path(__file__).parents[2] / "docs"
_Frame = wire.InferenceFrame | wire.PushFrame | wire.WeightsFrame
_Sent = tuple[wire.Tensor, bytes]
SERVER, CLIENT, VALIDATOR = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))


def receipt_vectors() -> dict[str, Any]:
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
    receipt = unsigned(
        span=(4, 6),
        dtype="bfloat16",
        quantisation="int8",
        client=CLIENT.peer_id,
        request_hash=StepRequest(**request).hash(),
        reply_hash=sha256(answer),
        previous_receipt=SessionRoot(**terms).hash(),
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
            "protocol": BACKWARD.id,
            "payloads": [payload, answer],
            "keep": {"names": ["prompts"], "payloads": [payload], "hash": kept},
            "mask": b"\xc0",
            "positions": [0, 1],
            "sequence": 2,
            "hash": hash_of_batch(BACKWARD.id, work, hash_of_payloads([payload, answer]), kept),
        },
    }


def _statement(statement: Statement) -> dict[str, Any]:
    return {**asdict(statement), "canonical": statement.canonical_bytes(), "hash": statement.hash()}  # type: ignore[call-overload]


def _credits() -> dict[str, Any]:
    issuer, holder, other = VALIDATOR.peer_id, SERVER.peer_id, CLIENT.peer_id
    until, now = 1_700_086_400_000, 1_700_000_000_000
    transfer = Transfer(issuer, other, holder, 7, 3, until).signed(CLIENT)
    return {
        "credit": _statement(Credit(issuer, holder, 100, 50, until, 2, now).signed(VALIDATOR)),
        "credit-query": _statement(CreditQuery(issuer, holder, now).signed(SERVER)),
        "credit-transfer": _statement(transfer),
        "credit-clearing": _statement(Clearing(transfer, now + 1).signed(VALIDATOR)),
        "credit-deposit": _statement(DepositOrder(issuer, holder, 50, until, 4).signed(SERVER)),
        "voucher": sign_voucher(VALIDATOR, holder, 50, until),
    }


def _codecs() -> list[dict[str, Any]]:
    values = torch.tensor([0.0, 1.0, -0.5, 0.1, 3.14159, -65504.0, 1e-5, 2.0**-14] + [0.0] * 56 + [127.0, -1.0])
    made = [(codec, *tensors.encode(values, codec)) for codec in ("none", "float16", "bfloat16", "int8-block64")]
    return [
        {
            "codec": codec,
            "shape": [len(values)],
            "payload": payload,
            "means": tensors.decode(header, payload).numpy().astype("<f4").tobytes(),
        }
        for codec, header, payload in made
    ]


def _tree(*entries: TreeEntry) -> tuple[Tree, bytes]:
    """Of tensors whose bytes count from 0 to 250, again and again."""
    data = bytes(number % 251 for number in range(sum(entry.nbytes for entry in entries)))
    pieces = b"".join(sha256(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))
    return Tree("safetensors", tuple(sorted(entries, key=lambda entry: entry.name)), pieces), data


_CONFIG = {"model_type": "llama", "hidden_size": 4, "rope_theta": 10000.0, "_name_or_path": "x", "torch_dtype": "f"}


def _embeddings() -> tuple[Tree, bytes]:
    """More than one piece."""
    return _tree(TreeEntry("embed_tokens.weight", "BF16", (131_080, 4), 1_048_640))


def _block() -> Tree:
    return _tree(TreeEntry("mlp.weight", "F32", (2, 4), 32), TreeEntry("attn.weight", "F32", (4, 4), 64))[0]


def _head() -> Tree:
    return _tree(TreeEntry("norm.weight", "F32", (4,), 16))[0]


def _manifest() -> Manifest:
    embeddings, _ = _embeddings()
    return Manifest(canonical_architecture(_CONFIG), embeddings.digest, (_block().digest,), _head().digest)


def _model() -> dict[str, Any]:
    embeddings, data = _embeddings()
    manifest = _manifest()
    return {
        "config.json": _CONFIG,
        "config": manifest.config.decode(),
        "parts": [
            {"tree": tree.to_wire().SerializeToString(deterministic=True), "digest": tree.digest}
            for tree in (embeddings, _block(), _head())
        ],
        "embeddings": {"bytes": len(data), "first piece": sha256(data[:PIECE_BYTES]), "last": data[PIECE_BYTES:]},
        "manifest": manifest.to_wire(),
        "version": manifest.version,
    }


def _prefix() -> dict[str, Any]:
    terms = PrefixTerms(
        model_version=b"m" * 32,
        span=Span(4, 6),
        batch=2,
        left_padding=(0, 0),
        codec="none",
        dtype="float32",
        adapter=b"",
        salt=b"s" * 16,
    )
    payload = bytes(number % 251 for number in range(2 * 65 * 8))  # hidden size 2
    names = PrefixNames(terms.root())
    names.append(token_digests(payload, 2, 65))
    moved = token_digests(payload, 2, 65, layout=Layout(tuple(range(3 * 2 * 65))))
    return {
        **asdict(terms),
        "salt": terms.salt,
        "span": (4, 6),
        "root": terms.root(),
        "tokens": 65,
        "payload": payload,
        "names": names.names,
        "with long factors": token_digests(payload, 2, 65, long_factors=True)[0],
        "with positions 0 to 389": moved[0],
        **_grouped(payload),
    }


def _grouped(payload: bytes) -> dict[str, Any]:
    """Of tokens 1 and 2 of the first row, and 2 and 3 of the second: together one group of three."""
    groups = [0] * 130
    groups[1:3] = groups[65 + 2 : 65 + 4] = 2, 1
    positions = tuple(range(3 * 2 * 65))
    return {
        "groups": bytes(groups),
        "with groups": token_digests(payload, 2, 65, layout=Layout(groups=tuple(groups)))[:5],
        "with groups and positions": token_digests(payload, 2, 65, layout=Layout(positions, tuple(groups)))[:5],
    }


def _laid_out_step() -> dict[str, Any]:
    """The request hash of a step that says all that can be said of its tokens."""
    tensor, payload = tensors.encode(torch.arange(24, dtype=torch.float32).reshape(1, 3, 8), "none")
    step = wire.Step(sequence=4, position=2, route_epoch=7, long_factors=True, positions=range(2, 11), groups=[3, 2, 1])
    return {"step": step.SerializeToString(deterministic=True), "hash": hash_of_step(step, tensor, sha256(payload))}


def _adapter() -> dict[str, Any]:
    given = [
        TensorDigest("3.self_attn.q_proj.lora_A", (4, 8), "float32", sha256(b"A")),
        TensorDigest("3.self_attn.q_proj.lora_B", (8, 4), "float32", sha256(b"B")),
        TensorDigest("5.prompts", (2, 8), "float32", sha256(b"P")),
    ]
    blocks = ((3, hash_of_block(given[:2])), (5, hash_of_block(given[2:])))
    return {"tensors": [asdict(tensor) for tensor in given], "blocks": blocks, "hash": hash_of_adapter(blocks)}


def _announcement() -> dict[str, Any]:
    said = Announcement(
        peer_id=SERVER.peer_id,
        model_version=b"m" * 32,
        model_name="smollm2",
        num_blocks=30,
        span=Span(3, 9),
        state=ServerState.ONLINE,
        sequence=1_700_000_000 * 10**9,
        expires=1_700_000_045.0,
        step_seconds=0.25,
        dtype="float32",
        cache_tokens_free=4096,
        cache_tokens=8192,
        addrs=("/ip4/203.0.113.7/tcp/31330",),
        max_session_length=2048,
    )
    signed = sign_announcement(SERVER, said)
    return {"announcement": signed.announcement, "signature": signed.signature, "signed": signed.to_bytes()}


@dataclass(frozen=True)
class _Opened:
    """A session at one server."""

    server: Identity
    opening: wire.Open
    granted: wire.Granted

    @classmethod
    def at(cls, server: Identity, span: Span, nonce: bytes, epoch: bytes, **more: Any) -> _Opened:
        opening = wire.Open(
            protocol_version=1,
            model_version=b"m" * 32,
            span=wire.Span(start=span.start, end=span.end),
            max_length=64,
            batch=1,
            codec="none",
            nonce=nonce,
            activation_dtype="float32",
            **more,
        )
        granted = wire.Granted(
            session_epoch=epoch,
            cache_tokens=64,
            codec="none",
            dtype="float32",
            quantisation="none",
            credits=8,
            max_step_tokens=2048,
            bytes_in_flight=16 << 20,
        )
        return cls(server, opening, granted)

    def receipt(self, step: wire.Step, given: _Sent, answer: _Sent, time_ms: int) -> Receipt:
        opening, epoch = self.opening, self.granted.session_epoch
        made = of_answer(opening, CLIENT.peer_id, epoch, step, given, answer[1])
        root = root_of(opening, CLIENT.peer_id, epoch)
        return replace(made, previous_receipt=root, time_ms=time_ms).signed(self.server)


def _session() -> tuple[list[dict[str, Any]], Receipt]:
    """From Open to Close, with the bytes of each message on the stream, and its receipt."""
    hidden = torch.arange(16, dtype=torch.float32).reshape(1, 2, 8) / 8
    (tensor, payload), (answer_tensor, answer) = (tensors.encode(hidden + more, "none") for more in (0, 1))
    session = _Opened.at(SERVER, Span(4, 6), b"n" * 16, b"e" * 16)
    step = wire.Step(sequence=1)
    receipt = session.receipt(step, (tensor, payload), (answer_tensor, answer), 1_700_000_000_500)
    reply = wire.Reply(sequence=1, position=2, receipt=receipt_to_wire(receipt), queue_us=10, compute_us=900)
    messages = (
        ("client", wire.InferenceFrame(open=session.opening), b""),
        ("server", wire.InferenceFrame(granted=session.granted), b""),
        ("client", wire.InferenceFrame(step=step, tensors=[tensor]), payload),
        ("server", wire.InferenceFrame(reply=reply, tensors=[answer_tensor]), answer),
        ("client", wire.InferenceFrame(close=wire.Close()), b""),
    )
    return [_framed(*message) for message in messages], receipt


def _pushed() -> list[dict[str, Any]]:
    """A step that the first server of a chain pushes to the second one; its messages as they follow each other."""
    ids = [peer_id_to_bytes(server.peer_id) for server in (SERVER, VALIDATOR)]
    first = _Opened.at(SERVER, Span(4, 6), b"n" * 16, b"e" * 16, route_epoch=7, downstream=ids[1])
    second = _Opened.at(VALIDATOR, Span(6, 9), b"o" * 16, b"f" * 16, route_epoch=7, upstream=ids[0])
    given, handed_on, answer = (
        tensors.encode(torch.arange(16, dtype=torch.float32).reshape(1, 2, 8) / 8 + more, "none") for more in range(3)
    )
    target = wire.PushTarget(peer_id=ids[1], nonce=second.opening.nonce, sequence=1)
    step = wire.Step(sequence=1, route_epoch=7, targets=[target])
    receipt = first.receipt(step, given, handed_on, 1_700_000_000_500)
    next_step = pushed_step(step, receipt.hash())
    last = receipt_to_wire(second.receipt(next_step, handed_on, answer, 1_700_000_000_600))
    push = wire.Push(
        client=peer_id_to_bytes(CLIENT.peer_id),
        nonce=second.opening.nonce,
        step=next_step,
        receipt=receipt_to_wire(receipt),
    )
    reply = wire.Reply(sequence=1, position=2, receipt=push.receipt, queue_us=10, compute_us=900, handed_on=True)
    last_reply = wire.Reply(sequence=1, position=2, receipt=last, queue_us=10, compute_us=900, pushed=True)
    last_reply.upstream.CopyFrom(push.receipt)
    messages: tuple[tuple[str, str, _Frame, bytes], ...] = (
        ("client", "first", wire.InferenceFrame(open=first.opening), b""),
        ("first", "client", wire.InferenceFrame(granted=first.granted), b""),
        ("client", "second", wire.InferenceFrame(open=second.opening), b""),
        ("second", "client", wire.InferenceFrame(granted=second.granted), b""),
        ("client", "first", wire.InferenceFrame(step=step, tensors=[given[0]]), given[1]),
        ("first", "second", wire.PushFrame(push=push, tensors=[handed_on[0]]), handed_on[1]),
        ("first", "client", wire.InferenceFrame(reply=reply, tensors=[handed_on[0]]), handed_on[1]),
        ("second", "client", wire.InferenceFrame(reply=last_reply, tensors=[answer[0]]), answer[1]),
    )
    return [{"to": to, **_framed(side, frame, payload)} for side, to, frame, payload in messages]


def _framed(side: str, frame: _Frame, payload: bytes = b"") -> dict[str, Any]:
    """A message as it stands on the stream, and which side sends it."""
    for tensor in frame.tensors:
        tensor.nbytes = len(payload)
    header = frame.SerializeToString(deterministic=True)
    return {"from": side, "message": frame.WhichOneof("body"), "bytes": varint(len(header)) + header + payload}


def _weights() -> list[dict[str, Any]]:
    """What is held of the version, the tree of its embeddings, and their last piece."""
    tree, data = _embeddings()
    version = _manifest().version
    asked = wire.WeightsQuery(model_version=version)
    offer = wire.WeightsOffer(parts=b"\x07", blocks="model.layers.", base="model.", bare=["lm_head.weight"])
    tree_query = wire.TreeQuery(model_version=version)
    piece_query = wire.PieceQuery(model_version=version, piece=1)
    piece = wire.WeightsFrame(piece=wire.WeightsPiece(), tensors=[wire.Tensor()])
    return [
        _framed("asker", wire.WeightsFrame(query=asked)),
        _framed("holder", wire.WeightsFrame(offer=offer)),
        _framed("asker", wire.WeightsFrame(tree_query=tree_query)),
        _framed("holder", wire.WeightsFrame(tree=tree.to_wire())),
        _framed("asker", wire.WeightsFrame(piece_query=piece_query)),
        _framed("holder", piece, data[PIECE_BYTES:]),
    ]


def _evidence(receipt: Receipt) -> dict[str, Any]:
    """Two answers to one request."""
    other = replace(receipt, reply_hash=sha256(b"another answer"), signature=b"").signed(SERVER)
    statement = wire.Evidence(
        version=1,
        accused=peer_id_to_bytes(SERVER.peer_id),
        kind="equivocation",
        receipts=[receipt_to_wire(receipt), receipt_to_wire(other)],
        time_ms=1_700_000_001_000,
    ).SerializeToString(deterministic=True)
    return {
        "statement": statement,
        "accuser": CLIENT.peer_id,
        "signature": CLIENT.sign(ACCUSATION_DOMAIN, statement),
        "id": digest(ACCUSATION_DOMAIN, statement),
    }


def message_vectors() -> dict[str, Any]:
    session, receipt = _session()
    return {
        "note": "bytes are in hexadecimal; keys as in receipt-vectors.json; what they mean is in docs/protocol.md",
        "announcement": _announcement(),
        "model": _model(),
        "codecs": _codecs(),
        "prefix": _prefix(),
        "adapter": _adapter(),
        "credits": _credits(),
        "session": session,
        "pushed step": _pushed(),
        "weights": _weights(),
        "laid out step": _laid_out_step(),
        "evidence": _evidence(receipt),
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


MADE: dict[str, Callable[[], dict[str, Any]]] = {"receipt": receipt_vectors, "message": message_vectors}


@pytest.mark.parametrize("name", MADE)
def test_vectors_mean_what_they_meant(name: str) -> None:
    """A change here is a change of the protocol: whoever runs an older version does not understand it any more."""
    assert (DOCS / f"{name}-vectors.json").read_text() == to_text(MADE[name]())


if __name__ == "__main__":
    print(to_text(MADE[sys.argv[1]]()), end="")
