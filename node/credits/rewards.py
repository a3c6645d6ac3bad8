"""What a validator finds, in points: verified work earns some, a proved fault takes the deposit."""

from __future__ import annotations

import logging
from typing import Final

import trio

from ...crypto.canonical import digest
from ..errors import MachineError
from ..trust.bundle import Bundle
from ..verification.observed import Observed
from ..verification.verdicts import Verdict
from .ledger import Ledger

log = logging.getLogger(__name__)

_MOST_WAITING: Final = 256


def points_for(observed: Observed) -> int:
    """One for each token of each row through each block that was recomputed."""
    return len(observed.span) * sum(each.shape[0] * each.shape[1] for each in observed.claimed)


def fault_id(bundle: Bundle) -> bytes:
    """Of the fault, whoever brings the evidence and however much of the session it shows: what the server signed."""
    evidence = bundle.evidence
    if evidence.HasField("work"):
        signed = [evidence.work.receipt]
    elif evidence.steps:
        signed = [evidence.steps[-1].receipt]
    else:  # of two answers to one request both, whatever their order; else the last one, which broke the pledge
        signed = list(evidence.receipts if evidence.kind == "equivocation" else evidence.receipts[-1:])
    return digest("petalnode/fault/1", bundle.accused, sorted(receipt.signature for receipt in signed))


class Rewards:
    """Books what `ledger`'s owner finds, and what evidence proves that others bring.

    Only the validator's own probes earn: of the receipts that clients show, a server could have made any number with a
    client of its own.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in, self._out = trio.open_memory_channel[Bundle](_MOST_WAITING)

    def verified(self, observed: Observed, verdict: Verdict) -> None:
        """Pays for work that is right. Waits for the disk. A ledger that cannot be used is said so and ends nothing."""
        if verdict.verdict != "ok":
            return
        try:
            if not self._ledger.issue(verdict.peer_id, points_for(observed)):
                log.warning("the ledger is full: server %s gets no points", verdict.peer_id)
        except MachineError as error:
            log.error("%s", error)

    def proven(self, bundle: Bundle) -> None:
        """Hears of evidence whose fault was checked here. Does not wait."""
        try:
            self._in.send_nowait(bundle)
        except trio.WouldBlock:
            log.warning("too many faults at once: that of %s costs no points", bundle.accused)

    async def take_deposits(self) -> None:
        """Takes the deposits of those whose faults were checked here, until it is cancelled."""
        async for bundle in self._out:
            try:
                await trio.to_thread.run_sync(self._ledger.forfeit, bundle.accused, fault_id(bundle), bundle.accuser)
            except MachineError as error:
                log.error("%s", error)
