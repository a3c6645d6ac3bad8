"""Credits: what peers who chose the same validator owe each other in points, as statements that it signs.

The incentive of Petals (ACL demo 2023, appendix A: points for serving, spent on priority). A `Credit` says how many
points a peer has with an issuer, a `Transfer` is a peer's order to hand some on, and a `Clearing` is the issuer's
word that it did so, once: the sequence numbers of a peer's orders only grow, so no point is handed on twice. This is
accounting among people who chose the same validator; it is not money.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from .canonical import canonical, digest
from .identity import Identity, verify
from .pledge import DEPOSIT_DOMAIN, deposit_bytes

CREDIT_DOMAIN: Final = "petalnode/credit/1"
QUERY_DOMAIN: Final = "petalnode/credit-query/1"
TRANSFER_DOMAIN: Final = "petalnode/credit-transfer/1"
CLEARING_DOMAIN: Final = "petalnode/credit-clearing/1"
DEPOSIT_ORDER_DOMAIN: Final = "petalnode/credit-deposit/1"
MAX_POINTS: Final = 1 << 48
"""Of one statement; an account of an honest issuer never comes near it."""


@dataclass(frozen=True)
class Credit:
    """`holder` has `points` with `issuer`, and `deposit` more that it keeps until `deposit_until_ms` for a pledge.

    `sequence` is that of the holder's last order, 0 for none. Times in milliseconds since 1970, by the issuer's clock.
    """

    issuer: str
    holder: str
    points: int
    deposit: int
    deposit_until_ms: int
    sequence: int
    time_ms: int
    signature: bytes = b""

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: every field but the signature, in the order of declaration."""
        return canonical(
            CREDIT_DOMAIN,
            self.issuer,
            self.holder,
            self.points,
            self.deposit,
            self.deposit_until_ms,
            self.sequence,
            self.time_ms,
        )

    def signed(self, issuer: Identity) -> Credit:
        """Raises ValueError: it is another issuer's."""
        _check_signer(issuer, self.issuer)
        return replace(self, signature=issuer.sign(CREDIT_DOMAIN, self.canonical_bytes()))

    @property
    def is_signed(self) -> bool:
        return verify(self.issuer, CREDIT_DOMAIN, self.canonical_bytes(), self.signature)


@dataclass(frozen=True)
class CreditQuery:
    """`holder` wants to know its credit. Nobody else is told."""

    issuer: str
    holder: str
    time_ms: int
    signature: bytes = b""

    def canonical_bytes(self) -> bytes:
        return canonical(QUERY_DOMAIN, self.issuer, self.holder, self.time_ms)

    def signed(self, holder: Identity) -> CreditQuery:
        """Raises ValueError: it is another holder's."""
        _check_signer(holder, self.holder)
        return replace(self, signature=holder.sign(QUERY_DOMAIN, self.canonical_bytes()))

    @property
    def is_signed(self) -> bool:
        return verify(self.holder, QUERY_DOMAIN, self.canonical_bytes(), self.signature)


@dataclass(frozen=True)
class Transfer:
    """`spender` orders `issuer` to hand `points` of its own to `recipient`; void if not cleared by `until_ms`.

    `sequence` is above that of every order that the spender gave this issuer before.
    """

    issuer: str
    spender: str
    recipient: str
    points: int
    sequence: int
    until_ms: int
    signature: bytes = b""

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: every field but the signature, in the order of declaration."""
        return canonical(
            TRANSFER_DOMAIN, self.issuer, self.spender, self.recipient, self.points, self.sequence, self.until_ms
        )

    def signed(self, spender: Identity) -> Transfer:
        """Raises ValueError: they are another one's points."""
        _check_signer(spender, self.spender)
        return replace(self, signature=spender.sign(TRANSFER_DOMAIN, self.canonical_bytes()))

    @property
    def is_signed(self) -> bool:
        return verify(self.spender, TRANSFER_DOMAIN, self.canonical_bytes(), self.signature)

    def hash(self) -> bytes:
        """Covers the signature."""
        return digest(TRANSFER_DOMAIN, self.canonical_bytes(), self.signature)


@dataclass(frozen=True)
class Clearing:
    """The issuer has carried out `transfer`, at `time_ms` by its clock: the recipient has the points."""

    transfer: Transfer
    time_ms: int
    signature: bytes = b""

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: hash of the transfer, and the time."""
        return canonical(CLEARING_DOMAIN, self.transfer.hash(), self.time_ms)

    def signed(self, issuer: Identity) -> Clearing:
        """Raises ValueError: it is another issuer's."""
        _check_signer(issuer, self.transfer.issuer)
        return replace(self, signature=issuer.sign(CLEARING_DOMAIN, self.canonical_bytes()))

    @property
    def is_signed(self) -> bool:
        """Whether both signatures hold, the issuer's and the spender's."""
        return self.transfer.is_signed and verify(
            self.transfer.issuer, CLEARING_DOMAIN, self.canonical_bytes(), self.signature
        )


@dataclass(frozen=True)
class DepositOrder:
    """`server` orders `issuer` to keep `points` of its own until `until_ms`, for a pledge; answered by a voucher.

    `sequence` as in `Transfer`.
    """

    issuer: str
    server: str
    points: int
    until_ms: int
    sequence: int
    signature: bytes = b""

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: every field but the signature, in the order of declaration."""
        return canonical(DEPOSIT_ORDER_DOMAIN, self.issuer, self.server, self.points, self.until_ms, self.sequence)

    def signed(self, server: Identity) -> DepositOrder:
        """Raises ValueError: they are another one's points."""
        _check_signer(server, self.server)
        return replace(self, signature=server.sign(DEPOSIT_ORDER_DOMAIN, self.canonical_bytes()))

    @property
    def is_signed(self) -> bool:
        return verify(self.server, DEPOSIT_ORDER_DOMAIN, self.canonical_bytes(), self.signature)


def sign_voucher(issuer: Identity, server: str, points: int, until_ms: int) -> bytes:
    """The issuer's word that it keeps so many points of the server until then: `Pledge.voucher`."""
    return issuer.sign(DEPOSIT_DOMAIN, deposit_bytes(server, points, until_ms))


def is_voucher(issuer: str, server: str, points: int, until_ms: int, voucher: bytes) -> bool:
    return verify(issuer, DEPOSIT_DOMAIN, deposit_bytes(server, points, until_ms), voucher)


def _check_signer(identity: Identity, name: str) -> None:
    if identity.peer_id != name:
        raise ValueError(f"{identity.peer_id} cannot sign what {name} says")
