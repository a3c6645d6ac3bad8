"""Faults that prove themselves, and pledges."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from petalnode.crypto.evidence import NotProven, check_chain, check_equivocation, check_pledge_broken
from petalnode.crypto.identity import Identity
from petalnode.crypto.pledge import Pledge
from petalnode.crypto.receipts import Receipt, SessionRoot
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import pledge_from_wire, pledge_to_wire
from tests.receipts import CLIENT, OTHER, RECEIPT, SERVER
from tests.statements import pledge_of, terms_of

HOLDER = Identity.from_seed(bytes(range(3, 35)))
PLEDGE = pledge_of(SERVER, HOLDER, span=(0, 10), quantisation="none", from_ms=1000, until_ms=2000)
TERMS = terms_of(CLIENT, PLEDGE, (3, 9))
ROOT = SessionRoot(**TERMS).hash()


def chain(count: int, **last: object) -> list[Receipt]:
    previous, made = ROOT, []
    for sequence in range(1, count + 1):
        receipt = replace(RECEIPT, sequence=sequence, previous_receipt=previous)
        if sequence == count:
            receipt = replace(receipt, **last)  # type: ignore[arg-type]
        made.append(receipt.signed(SERVER))
        previous = made[-1].hash()
    return made


# --- equivocation


def test_two_answers_to_one_request_prove_themselves() -> None:
    other = replace(RECEIPT, reply_hash=b"x" * 32).signed(SERVER)
    assert "two answers" in check_equivocation(SERVER.peer_id, RECEIPT, other)
    later = replace(other, time_ms=RECEIPT.time_ms + 5).signed(SERVER)
    assert check_equivocation(SERVER.peer_id, RECEIPT, later)


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"client": OTHER.peer_id}, {"nonce": b"x" * 16}, {"session_epoch": b"x" * 16}, {"sequence": 8},
        {"request_hash": b"x" * 32}, {"previous_receipt": b"x" * 32}, {"upstream_receipt": b"x" * 32},
    ],
    ids=str,
)  # fmt: skip
def test_what_honest_server_may_sign_is_no_equivocation(changed: dict[str, object]) -> None:
    """The same receipt again, another session, a restart, a rollback, a hedged request at another server."""
    reply = {} if not changed else {"reply_hash": b"x" * 32}
    other = replace(RECEIPT, **changed, **reply).signed(SERVER)  # type: ignore[arg-type]
    with pytest.raises(NotProven):
        check_equivocation(SERVER.peer_id, RECEIPT, other)


@pytest.mark.parametrize("forger", [OTHER, CLIENT])
def test_a_receipt_that_somebody_else_signed_proves_nothing(forger: Identity) -> None:
    forged = replace(RECEIPT, reply_hash=b"x" * 32).signed(forger)
    for pair in ((RECEIPT, forged), (forged, RECEIPT)):
        with pytest.raises(NotProven, match="not signed"):
            check_equivocation(SERVER.peer_id, *pair)
    with pytest.raises(NotProven, match="not signed"):
        check_equivocation(OTHER.peer_id, RECEIPT, replace(RECEIPT, reply_hash=b"x" * 32).signed(SERVER))


# --- pledges


@pytest.mark.parametrize(
    "changed",
    [
        {"span": (0, 11)}, {"deposit": 51}, {"until_ms": 3000}, {"from_ms": 0}, {"dtype": "float32"},
        {"quantisation": "int8"}, {"model_version": b"x" * 32}, {"holder": OTHER.peer_id}, {"voucher": b"x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_pledge_s_signature_covers(changed: dict[str, object]) -> None:
    assert PLEDGE.is_signed
    assert not replace(PLEDGE, **changed).is_signed  # type: ignore[arg-type]
    assert replace(PLEDGE, **changed).hash() != PLEDGE.hash()  # type: ignore[arg-type]


def test_nobody_pledges_for_another() -> None:
    with pytest.raises(ValueError, match="cannot sign"):
        PLEDGE.signed(OTHER)
    assert not replace(PLEDGE, server=OTHER.peer_id).is_signed


def test_a_deposit_counts_where_its_holder_is_trusted() -> None:
    assert PLEDGE.backed([HOLDER.peer_id]) == 50
    assert PLEDGE.backed([OTHER.peer_id]) == 0 and PLEDGE.backed([]) == 0
    assert replace(PLEDGE, deposit=500).backed([HOLDER.peer_id]) == 0
    assert replace(PLEDGE, until_ms=9000).backed([HOLDER.peer_id]) == 0
    assert replace(PLEDGE, holder="").backed([HOLDER.peer_id, ""]) == 0


def test_a_pledge_survives_the_wire() -> None:
    message = wire.Pledge.FromString(pledge_to_wire(PLEDGE).SerializeToString())
    assert pledge_from_wire(message) == PLEDGE
    assert pledge_from_wire(pledge_to_wire(replace(PLEDGE, holder="", voucher=b""))).holder == ""
    message.holder = b"nobody"
    with pytest.raises(ValueError, match="peer id"):
        pledge_from_wire(message)


def test_every_field_of_a_pledge_is_tried() -> None:
    assert {field.name for field in fields(Pledge)} == set(wire.Pledge.DESCRIPTOR.fields_by_name)


# --- chains


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client", OTHER.peer_id), ("nonce", b"x" * 16), ("session_epoch", b"x" * 16), ("model_version", b"x" * 32),
        ("span", (3, 8)), ("batch", 3), ("left_padding", (3, 0)), ("codec", "float16"), ("dtype", "float16"),
        ("adapter", b"a" * 32), ("pledge", b""),
    ],
)  # fmt: skip
def test_terms_of_session_are_in_its_root(name: str, value: object) -> None:
    assert set(TERMS) >= {name}
    assert SessionRoot(**TERMS | {name: value}).hash() != ROOT


def test_no_padding_is_no_padding() -> None:
    roots = {SessionRoot(**TERMS | {"left_padding": padding}).hash() for padding in ((), (0, 0))}
    assert len(roots) == 1


def test_session_s_receipts_form_chain_from_its_terms() -> None:
    check_chain(SERVER.peer_id, ROOT, chain(3))
    with pytest.raises(NotProven, match="follow"):
        check_chain(SERVER.peer_id, b"x" * 32, chain(3))
    with pytest.raises(NotProven, match="follow"):
        check_chain(SERVER.peer_id, ROOT, chain(3)[1:])
    with pytest.raises(NotProven, match="follow"):
        check_chain(SERVER.peer_id, ROOT, [chain(3)[0], chain(3)[2]])
    with pytest.raises(NotProven, match="no receipt"):
        check_chain(SERVER.peer_id, ROOT, [])
    with pytest.raises(NotProven, match="comes after"):
        check_chain(SERVER.peer_id, ROOT, chain(3, sequence=2))
    with pytest.raises(NotProven, match="another session"):
        check_chain(SERVER.peer_id, ROOT, chain(3, nonce=b"x" * 16))


@pytest.mark.parametrize(
    "outside", [{"span": (3, 11)}, {"dtype": "float32"}, {"quantisation": "nf4"}, {"model_version": b"x" * 32}], ids=str
)
def test_a_receipt_outside_of_the_pledge_proves_itself(outside: dict[str, object]) -> None:
    assert "pledge" in check_pledge_broken(SERVER.peer_id, PLEDGE, ROOT, chain(2, **outside))


def test_blocks_before_the_pledge_are_outside_it() -> None:
    pledge = replace(PLEDGE, span=(4, 10)).signed(SERVER)
    assert not pledge.covers(replace(RECEIPT, span=(3, 9))) and not pledge.covers(replace(RECEIPT, span=(4, 11)))
    inside = {"dtype": pledge.dtype, "quantisation": pledge.quantisation, "model_version": pledge.model_version}
    assert pledge.covers(replace(RECEIPT, span=(4, 10), **inside))  # type: ignore[arg-type]
    assert not pledge.covers(replace(RECEIPT, span=(3, 10), **inside))  # type: ignore[arg-type]
    assert pledge.is_in_force(1000) and pledge.is_in_force(2000)
    assert not pledge.is_in_force(999) and not pledge.is_in_force(2001)


def test_a_kept_pledge_is_no_fault() -> None:
    with pytest.raises(NotProven, match="pledged for"):
        check_pledge_broken(SERVER.peer_id, PLEDGE, ROOT, chain(2))
    with pytest.raises(NotProven, match="not the server's"):
        check_pledge_broken(SERVER.peer_id, replace(PLEDGE, span=(0, 5)), ROOT, chain(2))
    with pytest.raises(NotProven, match="follow"):
        check_pledge_broken(SERVER.peer_id, PLEDGE, b"x" * 32, chain(2, span=(3, 11)))
