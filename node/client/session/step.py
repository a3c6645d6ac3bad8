"""One step of a session on its way through the chain: what is asked of each server, and what comes of it.

Where something fails, `recovery` decides what is done, and `PipelineStep.recover` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import trio

from ....crypto.receipts import Receipt
from ....protocols import wire_pb2 as wire
from ....protocols.inference import pushed_step
from ...errors import BadInput, ServerCheated, ServerFailed, SwarmError
from ..deadlines import DEADLINES, push_patience
from ..request import PushedOther, StreamLost, WireTensor, blames_request, server_failed
from .answers import Answer, UncheckedAnswer
from .chain import Chain, next_interruption, wait_cause
from .history import Input
from .link import ServerLink, proven_lie
from .recovery import (
    Loss,
    Misled,
    Phase,
    Receive,
    Reconnect,
    Reconnected,
    Recover,
    Send,
    ServerError,
    Signal,
    StepAction,
    StepEvent,
    StepState,
    StreamEnded,
    next_action,
)
from .replacement import AnsweredWrong

UNWATCHED_BYTES: Final = 1 << 16
"""Of a step that is sent without a look at how long that takes: it fits the least window of a stream (256 KiB)."""


@dataclass
class Visit:
    """A step at one server, until it is answered there.

    phase: "sending" until it is sent or known to be pushed. asked: what the server is asked, once that is settled.
    generation: of its stream, when it was asked. pushed_before: steps that were pushed to it, when this one was waited
    for as such a step. deadline: for its answer. disturbed: a stream was lost, so that the time says nothing of it.
    """

    phase: Phase = "sending"
    asked: wire.Step | None = None
    generation: int = 0
    pushed_before: int | None = None
    deadline: float | None = None
    disturbed: bool = False


class PipelineStep:
    """A step at the server `index` of a chain, of which it knows no other step.

    With `push` each server is given those after it, and pushes its output to the next one. This client sends the step
    only where that has failed. `several`: others are under way beside it, and are pushed only where servers take
    several. `before`: tokens of a row that are under way before it; None: what its answers take is learnt from.
    `receipt_only`: nobody needs the last server's output for it, and no recovery either.

    Attributes:
        chunk: what enters the server at `index`, or has left the last one.
        unchecked: the answer of that server, once it is here.
        event: what went wrong there and is to be recovered from.
        state: of the recovery at that server. failures: of servers for its blocks.
        reach: servers with an index below have a number for the step.
        scope: of the task that carries the step, if it has one of its own.
    """

    def __init__(
        self,
        chain: Chain,
        given: Input,
        *,
        push: bool,
        several: bool = False,
        before: int | None = None,
        receipt_only: bool = False,
    ) -> None:
        self.given = given
        self.chain = chain
        self.push = push
        self.relayed = not push
        self.several = several
        self.before = before
        self.index = 0
        self.chunk = given.chunk
        self.at = Visit()
        self.unchecked: UncheckedAnswer | None = None
        self.event: StepEvent | None = None
        self.state: StepState | None = None
        self.failures: list[ServerFailed] = []
        self.reach = 0
        self.scope = trio.CancelScope()
        self._impossible: SwarmError | BadInput | None = None
        self.begun_at = trio.current_time()
        self._receipt_only = receipt_only
        self._receipt: Receipt | None = None  # of what left the server before
        self._entered: list[tuple[WireTensor, Receipt | None]] = []  # chunk and receipt at the servers before

    @property
    def link(self) -> ServerLink:
        return self.chain.links[self.index]

    @property
    def is_done(self) -> bool:
        return self.index == len(self.chain.links)

    @property
    def is_at_last(self) -> bool:
        return self.index == len(self.chain.links) - 1

    @property
    def targets(self) -> Sequence[ServerLink]:
        """The servers to which it is pushed when it is sent now."""
        if not self.push:
            return ()
        targets: list[ServerLink] = []
        may_push = self.chain.may_stream if self.several else self.chain.may_push
        for sender, receiver in pairwise(self.chain.links[self.index :]):
            if not may_push(sender, receiver):
                break
            targets.append(receiver)
        return targets

    # --- asking

    async def send(self, anew: bool = False) -> Signal:
        """Sends the step to the server, `anew` as another request than before. STANDBY_READY: it does not read.

        Raises:
            ServerFailed: the server is gone, or holds something else than it should.
        """
        link = self.link
        if link.server.misled:
            raise server_failed(link.server.hop, "what it was pushed may have changed what it holds")
        if anew:
            self.at = Visit()
        if self.at.asked is None:
            self.at.asked = self._request(link)
        self.at.generation = link.server.generation
        if len(self.chunk.payload) <= UNWATCHED_BYTES:
            await link.server.send(self.at.asked, self.chunk)
        elif not await self.chain.send_watched(link, self.at.asked, self.chunk):
            return Signal.STANDBY_READY
        self.at.phase = "sent"
        return Signal.SENT

    def _request(self, link: ServerLink) -> wire.Step:
        last, nbytes = self.chain.links[-1], len(self.chunk.payload)
        targets = [
            target.server.target(nbytes, receipt_only=self._receipt_only and target is last) for target in self.targets
        ]
        self.reach = max(self.reach, self.index + 1 + len(targets))
        return wire.Step(
            sequence=link.server.next_sequence(nbytes),
            position=self.given.position,
            reorder=self.given.reorder,
            route_epoch=self.chain.route_epoch,
            previous_receipt=self._receipt.hash() if self._receipt is not None else b"",
            targets=targets,
            receipt_only=self._receipt_only and link is last,
            long_factors=self.given.long_factors,
            positions=self.given.chunk.layout.positions,
            groups=self.given.chunk.layout.groups,
        )

    async def receive(self, phase: Phase) -> Signal | None:
        """Waits for the server's answer, as long as is due for a step in this `phase`.

        While it is late a standby is prepared. None: the answer is `unchecked` now.

        Raises:
            StreamLost: the stream has ended, or another one has taken its place without the step.
            ServerFailed: the server is silent, refuses, or answers nonsense.
        """
        link, at = self.link, self.at
        assert at.asked is not None
        at.phase = phase
        if at.deadline is None:
            at.deadline = trio.current_time() + self.chain.spec.step_timeout
        if phase == "late":
            return await self._receive_late(link, at.asked, at.deadline)
        patient = min(link.patience(self.chunk, self.before or 0), self.chain.spec.step_timeout)
        missed = phase == "sent" and at.pushed_before is not None
        hurried = missed and link.standby is None
        if phase == "pushed":
            at.generation, at.pushed_before = link.server.generation, link.server.pushed_steps
            due = push_patience(link.server.round_trip, len(self.chunk.payload))
            patient = min(patient, due + link.expected(self.chunk))
        elif missed:
            patient = min(patient, link.patience_once_more(self.chunk))
        if hurried:
            self.chain.prepare_standby(link, late=True, pays=False)  # it may be frozen; else it answers at once
        if phase == "sent" and at.generation != link.server.generation and link.server.held < at.asked.sequence:
            raise StreamLost(
                f"a step was lost with a stream to server {link.server.hop.peer_id}", link.server.hop.peer_id
            )
        self.unchecked = await link.server.read(at.asked, self.chunk, patient)
        if self.unchecked is None:
            return Signal.LATE
        if hurried:
            self.chain.dismiss_standby(link)  # the push was lost, which may be the fault of the server before
        return None

    async def _receive_late(self, link: ServerLink, asked: wire.Step, deadline: float) -> Signal | None:
        while trio.current_time() < deadline:
            # Where this machine stood still itself, the answer is here already.
            self.unchecked = await link.server.read(asked, self.chunk, DEADLINES.standby_poll)
            if self.unchecked is not None:
                return None
            if link.standby_ready:
                return Signal.STANDBY_READY
            self.chain.router.suspect(link.server.hop.peer_id)  # before another step of this client asks it
            self.chain.prepare_standby(link, late=True)
        raise link.server.silent(self.chain.spec.step_timeout)

    async def take(self) -> StepEvent | None:
        """Checks the answer that is here, and goes on to the next server; what went wrong if that cannot be."""
        answer, self.unchecked = self.unchecked, None
        assert answer is not None
        try:
            self._commit(await self.link.server.checked(answer))
        except ServerFailed as error:
            return self.failed(error)
        return None

    def _commit(self, answer: Answer) -> None:
        link, chunk, at, router = self.link, self.chunk, self.at, self.chain.router
        assert at.asked is not None
        if at.phase != "pushed":
            self._judge_push(link)
        signed = answer.receipt.reply_hash if link.server.accountable else b""
        link.history.append(replace(self.given, chunk=chunk, answered=signed))
        link.count(chunk.tokens)
        self.chain.replays.answered()
        router.note_tokens(link.server.hop.peer_id, chunk.tokens)
        if self.before is None and not at.disturbed:
            link.note(chunk.tokens)
            if at.phase != "pushed":
                router.note_transfer(link.server.timing, len(chunk.payload) + len(answer.chunk.payload))
        if link.server.draining:
            self.chain.prepare_standby(link)
        self._entered.append((chunk, self._receipt))
        self.chunk, self._receipt = answer.chunk, answer.receipt
        following = pushed_step(at.asked, answer.receipt.hash()) if at.asked.targets else None
        self.at = Visit("pushed" if following is not None and answer.handed_on else "sending", following)
        self.index += 1
        self.state = None
        self.failures.clear()

    def _judge_push(self, link: ServerLink) -> None:
        """Ends pushing between two servers for a while if this client had to send the second what the first had."""
        if self.index and not self.at.disturbed and self.at.pushed_before == link.server.pushed_steps:
            self._end_pushing(link)

    def _end_pushing(self, link: ServerLink) -> None:
        pair = self.chain.links[self.index - 1].server.hop.peer_id, link.server.hop.peer_id
        self.chain.no_push[pair] = trio.current_time() + DEADLINES.push_retry

    # --- what went wrong

    def failed(self, error: ServerFailed) -> StepEvent:
        """What the error of a server means for the step."""
        self.state = self.state or StepState(self.at.phase)
        if isinstance(error, PushedOther):
            return self._misled(error)
        self.failures.append(error)
        return self._stream_ended() if isinstance(error, StreamLost) else ServerError(blames_request(error))

    def _stream_ended(self) -> StepEvent:
        link, at = self.link, self.at
        assert at.asked is not None
        at.disturbed = True
        reconnector = self.chain.reconnector(link)
        returned = link.server.generation != at.generation  # in the background, before this step noticed
        if not returned:
            reconnector.report_lost()
        path = reconnector.state
        loss = Loss(link.server.kept, path.gone, path.attempts, 1, link.standby_ready, link.server.round_trip)
        return StreamEnded(loss, returned, link.server.held >= at.asked.sequence)

    def _misled(self, error: PushedOther) -> StepEvent:
        """A server has computed what was pushed, and the server before it has answered something else to this client.

        The receipt that came with the push says who lied. If it contradicts the one that came here, the server that
        signed both is replaced. If it does not, nobody can tell, and the step is sent from here. A server that shows no
        receipt is replaced and not blamed.
        """
        link, shown = self.link, error.upstream
        pusher = self.chain.links[self.index - 1].server.hop.peer_id
        self._end_pushing(link)
        self.failures.append(error)
        link.server.misled = self.chain.spec.batch > 1 or (self._receipt_only and self.is_at_last)
        if shown is not None and not shown.is_signed_by(pusher):
            what = f"server {error.peer_id} cannot be believed: what it says it was pushed is not signed by {pusher}"
            self.failures[-1] = ServerCheated(what, error.peer_id)
            return ServerError()
        if shown is None or self._receipt is None:
            return ServerError()
        proof = proven_lie(pusher, self._receipt, shown)
        if proof is None:
            return Misled(proved=False)
        self.failures[-1] = proof
        self.index -= 1
        self.chunk, self._receipt = self._entered.pop()
        self.at = Visit()
        return Misled(proved=True)

    # --- another way

    async def recover(self, event: StepEvent) -> StepEvent | None:
        """Does what follows from `event` at the server. Returns what came of it; None: the answer is here.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            SwarmError: several servers in a row failed at this step.
        """
        chain = self.chain
        if event is Signal.REPLACED:
            # Where one server is silent another may be, and what is pushed to it is missed later.
            self.push = False
        self.state, action = next_action(self.state or StepState(self.at.phase), event)
        # A person may want to know what holds the step up, before it is waited for.
        failure = self.failures[-1] if self.failures else None
        now, patience = trio.current_time(), chain.spec.step_timeout
        chain.interruption = next_interruption(chain.interruption, action, self.link.server.hop, failure, now, patience)
        try:
            with chain.waits.timed(wait_cause(action)):
                return await self._carry_out(action)
        except ServerFailed as error:
            if isinstance(action, Send | Receive):
                return self.failed(error)
            raise

    async def _carry_out(self, action: StepAction) -> StepEvent | None:
        match action:
            case Send():
                return await self.send(action.anew)
            case Receive():
                return await self.receive(action.phase)
            case Reconnect():
                return await self._reconnect(action.head_start)
            case Recover.RACE:
                return await self._race()
            case Recover.REPLACE:
                return await self._replace()
            case Recover.SWITCH:
                return Signal.REPLACED if await self.chain.switch(self.index) else Signal.SWITCH_FAILED
            case _:
                raise self._impossible or SwarmError(
                    f"{len(self.failures)} servers in a row failed at one step: {self.failures[-1]}"
                )

    async def _reconnect(self, head_start: float) -> StepEvent:
        reconnector = self.chain.reconnector(self.link)
        with trio.move_on_after(head_start):
            await reconnector.settled_or_failed()
        if reconnector.state.may_return:
            return Signal.HEAD_START_OVER
        return Signal.SESSION_GONE if reconnector.state.gone else self._reconnected()

    def _reconnected(self) -> Reconnected:
        assert self.at.asked is not None
        self.at.deadline = self._impossible = None
        return Reconnected(self.link.server.held >= self.at.asked.sequence)

    async def _race(self) -> StepEvent:
        """Reconnects and replaces side by side; the first that succeeds goes on.

        A person waits: a session is not waited for beyond the search for others, nor if its answers so far were wrong.
        """
        won: list[StepEvent] = []
        reconnector = self.chain.reconnector(self.link)

        async def reconnect() -> None:
            returned = False
            with trio.move_on_after(DEADLINES.recovery):
                returned = await reconnector.settled()
            if returned:
                won.append(self._reconnected())
                nursery.cancel_scope.cancel()

        async def take_others() -> None:
            if await self._replace() is Signal.REPLACED:
                won.insert(0, Signal.REPLACED)  # the links have changed already
            elif not isinstance(self._impossible, AnsweredWrong):
                return
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reconnect)
            nursery.start_soon(take_others)
        return won[0] if won else Signal.NOBODY_ELSE

    async def _replace(self) -> Signal:
        self._impossible = None
        try:
            await self.chain.replace(self.index, self.given.position, self.failures[-1])
        except (SwarmError, BadInput) as error:
            self._impossible = error
            return Signal.NOBODY_ELSE
        return Signal.REPLACED
