"""Recomputes the evidence that others publish, and endorses it if it proves the fault.

If it is refuted, its accuser and those who endorsed it have lied: they are banned.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

import trio

from ...protocols.framing import PeerError
from ...protocols.inference import Refusal
from ..errors import PetalnodeError
from ..models import ModelFolder
from ..swarm.swarm import Swarm
from ..trust.bundle import BadBundle, Bundle
from ..trust.evidence_message import EvidenceMessage
from ..verification.evidence_check import Outcome, check_evidence

log = logging.getLogger(__name__)

MAX_PENDING: Final = 16
MAX_REMEMBERED: Final = 1000
FETCH_TIMEOUT: Final = 60.0


class Endorser:
    """Recomputes published evidence, one piece at a time; `run` is its task.

    `folder` holds the whole of the one model that this validator can judge.

    Attributes:
        checked: the outcome of the last pieces of evidence, by id; None for one that waits.
    """

    def __init__(self, swarm: Swarm, folder: ModelFolder, *, device: str = "cpu") -> None:
        self.checked: OrderedDict[bytes, Outcome | None] = OrderedDict()
        self._swarm = swarm
        self._folder = folder
        self._device = device
        self._send, self._receive = trio.open_memory_channel[tuple[EvidenceMessage, str]](MAX_PENDING)
        swarm.on_evidence(self._queue)

    def _queue(self, message: EvidenceMessage, author: str) -> None:
        if message.evidence_id in self.checked or self._swarm.trust.is_banned(author):
            return
        try:
            self._send.send_nowait((message, author))
        except trio.WouldBlock:
            return  # other validators get it, too
        self._note(message.evidence_id, None)

    async def run(self) -> None:
        """Runs until it is cancelled. Nothing that a peer sends ends it."""
        async for message, author in self._receive:
            try:
                bundle = message.bundle or await self._swarm.fetch_evidence(
                    author, message.evidence_id, addrs=message.addrs, timeout=FETCH_TIMEOUT
                )
                await self._judge(message, bundle)
            except (PeerError, Refusal, BadBundle, PetalnodeError) as error:
                log.info("evidence against %s cannot be checked: %s", message.accused, error)

    async def _judge(self, message: EvidenceMessage, bundle: Bundle) -> None:
        if bundle.accused != message.accused or bundle.evidence.kind != "answer":
            self._distrust(message, bundle, "it is about something else than was said")
            return
        outcome = await trio.to_thread.run_sync(
            lambda: check_evidence(bundle, self._folder, device=self._device), abandon_on_cancel=True
        )
        self._note(message.evidence_id, outcome)
        if outcome.proven:
            await self._swarm.publish_evidence(bundle, recomputed=True)
        elif not outcome.inconclusive:
            self._distrust(message, bundle, outcome.reason)

    def _distrust(self, message: EvidenceMessage, bundle: Bundle, reason: str) -> None:
        liars = {bundle.accuser, *(endorsement.validator for endorsement in message.endorsements)}
        for liar in liars - {self._swarm.peer_id}:
            why = f"its evidence against {message.accused} was refuted here: {reason}"
            self._swarm.trust.ban(liar, why, "evidence")

    def _note(self, evidence_id: bytes, outcome: Outcome | None) -> None:
        self.checked[evidence_id] = outcome
        while len(self.checked) > MAX_REMEMBERED:
            self.checked.popitem(last=False)
