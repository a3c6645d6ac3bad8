"""What a server pledges while it holds one span."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final, Protocol

import trio

from ....crypto.identity import Identity
from ....crypto.pledge import Pledge
from ....crypto.statement import now_ms
from ...errors import SwarmError
from ..requests.admission import Hosted
from ..tallies import ChangeSignal

log = logging.getLogger(__name__)

PLEDGE_SECONDS: Final = 24 * 3600.0
_RENEW_SECONDS: Final = PLEDGE_SECONDS / 2
_RETRY_SECONDS: Final = 300.0


class Depositor(Protocol):
    """An account of points with the validator `issuer`, of which some can be left there as a deposit."""

    issuer: str

    async def deposit(self, points: int, until_ms: int) -> bytes:
        """Leaves points with the validator for a pledge; returns its voucher. Raises SwarmError."""


class Pledging:
    """Pledges `deposit` points for the receipts of what is hosted. Renewed when half of its time is over."""

    def __init__(self, identity: Identity, hosted: Hosted, deposit: int) -> None:
        self._identity = identity
        self._hosted = hosted
        self._deposit = deposit
        self._pledge: Pledge | None = None

    def current(self) -> Pledge:
        """The pledge for a session that is opened now."""
        now = now_ms()
        pledge = self._pledge
        # One that a validator backs is used to its end, should the validator be away when it is to be renewed.
        lasting = now if pledge is not None and pledge.holder else now + round(1000 * _RENEW_SECONDS)
        # It may not have begun yet: the clock was ahead when it was made.
        if pledge is None or not (pledge.is_in_force(now) and pledge.is_in_force(lasting)):
            pledge = self._pledge = self._made(now).signed(self._identity)
        return pledge

    async def keep_deposited(self, depositor: Depositor, changed: ChangeSignal) -> None:
        """Has a validator keep what is pledged, again and again; `changed` is set when the pledge is another one.
        Until the validator has the points, and when it has not, the pledge is a mere promise."""
        failed = False
        while True:
            pledge = self._made(now_ms())
            try:
                voucher = await depositor.deposit(pledge.deposit, pledge.until_ms)
            except SwarmError as error:
                log.log(logging.DEBUG if failed else logging.WARNING, "the pledge has no deposit: %s", error)
                failed = True
                await trio.sleep(_RETRY_SECONDS)
                continue
            failed = False
            self._pledge = replace(pledge, holder=depositor.issuer, voucher=voucher).signed(self._identity)
            changed.set()
            await trio.sleep(_RENEW_SECONDS)

    def _made(self, now: int) -> Pledge:
        hosted = self._hosted
        return Pledge(
            server=self._identity.peer_id,
            model_version=hosted.model_version,
            span=(hosted.span.start, hosted.span.end),
            dtype=hosted.dtype,
            quantisation=hosted.quantisation,
            deposit=self._deposit,
            from_ms=now,
            until_ms=now + round(1000 * PLEDGE_SECONDS),
        )
