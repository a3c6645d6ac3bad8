"""Who is served first where not all can be at once: pure decisions. Without points it is first come, first served."""

from __future__ import annotations

from collections.abc import Collection

from ...crypto.credits import Clearing
from ...protocols.credits import HONOURED_MS, SKEW_MS


def is_payment(
    clearing: Clearing,
    *,
    client: str,
    server: str,
    issuers: Collection[str],
    cost: int,
    since_ms: int,
    now_ms: int,
) -> bool:
    """Whether this buys the client a session of this `cost` at this server, which takes points of `issuers`.

    What was cleared before `since_ms`, when this server began to remember what was spent, is too old.
    """
    transfer = clearing.transfer
    return (
        transfer.issuer in issuers
        and transfer.spender == client
        and transfer.recipient == server
        and transfer.points >= cost
        and max(since_ms, now_ms - HONOURED_MS - SKEW_MS) <= clearing.time_ms <= now_ms + SKEW_MS
        and clearing.is_signed
    )
