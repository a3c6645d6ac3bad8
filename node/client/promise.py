"""What a server has announced of how it computes, and whether what it grants and signs keeps to that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import CLOCK_TOLERANCE, Announcement
from ...protocols.ids import Span


def check_time(receipt: Receipt, since_ms: int, now_ms: int) -> str | None:
    """What is wrong with the time of a receipt that was made after `since_ms` (milliseconds since 1970); None if
    nothing is. Clocks may differ by `CLOCK_TOLERANCE`."""
    tolerance = CLOCK_TOLERANCE * 1000
    if receipt.time_ms > now_ms + tolerance:
        return f"its receipt is dated {(receipt.time_ms - now_ms) / 1000:.0f} s ahead of this machine's clock"
    if receipt.time_ms < since_ms - tolerance:
        return f"its receipt is dated {(since_ms - receipt.time_ms) / 1000:.0f} s before it was asked"
    return None


@dataclass(frozen=True)
class Promise:
    """What a server announced. An empty `dtype` or `quantisation` promises nothing."""

    model_version: bytes
    span: Span
    dtype: str
    quantisation: str

    @classmethod
    def of(cls, announced: Announcement) -> Promise:
        # A server that is still loading does not know its dtype.
        return cls(announced.model_version, announced.span, announced.dtype, announced.quantisation)

    def broken_by_grant(self, granted: wire.Granted | wire.WorkGranted) -> str | None:
        """What is wrong with a grant; None if nothing is."""
        if self.dtype and (granted.dtype, granted.quantisation) != (self.dtype, self.quantisation):
            return (
                f"it announces {_kind(self.dtype, self.quantisation)} and grants "
                f"{_kind(granted.dtype, granted.quantisation)}"
            )
        return None

    def broken_by(self, receipt: Receipt) -> str | None:
        """What is wrong with a receipt, whose signature holds; None if nothing is."""
        if self.dtype and (receipt.dtype, receipt.quantisation) != (self.dtype, self.quantisation):
            return (
                f"it announces {_kind(self.dtype, self.quantisation)} and signs for "
                f"{_kind(receipt.dtype, receipt.quantisation)}"
            )
        return None


def _kind(dtype: str, quantisation: str) -> str:
    return dtype if quantisation in ("", "none") else f"{quantisation} weights in {dtype}"
