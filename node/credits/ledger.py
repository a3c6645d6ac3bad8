"""A validator's accounts in an sqlite file. An order is carried out once or not at all, whatever kills the process.

A point is one verified token through one block. Only verified work makes points. The rules for earning, transferring,
depositing and forfeiting them are pure functions of an `Account`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...crypto.credits import MAX_POINTS, Clearing, Credit, CreditQuery, DepositOrder, Transfer, sign_voucher
from ...crypto.identity import Identity
from ...crypto.statement import now_ms as current_ms
from ...protocols.credits import CREDITS_LIMITS
from ..trust.store import Database


@dataclass(frozen=True)
class LedgerPolicy:
    """What a ledger keeps, and for how long; what a fault costs."""

    max_accounts: int = 10_000
    """About 10 MB, clearings included. The last tenth is for servers that earn: nobody can fill it with transfers."""
    kept_clearings: int = 8
    """Of each spender: who did not get the answer may ask for this number of its last transfers again."""
    expiry_ms: int = 180 * 24 * 3_600_000
    """An account in which nothing has changed for so long is closed, and its points are nobody's."""
    max_proved: int = 100_000
    forfeit_share: int = 4
    """Who brought the evidence gets one part in four of a lost deposit; the rest is nobody's. Not more: a server
    that is about to be caught could bring the evidence itself, under another key."""
    max_order_ms: int = 3_600_000
    """An order may be valid for an hour."""
    max_deposit_ms: int = 48 * 3_600_000
    grace_ms: int = 24 * 3_600_000
    """A deposit is kept for so long after its time, for evidence that comes late."""


