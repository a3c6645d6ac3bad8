"""What verdicts and evidence do to accounts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio

from petalnode.crypto.credits import DepositOrder
from petalnode.crypto.evidence import ACCUSATION_DOMAIN
from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import NO_RECEIPT, Receipt
from petalnode.node.credits.issuer import Rewards, points_for
from petalnode.node.credits.ledger import Ledger
from petalnode.node.trust.bundle import Bundle, equivocation_bundle, resigned
from petalnode.node.trust.statement import SelfProven, check_statement
from petalnode.node.verification.judging import Result
from petalnode.node.verification.observed import Observed
from petalnode.node.verification.recomputation import SessionQuestion
from petalnode.node.verification.verdicts import Verdict
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span

ISSUER, SERVER, ACCUSER, OTHER = (Identity.from_seed(letter * 32) for letter in (b"i", b"s", b"a", b"o"))
NOW = 1_800_000_000_000


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", ISSUER, lambda: NOW) as opened:
        yield opened


def equivocation(accuser: Identity, answer: bytes = b"2", turned: bool = False) -> Bundle:
    session = (OTHER.peer_id, bytes(16), bytes(16), 1)
    first = Receipt(1, bytes(32), (0, 2), "float32", "none", *session, bytes(32), b"1" * 32, NO_RECEIPT, b"", NOW)
    second = replace(first, reply_hash=answer * 32)
    both = [first.signed(SERVER), second.signed(SERVER)]
    return equivocation_bundle(accuser, SERVER.peer_id, *(reversed(both) if turned else both))


def test_point_is_verified_token_through_block(ledger: Ledger) -> None:
    claimed = tuple(torch.zeros(2, tokens, 8) for tokens in (7, 1, 1))
    work = Observed(SERVER.peer_id, Span(2, 5), "float32", "none", SessionQuestion(Span(2, 5), ()), claimed)
    assert points_for(work) == 3 * 2 * 9
    rewards = Rewards(ledger)
    results: tuple[tuple[Result, int], ...] = (("faulty", 0), ("inconclusive", 0), ("ok", 54), ("ok", 108))
    for result, points in results:
        rewards.verified(work, Verdict(SERVER.peer_id, Span(2, 5), result, "", 0.0, 0.0))
        assert ledger.credit_of(SERVER.peer_id).points == points


def deposit(ledger: Ledger, sequence: int) -> None:
    ledger.deposit(DepositOrder(ISSUER.peer_id, SERVER.peer_id, 40, NOW + 1000, sequence).signed(SERVER))


async def test_fault_costs_deposit_once_whoever_brings_it(ledger: Ledger) -> None:
    ledger.issue(SERVER.peer_id, 100)
    deposit(ledger, 1)
    rewards = Rewards(ledger)

    async def booked(who: Identity, points: int) -> None:
        with trio.fail_after(600):
            while ledger.credit_of(who.peer_id).points < points:  # noqa: ASYNC110  (of another thread)
                await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rewards.take_deposits)
        rewards.proven(equivocation(ACCUSER))
        await booked(ACCUSER, 10)
        deposit(ledger, 2)
        # The same fault under another name, and told the other way round.
        rewards.proven(resigned(equivocation(ACCUSER), OTHER))
        rewards.proven(equivocation(OTHER, b"3"))
        await booked(OTHER, 10)
        nursery.cancel_scope.cancel()
    assert ledger.credit_of(ACCUSER.peer_id).points == 10
    assert ledger.credit_of(OTHER.peer_id).points == 10, "one of the two was another fault"
    assert ledger.totals() == (100, 40, 60)


def test_a_fault_has_one_name() -> None:
    fault = equivocation(ACCUSER).fault
    assert fault == resigned(equivocation(ACCUSER), OTHER).fault
    assert fault == equivocation(OTHER, turned=True).fault
    assert fault != equivocation(ACCUSER, b"3").fault


@pytest.mark.parametrize("field", ["steps", "work"])
def test_what_proves_nothing_renames_no_fault(field: str) -> None:
    """Else one fault would cost every later deposit, a part of which the accuser gets."""
    evidence, receipt = wire.Evidence(), wire.Receipt(signature=b"of the accuser's choice")
    evidence.CopyFrom(equivocation(ACCUSER).evidence)
    if field == "steps":
        evidence.steps.add().receipt.CopyFrom(receipt)
    else:
        evidence.work.receipt.CopyFrom(receipt)
    statement = evidence.SerializeToString(deterministic=True)
    renamed = Bundle(statement, OTHER.peer_id, OTHER.sign(ACCUSATION_DOMAIN, statement), {})
    assert isinstance(check_statement(renamed), SelfProven)
    assert renamed.fault == equivocation(ACCUSER).fault
