"""Where peers ask a validator what they have, and have it cleared: its side of `/petalnode/credits/1`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from ...crypto.credits import Clearing, Credit, CreditQuery, DepositOrder, Transfer
from ...protocols import wire_pb2 as wire
from ...protocols.credits import MAX_HEADER, CreditsStream, serve_credits
from ...protocols.framing import StreamClosed
from ...protocols.ids import CREDITS
from ...protocols.inference import Refusal
from ..errors import MachineError
from ..swarm.swarm import Swarm
from .account import NotCleared
from .ledger import Ledger

IDLE_TIMEOUT: Final = 30.0
MOST_STREAMS: Final = 64
MOST_WAITING: Final = 64
"""Orders that wait for the disk."""

T = TypeVar("T")


class CreditsService:
    """Serves `ledger` to every peer of a swarm that listens."""

    def __init__(self, swarm: Swarm, ledger: Ledger) -> None:
        self._ledger = ledger
        self._streams = 0
        self._waiting = 0
        self._turn = trio.Lock()
        swarm.set_handler(CREDITS, wire.CreditsFrame, self._serve, max_header=MAX_HEADER, max_payload=0)

    async def credit(self, query: CreditQuery) -> Credit:
        return await self._run(lambda: self._ledger.credit(query))

    async def clear(self, transfer: Transfer) -> Clearing:
        return await self._run(lambda: self._ledger.clear(transfer))

    async def deposit(self, order: DepositOrder) -> bytes:
        return await self._run(lambda: self._ledger.deposit(order))

    async def _serve(self, stream: CreditsStream) -> None:
        if self._streams >= MOST_STREAMS:
            busy = Refusal(wire.ERROR_BUSY, "this validator is asked by too many peers at once: ask again")
            await stream.send(wire.CreditsFrame(error=busy.to_wire()), timeout=IDLE_TIMEOUT)
            return
        self._streams += 1
        try:
            await serve_credits(stream, self, timeout=IDLE_TIMEOUT)
        except StreamClosed:
            pass  # as all of them end
        finally:
            self._streams -= 1

    async def _run(self, order: Callable[[], T]) -> T:
        """Carries out an order, in a thread: it waits for the disk.

        Raises:
            Refusal: it is not carried out, for the reason that is said.
        """
        if self._waiting >= MOST_WAITING:
            raise Refusal(wire.ERROR_BUSY, "this validator has too many orders to carry out: ask again")
        self._waiting += 1
        try:
            async with self._turn:
                return await trio.to_thread.run_sync(order)
        except NotCleared as error:
            raise Refusal(wire.ERROR_NOT_ALLOWED, str(error)) from None
        except MachineError:
            raise Refusal(wire.ERROR_INTERNAL, "this validator cannot use its ledger") from None
        finally:
            self._waiting -= 1