LEDGER: Final = LedgerPolicy()
_MAX_BY_TRANSFER: Final = LEDGER.max_accounts * 9 // 10
_NUMBERS: Final = ("points", "deposit", "deposit_until_ms", "sequence")
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS accounts (
    peer_id TEXT PRIMARY KEY,
    points INTEGER NOT NULL CHECK (points >= 0),
    deposit INTEGER NOT NULL CHECK (deposit >= 0),
    deposit_until_ms INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    changed_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clearings (
    spender TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    transfer BLOB NOT NULL,
    time_ms INTEGER NOT NULL,
    PRIMARY KEY (spender, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS proved (number INTEGER PRIMARY KEY AUTOINCREMENT, fault BLOB NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, points INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO totals VALUES ('issued', 0), ('void', 0);
"""


class NotCleared(Exception):
    """An order that is not carried out; the text says why. Nothing has changed."""


@dataclass(frozen=True)
class Account:
    """A peer's points: `points` that it may spend, and `deposit` that is kept until `deposit_until_ms`.

    `sequence` is that of its last order.
    """

    peer_id: str
    points: int = 0
    deposit: int = 0
    deposit_until_ms: int = 0
    sequence: int = 0


def matured(account: Account, now_ms: int) -> Account:
    """With the deposit back in the points, once it has been kept long enough."""
    if account.deposit and now_ms > account.deposit_until_ms + LEDGER.grace_ms:
        return replace(account, points=account.points + account.deposit, deposit=0, deposit_until_ms=0)
    return account


def earned(account: Account, points: int) -> Account:
    """After `points` for verified work.

    Raises:
        ValueError: not a number of points that work can be worth.
    """
    if not 0 <= points <= MAX_POINTS:
        raise ValueError(f"{points} points cannot be earned at once")
    return replace(account, points=account.points + points)


def transferred(spender: Account, recipient: Account, transfer: Transfer, now_ms: int) -> tuple[Account, Account]:
    """Both after a transfer whose signature was checked.

    Raises:
        NotCleared: it asks for more than there is, was given before, or comes late.
    """
    if transfer.spender == transfer.recipient:
        raise NotCleared("the spender and the recipient are one")
    _check_order(spender, transfer.points, transfer.sequence)
    if transfer.until_ms + CREDITS_LIMITS.skew_ms < now_ms:
        raise NotCleared("the order is too old; check this machine's clock")
    if transfer.until_ms > now_ms + LEDGER.max_order_ms + CREDITS_LIMITS.skew_ms:
        raise NotCleared(
            f"an order may be valid for {LEDGER.max_order_ms // 60_000} minutes; check this machine's clock"
        )
    _check_covered(spender, transfer.points)
    return (
        replace(spender, points=spender.points - transfer.points, sequence=transfer.sequence),
        replace(recipient, points=recipient.points + transfer.points),
    )


def deposited(account: Account, order: DepositOrder, now_ms: int) -> Account:
    """After an order, whose signature was checked, to keep at least so much for at least so long.

    An earlier deposit whose time is not over counts, and is not made less: its voucher is in somebody's hands.

    Raises:
        NotCleared: it asks for more than there is, was given before, or is for a wrong time.
    """
    account = matured(account, now_ms)
    _check_order(account, order.points, order.sequence)
    if not now_ms < order.until_ms <= now_ms + LEDGER.max_deposit_ms + CREDITS_LIMITS.skew_ms:
        raise NotCleared(
            f"a deposit is kept for {LEDGER.max_deposit_ms // 3_600_000} hours at most; check this machine's clock"
        )
    more = max(0, order.points - account.deposit)
    _check_covered(account, more)
    return replace(
        account,
        points=account.points - more,
        deposit=account.deposit + more,
        deposit_until_ms=max(account.deposit_until_ms, order.until_ms),
        sequence=order.sequence,
    )


def forfeited(account: Account, now_ms: int) -> tuple[Account, int, int]:
    """After a proved fault: the account without its deposit, what the accuser gets, what is nobody's."""
    account = matured(account, now_ms)
    share = account.deposit // LEDGER.forfeit_share
    return replace(account, deposit=0, deposit_until_ms=0), share, account.deposit - share


def _check_order(account: Account, points: int, sequence: int) -> None:
    if not 1 <= points <= MAX_POINTS:
        raise NotCleared(f"{points} is no number of points")
    if not account.sequence < sequence <= account.sequence + (1 << 32):
        raise NotCleared(
            f"order {sequence} is not the next one after order {account.sequence}: each is carried out once"
        )


def _check_covered(account: Account, points: int) -> None:
    if points > account.points:
        raise NotCleared(f"{points} points are wanted, {account.points} are there")


class Ledger(Database):
    """The accounts of the issuer `identity`. Safe to use from any thread.

    Each method is one transaction, on the disk when it returns. All raise MachineError if the file cannot be used.
    """

    NAME = "ledger"

    def __init__(self, file: Path, identity: Identity, now_ms: Callable[[], int] = current_ms) -> None:
        # A clearing that was sent must not be lost.
        super().__init__(file, _SCHEMA, ("journal_mode = WAL", "synchronous = FULL"), isolation_level=None)
        self._identity = identity
        self._now_ms = now_ms
        self._lock = threading.Lock()

    @property
    def issuer(self) -> str:
        return self._identity.peer_id

    def issue(self, peer_id: str, points: int) -> bool:
        """Gives `points` for verified work; False if there is no room for another account."""
        with self._changing() as now:
            account = self._account(peer_id, now)
            if account is None and not self._room(LEDGER.max_accounts, now):
                return False
            self._put(earned(account or Account(peer_id), points), now)
            self._count("issued", points)
        return True

    def credit(self, query: CreditQuery) -> Credit:
        """What the holder that asks has.

        Raises:
            NotCleared: not the holder asks, or not now.
        """
        self._check_issuer(query.issuer)
        now = self._now_ms()
        if not query.is_signed:
            raise NotCleared("the question is not signed by the holder of the account")
        if abs(query.time_ms - now) > CREDITS_LIMITS.skew_ms:
            raise NotCleared("the question was signed at another time; check this machine's clock")
        return self.credit_of(query.holder)

    def credit_of(self, holder: str) -> Credit:
        """What a peer has, signed."""
        with self._changing() as now:
            account = self._account(holder, now) or Account(holder)
        return Credit(
            self.issuer, holder, account.points, account.deposit, account.deposit_until_ms, account.sequence, now
        ).signed(self._identity)

    def clear(self, transfer: Transfer) -> Clearing:
        """Carries out a transfer. The same one again gets the same answer, and changes nothing.

        Raises:
            NotCleared: it is forged, asks for more than there is, comes late, or another order had its number.
        """
        self._check_issuer(transfer.issuer)
        if not transfer.is_signed:
            raise NotCleared("the transfer is not signed by the owner of the points")
        with self._changing() as now:
            earlier = self._database.execute(
                "SELECT transfer, time_ms FROM clearings WHERE spender = ? AND sequence = ?",
                (transfer.spender, min(transfer.sequence, 2**63 - 1)),
            ).fetchone()
            if earlier is not None and earlier[0] == transfer.hash():
                return Clearing(transfer, earlier[1]).signed(self._identity)
            spender = self._account(transfer.spender, now) or Account(transfer.spender)
            recipient = self._account(transfer.recipient, now)
            paid, richer = transferred(spender, recipient or Account(transfer.recipient), transfer, now)
            self._put(paid, now)  # first: making room must not close it
            if recipient is None and not self._room(_MAX_BY_TRANSFER, now):
                raise NotCleared("this validator has no room for another account")
            self._put(richer, now)
            self._database.execute(
                "INSERT INTO clearings VALUES (?, ?, ?, ?)",
                (transfer.spender, transfer.sequence, transfer.hash(), now),
            )
            self._database.execute(
                "DELETE FROM clearings WHERE spender = ? AND sequence NOT IN "
                "(SELECT sequence FROM clearings WHERE spender = ? ORDER BY sequence DESC LIMIT ?)",
                (transfer.spender, transfer.spender, LEDGER.kept_clearings),
            )
            return Clearing(transfer, now).signed(self._identity)

    def deposit(self, order: DepositOrder) -> bytes:
        """Keeps points for a pledge; returns the voucher for it.

        Raises:
            NotCleared: the order is forged, asks for more than there is, or comes late.
        """
        self._check_issuer(order.issuer)
        if not order.is_signed:
            raise NotCleared("the order is not signed by the owner of the points")
        with self._changing() as now:
            account = self._account(order.server, now) or Account(order.server)
            self._put(deposited(account, order, now), now)
        return sign_voucher(self._identity, order.server, order.points, order.until_ms)

    def forfeit(self, accused: str, fault: bytes, accuser: str) -> int:
        """Takes the deposit of a server whose fault is proved, by the id of the fault; what the accuser got.

        A fault counts once. Points that are not deposited are not touched.
        """
        with self._changing() as now:
            if self._database.execute("SELECT 1 FROM proved WHERE fault = ?", (fault,)).fetchone():
                return 0
            self._database.execute("INSERT INTO proved VALUES (NULL, ?)", (fault,))
            self._database.execute(
                "DELETE FROM proved WHERE number <= (SELECT MAX(number) FROM proved) - ?", (LEDGER.max_proved,)
            )
            account = self._account(accused, now)
            if account is None or not account.deposit:
                return 0
            poorer, share, void = forfeited(account, now)
            self._put(poorer, now)
            bringer = self._account(accuser, now)
            if accuser == accused or (bringer is None and not self._room(LEDGER.max_accounts, now)):
                share, void = 0, share + void
            else:
                self._put(earned(bringer or Account(accuser), share), now)
            self._count("void", void)
            return share

    def totals(self) -> tuple[int, int, int]:
        """Points that were issued, that are in accounts, and that are nobody's any more."""
        with self._changing():
            rows = dict(self._database.execute("SELECT name, points FROM totals"))
            (held,) = self._database.execute("SELECT COALESCE(SUM(points + deposit), 0) FROM accounts").fetchone()
        return rows["issued"], held, rows["void"]

    def _check_issuer(self, issuer: str) -> None:
        if issuer != self.issuer:
            raise NotCleared(f"these are points of {issuer}, not of this validator, {self.issuer}")

    def _account(self, peer_id: str, now: int) -> Account | None:
        row = self._database.execute(
            f"SELECT {', '.join(_NUMBERS)} FROM accounts WHERE peer_id = ?", (peer_id,)
        ).fetchone()
        return None if row is None else matured(Account(peer_id, *row), now)

    def _put(self, account: Account, now: int) -> None:
        values = [getattr(account, name) for name in _NUMBERS]
        self._database.execute(
            "INSERT OR REPLACE INTO accounts VALUES (?, ?, ?, ?, ?, ?)", (account.peer_id, *values, now)
        )

    def _count(self, name: str, points: int) -> None:
        self._database.execute("UPDATE totals SET points = points + ? WHERE name = ?", (points, name))

    def _room(self, most: int, now: int) -> bool:
        """Whether another account may be opened. Closes those whose time is over, if need be."""
        if self._accounts() < most:
            return True
        idle = "changed_ms < ? AND deposit_until_ms < ?", (now - LEDGER.expiry_ms, now - LEDGER.expiry_ms)
        (lost,) = self._database.execute(
            f"SELECT COALESCE(SUM(points + deposit), 0) FROM accounts WHERE {idle[0]}", idle[1]
        ).fetchone()
        self._count("void", lost)
        self._database.execute(
            f"DELETE FROM clearings WHERE spender IN (SELECT peer_id FROM accounts WHERE {idle[0]})", idle[1]
        )
        self._database.execute(f"DELETE FROM accounts WHERE {idle[0]}", idle[1])
        return self._accounts() < most

    def _accounts(self) -> int:
        return int(self._database.execute("SELECT COUNT(*) FROM accounts").fetchone()[0])

    @contextmanager
    def _changing(self) -> Iterator[int]:
        """A transaction, which begins by taking the file; gives the time. Whatever is raised undoes it."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield self._now_ms()
                    self._database.execute("COMMIT")
                except BaseException:
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._unusable(error) from error
