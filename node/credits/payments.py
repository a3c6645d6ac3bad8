"""Takes the points that clients show, each payment once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from ...protocols import wire_pb2 as wire
from ...protocols.credits import HONOURED_MS, SKEW_MS, clearing_from_wire, price
from ...protocols.inference import SessionTerms
from ..server.priority import is_payment

MOST_SPENT: Final = 10_000
"""Payments that are remembered; when there are more, no points are taken for a while."""

Payment: TypeAlias = tuple[str, str, int]
"""Issuer, spender and sequence number of a transfer."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class PaymentVerifier:
    """Of one server, which takes points of `issuers`. Forgets all when the server ends: what was cleared before
    this one began is not taken."""

    def __init__(self, server: str, issuers: Collection[str], now_ms: Callable[[], int] = _now_ms) -> None:
        self._server = server
        self._issuers = frozenset(issuers)
        self._now_ms = now_ms
        self._since_ms = now_ms()
        self._spent: dict[Payment, int] = {}  # until when it must be remembered

    def take(self, opened: wire.Open, client: str, terms: SessionTerms) -> Payment | None:
        """Takes what the client shows for a session; None if that buys no priority here, which is no error."""
        if not opened.HasField("clearing") or not self._issuers:
            return None
        now = self._now_ms()
        try:
            clearing = clearing_from_wire(opened.clearing)
        except ValueError:
            return None
        transfer = clearing.transfer
        payment = transfer.issuer, transfer.spender, transfer.sequence
        self._spent = {each: until for each, until in self._spent.items() if until >= now}
        if payment in self._spent or len(self._spent) >= MOST_SPENT:
            return None
        cost = price(terms.batch, terms.max_length)
        if not is_payment(
            clearing,
            client=client,
            server=self._server,
            issuers=self._issuers,
            cost=cost,
            since_ms=self._since_ms,
            now_ms=now,
        ):
            return None
        self._spent[payment] = clearing.time_ms + HONOURED_MS + 2 * SKEW_MS
        return payment

    def give_back(self, payment: Payment | None) -> None:
        """The session was not granted: the client may show the payment again."""
        if payment is not None:
            self._spent.pop(payment, None)
