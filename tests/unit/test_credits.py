"""Statements about points: signed by whom they bind, and by nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.credits import (
    Clearing,
    Credit,
    CreditQuery,
    DepositOrder,
    Transfer,
    is_voucher,
    sign_voucher,
)
from petalnode.crypto.identity import Identity
from petalnode.crypto.pledge import Pledge

ISSUER, SPENDER, OTHER = (Identity.from_seed(letter * 32) for letter in (b"i", b"s", b"o"))
CREDIT = Credit(ISSUER.peer_id, SPENDER.peer_id, 70, 30, 9, 4, 1_000).signed(ISSUER)
QUERY = CreditQuery(ISSUER.peer_id, SPENDER.peer_id, 1_000).signed(SPENDER)
TRANSFER = Transfer(ISSUER.peer_id, SPENDER.peer_id, OTHER.peer_id, 5, 1, 2_000).signed(SPENDER)
CLEARING = Clearing(TRANSFER, 1_500).signed(ISSUER)
ORDER = DepositOrder(ISSUER.peer_id, SPENDER.peer_id, 5, 2_000, 1).signed(SPENDER)
NUMBERS = [
    (CREDIT, "points"),
    (CREDIT, "deposit"),
    (CREDIT, "deposit_until_ms"),
    (CREDIT, "sequence"),
    (CREDIT, "time_ms"),
    (QUERY, "time_ms"),
    (TRANSFER, "points"),
    (TRANSFER, "sequence"),
    (TRANSFER, "until_ms"),
    (CLEARING, "time_ms"),
    (ORDER, "points"),
    (ORDER, "until_ms"),
    (ORDER, "sequence"),
]


@pytest.mark.parametrize("statement", [CREDIT, QUERY, TRANSFER, CLEARING, ORDER])
def test_what_is_signed_holds(statement: Credit | CreditQuery | Transfer | Clearing | DepositOrder) -> None:
    assert statement.is_signed
    assert not replace(statement, signature=b"").is_signed
    assert not replace(statement, signature=bytes(64)).is_signed


@pytest.mark.parametrize(("statement", "field"), NUMBERS)
def test_no_number_can_be_changed(statement: Credit, field: str) -> None:
    assert not replace(statement, **{field: getattr(statement, field) + 1}).is_signed


@given(st.integers(-1000, 1000).filter(bool))
def test_another_amount_is_another_transfer(more: int) -> None:
    changed = replace(TRANSFER, points=TRANSFER.points + more)
    assert not replace(CLEARING, transfer=changed).is_signed
    # Not even if the spender signs that, too: the issuer has cleared the other one.
    assert not replace(CLEARING, transfer=changed.signed(SPENDER)).is_signed


def test_nobody_signs_for_another() -> None:
    for unsigned in (CREDIT, Clearing(TRANSFER, 1)):
        with pytest.raises(ValueError, match="cannot sign"):
            unsigned.signed(SPENDER)
    for order in (QUERY, TRANSFER, ORDER):
        with pytest.raises(ValueError, match="cannot sign"):
            order.signed(ISSUER)


def test_one_kind_of_statement_is_never_another() -> None:
    kinds = (CREDIT, QUERY, TRANSFER, CLEARING, ORDER)
    assert len({kind.canonical_bytes()[:60] for kind in kinds}) == len(kinds)


def test_voucher_backs_pledge_with_whoever_trusts_issuer() -> None:
    voucher = sign_voucher(ISSUER, SPENDER.peer_id, 30, 5_000)
    assert is_voucher(ISSUER.peer_id, SPENDER.peer_id, 30, 5_000, voucher)
    pledge = Pledge(
        SPENDER.peer_id, bytes(32), (0, 2), "float32", "none", 30, 1_000, 5_000, ISSUER.peer_id, voucher
    ).signed(SPENDER)
    assert pledge.backed([ISSUER.peer_id]) == 30
    assert pledge.backed([OTHER.peer_id]) == 0
    assert replace(pledge, deposit=31).backed([ISSUER.peer_id]) == 0
    assert replace(pledge, until_ms=5_001).backed([ISSUER.peer_id]) == 0
