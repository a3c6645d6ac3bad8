"""The steps of a session that are under way through its chain: one token, drafts, or the chunks of a long prompt.

The servers push a step on while the client sends the next one. So each computes another step, and the way there and
back is waited for once. Chunks of a prompt pass the servers as micro-batches pass the stages of GPipe (arXiv
1811.06965, section 2.3). Drafts are sent before it is known whether they are wanted (asynchronous verification). A step
that is not wanted is rolled back without a message of its own. The next one names the position from which it goes on.
The answers to those between are skipped when they come.

At each server the steps keep their order. One is sent after the one before was sent, and its answer is read after the
answer to that one. Where a server cannot be pushed to, this client sends it what the one before has answered, without
waiting either. When a server fails, the oldest step there goes on by itself (`PipelineStep.recover`), once those before
it are answered. What is under way behind it is void, and is sent once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

import trio

from ...errors import PetalnodeError, ServerFailed, unwrapped
from ...swarm.routing import Hop
from ..request import WireTensor
from .answers import UncheckedAnswer
from .chain import Chain
from .history import Input
from .recovery import Signal, StepEvent
from .step import UNWATCHED_BYTES, PipelineStep

MOST_BYTES: Final = 3 * UNWATCHED_BYTES
"""Of the drafts under way together: they fit the least window of a stream (256 KiB), so that sending does not wait."""


class Pipeline:
    """Steps under way through one chain, for one task; another one may `ask` while it waits for the oldest answer.

    `push`: servers may push steps on. `in_step`: each server has had all numbers that were given out for its steps. So
    the next one can be pushed to it.

    Attributes:
        position: tokens of a row that the session holds after the last answer.
        in_step: the same now.
        first_output: what has left the last server for the first step.
    """

    def __init__(self, chain: Chain, position: int, *, push: bool, in_step: bool) -> None:
        self.position = position
        self.in_step = in_step
        self.first_output: WireTensor | None = None
        self._chain = chain
        self._push = push
        self._steps: deque[PipelineStep] = deque()
        self._again: deque[Input] = deque()  # behind `_steps`, to be asked anew, one after another
        self._broken = False
        self._moved = trio.lowlevel.ParkingLot()  # for a step that was sent, has left a server or is done

    def __len__(self) -> int:
        """Steps that are under way and wanted."""
        return len(self._steps) + len(self._again)

    @property
    def route(self) -> tuple[Hop, ...]:
        """The servers that the steps go through."""
        return self._chain.route

    # --- one step, or drafts

    @property
    def may_ask(self) -> bool:
        """Whether the servers take one more draft now, and nobody waits for the session to be changed between steps."""
        return (
            self._goes_well
            and not self._chain.between_steps.statistics().tasks_waiting
            and not any(link.standby_ready for link in self._chain.links)
            and all(link.server.spare_credits > 0 for link in self._chain.links)
            and sum(len(step.given.chunk.payload) for step in self._steps) < MOST_BYTES
        )

    @property
    def _goes_well(self) -> bool:
        return self._push and self.in_step and not self._broken

    async def ask(self, chunk: WireTensor, position: int) -> bool:
        """Sends a step with `position` tokens of a row before it; at most as many as there are after the step before.

        Returns whether it is under way: not if it is too large, or the servers cannot push to each other.
        """
        if not self._goes_well or len(chunk.payload) > UNWATCHED_BYTES:
            return False
        step = self._step(self._input(chunk, position), before=sum(step.chunk.tokens for step in self._steps))
        if len(step.targets) < len(self._chain.links) - 1:
            return False
        await self._begin(step)
        self._broken = self._broken or step.event is not None  # who waits for the answer learns why
        return True

    async def send(self, chunk: WireTensor) -> None:
        """Sends the next step; `answer` has to follow."""
        await self._begin(self._step(self._input(chunk, self.position)))

    def _input(self, chunk: WireTensor, position: int) -> Input:
        return Input(position, (), chunk, self._chain.spec.takes_long_factors(position + chunk.tokens))

    def _step(
        self, given: Input, *, before: int | None = None, several: bool = False, receipt_only: bool = False
    ) -> PipelineStep:
        push = self._push and self.in_step
        return PipelineStep(self._chain, given, push=push, several=several, before=before, receipt_only=receipt_only)

    async def _begin(self, step: PipelineStep) -> None:
        self._steps.append(step)
        try:
            step.event = await self._sent(step)
        except BaseException:
            self.in_step = False  # the servers may never see the numbers that were given out for it
            raise

    async def arrive(self) -> UncheckedAnswer | None:
        """The last server's answer to the oldest step, before its receipt is checked; None if that is done."""
        await self._carry(self._steps[0], checked=False)
        return self._steps[0].unchecked

    async def answer(self) -> WireTensor:
        """What leaves the last server for the oldest step; it is held then.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            SwarmError: several servers in a row failed at this step.
        """
        if not self._steps:
            self._steps.append(self._step(self._again.popleft()))
        step = self._steps[0]
        await self._carry(step)
        self._finish(step)
        self.position = step.given.end
        return step.chunk

    def drop(self) -> None:
        """Wants no answer to any step that is under way."""
        self._steps.clear()
        self._again.clear()

    async def settle(self) -> None:
        """Counts an answer that has arrived and nobody wants any more. Never raises."""
        for step in self._steps:
            if step.unchecked is not None:
                with trio.CancelScope(shield=True):
                    step.event = await step.take()

    # --- steps that are all wanted

    async def run(self, steps: Sequence[Input], receipts: Collection[int] = frozenset()) -> list[WireTensor]:
        """What leaves the last server for each step; for those at the positions `receipts`, its receipt is enough. If
        several are cancelled, servers drop those that they have not begun.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            SwarmError: several servers in a row failed at one step.
        """
        out: list[WireTensor] = []
        given_up = len(steps) > 1
        try:
            while left := steps[len(out) :]:
                if len(left) > 1 and self.in_step:
                    await self._side_by_side(left, receipts, out)
                else:  # behind a failure, a step is to reach all servers before others are under way
                    step = self._step(left[0], receipt_only=left[0].position in receipts)
                    self._steps.append(step)
                    await self._drive(step, out)
            given_up = False
        except PetalnodeError:
            given_up = False
            raise
        finally:
            for link in self._chain.links if given_up else ():
                await self._chain.abandon(link)
        self.position = steps[-1].end
        return out

    async def _side_by_side(self, steps: Sequence[Input], receipts: Collection[int], out: list[WireTensor]) -> None:
        """Adds what leaves the last server for each of several steps, or for those up to one at which one failed."""
        self._broken = False
        with unwrapped(PetalnodeError):
            async with trio.open_nursery() as nursery:
                for given in steps:
                    step = self._step(given, several=True, receipt_only=given.position in receipts)
                    self._steps.append(step)
                    nursery.start_soon(self._drive, step, out)
                    while not step.reach and not self._broken:
                        await self._moved.park()
                    if self._broken:
                        return

    async def _drive(self, step: PipelineStep, out: list[WireTensor]) -> None:
        with step.scope:
            await self._carry(step)
            self._finish(step)
            out.append(step.chunk)
            self._moved.unpark_all()

    # --- from server to server

    async def _carry(self, step: PipelineStep, *, checked: bool = True) -> None:
        """Carries a step to its end, or, not `checked`, until the last server's answer is here."""
        try:
            while not step.is_done:
                event, step.event = step.event, None
                if event is None and step.unchecked is None:
                    event = await self._ask(step)
                elif event is None:
                    if step.is_at_last and not checked:
                        return
                    event = await step.take()
                    self._moved.unpark_all()
                if event is not None:
                    await self._recover(step, event)
        finally:
            if step.unchecked is None:
                self._chain.waits.add("step", trio.current_time() - step.begun_at)

    async def _recover(self, step: PipelineStep, event: StepEvent | None) -> None:
        """Returns once an answer of the server at which the step is, or of others in its place, is here."""
        try:
            while event is not None:
                if event not in (Signal.SENT, Signal.LATE):
                    await self._stop_behind(step)
                event = await step.recover(event)
        finally:
            self._chain.interruption = None

    async def _ask(self, step: PipelineStep) -> StepEvent | None:
        """Sends the step, unless it was pushed, and waits for the answer; what went wrong if it does not come."""
        if step.at.phase == "sending" and (event := await self._sent(step)) is not None:
            return event
        if step.several:
            await self._turn(step, sending=False)
        pushed = step.at.phase == "pushed"
        try:
            with self._chain.waits.timed("push" if pushed else "answer"):
                return await step.receive("pushed" if pushed else "sent")
        except ServerFailed as error:
            return step.failed(error)

    async def _sent(self, step: PipelineStep) -> StepEvent | None:
        """Sends the step, when it may be; what went wrong if it could not."""
        if step.several:
            await self._turn(step, sending=True)
            here = [other for other in self._steps if other.index == step.index < other.reach]
            step.before = sum(other.chunk.tokens for other in here) or None
        try:
            with self._chain.waits.timed("send"):
                signal = await step.send()
        except ServerFailed as error:
            return step.failed(error)
        finally:
            self._moved.unpark_all()
        return None if signal is Signal.SENT else signal

    def _finish(self, step: PipelineStep) -> None:
        self._steps.popleft()
        self.in_step = self.in_step or step.relayed
        self.first_output = self.first_output or step.chunk

    async def _stop_behind(self, step: PipelineStep) -> None:
        """Gives up what is under way behind a step at which a server failed, and waits until it is the oldest one."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._broken = True
        index = self._steps.index(step)
        behind = list(self._steps)[index + 1 :]
        for other in behind:
            self._steps.remove(other)
            other.scope.cancel()
            self.in_step = False  # some servers will never see the numbers that were given out for it
        if not step.several:
            self._again.extendleft(other.given for other in reversed(behind))
        self._moved.unpark_all()
        while self._steps[0] is not step:
            await self._moved.park()

    # --- the order at each server

    async def _turn(self, step: PipelineStep, *, sending: bool) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()  # it may have been given up meanwhile
        while not (self._may_send(step) if sending else self._may_receive(step)):
            await self._moved.park()
            await trio.lowlevel.checkpoint_if_cancelled()

    def _may_receive(self, step: PipelineStep) -> bool:
        before = self._before(step)
        return before is None or before.index > step.index

    def _may_send(self, step: PipelineStep) -> bool:
        """Whether the server will have the step in its turn and takes one more. Those that it is pushed to have to, as
        well."""
        before = self._before(step)
        if before is not None and before.index < step.index:
            return False
        if before is not None and before.index == step.index and before.at.phase in ("sending", "pushed"):
            return False  # of what is pushed, only the answer says that it is there
        if before is None or step.at.asked is not None:
            return True  # nothing else counts for the oldest step: numbers given out behind it may never be answered
        nbytes, end = len(step.chunk.payload), step.index + 1 + len(step.targets)
        return all(self._takes(index, nbytes) for index in range(step.index, end))

    def _takes(self, index: int, nbytes: int) -> bool:
        """Whether one more step of `nbytes` bytes may be under way at a server."""
        server = self._chain.links[index].server
        # Of each step that has a number at the server and is not answered there.
        under_way = [len(step.chunk.payload) for step in self._steps if step.index <= index < step.reach]
        return not under_way or (sum(under_way) + nbytes <= server.bytes_in_flight and server.spare_credits > 0)

    def _before(self, step: PipelineStep) -> PipelineStep | None:
        index = self._steps.index(step)
        return self._steps[index - 1] if index else None
