"""The validator as issuer of points: it answers `/petalnode/credits/1`, pays for verified work and takes deposits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from ...crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer
from ...protocols import wire_pb2 as wire
from ...protocols.credits import CREDITS, CreditsStream, serve_credits
from ...protocols.framing import StreamClosed
from ...protocols.inference import Refusal
from ..errors import MachineError
from ..network.transport.places import Place, Places
from ..swarm.swarm import Swarm
from ..trust.bundle import Bundle
from ..verification.observed import Observed
from ..verification.verdicts import Verdict
from .ledger import Ledger, NotCleared

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IssuerLimits:
    """What a validator that keeps accounts takes on at once."""

    idle_timeout: float = 30.0
    max_streams: int = 64
    max_pending_orders: int = 64
    """Orders that wait for the disk."""
    max_pending_faults: int = 256


ISSUER: Final = IssuerLimits()
T = TypeVar("T")


class CreditsService:
    """Handles `/petalnode/credits/1` on a swarm that listens: balances, transfers and deposits in `ledger`."""

    def __init__(self, swarm: Swarm, ledger: Ledger) -> None:
        self._ledger = ledger
        self._swarm = swarm
        self._places = Places(ISSUER.max_streams)
        self._pending = 0
        self._writing = trio.Lock()
        swarm.set_handler(CREDITS, self._serve)

    async def credit(self, query: CreditQuery) -> Credit:
        async with self._turn():
            return await trio.to_thread.run_sync(self._ledger.credit, query)

    async def clear(self, transfer: Transfer) -> Clearing:
        async with self._turn():
            return await trio.to_thread.run_sync(self._ledger.clear, transfer)

    async def deposit(self, order: DepositOrder) -> bytes:
        async with self._turn():
            return await trio.to_thread.run_sync(self._ledger.deposit, order)

    async def _serve(self, stream: CreditsStream) -> None:
        with self._places.take(stream.peer_id, self._swarm.host.origin_of(stream.peer_id)) as place:
            if place is not None:
                with contextlib.suppress(StreamClosed):  # the usual end of a stream
                    await serve_credits(stream, _Working(self, place), timeout=ISSUER.idle_timeout)
        if place is None or place.scope.cancelled_caught:
            busy = Refusal(wire.ERROR_BUSY, "this validator is asked by too many peers at once: ask again")
            await stream.send(wire.CreditsFrame(error=busy.to_wire()), timeout=ISSUER.idle_timeout)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """For one order, which is carried out in a worker thread, because it waits for the disk.

        Raises:
            Refusal: with the reason why it was not carried out.
        """
        if self._pending >= ISSUER.max_pending_orders:
            raise Refusal(wire.ERROR_BUSY, "this validator has too many orders to carry out: ask again")
        self._pending += 1
        try:
            async with self._writing:
                yield
        except NotCleared as error:
            raise Refusal(wire.ERROR_NOT_ALLOWED, str(error)) from None
        except MachineError:
            raise Refusal(wire.ERROR_INTERNAL, "this validator cannot use its ledger") from None
        finally:
            self._pending -= 1


class _Working:
    """What carries out the orders of one stream, whose `place` is at work meanwhile."""

    def __init__(self, service: CreditsService, place: Place) -> None:
        self._service = service
        self._place = place

    async def credit(self, query: CreditQuery) -> Credit:
        with self._place.working():
            return await self._service.credit(query)

    async def clear(self, transfer: Transfer) -> Clearing:
        with self._place.working():
            return await self._service.clear(transfer)

    async def deposit(self, order: DepositOrder) -> bytes:
        with self._place.working():
            return await self._service.deposit(order)


def points_for(observed: Observed) -> int:
    """One point for each token of each row through each block that was recomputed."""
    return len(observed.span) * sum(answer.shape[0] * answer.shape[1] for answer in observed.claimed)


class Rewards:
    """Books in `ledger` what its owner verifies, and takes the deposits of servers whose faults are proved.

    Only the validator's own probes earn points: a server could make any number of receipts with a client of its own.
    A ledger that cannot be used is logged and ends nothing.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._send, self._receive = trio.open_memory_channel[Bundle](ISSUER.max_pending_faults)

    def verified(self, observed: Observed, verdict: Verdict) -> None:
        """Pays for an answer whose verdict is "ok". Waits for the disk."""
        if verdict.verdict != "ok":
            return
        try:
            if not self._ledger.issue(verdict.peer_id, points_for(observed)):
                log.warning("the ledger is full: server %s gets no points", verdict.peer_id)
        except MachineError as error:
            log.error("%s", error)

    def proven(self, bundle: Bundle) -> None:
        """Queues evidence whose fault was checked here. Does not wait."""
        try:
            self._send.send_nowait(bundle)
        except trio.WouldBlock:
            log.warning("too many faults at once: that of %s costs no points", bundle.accused)

    async def take_deposits(self) -> None:
        """Takes the deposits of the queued faults until it is cancelled."""
        async for bundle in self._receive:
            try:
                await trio.to_thread.run_sync(self._ledger.forfeit, bundle.accused, bundle.fault, bundle.accuser)
            except MachineError as error:
                log.error("%s", error)
