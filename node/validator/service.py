"""The validator: goes round the servers of a model, one probe after another, and says what it found.

Validator peers of Petals (NeurIPS 2023, appendix H), which describes them and leaves them to be built.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

import trio

from ...crypto.identity import Identity
from ...protocols.announcement import Announcement, ServerState
from ...protocols.ids import Span
from ..client.deadlines import REFRESH_TIMEOUT
from ..client.swarm_model import SwarmModel
from ..credits.rewards import Rewards
from ..errors import PetalnodeError, SwarmError
from ..swarm.config import SwarmConfig
from ..swarm.swarm import Swarm
from ..trust.bundle import Bundle, Found, resigned
from ..verification.evidence_check import check_evidence
from ..verification.verdicts import Compared, Judge, Verdict, worst_of
from .accusation import bundle_of, save_evidence
from .auditing import ReceiptAuditService
from .history import History
from .probe_plan import Probe, Serving, next_probe, waiting_seconds, whole_round
from .prober import Probed, ProbeModel, run_probe

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 3
"""Chains over which a server is tried, because another one of a chain may be the one that fails."""


@dataclass(frozen=True)
class ValidatorOptions:
    """`config` is that of the hosts that probes are made from; each gets a key of its own.

    Evidence is signed by `accuser` and kept in `evidence_dir`, if there are both.
    `rewards` pays the servers.
    """

    config: SwarmConfig
    own: ProbeModel
    judge: Judge
    history: History
    on_verdict: Callable[[Verdict], object]
    rewards: Rewards | None = None
    evidence_dir: Path | None = None
    accuser: Identity | None = None
    random: Random = SystemRandom()  # noqa: RUF009  (has no state)


class Validator:
    """Probes the servers of one model that `swarm` knows."""

    def __init__(self, swarm: Swarm, options: ValidatorOptions) -> None:
        self._swarm = swarm
        self._options = options

    @property
    def _model(self) -> SwarmModel:
        return self._options.own.model

    async def servers(self) -> dict[str, Announcement]:
        """Those that take sessions now, by peer id.

        Raises:
            SwarmError: nobody answers, or nobody serves the model.
        """
        view = await self._swarm.refresh(model_version=self._model.version, timeout=REFRESH_TIMEOUT)
        found = {
            each.peer_id: each
            for each in view.servers(self._model.version, now=time.time())
            if each.state is ServerState.ONLINE and each.num_blocks == self._model.num_blocks
        }
        if not found:
            raise SwarmError(f"nobody in this swarm serves {self._model.name} (yet): there is nothing to validate")
        return found

    async def once(self) -> list[Verdict]:
        """One verdict for every server, after it has answered for all of its blocks.

        Raises:
            SwarmError: nobody answers, or nobody serves the model.
            PetalnodeError: the truth cannot be computed here.
        """
        announced = await self.servers()
        serving = [Serving(each.peer_id, each.span) for each in announced.values()]
        done: list[Probed] = []
        failed: dict[str, str] = {}
        for probe in whole_round(serving, self._model.num_blocks, self._options.random):
            await self._probe_into(probe, done, failed)
        for _ in range(_ATTEMPTS - 1):
            for peer_id in _silent(announced, done):
                # Who has failed does not stand in the way of others any more.
                around = [each for each in serving if each.peer_id == peer_id or each.peer_id not in failed]
                for probe in whole_round(around, self._model.num_blocks, self._options.random, targets=[peer_id]):
                    await self._probe_into(probe, done, failed)
        verdicts = await self._judged(done)
        silent = _silent(announced, done)
        found = []
        for peer_id, server in announced.items():
            own = [each for each in verdicts if each.peer_id == peer_id]
            if own and (peer_id not in silent or any(each.verdict == "faulty" for each in own)):
                found.append(worst_of(own, server.span))
            else:
                reason = failed.get(peer_id, "it was not reached by any probe")
                found.append(Verdict(peer_id, server.span, "inconclusive", reason, None, None))
        for verdict in found:
            self._tell(verdict)
        return found

    async def run(self, interval: float) -> None:
        """Probes for ever, every `interval` seconds in the mean. What goes wrong with the swarm is waited out."""
        while True:
            await trio.sleep(waiting_seconds(interval, self._options.random))
            try:
                announced = await self.servers()
                serving = [Serving(each.peer_id, each.span) for each in announced.values()]
                since = self._options.history.seconds_since(self._model.version)
                probe = next_probe(serving, since, self._model.num_blocks, self._options.random)
                probed = await self._probe(probe)
            except SwarmError:
                continue
            verdicts = await self._judged([probed])
            for hop in probe.route:
                own = [each for each in verdicts if each.peer_id == hop.peer_id]
                if own:
                    self._tell(worst_of(own, hop.span))
                elif hop.peer_id in probed.failures:
                    reason = str(probed.failures[hop.peer_id])
                    self._tell(Verdict(hop.peer_id, hop.span, "inconclusive", reason, None, None))

    async def audit(self) -> None:
        """Judges for ever what clients show of their own receipts: the swarm has to listen, and clients to call it.

        Only this finds servers that are honest to strangers.
        """
        folder, device = self._model.folder, self._options.judge.device
        desk = ReceiptAuditService(self._swarm, lambda receipt: receipt.model_version == self._model.version)
        while True:
            shown = await desk.next()
            try:
                checked = await trio.to_thread.run_sync(
                    lambda: check_evidence(shown.bundle, folder, device=device),  # noqa: B023  (awaited at once)
                    abandon_on_cancel=True,
                )
            except PetalnodeError as error:
                log.warning("what %s shows cannot be judged: %s", shown.client, error)
                continue
            right = checked.tolerance > 0 and checked.error <= checked.tolerance
            verdict = Verdict(
                shown.bundle.accused,
                Span(*shown.receipt.span),
                "faulty" if checked.proven else "ok" if right else "inconclusive",
                checked.reason,
                checked.error,
                checked.tolerance,
                "receipts",
                1,
            )
            if checked.proven and self._options.accuser is not None:
                found = Found(checked.error, checked.tolerance)
                bundle = resigned(shown.bundle, self._options.accuser, found)
                await self._swarm.publish_evidence(bundle, recomputed=True)
                verdict = await trio.to_thread.run_sync(self._kept, verdict, bundle)
            self._tell(verdict)

    async def _probe(self, probe: Probe) -> Probed:
        return await run_probe(self._options.config, self._options.own, probe)

    async def _probe_into(self, probe: Probe, done: list[Probed], failed: dict[str, str]) -> None:
        probed = await self._probe(probe)
        done.append(probed)
        failed.update({peer: str(error) for peer, error in probed.failures.items()})

    async def _judged(self, done: Collection[Probed]) -> list[Verdict]:
        def compared() -> list[Compared]:
            return self._options.judge.compare([each for probed in done for each in probed.observed()])

        every = await trio.to_thread.run_sync(compared, abandon_on_cancel=True)
        return [await self._judged_one(each) for each in every]

    async def _judged_one(self, compared: Compared) -> Verdict:
        verdict = self._options.judge.verdict(compared)
        if self._options.rewards is not None:
            await trio.to_thread.run_sync(self._options.rewards.verified, compared.observed, verdict)
        if verdict.verdict == "ok":
            tokens = sum(each.shape[0] * each.shape[1] for each in compared.observed.claimed)
            self._swarm.trust.note_tokens(verdict.peer_id, tokens, recomputed=True)
        if verdict.verdict != "faulty" or self._options.accuser is None:
            return verdict
        bundle = await trio.to_thread.run_sync(bundle_of, compared, verdict, self._options.accuser)
        if bundle is None:
            return verdict
        if (verdict.error or 0.0) > (verdict.tolerance or 0.0):  # others see no more than distances
            await self._swarm.publish_evidence(bundle, recomputed=True)
        return await trio.to_thread.run_sync(self._kept, verdict, bundle)

    def _kept(self, verdict: Verdict, bundle: Bundle) -> Verdict:
        """Writes evidence down, if it is wanted."""
        if self._options.evidence_dir is None:
            return verdict
        try:
            return replace(verdict, evidence=save_evidence(self._options.evidence_dir, bundle))
        except OSError as error:
            log.warning("evidence cannot be kept in %s: %s", self._options.evidence_dir, error)
            return verdict

    def _tell(self, verdict: Verdict) -> None:
        self._options.history.add(self._model.version, verdict)
        self._options.on_verdict(verdict)


def _silent(announced: Mapping[str, Announcement], done: Collection[Probed]) -> list[str]:
    """Servers that have not answered in a conversation for all of their blocks."""
    seen = {
        (each.peer_id, Span(*each.entries[0].receipt.span))
        for probed in done
        for each in probed.archive.sessions
        if each.entries
    }
    return [peer_id for peer_id, server in announced.items() if (peer_id, server.span) not in seen]
