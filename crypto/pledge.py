"""Pledges: a server's signed word that it stands by its receipts, and what it loses if one is proved wrong.

The "pledge" of Petals (ACL demo 2023, appendix A): "Some servers may vouch for the correctness of their outputs by
depositing a certain number of points". Who keeps the points is a validator, which signs for it; without one the deposit
is a mere promise, and worth what those think of it who hear of a fault.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from .canonical import canonical, digest
from .identity import Identity, verify
from .receipts import Receipt

PLEDGE_DOMAIN: Final = "petalnode/pledge/1"
DEPOSIT_DOMAIN: Final = "petalnode/deposit/1"


@dataclass(frozen=True)
class Pledge:
    """`server` stands by its receipts for this model version, these blocks, this dtype and quantisation, from `from_ms`
    until `until_ms` (milliseconds since 1970), with `deposit` points that `holder` keeps (a peer id; empty: nobody)."""

    server: str
    model_version: bytes
    span: tuple[int, int]
    dtype: str
    quantisation: str
    deposit: int
    from_ms: int
    until_ms: int
    holder: str = ""
    voucher: bytes = b""
    signature: bytes = b""

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: every field but the signature, in the order of declaration."""
        return canonical(
            PLEDGE_DOMAIN,
            self.server,
            self.model_version,
            self.span,
            self.dtype,
            self.quantisation,
            self.deposit,
            self.from_ms,
            self.until_ms,
            self.holder,
            self.voucher,
        )

    def signed(self, identity: Identity) -> Pledge:
        """A copy that carries the server's signature.

        Raises:
            ValueError: it is another server's.
        """
        if identity.peer_id != self.server:
            raise ValueError("a server pledges for itself only")
        return replace(self, signature=identity.sign(PLEDGE_DOMAIN, self.canonical_bytes()))

    @property
    def is_signed(self) -> bool:
        return verify(self.server, PLEDGE_DOMAIN, self.canonical_bytes(), self.signature)

    def hash(self) -> bytes:
        """What the terms of a session refer to. Covers the signature."""
        return digest(PLEDGE_DOMAIN, self.canonical_bytes(), self.signature)

    def covers(self, receipt: Receipt) -> bool:
        """Whether the receipt is one of those that are pledged for, whatever its time."""
        return (
            receipt.model_version == self.model_version
            and self.span[0] <= receipt.span[0]
            and receipt.span[1] <= self.span[1]
            and (receipt.dtype, receipt.quantisation) == (self.dtype, self.quantisation)
        )

    def is_in_force(self, time_ms: int) -> bool:
        return self.from_ms <= time_ms <= self.until_ms

    def backed(self, trusted: Collection[str]) -> int:
        """Points that one of the `trusted` validators keeps; 0 if none of them does."""
        held = self.holder in trusted and verify(
            self.holder, DEPOSIT_DOMAIN, deposit_bytes(self.server, self.deposit, self.until_ms), self.voucher
        )
        return self.deposit if held else 0


def deposit_bytes(server: str, points: int, until_ms: int) -> bytes:
    """What a validator signs that keeps so many points of a server until then."""
    return canonical(DEPOSIT_DOMAIN, server, points, until_ms)
