"""Accounts of one validator: pure rules for earning, transferring, depositing and forfeiting points.

A point is one verified token through one block. Only verified work makes points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ...crypto.credits import MAX_POINTS, DepositOrder, Transfer
from ...protocols.credits import SKEW_MS

FORFEIT_SHARE: Final = 4
"""Who brought the evidence gets one part in so many of a lost deposit; the rest is nobody's. Not more: a server that is
about to be caught could bring the evidence itself, under another key."""
MAX_ORDER_MS: Final = 3_600_000
"""An order may be valid for an hour."""
MAX_DEPOSIT_MS: Final = 48 * 3_600_000
GRACE_MS: Final = 24 * 3_600_000
"""A deposit is kept for so long after its time, for evidence that comes late."""


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
    if account.deposit and now_ms > account.deposit_until_ms + GRACE_MS:
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
    if transfer.until_ms + SKEW_MS < now_ms:
        raise NotCleared("the order is too old; check this machine's clock")
    if transfer.until_ms > now_ms + MAX_ORDER_MS + SKEW_MS:
        raise NotCleared(f"an order may be valid for {MAX_ORDER_MS // 60_000} minutes; check this machine's clock")
    _check_covered(spender, transfer.points)
    return (
        replace(spender, points=spender.points - transfer.points, sequence=transfer.sequence),
        replace(recipient, points=recipient.points + transfer.points),
    )


def deposited(account: Account, order: DepositOrder, now_ms: int) -> Account:
    """After an order, whose signature was checked, to keep at least so much for at least so long.

    An earlier deposit whose time is not over counts, and is not made less: its voucher is in somebody's hands.

    Raises:
        NotCleared: it asks for more than there is, was given before, or is for a time that is over or too far away.
    """
    account = matured(account, now_ms)
    _check_order(account, order.points, order.sequence)
    if not now_ms < order.until_ms <= now_ms + MAX_DEPOSIT_MS + SKEW_MS:
        raise NotCleared(
            f"a deposit is kept for {MAX_DEPOSIT_MS // 3_600_000} hours at most; check this machine's clock"
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
    share = account.deposit // FORFEIT_SHARE
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
