"""Evidence whose header is made to be costly: a few MiB that take seconds to parse, or hundreds of MiB of memory."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import trio

from petalnode.crypto.evidence import ACCUSATION_DOMAIN
from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.crypto.safetensors_header import header_limits
from petalnode.node.testing import message_streams
from petalnode.node.trust import bundle, evidence_gossip
from petalnode.node.trust.bundle import BUNDLE, BadBundle, Bundle
from petalnode.node.trust.evidence_gossip import fetch_bundle
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.evidence import EVIDENCE, EVIDENCE_SIZES, send_bundle
from tests.attacks.forger import ATTACKER
from tests.lines_run import LinesRun


def file_of(header: bytes, tensors: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def stating(statement: bytes, **tensors: object) -> bytes:
    """A file that the attacker has signed."""
    signed = wire.SignedEvidence(
        evidence=statement,
        accuser=peer_id_to_bytes(ATTACKER.peer_id),
        signature=ATTACKER.sign(ACCUSATION_DOMAIN, statement),
    )
    text = base64.b64encode(signed.SerializeToString()).decode()
    return file_of(json.dumps({"__metadata__": {"petalnode_evidence": text}, **tensors}).encode())


def empty(field: str, within: str = "") -> bytes:
    """A statement full of empty messages, each of two bytes."""
    number = wire.Evidence.DESCRIPTOR.fields_by_name[field].number
    pairs = bytes([number << 3 | 2, 0])
    if not within:
        return pairs * (BUNDLE.max_statement // 2)
    step = wire.EvidenceStep(step=wire.Step(targets=[wire.PushTarget()] * 4000)).SerializeToString()
    whole = wire.Evidence(steps=[wire.EvidenceStep.FromString(step)]).SerializeToString()
    return whole * (BUNDLE.max_statement // len(whole))


MIB = 1 << 20
COSTLY = {
    "arrays, 18 MiB": lambda: file_of(b'{"a":[' + b"[]," * (6 * MIB) + b"[]]}"),
    "arrays, 12 MiB": lambda: file_of(b'{"a":[' + b"[]," * (4 * MIB) + b"[]]}"),
    "objects": lambda: file_of(b"[" + b'{"":{}},' * MIB + b"{}]"),
    "keys": lambda: file_of(b"{" + b",".join(b'"%x":0' % number for number in range(MIB)) + b"}"),
    "numbers": lambda: file_of(b"[" + (b"9" * 4200 + b",") * 3000 + b"1]"),
    "depth": lambda: file_of(b"[" * (12 * MIB)),
    "quotation marks": lambda: file_of(b'"' * (12 * MIB)),
    "escapes": lambda: file_of(b'"' + b"\\u0041" * (2 * MIB) + b'"'),
    "receipts": lambda: stating(empty("receipts")),
    "steps": lambda: stating(empty("steps")),
    "targets of steps": lambda: stating(empty("steps", "targets")),
}


class Unread:
    """In place of evidence: its fields are counted, and it is not parsed."""

    DESCRIPTOR = wire.Evidence.DESCRIPTOR

    def MergeFromString(self, data: bytes) -> None:
        raise AssertionError(f"{len(data):,} bytes are parsed")


def test_evidence_has_bounds_of_what_is_counted() -> None:
    assert BUNDLE.max_fields <= 400_000
    assert header_limits(0, BUNDLE.max_tensors).values <= 330_000


@pytest.mark.parametrize("name", COSTLY)
async def test_costly_evidence_is_refused_beside_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 18 MiB of arrays held the loop of whoever fetched them for 3 s, and 8 MiB of receipts took 700 MiB.

    Here evidence may have less, which is counted sooner."""
    data = COSTLY[name]()
    assert len(data) <= EVIDENCE_SIZES.max_shared
    few = replace(BUNDLE, max_tensors=200, max_fields=4000)
    most = few.max_fields + header_limits(0, few.max_tensors).values
    threads: list[int] = []
    identify, loads = evidence_gossip._identified, json.loads

    def identified(data: bytes) -> tuple[Bundle, bytes]:
        threads.append(threading.get_ident())
        with LinesRun(30 * most):
            return identify(data)

    def load(text: str, **hooks: Any) -> Any:
        assert sum(map(text.count, ",:[{")) <= most
        return loads(text, **hooks)

    monkeypatch.setattr(bundle, "BUNDLE", few)
    monkeypatch.setattr(wire, "Evidence", Unread)
    monkeypatch.setattr(json, "loads", load)
    monkeypatch.setattr(evidence_gossip, "_identified", identified)
    ours, theirs = message_streams(EVIDENCE, "honest", "attacker")

    async def send() -> None:
        await theirs.receive(timeout=1000)
        await send_bundle(theirs, data, timeout=1000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        with pytest.raises(BadBundle):
            await fetch_bundle(ours, bytes(32))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_tensors_are_read_up_to_evidences_limit() -> None:
    names = {f"input.{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(19_999)}
    statement = wire.Evidence(version=1, kind="answer", accused=peer_id_to_bytes(ATTACKER.peer_id)).SerializeToString()
    found = Bundle.from_bytes(stating(statement, **names) + bytes(19_999))
    assert len(found.payloads) == 19_999
