"""A session that runs through several chains which share no server, and compares what they answer at every step.

The person's own check of servers, without a validator: a wrong answer is noticed before it is used. What most chains
agree on goes on. If the model folder has all weights, the blocks in which the chains part are computed here, one at a
time. That decides. The servers at fault are banned here, and another chain takes the place of theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
import trio

from ....protocols.ids import Span
from ...errors import BadInput, NoChainError, PetalnodeError, SwarmError
from ...models.folder import has_experts
from ...models.quantisation import is_exact
from ...swarm.routing import Hop
from ...verification.judging import no_padding
from ...verification.tolerances import Tolerance
from ..chunks import from_chunks
from ..deadlines import DEADLINES, Waits
from ..request import WireTensor
from ..router import Router
from .comparing import (
    NO_TOLERANCE,
    Disagreement,
    Settlement,
    SpanAnswer,
    Weights,
    decide,
    plan_chains,
    questioned,
    settle,
    span_answers,
    tolerance_between,
)
from .replacement import steps_of
from .session import ClientSession
from .stream import SessionSpec

REPLACE_RETRY: Final = 30.0
"""Seconds after which another chain is looked for again where there was none."""

SUSPECTED_LIAR_SECONDS: Final = 600.0
"""For which servers of which one has lied are a last resort in other sessions; in this one they are not used again."""
_UNKNOWN: Final = "chains cannot be compared: nobody has measured how much honest servers differ"

log = logging.getLogger(__name__)


class ReplicaChain:
    """One of the chains that are compared: its session, and the client as it sees it: without other chains' servers and
    those with other weights."""

    def __init__(self, client: Router, compared: ComparedSession, wait: bool, planned: tuple[Hop, ...] = ()) -> None:
        self._client = client
        self._compared = compared
        self._planned = planned
        self._coming = {hop.peer_id for hop in planned}
        self.session = ClientSession(cast(Router, self), compared.spec, wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @property
    def used(self) -> set[str]:
        """The servers that it has, and those that it means to have."""
        return self._coming | self.session.coming | {hop.peer_id for hop in self.session.route}

    async def route(self, spec: SessionSpec, excluded: Collection[str] = ()) -> tuple[Hop, ...]:
        async with self._compared.choosing:
            planned, self._planned = self._planned, ()
            if not planned or excluded:
                planned = await self._client.route(spec, {*excluded, *self._compared.forbidden(self)})
            self._coming = {hop.peer_id for hop in planned}
            return planned

    async def standby(
        self, spec: SessionSpec, route: Sequence[Hop], index: int, excluded: Collection[str] = ()
    ) -> tuple[Hop, ...]:
        async with self._compared.choosing:
            return await self._client.standby(spec, route, index, {*excluded, *self._compared.forbidden(self)})


class ComparedSession:
    """As `ClientSession`, through `count` chains; made by `SwarmClient.session`."""

    def __init__(self, client: Router, spec: SessionSpec, count: int, wait: bool) -> None:
        # Several sessions to take up again are none: what is kept is the text.
        self.spec = replace(spec, keep=0.0)
        self.choosing = trio.Lock()
        self._client = client
        self._count = count
        self._wait = wait
        self._chains: list[ReplicaChain] = []
        self._weights = Weights("", "")
        self._recovered = 0
        self._suspects: set[str] = set()
        self._retry_at = 0.0
        self._alone = False
        self._torn = False

    @property
    def route(self) -> tuple[Hop, ...]:
        """The chain whose answers are taken."""
        return self._chains[0].session.route if self._chains else ()

    @property
    def routes(self) -> tuple[tuple[Hop, ...], ...]:
        """All chains."""
        return tuple(chain.session.route for chain in self._chains)

    @property
    def recoveries(self) -> int:
        return self._recovered + sum(chain.session.recoveries for chain in self._chains)

    @property
    def waits(self) -> Waits:
        """What the steps of all chains waited for."""
        return Waits.of(*(chain.session.waits for chain in self._chains))

    @property
    def position(self) -> int:
        """Tokens that each row holds; may be set lower."""
        return self._chains[0].session.position if self._chains else 0

    @position.setter
    def position(self, position: int) -> None:
        for chain in self._chains:
            chain.session.position = position

    def fit(self, length: int) -> None:
        """As `ClientSession.fit`."""
        for chain in self._chains:
            chain.session.fit(length)

    def chunk_tokens(self, tokens: int, values: int) -> int:
        return min((chain.session.chunk_tokens(tokens, values) for chain in self._chains), default=1)

    def saved(self) -> None:
        """Another process cannot take it up."""

    async def resume(self, saved: object) -> bool:
        """It never can."""
        return False

    def forbidden(self, chain: ReplicaChain) -> set[str]:
        """The servers that a chain must not use."""
        others = [other.used for other in self._chains if other is not chain]
        same = {peer_id for peer_id, weights in self._comparable().items() if self._weights.includes(weights)}
        return self._suspects.union(*others) | {server.peer_id for server in self._client.servers()} - same

    async def open(self) -> None:
        """Finds chains that share no server, and opens a session at each.

        Raises:
            NoChainError: there are not enough; the text says how many there are.
            BadInput: no server takes a session like this.
        """
        routes = await self._plan()
        for route in routes:
            self._chains.append(ReplicaChain(self._client, self, self._wait, route))
        if self._tolerance(routes) is None:
            raise SwarmError(f"{_UNKNOWN} that compute in {self._weights} on different devices")
        try:
            for failure in _failures(await self._all(ClientSession.open)).values():
                raise failure
        except BaseException:
            await self.close()
            raise

    async def _plan(self) -> list[tuple[Hop, ...]]:
        fresh = False
        while True:
            candidates = await self._client.candidates(adapter=self.spec.adapter)
            weights = self._comparable()
            known = [candidate for candidate in candidates if candidate.peer_id in weights]
            if candidates and not known and (fresh or not self._wait):
                raise SwarmError(f"{_UNKNOWN} that compute as those of this swarm: {', '.join(self._kinds())}")
            model, demand = self._client.model.name, self._client.demand(self.spec)
            try:
                self._weights, routes = plan_chains(known, weights, self.spec.span, self._count, model, demand)
            except NoChainError as error:
                if fresh and not self._wait:
                    raise self._client.explained(error, bool(candidates)) from None
                await self._client.refresh()
                await trio.sleep(DEADLINES.retry_interval if fresh else 0)
                fresh = True
            else:
                return routes

    async def close(self) -> None:
        chains, self._chains = self._chains, []
        for chain in chains:
            await chain.session.close()

    async def step(self, chunks: Sequence[WireTensor], reorder: Sequence[int] = ()) -> list[WireTensor]:
        """As `ClientSession.step`, through all chains; returns what they agree on.

        Raises:
            SwarmError: they do not agree, and nobody knows which is right; or there is nothing left to compare.
        """
        if self._torn:
            raise SwarmError("this session was cut off while its rows changed places; open another")
        await self._fill_up()
        if len(self._chains) < 2 and not self._alone:
            raise SwarmError("there are no two chains left to compare: start more servers, or compare fewer chains")
        before = self.position
        self._torn = bool(reorder)
        done = False
        try:
            outputs = await self._all(ClientSession.step, chunks, reorder)
            failures = _failures(outputs)
            for failure in failures.values():
                if isinstance(failure, BadInput):
                    raise failure
            for chain in failures:
                await self._drop(chain)
                log.warning("one of the chains that are compared is lost: %s", failures[chain])
            if failures and len(self._chains) < 2:
                raise SwarmError(f"there are no two chains left to compare: {next(iter(failures.values()))}")
            answers = [outputs[chain] for chain in self._chains]
            leading = await self._compare(before, answers)
            done = True
        finally:
            self._torn = bool(reorder) and not done
            if not done:
                for chain in self._chains:  # some have taken the step, and others not
                    chain.session.position = min(before, chain.session.position)
        return leading

    async def _all(self, function: Any, *arguments: Any) -> dict[ReplicaChain, Any]:
        """What it returns of the session of every chain, side by side, or the error that it raises there."""
        results: dict[ReplicaChain, Any] = {}
        async with trio.open_nursery() as nursery:
            for chain in self._chains:
                nursery.start_soon(self._one, results, chain, function, arguments)
        return results

    async def _one(
        self, results: dict[ReplicaChain, Any], chain: ReplicaChain, function: Any, arguments: Sequence[Any]
    ) -> None:
        try:
            results[chain] = await function(chain.session, *arguments)
        except (SwarmError, BadInput) as error:
            results[chain] = error

    # --- comparing

    def _comparable(self) -> Mapping[str, Weights]:
        """What each server says that it computes in, where it is known how much honest ones differ."""
        weights = {server.peer_id: Weights(server.dtype, server.quantisation) for server in self._client.servers()}
        devices = {server.peer_id: server.device for server in self._client.servers()}
        blocks, spec = len(self.spec.span), self.spec
        return {
            peer_id: computed_in
            for peer_id, computed_in in weights.items()
            if tolerance_between(computed_in, [devices[peer_id]], blocks, spec.codec, spec.dtype, 1) is not None
        }

    def _kinds(self) -> list[str]:
        servers = self._client.servers()
        return sorted(
            {f"{Weights(server.dtype, server.quantisation)} on {server.device or 'what?'}" for server in servers}
        )

    def _tolerance(self, routes: Sequence[Sequence[Hop]]) -> Tolerance | None:
        devices = {server.peer_id: server.device for server in self._client.servers()}
        used = [devices.get(hop.peer_id, "") for route in routes for hop in route]
        return tolerance_between(
            self._weights,
            used or [""],
            len(self.spec.span),
            self.spec.codec,
            self.spec.dtype,
            max(len(route) for route in routes),
        )

    async def _compare(self, before: int, answers: Sequence[list[WireTensor]]) -> list[WireTensor]:
        """The answer that is believed; the chains with others are gone after it."""
        if len(self._chains) < 2:
            return answers[0]
        tolerance = self._tolerance(self.routes)
        if tolerance is None:
            raise SwarmError("a server has taken another's place whose answers nobody knows how to compare")
        payloads = [[chunk.payload for chunk in answer] for answer in answers]
        if tolerance == NO_TOLERANCE and all(answer == payloads[0] for answer in payloads):
            return answers[0]
        counts = no_padding(self.spec.left_padding, self.spec.batch, before, sum(chunk.tokens for chunk in answers[0]))
        found = await trio.to_thread.run_sync(
            lambda: decide([from_chunks(answer)[counts].unsqueeze(0) for answer in answers], tolerance)
        )
        if found.agreed and not found.dissenting:
            return answers[0]
        answered = [
            span_answers([(link.server.hop, link.history) for link in chain.session.links], before, from_chunks(answer))
            for chain, answer in zip(self._chains, answers, strict=True)
        ]
        blocks = await trio.to_thread.run_sync(questioned, answered, counts, tolerance)
        wrong = await trio.to_thread.run_sync(self._recompute, answered, blocks, counts)
        steady = is_exact(self._weights.quantisation) or not has_experts(self._client.model.folder.path)
        verdict = await trio.to_thread.run_sync(settle, found, answered, counts, tolerance, wrong, steady)
        await self._carry_out(verdict)
        disagreement = Disagreement(
            before,
            len(answers),
            len(self._chains) if verdict.kept else 0,
            verdict.settled,
            tuple(sorted(verdict.liars)),
            tuple(sorted(verdict.suspects)),
            found.error,
            found.tolerance,
        )
        self._client.disagreements.append(disagreement)
        if not verdict.kept:
            raise SwarmError(
                f"{disagreement}. Compare 3 chains or more, so that most of them decide, or keep all weights of the "
                "model here: then the blocks in question are computed on this machine"
            )
        log.warning("%s", disagreement)
        return answers[verdict.kept[0]]

    async def _carry_out(self, verdict: Settlement) -> None:
        """Bans and suspects servers, and replaces the chains that are not believed."""
        for peer_id, reason in verdict.liars.items():
            self._client.accuse(peer_id, reason)
        for peer_id in verdict.suspects:
            self._client.suspect(peer_id, SUSPECTED_LIAR_SECONDS)
        self._suspects |= verdict.suspects
        kept = [self._chains[index] for index in verdict.kept]
        if kept:
            for chain in [chain for chain in self._chains if chain not in kept]:
                await self._drop(chain)
            self._chains = kept
            self._alone = len(kept) == 1
            self._retry_at = 0.0
            await self._fill_up()

    def _recompute(
        self, answered: Sequence[Sequence[SpanAnswer]], blocks: Span, counts: torch.Tensor
    ) -> dict[str, str] | None:
        """The servers for `blocks` whose answers own weights prove wrong, and why; None without own weights."""
        from ...models import compute_manifest
        from ...verification.observed import Observed
        from ...verification.recomputation import SessionQuestion
        from ...verification.verdicts import Judge

        asked = [answer for chain in answered for answer in chain if answer.hop.span.overlaps(blocks)]
        folder = self._client.model.folder
        if self.spec.adapter is not None:
            return None
        try:
            if compute_manifest(folder).version != self._client.model.version:
                return None
            seen = []
            for claim in asked:
                steps = steps_of(claim.history.needed(claim.history.end))
                # What it says of its device is its own word: the widest tolerance applies.
                seen.append(
                    Observed(
                        claim.hop.peer_id,
                        claim.hop.span,
                        self._weights.dtype,
                        self._weights.quantisation,
                        SessionQuestion(claim.hop.span, steps, self.spec.left_padding),
                        (claim.claimed,),
                        codec=self._answer_codec,
                        counts=counts,
                    )
                )
            verdicts = Judge(folder.path, coarser=False).verdicts(seen)
        except (PetalnodeError, ValueError) as error:
            log.info("what the chains differ in cannot be computed here: %s", error)
            return None
        return {verdict.peer_id: verdict.reason for verdict in verdicts if verdict.verdict == "faulty"}

    @property
    def _answer_codec(self) -> str:
        """What an answer was rounded by on its way; a coarser dtype than the server's rounds like the codec."""
        rounded = self.spec.dtype != "float32" and self._weights.dtype == "float32" and self.spec.codec == "none"
        return self.spec.dtype if rounded else self.spec.codec

    # --- chains come and go

    async def _drop(self, chain: ReplicaChain) -> None:
        self._chains.remove(chain)
        self._recovered += chain.session.recoveries + 1
        self._client.start_soon(chain.session.close)

    async def _fill_up(self) -> None:
        """Brings other chains to where the first one is, if some are missing and there are servers for them."""
        while 0 < len(self._chains) < self._count and trio.current_time() >= self._retry_at:
            chain = ReplicaChain(self._client, self, wait=False)
            leading = self._chains[0].session
            self._chains.append(chain)  # so that its servers are known to be taken
            position, ready = leading.position, False
            try:
                await chain.session.open()
                if position:
                    for step in leading.links[0].history.replay(position, chain.session.max_step_tokens):
                        chain.session.position = step.position
                        await chain.session.step([step.chunk], step.reorder, long_factors=step.long_factors)
                    chain.session.position = position
                ready = True
            except (SwarmError, BadInput) as error:
                log.info("no chain takes the place of the one that was lost: %s", error)
                self._retry_at = trio.current_time() + REPLACE_RETRY
            finally:
                if not ready:
                    self._chains.remove(chain)
                    self._client.start_soon(chain.session.close)
        if len(self._chains) > 1:
            self._alone = False


Session = ClientSession | ComparedSession
"""What `SwarmClient.session` opens."""


def _failures(results: Mapping[ReplicaChain, Any]) -> dict[ReplicaChain, SwarmError | BadInput]:
    return {chain: error for chain, error in results.items() if isinstance(error, (SwarmError, BadInput))}
