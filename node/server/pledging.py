"""What a server pledges while it holds one span."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ...crypto.identity import Identity
from ...crypto.pledge import Pledge
from .admission import Hosted

PLEDGE_SECONDS: Final = 24 * 3600.0
_RENEW_SECONDS: Final = PLEDGE_SECONDS / 2

Pledger = Callable[[], Pledge | None]
"""The pledge for what is opened now; None for none."""


def pledger(identity: Identity, hosted: Hosted, deposit: int) -> Pledger:
    """Pledges `deposit` points for the receipts of what is hosted. Renewed when half of its time is over."""
    current: Pledge | None = None

    def pledge() -> Pledge:
        nonlocal current
        now = time.time_ns() // 1_000_000
        if current is None or not current.is_in_force(now + round(1000 * _RENEW_SECONDS)):
            current = Pledge(
                server=identity.peer_id,
                model_version=hosted.model_version,
                span=(hosted.span.start, hosted.span.end),
                dtype=hosted.dtype,
                quantisation=hosted.quantisation,
                deposit=deposit,
                from_ms=now,
                until_ms=now + round(1000 * PLEDGE_SECONDS),
            ).signed(identity)
        return current

    return pledge
