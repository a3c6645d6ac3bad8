"""What a server has announced of how it computes, and whether what it grants and signs keeps to that. Pure."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from ...crypto.pledge import Pledge
from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.announcement import CLOCK_TOLERANCE, Announcement, pledge_from_wire
from ...protocols.ids import Span
from ..errors import ServerFailed


@dataclass(frozen=True)
class WireTensor:
    """A tensor as it stands on the wire; hidden states are [batch, tokens, hidden]."""

    tensor: wire.Tensor
    payload: bytes | bytearray

    @property
    def tokens(self) -> int:
        return self.tensor.shape[1]


class ServerRefused(ServerFailed):
    """A server answered with an error; `code` is the protocol's."""

    def __init__(self, message: str, peer_id: str, code: wire.ErrorCode.ValueType) -> None:
        super().__init__(message, peer_id)
        self.code = code


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def check_time(receipt: Receipt, since_ms: int, now_ms: int) -> str | None:
    """What is wrong with the time of a receipt that was made after `since_ms` (milliseconds since 1970); None if
    nothing is. Clocks may differ by `CLOCK_TOLERANCE`."""
    tolerance = CLOCK_TOLERANCE * 1000
    if receipt.time_ms > now_ms + tolerance:
        return f"its receipt is dated {(receipt.time_ms - now_ms) / 1000:.0f} s ahead of this machine's clock"
    if receipt.time_ms < since_ms - tolerance:
        return f"its receipt is dated {(since_ms - receipt.time_ms) / 1000:.0f} s before it was asked"
    return None


def pledged_points(announced: Announcement, trusted: Collection[str], now_ms: int) -> int | None:
    """The points that a server has pledged for what it announces; None if it pledges nothing, or for something else.

    With `trusted` validators, only what one of them keeps; else what the server promises.
    """
    pledge = announced.pledge
    if (
        pledge is None
        or not pledge.is_in_force(now_ms)
        or (pledge.model_version, pledge.dtype, pledge.quantisation)
        != (announced.model_version, announced.dtype, announced.quantisation)
        or not Span(*pledge.span).covers(announced.span)
        or not _is_signed(pledge)
    ):
        return None
    return pledge.backed(trusted) if trusted else pledge.deposit


@lru_cache(maxsize=1024)
def _is_signed(pledge: Pledge) -> bool:
    return pledge.is_signed


def granted_pledge(
    granted: wire.Granted | wire.BatchGranted, peer_id: str, model_version: bytes, span: Span, now_ms: int
) -> Pledge | None:
    """The checked pledge under which `peer_id` grants these blocks; None for none.

    Raises:
        ValueError: it is not the server's, not in force, or for something else than is granted.
    """
    if not granted.HasField("pledge"):
        return None
    pledge = pledge_from_wire(granted.pledge)
    if pledge.server != peer_id or not pledge.is_signed:
        raise ValueError("its pledge is not signed by its key")
    tolerance = round(CLOCK_TOLERANCE * 1000)
    if not (pledge.is_in_force(now_ms - tolerance) or pledge.is_in_force(now_ms + tolerance)):
        raise ValueError("its pledge is not in force")
    if (pledge.model_version, pledge.dtype, pledge.quantisation) != (
        model_version,
        granted.dtype,
        granted.quantisation,
    ) or not Span(*pledge.span).covers(span):
        raise ValueError("its pledge is for something else than it grants")
    return pledge


@dataclass(frozen=True)
class ServerClaims:
    """What a server announced. An empty `dtype` or `quantisation` promises nothing."""

    model_version: bytes
    span: Span
    dtype: str
    quantisation: str
    pledge: Pledge | None = None

    @classmethod
    def of(cls, announced: Announcement) -> ServerClaims:
        # A server that is still loading does not know its dtype.
        return cls(announced.model_version, announced.span, announced.dtype, announced.quantisation, announced.pledge)

    def broken_by_grant(self, granted: wire.Granted | wire.BatchGranted) -> str | None:
        """What is wrong with a grant; None if nothing is."""
        if self.dtype and (granted.dtype, granted.quantisation) != (self.dtype, self.quantisation):
            return (
                f"it announces {_kind(self.dtype, self.quantisation)} and grants "
                f"{_kind(granted.dtype, granted.quantisation)}"
            )
        if self.pledge is not None and self.pledge.deposit > granted.pledge.deposit:
            return f"it announces a pledge of {self.pledge.deposit} points and grants one of {granted.pledge.deposit}"
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
