"""Checks the points that clients show to a server for priority, and accepts each payment once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from ...crypto.statement import now_ms as current_ms
from ...protocols import wire_pb2 as wire
from ...protocols.credits import CREDITS_LIMITS, clearing_from_wire, price
from ...protocols.inference import SessionTerms

MOST_SPENT: Final = 10_000
"""Payments that are remembered; when there are more, no points are taken for a while."""

Payment: TypeAlias = tuple[str, str, int]
"""Issuer, spender and sequence number of a transfer."""


class PaymentVerifier:
    """Takes points of `issuers` for sessions at `server`.

    Spent payments are kept in memory only. So a payment that was cleared before this object was made is refused.
    """

    def __init__(self, server: str, issuers: Collection[str], now_ms: Callable[[], int] = current_ms) -> None:
        self._server = server
        self._issuers = frozenset(issuers)
        self._now_ms = now_ms
        self._since_ms = now_ms()
        self._spent: dict[Payment, int] = {}  # until when each must be remembered

    def take(self, opened: wire.Open, client: str, terms: SessionTerms) -> Payment | None:
        """Spends the clearing that a client shows for a session. None if it buys no priority, which is no error."""
        if not opened.HasField("clearing") or not self._issuers:
            return None
        now = self._now_ms()
        try:
            clearing = clearing_from_wire(opened.clearing)
        except ValueError:
            return None
        transfer = clearing.transfer
        payment = transfer.issuer, transfer.spender, transfer.sequence
        self._spent = {spent: until for spent, until in self._spent.items() if until >= now}
        if (
            payment in self._spent
            or len(self._spent) >= MOST_SPENT
            or transfer.issuer not in self._issuers
            or transfer.spender != client
            or transfer.recipient != self._server
            or transfer.points < price(terms.batch, terms.max_length)
            or not max(self._since_ms, now - CREDITS_LIMITS.honoured_ms - CREDITS_LIMITS.skew_ms)
            <= clearing.time_ms
            <= now + CREDITS_LIMITS.skew_ms
            or not clearing.is_signed
        ):
            return None
        self._spent[payment] = clearing.time_ms + CREDITS_LIMITS.honoured_ms + 2 * CREDITS_LIMITS.skew_ms
        return payment

    def give_back(self, payment: Payment | None) -> None:
        """After a session that was not granted: the client may show the payment again."""
        if payment is not None:
            self._spent.pop(payment, None)
