"""The validator: goes round the servers of a model, one probe after another, and says what it found.

Validator peers of Petals (NeurIPS 2023, appendix H), which describes them and leaves them to be built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Final

import trio

from ...protocols.announcement import Announcement, ServerState
from ..client.core import SwarmModel
from ..client.deadlines import REFRESH_TIMEOUT
from ..errors import SwarmError
from ..swarm.swarm import Swarm, SwarmConfig
from .history import History
from .plan import Probe, Serving, next_probe, waiting_seconds, whole_round
from .prober import Own, Probed, run_probe
from .rewards import Rewards
from .verdicts import Compared, Judge, Verdict, worst_of

_ATTEMPTS: Final = 3
"""Chains over which a server is tried, because another one of a chain may be the one that fails."""


@dataclass(frozen=True)
class ValidatorOptions:
    """`config` is that of the hosts that probes are made from; each gets a key of its own.

    `rewards` pays the servers.
    """

    config: SwarmConfig
    own: Own
    judge: Judge
    history: History
    on_verdict: Callable[[Verdict], object]
    rewards: Rewards | None = None
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

    async def _probe(self, probe: Probe) -> Probed:
        return await run_probe(self._options.config, self._options.own, probe)

    async def _probe_into(self, probe: Probe, done: list[Probed], failed: dict[str, str]) -> None:
        probed = await self._probe(probe)
        done.append(probed)
        failed.update({peer: str(error) for peer, error in probed.failures.items()})

    async def _judged(self, done: Collection[Probed]) -> list[Verdict]:
        observed = [each for probed in done for each in probed.observed]

        def judged() -> list[Verdict]:
            return [self._judged_one(each) for each in self._options.judge.compare(observed)]

        return await trio.to_thread.run_sync(judged, abandon_on_cancel=True)

    def _judged_one(self, compared: Compared) -> Verdict:
        verdict = self._options.judge.verdict(compared)
        if self._options.rewards is not None:
            self._options.rewards.verified(compared.observed, verdict)
        return verdict

    def _tell(self, verdict: Verdict) -> None:
        self._options.history.add(self._model.version, verdict)
        self._options.on_verdict(verdict)


def _silent(announced: Mapping[str, Announcement], done: Collection[Probed]) -> list[str]:
    """Servers that have not answered in a conversation for all of their blocks."""
    seen = {(each.peer_id, each.span) for probed in done if probed.probe.kind == "chat" for each in probed.observed}
    return [peer_id for peer_id, server in announced.items() if (peer_id, server.span) not in seen]
