"""Credits: what peers who chose the same validator owe each other in points, as statements that it signs.

The incentive of Petals (ACL demo 2023, appendix A: points for serving, spent on priority). A `Credit` says how many
points a peer has with an issuer. A `Transfer` is a peer's order to hand some on. A `Clearing` is the issuer's word that
it did so, once. The sequence numbers of a peer's orders only grow, so no point is handed on twice. This is accounting
among people who chose the same validator; it is not money.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from .canonical import canonical
from .identity import Identity, verify
from .pledge import DEPOSIT_DOMAIN, deposit_bytes
from .statement import Statement

MAX_POINTS: Final = 1 << 48
"""Of one statement; an account of an honest issuer never comes near it."""


@dataclass(frozen=True)
class Credit(Statement):
    """`holder` has `points` with `issuer`, and `deposit` more that it keeps until `deposit_until_ms` for a pledge.

    `sequence` is that of the holder's last order, 0 for none. Times in milliseconds since 1970, by the issuer's clock.
    """

    DOMAIN: ClassVar[str] = "petalnode/credit/1"
    SIGNER: ClassVar[str] = "issuer"

    issuer: str
    holder: str
    points: int
    deposit: int
    deposit_until_ms: int
    sequence: int
    time_ms: int
    signature: bytes = b""


@dataclass(frozen=True)
class CreditQuery(Statement):
    """`holder` wants to know its credit. Nobody else is told."""

    DOMAIN: ClassVar[str] = "petalnode/credit-query/1"
    SIGNER: ClassVar[str] = "holder"

    issuer: str
    holder: str
    time_ms: int
    signature: bytes = b""


@dataclass(frozen=True)
class Transfer(Statement):
    """`spender` orders `issuer` to hand `points` of its own to `recipient`; void if not cleared by `until_ms`.

    `sequence` is above that of every order that the spender gave this issuer before.
    """

    DOMAIN: ClassVar[str] = "petalnode/credit-transfer/1"
    SIGNER: ClassVar[str] = "spender"

    issuer: str
    spender: str
    recipient: str
    points: int
    sequence: int
    until_ms: int
    signature: bytes = b""


@dataclass(frozen=True)
class Clearing(Statement):
    """The issuer has carried out `transfer`, at `time_ms` by its clock: the recipient has the points."""

    DOMAIN: ClassVar[str] = "petalnode/credit-clearing/1"

    transfer: Transfer
    time_ms: int
    signature: bytes = b""

    @property
    def signer(self) -> str:
        return self.transfer.issuer

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: hash of the transfer, and the time."""
        return canonical(self.DOMAIN, self.transfer.hash(), self.time_ms)

    @property
    def is_signed(self) -> bool:
        """Whether both signatures hold, the issuer's and the spender's."""
        return self.transfer.is_signed and super().is_signed


@dataclass(frozen=True)
class DepositOrder(Statement):
    """`server` orders `issuer` to keep `points` of its own until `until_ms`, for a pledge; answered by a voucher.

    `sequence` as in `Transfer`.
    """

    DOMAIN: ClassVar[str] = "petalnode/credit-deposit/1"
    SIGNER: ClassVar[str] = "server"

    issuer: str
    server: str
    points: int
    until_ms: int
    sequence: int
    signature: bytes = b""


def sign_voucher(issuer: Identity, server: str, points: int, until_ms: int) -> bytes:
    """The issuer's word that it keeps these points of the server until then: `Pledge.voucher`."""
    return issuer.sign(DEPOSIT_DOMAIN, deposit_bytes(server, points, until_ms))


def is_voucher(issuer: str, server: str, points: int, until_ms: int, voucher: bytes) -> bool:
    return verify(issuer, DEPOSIT_DOMAIN, deposit_bytes(server, points, until_ms), voucher)
