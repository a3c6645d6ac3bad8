"""A validator hears of evidence that has to be recomputed, recomputes it, and says so if it holds.

If it does not hold, whoever brought it has lied, and so has who endorsed it: neither is believed here any more.
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

MOST_WAITING: Final = 16
MOST_REMEMBERED: Final = 1000
FETCH_TIMEOUT: Final = 60.0


class Endorser:
    """Recomputes what others accuse servers of, one piece of evidence at a time; `run` is its task.

    `folder` holds the whole of the one model that this validator can judge.

    Attributes:
        checked: what became of each piece of evidence, by id; the last few.
    """

    def __init__(self, swarm: Swarm, folder: ModelFolder, version: bytes, *, device: str = "cpu") -> None:
        self.checked: OrderedDict[bytes, Outcome | None] = OrderedDict()
        self._swarm = swarm
        self._folder = folder
        self._version = version
        self._device = device
        self._in, self._out = trio.open_memory_channel[tuple[EvidenceMessage, str]](MOST_WAITING)
        swarm.on_evidence(self._hear)

    def _hear(self, notice: EvidenceMessage, maker: str) -> None:
        if notice.evidence_id in self.checked or self._swarm.trust.is_banned(maker):
            return
        try:
            self._in.send_nowait((notice, maker))
        except trio.WouldBlock:
            return  # others will hear of it, too
        self._note(notice.evidence_id, None)

    async def run(self) -> None:
        """Runs for ever. Nothing that a peer sends ends it."""
        async for notice, maker in self._out:
            try:
                bundle = notice.bundle or await self._swarm.fetch_evidence(
                    maker, notice.evidence_id, addrs=notice.addrs, timeout=FETCH_TIMEOUT
                )
                await self._judge(notice, bundle)
            except (PeerError, Refusal, BadBundle, PetalnodeError) as error:
                log.info("evidence against %s cannot be checked: %s", notice.accused, error)

    async def _judge(self, notice: EvidenceMessage, bundle: Bundle) -> None:
        if bundle.accused != notice.accused or bundle.evidence.kind != "answer":
            self._distrust(notice, bundle, "it is about something else than was said")
            return
        outcome = await trio.to_thread.run_sync(
            lambda: check_evidence(bundle, self._folder, device=self._device), abandon_on_cancel=True
        )
        self._note(notice.evidence_id, outcome)
        if outcome.proven:
            await self._swarm.publish_evidence(bundle, recomputed=True)
        elif not outcome.inconclusive:
            self._distrust(notice, bundle, outcome.reason)

    def _distrust(self, notice: EvidenceMessage, bundle: Bundle, reason: str) -> None:
        liars = {bundle.accuser, *(endorsement.validator for endorsement in notice.endorsements)} - {
            self._swarm.peer_id
        }
        for liar in liars:
            self._swarm.trust.ban(liar, f"its evidence against {notice.accused} was refuted here: {reason}", "evidence")

    def _note(self, evidence_id: bytes, outcome: Outcome | None) -> None:
        self.checked[evidence_id] = outcome
        while len(self.checked) > MOST_REMEMBERED:
            self.checked.popitem(last=False)
