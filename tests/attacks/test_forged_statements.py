"""Statements in which one thing is not what the server signed, or what no server takes. Signatures and hashes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from petalnode.crypto.evidence import ExchangedTensors, NotProven
from petalnode.crypto.identity import Identity
from petalnode.crypto.pledge import Pledge
from petalnode.crypto.receipts import Receipt
from petalnode.node.trust.bundle import Bundle, batch_bundle, equivocation_bundle, session_bundle
from petalnode.node.trust.receipt_log import LoggedBatch, SessionLog
from petalnode.node.trust.statement import SelfProven, SessionClaim, check_statement
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import (
    MAX_BATCH,
    MAX_LENGTH,
    hash_of_step,
    pledge_to_wire,
    receipt_from_wire,
    receipt_to_wire,
    root_of,
    sha256,
)
from petalnode.protocols.training import BACKWARD, FORWARD, MICRO_BATCH_TOKENS, KeptSet, MicroBatch, hash_of_payloads
from tests.attacks.forger import ATTACKER, altered, signed_anew
from tests.messages import opening
from tests.receipts import unsigned

SERVER, CLIENT = (Identity.from_seed(bytes([number]) * 32) for number in (21, 22))
VERSION, NONCE, EPOCH = b"v" * 32, b"n" * 16, b"e" * 16
SPAN, HIDDEN = (1, 4), 8
PLEDGE = Pledge(SERVER.peer_id, VERSION, SPAN, "float32", "none", 10, 1, 10_000).signed(SERVER)
Change = Callable[[wire.Evidence, dict[str, bytes]], object]


class Signer:
    """Signs as a server does, whatever it is given, with no model behind it."""

    identity = SERVER


def receipt(**fields: Any) -> Receipt:
    usual = {"model_version": VERSION, "span": SPAN, "client": CLIENT.peer_id, "time_ms": 5000}
    return unsigned(**usual | fields).signed(SERVER)


def tensor(*shape: int, **fields: Any) -> wire.Tensor:
    return wire.Tensor(**{"shape": shape, "dtype": "float32", "codec": "none"} | fields)


# --- sessions

Step = tuple[int, wire.Tensor, Sequence[int]]
STEPS: list[Step] = [(0, tensor(2, 5, HIDDEN), ()), (5, tensor(2, 1, HIDDEN), ()), (4, tensor(2, 2, HIDDEN), (1, 0))]
"""A prompt, a step, and one that undoes it. Rows change places."""


def session(steps: Sequence[Step] = STEPS, pledge: Pledge | None = PLEDGE, **opened: Any) -> Bundle:
    """Evidence of the answer to the last of `steps` (position, tensor, reorder), which the server has signed."""
    usual = {"model_version": VERSION, "nonce": NONCE, "max_length": 10, "batch": 2}
    asked_for = opening(Span(*SPAN), **usual | opened)
    log = SessionLog(SERVER.peer_id, keeps_tensors=True)
    log.begin(asked_for, wire.Granted(session_epoch=EPOCH, pledge=pledge_to_wire(pledge) if pledge else None))
    previous = root_of(asked_for, CLIENT.peer_id, EPOCH, pledge.hash() if pledge else b"")
    for sequence, (position, header, reorder) in enumerate(steps, 1):
        step, asked = wire.Step(sequence=sequence, position=position, reorder=reorder), b"in %d" % sequence
        request = hash_of_step(step, header, sha256(asked))
        answer = b"out %d" % sequence
        signed = receipt(sequence=sequence, request_hash=request, reply_hash=sha256(answer), previous_receipt=previous)
        log.asked(step, header, asked)
        log.answered(sequence, signed, answer)
        previous = signed.hash()
    return session_bundle(ATTACKER, log, len(steps) - 1)


def test_what_server_answered_in_session_is_claim() -> None:
    claim = check_statement(session())
    assert isinstance(claim, SessionClaim) and claim.output == b"out 3" and claim.receipt.sequence == 3
    assert [(step.sequence, payload) for step, _, payload in claim.steps] == [(1, b"in 1"), (3, b"in 3")]
    assert [tuple(header.shape) for _, header, _ in claim.steps] == [(2, 5, HIDDEN), (2, 2, HIDDEN)]
    assert claim.terms.span == Span(*SPAN)
    assert isinstance(check_statement(session(pledge=None)), SessionClaim)
    assert isinstance(check_statement(session(STEPS[:1], max_length=5)), SessionClaim)


EDGES: dict[str, tuple[list[Step], str]] = {
    "two dimensions": ([(0, tensor(2, 5), ())], "shape .* is not"),
    "four dimensions": ([(0, tensor(2, 5, HIDDEN, 1), ())], "shape .* is not"),
    "other rows than the session": ([(0, tensor(1, 5, HIDDEN), ())], "shape .* is not"),
    "no tokens": ([(0, tensor(2, 0, HIDDEN), ())], "shape .* is not"),
    "nothing hidden": ([(0, tensor(2, 5, 0), ())], "shape .* is not"),
    "it begins later": ([(1, tensor(2, 5, HIDDEN), ())], "is ahead of"),
    "a gap": ([*STEPS[:2], (7, tensor(2, 1, HIDDEN), ())], "is ahead of"),
    "a gap after a rollback": ([*STEPS, (7, tensor(2, 1, HIDDEN), ())], "is ahead of"),
    "longer than the session": ([(0, tensor(2, 11, HIDDEN), ())], "max_length of 10"),
    "rows of too few": ([(0, tensor(2, 5, HIDDEN), (1,))], "reorder takes a row"),
    "rows of too many": ([(0, tensor(2, 5, HIDDEN), (1, 0, 0))], "reorder takes a row"),
    "a row that is not there": ([(0, tensor(2, 5, HIDDEN), (0, 2))], "reorder takes a row"),
    "another codec": ([(0, tensor(2, 5, HIDDEN, codec="bfloat16"), ())], "the session speaks"),
    "another dtype": ([(0, tensor(2, 5, HIDDEN, dtype="float16"), ())], "the session speaks"),
}


@pytest.mark.parametrize("name", EDGES)
def test_no_server_takes_such_a_step(name: str) -> None:
    """Also where a later step undoes it: which steps count follows from the headers of all."""
    steps, why = EDGES[name]
    with pytest.raises(NotProven, match=why):
        check_statement(session(steps))
    with pytest.raises(NotProven, match=why):
        check_statement(session([*steps, (0, tensor(2, 5, HIDDEN), ())]))


def test_what_a_server_just_takes_is_a_claim() -> None:
    full: list[Step] = [
        (0, tensor(2, 9, HIDDEN), (0, 1)),
        (9, tensor(2, 1, HIDDEN), ()),
        (0, tensor(2, 10, HIDDEN), ()),
    ]
    assert isinstance(check_statement(session(full)), SessionClaim)


def test_no_session_is_longer_than_any_server_takes() -> None:
    with pytest.raises(NotProven, match="max_length"):
        check_statement(session(max_length=MAX_LENGTH + 1))


def re_signed(number: int, by: Identity = SERVER, **fields: Any) -> Change:
    """A receipt of the session that says something else, and is signed by somebody."""

    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        changed = replace(receipt_from_wire(evidence.steps[number].receipt), **fields).signed(by)
        evidence.steps[number].receipt.CopyFrom(receipt_to_wire(changed))

    return change


SESSION_LIES: dict[str, tuple[Change, type[NotProven], str]] = {
    "no steps": (lambda evidence, payloads: evidence.ClearField("steps"), NotProven, "no receipt"),
    "another's receipt": (re_signed(2, ATTACKER), NotProven, "not signed"),
    "another's first receipt": (re_signed(0, ATTACKER), NotProven, "not signed"),
    "a receipt for other blocks": (re_signed(2, span=(1, 3)), NotProven, "other blocks"),
    "a receipt for another model": (re_signed(2, model_version=b"x" * 32), NotProven, "other blocks"),
    "another opening": (
        lambda evidence, payloads: setattr(evidence.opening, "codec", "bfloat16"),
        NotProven,
        "does not follow",
    ),
    "another epoch": (
        lambda evidence, payloads: setattr(evidence, "session_epoch", b"x" * 16),
        NotProven,
        "does not follow",
    ),
    "no pledge": (lambda evidence, payloads: evidence.ClearField("pledge"), NotProven, "does not follow"),
    "an opening that no server takes": (
        lambda evidence, payloads: setattr(evidence.opening, "max_length", 0),
        NotProven,
        "no server takes",
    ),
    "another header": (
        lambda evidence, payloads: setattr(evidence.steps[1].step, "route_epoch", 9),
        NotProven,
        "step 2 is not what",
    ),
    "another header that is needed": (
        lambda evidence, payloads: setattr(evidence.steps[0].step, "route_epoch", 9),
        NotProven,
        "step 1 is not what",
    ),
    "another payload's hash": (
        lambda evidence, payloads: setattr(evidence.steps[1], "payload_hash", sha256(b"x")),
        NotProven,
        "step 2 is not what",
    ),
    "an undone step without its payload's hash": (
        lambda evidence, payloads: evidence.steps[1].ClearField("payload_hash"),
        NotProven,
        "step 2, which was undone",
    ),
    "another input": (lambda evidence, payloads: payloads.update({"input.2": b"x"}), ExchangedTensors, "step 3"),
    "no input": (lambda evidence, payloads: payloads.pop("input.0"), ExchangedTensors, "input.0 is missing"),
    "another output": (lambda evidence, payloads: payloads.update(output=b"x"), ExchangedTensors, "the answer"),
    "no output": (lambda evidence, payloads: payloads.pop("output"), ExchangedTensors, "output is missing"),
}


@pytest.mark.parametrize("name", SESSION_LIES)
def test_a_session_that_was_otherwise_proves_nothing(name: str) -> None:
    change, kind, why = SESSION_LIES[name]
    with pytest.raises(NotProven, match=why) as raised:
        check_statement(altered(session(), change))
    assert raised.type is kind


# --- faults that prove themselves


def self_proving(kind: str, *receipts: Receipt, pledge: Pledge | None = None) -> Bundle:
    genuine = session(STEPS[:1]) if kind == "pledge" else equivocation_bundle(ATTACKER, SERVER.peer_id, *receipts[:2])

    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        evidence.kind = kind
        evidence.ClearField("receipts")
        evidence.receipts.extend(map(receipt_to_wire, receipts))

    return altered(genuine, change)


def test_two_answers_and_a_broken_pledge_prove_themselves() -> None:
    one, other = receipt(), receipt(reply_hash=b"x" * 32)
    assert isinstance(check_statement(self_proving("equivocation", one, other)), SelfProven)
    for receipts in ((), (one,), (one, other, one)):
        with pytest.raises(NotProven, match="two receipts"):
            check_statement(altered(self_proving("equivocation", one, other), _with_receipts(*receipts)))
    root = root_of(session().evidence.opening, CLIENT.peer_id, EPOCH, PLEDGE.hash())
    kept, broken = receipt(previous_receipt=root), receipt(previous_receipt=root, span=(0, 9))
    assert isinstance(check_statement(self_proving("pledge", broken)), SelfProven)
    later = receipt(previous_receipt=kept.hash(), sequence=2, span=(0, 9))
    assert isinstance(check_statement(self_proving("pledge", kept, later)), SelfProven)
    with pytest.raises(NotProven, match="pledged for"):
        check_statement(self_proving("pledge", kept))
    with pytest.raises(NotProven, match="no receipt"):
        check_statement(self_proving("pledge"))


def _with_receipts(*receipts: Receipt) -> Change:
    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        evidence.ClearField("receipts")
        evidence.receipts.extend(map(receipt_to_wire, receipts))

    return change


def test_what_is_no_peer_id_contradicts_itself() -> None:
    with pytest.raises(NotProven, match="contradicts itself"):
        check_statement(altered(session(), lambda evidence, _: setattr(evidence.steps[0].receipt, "client", b"x")))


# --- batches


def batch(
    protocol: str = FORWARD.id, shape: Sequence[int] = (2, 3, HIDDEN), keep: wire.Keep | None = None, **request: Any
) -> LoggedBatch:
    """A reply that the server has signed, as its client logs it."""
    count = 2 if protocol == BACKWARD.id else 1
    asked = wire.BatchRequest(**{"sequence": 1, "tensors": [tensor(*shape)] * count} | request)
    kept = tuple(b"kept %d" % number for number in range(len(keep.tensors) if keep else 0))
    outputs = (b"out", *(kept if protocol == BACKWARD.id else ()))
    inputs = tuple(b"in %d" % number for number in range(count))
    batch = MicroBatch(asked, inputs, None if keep is None else KeptSet.of(keep, kept))
    logged = LoggedBatch(SERVER.peer_id, protocol, receipt(), batch, outputs)
    return signed_anew(Signer(), logged, reply_hash=hash_of_payloads(outputs))  # type: ignore[arg-type]


def keeping(*tensors: tuple[str, Sequence[int]]) -> wire.Keep:
    return wire.Keep(number=1, names=[name for name, _ in tensors], tensors=[tensor(*shape) for _, shape in tensors])


LORA = ("2.mlp.lora_A", (2, 3))
LONG = MICRO_BATCH_TOKENS // 2
TAKEN: dict[str, dict[str, Any]] = {
    "forward": {},
    "backward": {"protocol": BACKWARD.id},
    "as many tokens as go": {"shape": (2, LONG, HIDDEN)},
    "one long row": {"shape": (1, MAX_LENGTH, HIDDEN)},
    "many rows": {"shape": (MAX_BATCH, 1, HIDDEN)},
    "a mask": {"mask": b"\x01"},
    "positions": {"positions": [0, 1, 2, 0, 1, MAX_LENGTH - 1]},
    "prompts for all rows": {"keep": keeping(("prompts", (3, 1, 3, HIDDEN)))},
    "prompts for each row": {"keep": keeping(("prompts", (3, 2, 1, HIDDEN)))},
    "LoRA": {"keep": keeping(LORA, ("1.mlp.lora_B", (1, 1)), ("3.x.lora_A", (9, 9))), "protocol": BACKWARD.id},
}
NOT_TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "no pass at all": ("no pass", {"protocol": "/petalnode/inference/1"}),
    "no tensor": ("takes 1 tensors", {"tensors": []}),
    "two tensors": ("takes 1 tensors", {"tensors": [tensor(2, 3, HIDDEN)] * 2}),
    "no gradient": ("takes 2 tensors", {"protocol": BACKWARD.id, "tensors": [tensor(2, 3, HIDDEN)]}),
    "another gradient": (
        "not of what comes of hidden states",
        {"protocol": BACKWARD.id, "tensors": [tensor(2, 3, HIDDEN), tensor(2, 4, HIDDEN)]},
    ),
    "two dimensions": ("is not .rows up to", {"shape": (2, 3)}),
    "four dimensions": ("is not .rows up to", {"shape": (2, 3, HIDDEN, 1)}),
    "no rows": ("is not .rows up to", {"shape": (0, 3, HIDDEN)}),
    "too many rows": ("is not .rows up to", {"shape": (MAX_BATCH + 1, 1, HIDDEN)}),
    "no tokens": ("is not .rows up to", {"shape": (1, 0, HIDDEN)}),
    "too many tokens": ("the model takes .* tokens", {"shape": (1, MAX_LENGTH + 1, HIDDEN)}),
    "nothing hidden": ("is not .rows up to", {"shape": (1, 3, 0)}),
    "too many tokens together": ("are allowed", {"shape": (2, LONG + 1, HIDDEN)}),
    "a short mask": ("a mask", {"shape": (2, 5, HIDDEN), "mask": b"\x01"}),
    "a long mask": ("a mask", {"mask": b"\x01\x01"}),
    "too few positions": ("positions", {"positions": [0]}),
    "a position beyond": ("positions", {"positions": [0, 1, 2, 0, 1, MAX_LENGTH]}),
    "two of one name": ("a name of its own", {"keep": keeping(LORA, LORA)}),
    "a tensor without a name": (
        "a name of its own",
        {"keep": wire.Keep(names=["2.mlp.lora_A"], tensors=[tensor(2, 3)] * 2)},
    ),
    "LoRA of a block before": ("in blocks", {"keep": keeping(("0.mlp.lora_A", (2, 3)))}),
    "LoRA of a block behind": ("in blocks", {"keep": keeping(("4.mlp.lora_A", (2, 3)))}),
    "LoRA of three dimensions": ("in blocks", {"keep": keeping(("2.mlp.lora_A", (2, 3, 1)))}),
    "LoRA of nothing": ("in blocks", {"keep": keeping(("2.mlp.lora_A", (2, 0)))}),
    "another name": ("knows no tensor", {"keep": keeping(("prefix", (3, 1, 3, HIDDEN)))}),
    "prompts of three dimensions": ("are not .3, rows", {"keep": keeping(("prompts", (3, 1, HIDDEN)))}),
    "prompts of too few blocks": ("are not .3, rows", {"keep": keeping(("prompts", (2, 1, 3, HIDDEN)))}),
    "prompts of another size": ("are not .3, rows", {"keep": keeping(("prompts", (3, 1, 3, HIDDEN + 1)))}),
    "prompts of other rows": ("do not fit hidden states", {"keep": keeping(("prompts", (3, 3, 3, HIDDEN)))}),
    "no prompts": ("are not .3, rows", {"keep": keeping(("prompts", (3, 1, 0, HIDDEN)))}),
    "prompts longer than the rows": ("do not fit hidden states", {"keep": keeping(("prompts", (3, 1, 4, HIDDEN)))}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_server_answered_to_batch_is_claim(name: str) -> None:
    logged = batch(**TAKEN[name])
    assert check_statement(batch_bundle(ATTACKER, logged)) == logged


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_no_server_takes_such_a_batch(name: str) -> None:
    why, fields = NOT_TAKEN[name]
    with pytest.raises(NotProven, match=why):
        check_statement(batch_bundle(ATTACKER, batch(**fields)))


KEPT = {"protocol": BACKWARD.id, "keep": keeping(LORA)}
OTHER = "the batch request is not what"
BATCH_LIES: dict[str, tuple[Change, type[NotProven], str]] = {
    "another batch request": (lambda evidence, payloads: setattr(evidence.work.work, "sequence", 2), NotProven, OTHER),
    "another name for what is kept": (
        lambda evidence, payloads: evidence.work.keep.names.__setitem__(0, "1.x.lora_A"),
        NotProven,
        OTHER,
    ),
    "nothing kept": (lambda evidence, payloads: evidence.work.ClearField("keep"), NotProven, OTHER),
    "another input": (lambda evidence, payloads: payloads.update({"input.1": b"x"}), ExchangedTensors, OTHER),
    "no input": (lambda evidence, payloads: payloads.pop("input.1"), ExchangedTensors, "input.1 is missing"),
    "another kept tensor": (lambda evidence, payloads: payloads.update({"kept.0": b"x"}), ExchangedTensors, OTHER),
    "no kept tensor": (lambda evidence, payloads: payloads.pop("kept.0"), ExchangedTensors, "kept.0 is missing"),
    "another answer": (lambda evidence, payloads: payloads.update({"output.0": b"x"}), ExchangedTensors, "the answer"),
    "another gradient of what is kept": (
        lambda evidence, payloads: payloads.update({"output.1": b"x"}),
        ExchangedTensors,
        "the answer",
    ),
    "no gradient of what is kept": (
        lambda evidence, payloads: payloads.pop("output.1"),
        ExchangedTensors,
        "output.1 is missing",
    ),
}


@pytest.mark.parametrize("hashes", [True, False], ids=["", "of an older version"])
@pytest.mark.parametrize("name", BATCH_LIES)
def test_a_batch_that_was_otherwise_proves_nothing(name: str, hashes: bool) -> None:
    """Evidence of older versions does not name the payloads: then it may be the fault of who sent them."""
    lie, kind, why = BATCH_LIES[name]

    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        lie(evidence, payloads)
        if not hashes:
            evidence.work.ClearField("input_hash")

    with pytest.raises(NotProven, match=why) as raised:
        check_statement(altered(batch_bundle(ATTACKER, batch(**KEPT)), change))
    assert raised.type is (kind if hashes else ExchangedTensors)


def test_what_was_kept_is_what_the_accuser_names() -> None:
    def change(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
        evidence.work.kept_hash = sha256(b"x")

    with pytest.raises(NotProven, match=OTHER):
        check_statement(altered(batch_bundle(ATTACKER, batch(**KEPT)), change))


@pytest.mark.parametrize("fields", TAKEN.values(), ids=TAKEN)
def test_a_batch_that_another_key_signed_proves_nothing(fields: dict[str, Any]) -> None:
    logged = batch(**fields)
    forged = replace(logged, receipt=logged.receipt.signed(ATTACKER))
    with pytest.raises(NotProven, match="not signed"):
        check_statement(batch_bundle(ATTACKER, forged))
