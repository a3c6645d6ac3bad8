"""One step of a session on its way through the chain: carries out what `recovery` decides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final, Literal

import trio

from ....crypto.receipts import Receipt
from ....protocols import wire_pb2 as wire
from ....protocols.inference import pushed_step
from ...errors import BadInput, ServerCheated, ServerFailed, SwarmError
from ..deadlines import PUSH_RETRY, RECOVERY_TIMEOUT, STANDBY_POLL, push_patience
from ..request import PushedOther, StreamLost, WireTensor, blames_request, server_failed
from .answers import Answer, UncheckedAnswer
from .chain import Chain, next_trouble, wait_cause
from .history import Input
from .link import WHOLE_CHAIN, Handover, ProvenLiar, ServerLink, WholeChain, proven_lie
from .recovery import (
    Answered,
    Loss,
    Misled,
    Phase,
    Receive,
    Reconnect,
    Reconnected,
    Recover,
    Replaced,
    Send,
    ServerError,
    Signal,
    StepAction,
    StepEvent,
    StepState,
    StreamEnded,
    begin_step,
    next_action,
)

UNWATCHED_BYTES: Final = 1 << 16
"""Of a step that is sent without a look at how long that takes: it fits the least window of a stream (256 KiB)."""


class StepRun:
    """Runs `step` through `links`, replacing in that list whichever server fails.

    With `push` the first server is given the other servers, and those beyond its `stage`, and each
    pushes its output to the next one; this client sends a step only where that has failed. `before`: tokens of a row
    that are under way in steps before this one. `stage`: what `links` are of the chain.
    `entry`: how the step comes from a server before `links`; a proof that this one lies is raised as `ProvenLiar`.

    Attributes:
        smooth: no server was replaced or reconnected so far.
    """

    def __init__(
        self,
        chain: Chain,
        links: list[ServerLink],
        step: Input,
        *,
        push: bool,
        before: int | None = None,
        entry: Handover | None = None,
        stage: WholeChain = WHOLE_CHAIN,
    ) -> None:
        self.smooth = True
        self._stage = stage
        self._entry = entry
        self._chain = chain
        self._links = links
        self._step = step
        self._push = push
        self._before = before or 0
        self._alone = before is None
        self._sent_ahead = False
        self._index = 0
        self._chunk = step.chunk  # what enters the server at `index`
        self._receipt = entry.receipt if entry is not None else None  # of what left the server before it
        self._entered: list[tuple[WireTensor, Receipt | None]] = []  # the same for the servers before, in order
        self._asked = entry.asked if entry is not None else None  # what the server at `index` is asked, if settled
        self._handed_on = False
        self._generation = 0  # of its stream, when it was asked
        self._deadline: float | None = None  # for its answer
        self._pushed = False  # by the server before
        self._pushed_before = 0  # steps, until then
        self._disturbed = False  # a stream was lost: what the answer took says nothing of the server
        self._failures: list[ServerFailed] = []
        self._impossible: SwarmError | BadInput | None = None
        self._state: StepState | None = None
        self._action: StepAction = Recover.FINISH
        self._since: float | None = None  # of an action that is not at its end
        self._begun_at = 0.0
        self._unchecked: UncheckedAnswer | None = None

    async def send(self) -> None:
        """Sends the step, if no server has it yet; `arrive` and `run` wait for the answers."""
        await self._go_on("sent")

    async def arrive(self) -> WireTensor | None:
        """What leaves the last server, before its receipt is checked; None if that is done. `run` has to follow."""
        await self._go_on("arrived")
        return None if self._unchecked is None else self._unchecked.chunk

    def start_check(self) -> None:
        """Has what has arrived checked in another thread, beside what this one computes."""
        if self._unchecked is not None:
            self._unchecked.start_check()

    async def run(self) -> WireTensor:
        """What leaves the last server.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            SwarmError: several servers in a row failed at this step.
        """
        await self._go_on()
        return self._chunk

    async def settle(self) -> None:
        """Counts an answer that has arrived and nobody wants any more. Never raises."""
        if self._unchecked is not None:
            with trio.CancelScope(shield=True):
                await self._noting_failures(self._check, "sent")

    async def _go_on(self, until: Literal["sent", "arrived"] | None = None) -> None:
        """Carries the step on until it is sent, the last answer is there to be checked, or all is done."""
        if self._state is None:
            self._state, self._action = self._begun()
            self._begun_at = trio.current_time()
        elif self._action is Recover.FINISH:
            return
        paused = False
        try:
            while self._action is not Recover.FINISH and not paused:
                if until == "sent" and isinstance(self._action, Receive):
                    paused = True
                else:
                    paused = not await self._take_action(until == "arrived")
        finally:
            self._chain.trouble = None
            if not paused:
                self._chain.waits.add("step", trio.current_time() - self._begun_at)

    async def _take_action(self, may_pause: bool) -> bool:
        """One action of the step; false if what has arrived is left unchecked."""
        assert self._state is not None
        self._note_trouble(self._action)
        begun, self._since = self._since or trio.current_time(), None
        event = await self._carry_out(self._action, may_pause)
        if event is None:
            self._since = begun
            return False
        self._chain.waits.add(wait_cause(self._action), trio.current_time() - begun)
        if self.smooth and not (isinstance(event, Answered) or event in (Signal.SENT, Signal.LATE)):
            self.smooth = False
            self._stage.roughen(self._step)
        if isinstance(event, Replaced):
            # Where one server is silent another may be, and what is pushed to it is missed later.
            self._push = False
        self._state, self._action = next_action(self._state, event)
        return True

    def _begun(self) -> tuple[StepState, StepAction]:
        if self._sent_ahead:
            self._deadline = trio.current_time() + self._chain.spec.step_timeout
        if self._entry is None or self._sent_ahead:
            return begin_step(len(self._links), self._sent_ahead)
        return next_action(StepState(1 + len(self._links), "sent"), Answered(self._entry.handed_on))

    @property
    def handover(self) -> Handover:
        """What has left the last server, after `run`."""
        return Handover(self._chunk, self._receipt, self._asked, self._handed_on, self._links[self._index - 1])

    @property
    def is_current(self) -> bool:
        """Whether what was sent ahead was not lost with a stream."""
        return not self._sent_ahead or self._generation == self._link.server.generation

    async def send_ahead(self) -> bool:
        """Sends the step to the first server, which pushes it on; `run` then waits for the answers. Steps before this
        one may be under way. False where not all servers can push to each other, and nothing is sent, or where a
        standby was ready before the server had read it.

        Raises:
            StreamLost: the server is gone or does not read.
        """
        if not all(self._chain.may_push(*pair) for pair in pairwise(self._links)):
            return False
        self._sent_ahead = await self._send(self._asked is None) is Signal.SENT
        return self._sent_ahead

    def _note_trouble(self, action: StepAction) -> None:
        """Keeps what holds the step up, before it is waited for: a person may want to know."""
        failure = self._failures[-1] if self._failures else None
        now, patience = trio.current_time(), self._chain.spec.step_timeout
        self._chain.trouble = next_trouble(self._chain.trouble, action, self._link.server.hop, failure, now, patience)

    @property
    def _link(self) -> ServerLink:
        return self._links[self._index]

    @property
    def _link_before(self) -> ServerLink | None:
        return self._links[self._index - 1] if self._index else self._entry.before if self._entry is not None else None

    async def _carry_out(self, action: StepAction, may_pause: bool) -> StepEvent | None:
        """What came of an action; None if an answer has arrived and is not checked yet."""
        match action:
            case Send():
                return await self._noting_failures(self._send, action.anew)
            case Receive():
                if self._unchecked is None:
                    event = await self._noting_failures(self._receive, action.phase)
                    if self._unchecked is None or (may_pause and self._index == len(self._links) - 1):
                        return event
                return await self._noting_failures(self._check, action.phase)
            case Reconnect():
                return await self._reconnect(action.head_start)
            case Recover.RACE:
                return await self._race()
            case Recover.REPLACE:
                return await self._replace()
            case Recover.SWITCH:
                servers = await self._chain.switch(self._links, self._index)
                return Replaced(servers) if servers else Signal.SWITCH_FAILED
            case _:
                raise self._impossible or SwarmError(
                    f"{len(self._failures)} servers in a row failed at one step: {self._failures[-1]}"
                )

    async def _noting_failures(
        self, function: Callable[..., Awaitable[StepEvent | None]], argument: object
    ) -> StepEvent | None:
        try:
            return await function(argument)
        except PushedOther as error:
            return self._misled(error)
        except StreamLost as error:
            self._failures.append(error)
            return self._stream_ended()
        except ServerFailed as error:
            self._failures.append(error)
            return ServerError(blames_request(error))

    # --- asking

    async def _send(self, anew: bool) -> StepEvent:
        link = self._link
        if link.server.misled:
            raise server_failed(link.server.hop, "what it was pushed may have changed what it holds")
        if anew or self._asked is None:
            self._asked = self._request()
            self._deadline, self._pushed = None, False
        self._begin()
        if len(self._chunk.payload) > UNWATCHED_BYTES:
            sent = await self._chain.send_watched(link, self._asked, self._chunk)
            return Signal.SENT if sent else Signal.STANDBY_READY
        await link.server.send(self._asked, self._chunk)
        return Signal.SENT

    def _begin(self) -> None:
        server = self._link.server
        self._generation = server.generation
        if self._deadline is None:
            self._deadline = trio.current_time() + self._chain.spec.step_timeout

    def _request(self) -> wire.Step:
        targets = []
        unwanted = self._stage.unwanted(self._step)
        if self._push:
            for sender, receiver in pairwise([*self._links[self._index :], *self._stage.beyond()]):
                if not self._chain.may_push(sender, receiver):
                    break
                targets.append(receiver.server.target(len(self._chunk.payload), receipt_only=receiver is unwanted))
        return wire.Step(
            sequence=self._link.server.next_sequence(len(self._chunk.payload)),
            position=self._step.position,
            reorder=self._step.reorder,
            route_epoch=self._chain.route_epoch,
            previous_receipt=self._receipt.hash() if self._receipt is not None else b"",
            targets=targets,
            receipt_only=self._link is unwanted,
            long_factors=self._step.long_factors,
        )

    async def _receive(self, phase: Phase) -> StepEvent | None:
        """Waits for a server's answer; one that is late has a standby prepared. None: it is `_unchecked` now."""
        link, asked = self._link, self._asked
        assert asked is not None
        nbytes, round_trip = len(self._chunk.payload), link.server.round_trip
        patient = min(link.patience(self._chunk, self._before), self._chain.spec.step_timeout)
        if phase == "late":
            return await self._receive_late(link, asked)
        if phase == "pushed":
            self._begin()
            self._pushed, self._pushed_before = True, link.server.pushed_steps
            patient = min(patient, push_patience(round_trip, nbytes) + link.expected(self._chunk))
        self._unchecked = await link.server.read(asked, self._chunk, patient)
        return Signal.LATE if self._unchecked is None else None

    async def _check(self, phase: Phase) -> StepEvent:
        answer, self._unchecked = self._unchecked, None
        assert answer is not None
        return self._answered(await self._link.server.checked(answer), phase)

    async def _receive_late(self, link: ServerLink, asked: wire.Step) -> StepEvent | None:
        self._chain.router.suspect(link.server.hop.peer_id)  # before another step of this client asks it
        while self._deadline is not None and trio.current_time() < self._deadline:
            self._chain.prepare_standby(link, late=True)
            self._unchecked = await link.server.read(asked, self._chunk, STANDBY_POLL)
            if self._unchecked is not None:
                return None
            if link.standby_ready:
                return Signal.STANDBY_READY
        raise link.server.silent(self._chain.spec.step_timeout)

    def _answered(self, answer: Answer, phase: Phase) -> StepEvent:
        """Commits the step at this server, and goes on to the next one."""
        link, chunk, asked = self._link, self._chunk, self._asked
        assert asked is not None
        if phase != "pushed":
            self._judge_push(link)
        link.history.append(replace(self._step, chunk=chunk))
        link.count(chunk.tokens)
        self._chain.router.note_tokens(link.server.hop.peer_id, chunk.tokens)
        if self._alone and not self._disturbed:
            link.note(chunk.tokens)
        if self._alone and not self._disturbed and phase != "pushed":
            self._chain.router.note_transfer(link.server.timing, len(chunk.payload) + len(answer.chunk.payload))
        if link.server.draining:
            self._chain.prepare_standby(link)
        self._entered.append((chunk, self._receipt))
        self._chunk, self._receipt = answer.chunk, answer.receipt
        self._asked = pushed_step(asked, answer.receipt.hash()) if asked.targets else None
        self._handed_on = answer.handed_on and self._asked is not None
        self._index += 1
        self._deadline, self._pushed, self._disturbed = None, False, False
        self._failures.clear()
        return Answered(self._handed_on)

    def _misled(self, error: PushedOther) -> StepEvent:
        """A server has computed what was pushed, and the server before it has answered something else to this client.

        The receipt that came with the push says who lied. If it contradicts the one that came here, the server that
        signed both is replaced. If it does not, nobody can tell, and the step is sent from here. A server that shows no
        receipt, as older versions do, is replaced and not blamed.
        """
        before, link = self._link_before, self._link
        assert before is not None
        self._chain.no_push[_peers(before, link)] = trio.current_time() + PUSH_RETRY
        self._failures.append(error)
        link.server.misled = self._chain.spec.batch > 1 or link is self._stage.unwanted(self._step)
        pusher, shown = before.server.hop.peer_id, error.upstream
        if shown is not None and not shown.is_signed_by(pusher):
            what = f"server {error.peer_id} cannot be believed: what it says it was pushed is not signed by {pusher}"
            self._failures[-1] = ServerCheated(what, error.peer_id)
            return ServerError()
        if shown is None or self._receipt is None:
            return ServerError()
        proof = proven_lie(pusher, self._receipt, shown)
        if proof is None:
            return Misled(proved=False)
        self._failures[-1] = proof
        if not self._index:
            raise ProvenLiar(before, proof)
        self._index -= 1
        self._chunk, self._receipt = self._entered.pop()
        self._asked, self._deadline, self._pushed = None, None, False
        return Misled(proved=True)

    def _judge_push(self, link: ServerLink) -> None:
        """Ends the pushing between two servers for a while if this client had to send the second what the first had."""
        before = self._link_before
        if self._pushed and not self._disturbed and before and link.server.pushed_steps == self._pushed_before:
            self._chain.no_push[_peers(before, link)] = trio.current_time() + PUSH_RETRY

    # --- recovery

    def _stream_ended(self) -> StepEvent:
        link, asked = self._link, self._asked
        assert asked is not None
        self._disturbed = True
        reconnector = self._chain.reconnector(link)
        returned = link.server.generation != self._generation  # in the background, before this step noticed
        if not returned:
            reconnector.report_lost()
        path = reconnector.state
        loss = Loss(link.server.kept, path.gone, path.attempts, 1, link.standby_ready, link.server.round_trip)
        return StreamEnded(loss, returned, link.server.held >= asked.sequence)

    async def _reconnect(self, head_start: float) -> StepEvent:
        reconnector = self._chain.reconnector(self._link)
        with trio.move_on_after(head_start):
            await reconnector.settled_or_failed()
        if reconnector.state.may_return:
            return Signal.HEAD_START_OVER
        return Signal.SESSION_GONE if reconnector.state.gone else self._reconnected()

    def _reconnected(self) -> Reconnected:
        assert self._asked is not None
        self._deadline = self._impossible = None
        return Reconnected(self._link.server.held >= self._asked.sequence)

    async def _race(self) -> StepEvent:
        """Reconnects and replaces side by side; the first that succeeds goes on.

        A person waits: a session that its server keeps for longer than others are looked for is not waited for.
        """
        won: list[StepEvent] = []
        reconnector = self._chain.reconnector(self._link)

        async def reconnect() -> None:
            returned = False
            with trio.move_on_after(RECOVERY_TIMEOUT):
                returned = await reconnector.settled()
            if returned:
                won.append(self._reconnected())
                nursery.cancel_scope.cancel()

        async def take_others() -> None:
            event = await self._replace()
            if isinstance(event, Replaced):
                won.insert(0, event)  # the links have changed already
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reconnect)
            nursery.start_soon(take_others)
        return won[0] if won else Signal.NOBODY_ELSE

    async def _replace(self) -> StepEvent:
        failure, self._impossible = self._failures[-1], None
        try:
            return Replaced(await self._chain.replace(self._links, self._index, self._step.position, failure))
        except (SwarmError, BadInput) as error:
            self._impossible = error
            return Signal.NOBODY_ELSE


def _peers(sender: ServerLink, receiver: ServerLink) -> tuple[str, str]:
    return sender.server.hop.peer_id, receiver.server.hop.peer_id
