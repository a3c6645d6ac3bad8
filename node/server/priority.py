"""Who is served first where not all can be at once: pure decisions. Without points it is first come, first served."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ...crypto.credits import Clearing
from ...protocols.credits import HONOURED_MS, SKEW_MS

MOST_OVERTAKING: Final = 3
"""Who has paid goes ahead of the first who has not so many times in a row; then it is the other's turn."""


def next_in_line(paid: Sequence[bool], overtaken: int) -> int:
    """The place in a queue, in order of arrival, of who is next. `paid` says for each whether it has priority;
    `overtaken` how many went ahead of the first that has none since one of those was served."""
    if True not in paid or False not in paid:
        return 0
    return paid.index(overtaken < MOST_OVERTAKING)


def now_overtaken(paid: Sequence[bool], chosen: int, overtaken: int) -> int:
    """`overtaken` after `chosen` was served."""
    return overtaken + 1 if paid[chosen] and False in paid else 0


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
