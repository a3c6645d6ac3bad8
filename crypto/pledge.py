"""Pledges: a server's signed statement that it stands by its receipts, and the deposit it loses if one is proved wrong.

The "pledge" of Petals (ACL demo 2023, appendix A): "Some servers may vouch for the correctness of their outputs by
depositing a certain number of points". Who keeps the points is a validator, which signs for it. Without one the deposit
is a promise without security.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final

from .canonical import canonical
from .identity import verify
from .receipts import Receipt
from .statement import Statement

DEPOSIT_DOMAIN: Final = "petalnode/deposit/1"


@dataclass(frozen=True)
class Pledge(Statement):
    """`server` stands by its receipts for this model version, these blocks, this dtype and quantisation. It does so
    from `from_ms` until `until_ms` (milliseconds since 1970), with `deposit` points that `holder` keeps (a peer id;
    empty: nobody)."""

    DOMAIN: ClassVar[str] = "petalnode/pledge/1"
    SIGNER: ClassVar[str] = "server"

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
    """What a validator signs that keeps points of a server until then."""
    return canonical(DEPOSIT_DOMAIN, server, points, until_ms)
