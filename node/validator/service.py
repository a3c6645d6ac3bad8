"""The validator's loop: probes the servers of a model one after the other, judges their answers, publishes evidence.

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
from ..client.deadlines import DEADLINES
from ..client.swarm_model import SwarmModel
from ..errors import PetalnodeError, ServerCheated, SwarmError
from ..models import ModelFolder
from ..swarm.config import SwarmConfig
from ..swarm.swarm import Swarm
from ..trust.bundle import Bundle, Measurement, batch_bundle, equivocation_bundle, resigned, session_bundle
from ..trust.receipt_log import SessionLog
from ..verification.evidence_check import check_evidence
from ..verification.observed import Observed
from ..verification.verdicts import Compared, Judge, Verdict, worst_of
from .auditing import ReceiptAuditService
from .endorsing import Endorser, announced_device
from .history import History
from .probe_inputs import ProbeModel
from .probe_plan import Probe, ProbedServer, next_probe, waiting_seconds, whole_round
from .prober import Probed, run_probe

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 3
"""Chains over which a server is tried, because another server of a chain may be the one that fails."""


@dataclass(frozen=True)
class ValidatorOptions:
    """
    Attributes:
        config: of the hosts that probes are made from; each gets a key of its own.
        on_verdict: called with each verdict that is reported.
        on_judged: called in a worker thread with each answer of a probe and its verdict.
        evidence_dir, accuser: evidence is signed by `accuser` and saved in `evidence_dir`, if there are both.
    """

    config: SwarmConfig
    model: ProbeModel
    judge: Judge
    history: History
    on_verdict: Callable[[Verdict], object]
    on_judged: Callable[[Observed, Verdict], object] | None = None
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
        return self._options.model.swarm_model

    async def servers(self) -> dict[str, Announcement]:
        """Those that take sessions now, by peer id.

        Raises:
            SwarmError: nobody answers, or nobody serves the model.
        """
        view = await self._swarm.refresh(model_version=self._model.version, everything=True, timeout=DEADLINES.refresh)
        found = {
            server.peer_id: server
            for server in view.servers(self._model.version, now=time.time())
            if server.state is ServerState.ONLINE and server.num_blocks == self._model.num_blocks
        }
        if not found:
            raise SwarmError(f"nobody in this swarm serves {self._model.name} (yet): there is nothing to validate")
        return found

    async def once(self) -> list[Verdict]:
        """One verdict for every server, after it has answered for all of its blocks.

        Raises:
            SwarmError: nobody answers, or nobody serves the model.
            PetalnodeError: the answers cannot be recomputed here.
        """
        announced = await self.servers()
        serving = [ProbedServer(server.peer_id, server.span) for server in announced.values()]
        done: list[Probed] = []
        failed: dict[str, SwarmError] = {}
        for probe in whole_round(serving, self._model.num_blocks, self._options.random):
            await self._probe_into(probe, done, failed)
        for _ in range(_ATTEMPTS - 1):
            for peer_id in _silent(announced, done):
                # A server that has failed is left out of the chains to the others.
                usable = [server for server in serving if server.peer_id == peer_id or server.peer_id not in failed]
                for probe in whole_round(usable, self._model.num_blocks, self._options.random, targets=[peer_id]):
                    await self._probe_into(probe, done, failed)
        verdicts = await self._judged(done)
        silent = _silent(announced, done)
        found = []
        for peer_id, server in announced.items():
            of_server = [verdict for verdict in verdicts if verdict.peer_id == peer_id]
            if of_server and (peer_id not in silent or any(verdict.verdict == "faulty" for verdict in of_server)):
                found.append(worst_of(of_server, server.span))
            else:
                found.append(await self._failed(peer_id, server.span, failed.get(peer_id)))
        for verdict in found:
            self._report(verdict)
        return found

    async def run(self, interval: float) -> None:
        """Probes for ever, every `interval` seconds in the mean. Failures of the swarm are waited out."""
        while True:
            await trio.sleep(waiting_seconds(interval, self._options.random))
            try:
                announced = await self.servers()
                serving = [ProbedServer(server.peer_id, server.span) for server in announced.values()]
                since = self._options.history.seconds_since(self._model.version)
                probe = next_probe(serving, since, self._model.num_blocks, self._options.random)
                probed = await self._probe(probe)
            except SwarmError:
                continue
            verdicts = await self._judged([probed])
            asked = {log.peer_id for log in probed.archive.sessions}
            for hop in probe.route:
                of_server = [verdict for verdict in verdicts if verdict.peer_id == hop.peer_id]
                if of_server:
                    self._report(worst_of(of_server, hop.span))
                elif hop.peer_id in probed.failures or hop.peer_id in asked:
                    self._report(await self._failed(hop.peer_id, hop.span, probed.failures.get(hop.peer_id)))

    async def judge_for_others(self) -> None:
        """Judges for ever the receipts that clients share, and the evidence that others publish: the swarm has to
        listen, and clients to call it. Only audits find servers that are honest to strangers.

        Not where blocks come from peers for it: by a few KB a stranger would have it fetch a model.
        """
        folder, device = self._model.folder, self._options.judge.device
        if folder.fetches:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Endorser(self._swarm, folder, device=device).run)
            await self._audit(folder, device)

    async def _audit(self, folder: ModelFolder, device: str) -> None:
        service = ReceiptAuditService(self._swarm, self._model.version)
        while True:
            shared = await service.next()
            try:
                said = announced_device(self._swarm, shared.bundle.accused)
                checked = await trio.to_thread.run_sync(
                    lambda: check_evidence(shared.bundle, folder, device=device, server_device=said),  # noqa: B023
                    abandon_on_cancel=True,
                )
                blocks = Span(*shared.receipt.span)
            except PetalnodeError as error:
                log.warning("the receipt of %s cannot be judged: %s", shared.client, error)
                continue
            except Exception as error:  # strangers chose what was computed
                log.warning("the receipt of %s cannot be judged here", shared.client, exc_info=error)
                continue
            if not checked.signed:
                log.info("%s shares what says nothing of %s: %s", shared.client, shared.bundle.accused, checked.reason)
                continue
            verdict = Verdict(
                shared.bundle.accused,
                blocks,
                "faulty" if checked.proven else "inconclusive" if checked.inconclusive else "ok",
                checked.reason,
                checked.error,
                checked.tolerance,
                "receipts",
                1,
            )
            if checked.proven and self._options.accuser is not None:
                measured = Measurement(checked.error, checked.tolerance)
                bundle = resigned(shared.bundle, self._options.accuser, measured)
                await self._swarm.publish_evidence(bundle, recomputed=True, one_bit=checked.one_bit)
                verdict = await trio.to_thread.run_sync(self._with_evidence, verdict, bundle)
            self._report(verdict)

    async def _probe(self, probe: Probe) -> Probed:
        return await run_probe(self._options.config, self._options.model, probe)

    async def _probe_into(self, probe: Probe, done: list[Probed], failed: dict[str, SwarmError]) -> None:
        probed = await self._probe(probe)
        done.append(probed)
        failed.update(probed.failures)

    async def _failed(self, peer_id: str, blocks: Span, error: SwarmError | None) -> Verdict:
        """Of a server without an answer that can be judged: faulty only if two receipts of its own contradict each
        other. Whatever else is wrong, others may have made it so."""
        proof = error.proof if isinstance(error, ServerCheated) else None
        if proof is None:
            reason = "no probe has answers of it that can be judged" if error is None else str(error)
            return Verdict(peer_id, blocks, "inconclusive", reason, None, None)
        verdict = Verdict(peer_id, blocks, "faulty", str(error), None, None, "receipts", 1)
        if self._options.accuser is None:
            return verdict
        bundle = equivocation_bundle(self._options.accuser, peer_id, *proof)
        await self._swarm.publish_evidence(bundle, recomputed=False)
        return await trio.to_thread.run_sync(self._with_evidence, verdict, bundle)

    async def _judged(self, done: Collection[Probed]) -> list[Verdict]:
        answers = await trio.to_thread.run_sync(self._compared, done, abandon_on_cancel=True)
        return [await self._judged_one(compared) for compared in answers]

    def _compared(self, done: Collection[Probed]) -> list[Compared]:
        return self._options.judge.compare([observed for probed in done for observed in probed.observed()])

    async def _judged_one(self, compared: Compared) -> Verdict:
        verdict = self._options.judge.verdict(compared)
        if self._options.on_judged is not None:
            await trio.to_thread.run_sync(self._options.on_judged, compared.observed, verdict)
        if verdict.verdict == "ok":
            tokens = sum(answer.shape[0] * answer.shape[1] for answer in compared.observed.claimed)
            self._swarm.trust.note_tokens(verdict.peer_id, tokens, recomputed=True)
        if verdict.verdict != "faulty" or self._options.accuser is None:
            return verdict
        bundle = await trio.to_thread.run_sync(evidence_of, compared, verdict, self._options.accuser)
        if bundle is None:
            return verdict
        if (verdict.error or 0.0) > (verdict.tolerance or 0.0):  # a third party can check no more than distances
            await self._swarm.publish_evidence(bundle, recomputed=True, one_bit=verdict.one_bit)
        return await trio.to_thread.run_sync(self._with_evidence, verdict, bundle)

    def _with_evidence(self, verdict: Verdict, bundle: Bundle) -> Verdict:
        """Saves the evidence in `evidence_dir`, if there is one, and names the file in the verdict."""
        if self._options.evidence_dir is None:
            return verdict
        file = self._options.evidence_dir / f"{bundle.accused[-8:]}-{bundle.id.hex()[:16]}.safetensors"
        try:
            bundle.save(file)
        except OSError as error:
            log.warning("evidence cannot be kept in %s: %s", self._options.evidence_dir, error)
            return verdict
        return replace(verdict, evidence=file)

    def _report(self, verdict: Verdict) -> None:
        self._options.history.add(self._model.version, verdict)
        self._options.on_verdict(verdict)


def evidence_of(compared: Compared, verdict: Verdict, accuser: Identity) -> Bundle | None:
    """Evidence of a fault from the receipts of an answer, for anyone with the weights. None if they are not enough.

    Of a session it shows the answer that is farthest off, and what led to it.
    """
    source = compared.observed.source
    measured = Measurement(verdict.error or 0.0, verdict.tolerance or 0.0, compared.observed.device)
    try:
        if isinstance(source, SessionLog):
            worst = max(range(len(compared.steps)), key=lambda index: compared.steps[index].worst)
            return session_bundle(accuser, source, worst, measured)
        return None if source is None else batch_bundle(accuser, source, measured)
    except ValueError:
        return None


def _silent(announced: Mapping[str, Announcement], done: Collection[Probed]) -> list[str]:
    """Servers that have not answered in a conversation for all of their blocks."""
    answered = {
        (session.peer_id, Span(*session.entries[0].receipt.span))
        for probed in done
        for session in probed.archive.sessions
        if session.entries
    }
    return [peer_id for peer_id, server in announced.items() if (peer_id, server.span) not in answered]
