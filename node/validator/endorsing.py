"""Recomputes the evidence that others publish, and endorses it if it proves the fault.

If it is refuted, its accuser and those who endorsed it have lied: they are banned. Nobody is banned for what others
have made of evidence: tensors that do not belong to it, or the name of another server, are the author's of the message.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Final

import trio

from ...protocols.framing import PeerError
from ...protocols.inference import Refusal
from ..errors import PetalnodeError
from ..models import ModelFolder
from ..swarm.swarm import Swarm
from ..trust.bundle import BadBundle, Bundle
from ..trust.evidence_message import EvidenceMessage, is_answer_recent
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
                await self._judge(message, author, bundle)
            except (PeerError, Refusal, BadBundle, PetalnodeError) as error:
                log.info("evidence against %s cannot be checked: %s", message.accused, error)
                self._forget(message.evidence_id)
            except Exception as error:
                log.warning("evidence against %s cannot be checked here", message.accused, exc_info=error)
                self._note(
                    message.evidence_id, Outcome(False, f"it cannot be checked here: {error}", inconclusive=True)
                )

    async def _judge(self, message: EvidenceMessage, author: str, bundle: Bundle) -> None:
        if bundle.accused != message.accused:
            # The author and the endorsers have signed who is accused; the accuser has signed another name.
            self._distrust(message, {author}, f"evidence {bundle.id.hex()[:12]} is about another server")
            self._forget(message.evidence_id)
            return
        if not is_answer_recent(bundle, time.time()):
            self._note(message.evidence_id, Outcome(False, "it is old", inconclusive=True))
            return
        outcome = await trio.to_thread.run_sync(
            lambda: check_evidence(bundle, self._folder, device=self._device), abandon_on_cancel=True
        )
        if outcome.exchanged:
            # The accuser has signed none of the tensors, and the endorsers have seen others.
            self._ban(author, f"it exchanged the tensors of evidence {bundle.id.hex()[:12]}: {outcome.reason}")
            self._forget(message.evidence_id)
            return
        self._note(message.evidence_id, outcome)
        if outcome.proven:
            await self._swarm.publish_evidence(bundle, recomputed=True)
        elif not outcome.inconclusive:
            self._distrust(message, {bundle.accuser}, outcome.reason)

    def _distrust(self, message: EvidenceMessage, liars: set[str], reason: str) -> None:
        """Bans `liars` and who endorsed the evidence against the server that the message names."""
        for liar in liars | {endorsement.validator for endorsement in message.endorsements}:
            self._ban(liar, f"its evidence against {message.accused} was refuted here: {reason}")

    def _ban(self, peer_id: str, reason: str) -> None:
        if peer_id != self._swarm.peer_id:
            self._swarm.trust.ban(peer_id, reason, "evidence")

    def _forget(self, evidence_id: bytes) -> None:
        """What came was not the evidence of this id, which another peer may still bring."""
        self.checked.pop(evidence_id, None)

    def _note(self, evidence_id: bytes, outcome: Outcome | None) -> None:
        self.checked[evidence_id] = outcome
        while len(self.checked) > MAX_REMEMBERED:
            self.checked.popitem(last=False)
