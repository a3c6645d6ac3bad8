"""What a wallet makes of orders whose answers were lost, and of payments that no server has taken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer
from petalnode.crypto.identity import Identity
from petalnode.crypto.statement import now_ms
from petalnode.node.credits.ledger import Ledger, NotCleared
from petalnode.node.credits.wallet import Wallet
from petalnode.node.errors import SwarmError, unwrapped
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.credits import CREDITS, CREDITS_LIMITS, CreditsStream, price, serve_credits
from petalnode.protocols.inference import Refusal
from tests.announcements import plain

ISSUER, PAYER, SERVER, OTHER = (Identity.from_seed(letter * 32) for letter in (b"i", b"p", b"s", b"o"))


class Validator:
    """The validator of a wallet, and its swarm. The next `lost` transfers are carried out, and the next `late` ones do
    not arrive; neither is answered."""

    lost = late = 0

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def remember(self, *_: object) -> None:
        """As a host does."""

    @property
    def host(self) -> Validator:
        return self

    @asynccontextmanager
    async def open_stream(self, *_: object, **__: object) -> AsyncIterator[CreditsStream]:
        ours, theirs = message_streams(CREDITS, PAYER.peer_id, ISSUER.peer_id)
        with unwrapped(Exception):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: serve_credits(theirs, self, timeout=60))
                yield ours
                nursery.cancel_scope.cancel()

    async def credit(self, query: CreditQuery) -> Credit:
        return self.ledger.credit(query)

    async def clear(self, transfer: Transfer) -> Clearing:
        if self.late:
            self.late -= 1
            await trio.sleep_forever()
        try:
            clearing = self.ledger.clear(transfer)
        except NotCleared as error:
            raise Refusal(wire.ERROR_NOT_ALLOWED, str(error)) from None
        if self.lost:
            self.lost -= 1
            await trio.sleep_forever()
        return clearing

    async def deposit(self, order: DepositOrder) -> bytes:
        return self.ledger.deposit(order)

    @property
    def left(self) -> int:
        return self.ledger.credit_of(PAYER.peer_id).points


@pytest.fixture
def validator(tmp_path: Path) -> Iterator[Validator]:
    with Ledger(tmp_path / "ledger.sqlite", ISSUER) as ledger:
        ledger.issue(PAYER.peer_id, 1000)
        yield Validator(ledger)


def wallet_at(validator: Any) -> Wallet:
    return Wallet(validator, PAYER, f"/ip4/127.0.0.1/tcp/1/p2p/{ISSUER.peer_id}")


async def given_up(wallet: Wallet, recipient: Identity) -> None:
    """A transfer that is waited for until nothing goes on any more."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wallet.transfer, recipient.peer_id, 10)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_an_order_is_repeated_after_others(validator: Validator) -> None:
    wallet, validator.lost = wallet_at(validator), 1
    await given_up(wallet, SERVER)
    await wallet.transfer(OTHER.peer_id, 10)
    clearing = await wallet.transfer(SERVER.peer_id, 10)
    assert (clearing.transfer.sequence, validator.left) == (1, 980), "it was carried out already"
    await wallet.transfer(SERVER.peer_id, 10)
    assert validator.left == 970


async def test_order_whose_number_is_taken_is_given_anew(validator: Validator) -> None:
    wallet, validator.late = wallet_at(validator), 1
    await given_up(wallet, SERVER)
    await wallet.transfer(OTHER.peer_id, 10)
    with pytest.raises(SwarmError, match="is not the next one"):
        await wallet.transfer(SERVER.peer_id, 10)
    await wallet.transfer(SERVER.peer_id, 10)
    assert validator.left == 980


async def test_payment_for_another_session_is_not_lost(validator: Validator) -> None:
    """Two sessions are opened at once, and the server takes the points of the shorter one only."""
    wallet = wallet_at(validator)
    server = replace(plain(SERVER.peer_id), credits_of=(ISSUER.peer_id,), cache_tokens_free=0, queue_depth=9)
    short, long = await wallet.pay(server, 1, 10), await wallet.pay(server, 1, 20)
    assert short is not None and long is not None and validator.left == 1000 - price(1, 10) - price(1, 20)
    wallet.spent(short)
    assert await wallet.pay(server, 1, 20) == long
    wallet.spent(long)
    assert await wallet.pay(server, 1, 20) not in (None, long)


async def test_payment_of_long_ago_is_not_shown(validator: Validator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was lost, and others were ordered since: it is repeated, and no server honours it any more."""
    server = replace(plain(SERVER.peer_id), credits_of=(ISSUER.peer_id,), cache_tokens_free=0, queue_depth=9)
    wallet, validator.lost = wallet_at(validator), 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wallet.pay, server, 1, 10)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await wallet.transfer(OTHER.peer_id, 1)
    later = now_ms() + CREDITS_LIMITS.honoured_ms
    monkeypatch.setattr("petalnode.node.credits.wallet.now_ms", lambda: later)
    monkeypatch.setattr(validator.ledger, "_now_ms", lambda: later)
    shown = await wallet.pay(server, 1, 10)
    assert shown is not None and shown.transfer.sequence == 3
