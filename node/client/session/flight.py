"""Several steps of a session under way at once, before it is known whether the later ones are wanted.

The servers push a step on while the client sends the next one, so that each computes another step and the way there and
back is waited for once (asynchronous verification of drafts). A step that turns out not to be wanted is rolled back
without a message of its own: the next one names the position from which it goes on, and the answers to those between
are skipped when they come.

The steps of a long prompt are all wanted (`Prefill`). They pass the servers as micro-batches pass the stages of GPipe
(arXiv 1811.06965, section 2.3), and each server's answers are collected side by side and in order, for their receipts,
and for the inputs from which a replacement is filled. Where a server cannot be pushed to, this client sends it what the
one before has answered, without waiting either. When a server fails, the step that is waited for there goes on as any
other does; what is under way behind it is void at that server, and is sent once more, one step after another, as are
the steps at the servers behind it. A server that grants no `bytes_in_flight`, as older versions do, is sent one step at
a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

import trio

from ...errors import ServerFailed, SwarmError, unwrapped
from ...swarm.routing import Hop
from ..request import WireTensor
from .chain import Chain
from .history import Input
from .link import Handover, ServerLink, WholeChain
from .step import UNWATCHED_BYTES, StepRun

MOST_BYTES: Final = 3 * UNWATCHED_BYTES
"""Of the steps under way together: they fit the least window of a stream (256 KiB), so that sending does not wait."""


class Flight:
    """Steps under way through one chain. One task may ask while another one waits for the oldest answer.

    Made by `ClientSession.flight`. When a server fails, the step that is waited for goes on as any other one does;
    those behind it are asked once more, one after another, and no more are taken.

    Attributes:
        position: tokens of a row that the session holds after the last answer.
        smooth: the servers may push, and nothing has failed so far.
    """

    def __init__(self, chain: Chain, position: int, *, may_push: bool = True) -> None:
        self.position = position
        self.smooth = may_push
        self._chain = chain
        self._under_way: deque[tuple[Input, StepRun | None]] = deque()

    def __len__(self) -> int:
        """Steps that are under way and wanted."""
        return len(self._under_way)

    @property
    def route(self) -> tuple[Hop, ...]:
        """The servers that the steps go through."""
        return self._chain.route

    @property
    def may_ask(self) -> bool:
        """Whether the servers take one more step now, and nobody waits for the session to be changed between steps."""
        return (
            self.smooth
            and not self._chain.between_steps.statistics().tasks_waiting
            and not any(link.standby_ready for link in self._chain.links)
            and all(link.server.spare_credits > 0 for link in self._chain.links)
            and sum(len(step.chunk.payload) for step, _ in self._under_way) < MOST_BYTES
        )

    async def ask(self, chunk: WireTensor, position: int) -> bool:
        """Sends a step with `position` tokens of a row before it; at most as many as there are after the step before.

        Returns whether it is under way: not if it is too large, or the servers cannot push to each other.
        """
        if not self.smooth or len(chunk.payload) > UNWATCHED_BYTES:
            return False
        step = Input(position, (), chunk, self._chain.spec.takes_long_factors(position + chunk.tokens))
        before = sum(other.chunk.tokens for other, _ in self._under_way)
        run = StepRun(self._chain, self._chain.links, step, push=True, before=before)
        self._under_way.append((step, run))
        try:
            sent = await run.send_ahead()
        except ServerFailed:
            self._stop_asking()  # whoever waits for the answer to a step before learns why
            return True
        if not sent:
            self._under_way.remove((step, run))
        return sent

    async def answer(self) -> WireTensor:
        """What leaves the last server for the oldest step; it is held then.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            SwarmError: several servers in a row failed at this step.
        """
        step, run = self._under_way[0]
        if run is None:  # its numbers are used up at some servers and not at others
            run = StepRun(self._chain, self._chain.links, step, push=False)
        out = await run.run()
        self._under_way.popleft()
        self.position = step.end
        if not run.smooth:
            self._stop_asking()
        return out

    def drop(self) -> None:
        """Wants no answer to any step that is under way."""
        self._under_way.clear()

    def _stop_asking(self) -> None:
        self.smooth = False
        self._under_way = deque((step, None) for step, _ in self._under_way)


Entering = tuple[Input, Handover]
"""A step, and how it comes to a server."""
Underway = tuple[Input, Handover, StepRun | None]
"""The same with its run, or None where the step is to be sent when those before it are answered."""


class Prefill:
    """Steps that follow each other, through one chain. With `push` the servers push them on. Used once.

    `unwanted`: positions of steps whose output nobody needs; their receipts are enough. No recovery needs it either,
    because nothing comes after the last server.
    """

    def __init__(
        self, chain: Chain, steps: Sequence[Input], *, push: bool, unwanted: Collection[int] = frozenset()
    ) -> None:
        self._chain = chain
        self._steps = steps
        self._unwanted = unwanted
        self.collected = trio.Event()
        self.stages: list[Stage] = []
        before: ServerLink | None = None
        for link in chain.links:
            pushed = push and before is not None and chain.may_stream(before, link)
            self.stages.append(Stage(self, chain, link, pushed=pushed))
            before = link

    async def run(self) -> list[WireTensor]:
        """What leaves the last server for each step. If cancelled, servers drop the steps that they have not begun.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            ProvenLiar: one of them has pushed something else than it answered; none of the outputs is to be used.
            SwarmError: several servers in a row failed at one step.
        """
        out: list[WireTensor] = []
        given_up = True
        try:
            with unwrapped(SwarmError):
                async with trio.open_nursery() as nursery:
                    # The number of steps bounds every channel, so no stage waits for the next one's room.
                    send, receive = trio.open_memory_channel[Entering](len(self._steps))
                    for step in self._steps:
                        send.send_nowait((step, Handover(step.chunk)))
                    send.close()
                    for stage in self.stages:
                        send, following = trio.open_memory_channel[Entering](len(self._steps))
                        nursery.start_soon(stage.run, receive, send, len(self._steps))
                        receive = following
                    async for _, left in receive:
                        out.append(left.chunk)
            given_up = False
        except SwarmError:
            given_up = False
            raise
        finally:
            # Also after a failure: servers that took another's place must be closed some day, and can be used again.
            self._chain.links = [link for stage in self.stages for link in stage.links]
            for link in self._chain.links if given_up else ():
                await self._chain.abandon(link)
        return out

    def pushed_from(self, stage: Stage) -> Iterable[Stage]:
        """The stages to which what a stage sends is pushed."""
        for following in self.stages[self.stages.index(stage) + 1 :]:
            if not following.pushed:
                return
            yield following

    def unwanted(self, step: Input) -> ServerLink | None:
        """The server whose output for this step nobody needs."""
        return self.stages[-1].links[-1] if step.position in self._unwanted else None

    def tell(self) -> None:
        """A step has been answered, or a stage takes no more pushes."""
        self.collected.set()
        self.collected = trio.Event()


class Stage(WholeChain):
    """One server of the chain, or those that have taken its place, while the steps pass.

    Attributes:
        links: the server, or those.
        pushed: the server before it pushes, and nothing has failed here.
        allotted: bytes of the steps that have a number at the server and are not answered, by their position.
    """

    def __init__(self, prefill: Prefill, chain: Chain, link: ServerLink, *, pushed: bool) -> None:
        self.links = [link]
        self.pushed = pushed
        self.allotted: dict[int, int] = {}
        self._prefill = prefill
        self._chain = chain
        self._first = not prefill.stages
        self._pushes = pushed
        self._coming: set[int] = set()  # positions of steps that were pushed and are not answered
        self._tokens = 0  # of steps that are sent or pushed and not answered
        self._rough_from = math.inf if link.server.bytes_in_flight else 0  # from this position on, one step at a time
        self._sending = trio.CancelScope()

    async def run(
        self, source: trio.MemoryReceiveChannel[Entering], sink: trio.MemorySendChannel[Entering], steps: int
    ) -> None:
        """Takes all steps of `source`, and hands each on to `sink` when it is answered."""
        send, under_way = trio.open_memory_channel[Underway](steps)
        async with trio.open_nursery() as nursery, sink:
            nursery.start_soon(self._send_all, source, send)
            async for step, entry, run in under_way:
                sink.send_nowait((step, await self._answer(step, entry, run)))

    async def _send_all(
        self, source: trio.MemoryReceiveChannel[Entering], sink: trio.MemorySendChannel[Underway]
    ) -> None:
        async with sink:
            async for step, entry in source:
                sink.send_nowait((step, entry, await self._under_way(step, entry)))

    async def _under_way(self, step: Input, entry: Handover) -> StepRun | None:
        """The run of a step that the server gets, or has, without waiting for the answers to those before it."""
        if self._pushes and entry.asked is None:  # something has failed at a server before
            self.roughen(step)
        if step.position >= self._rough_from:
            return None
        run = StepRun(
            self._chain,
            self.links,
            replace(step, chunk=entry.chunk),
            push=True,
            before=self._tokens or None,
            entry=None if self._first else entry,
            stage=self,
        )
        self._tokens += step.chunk.tokens
        if entry.handed_on:
            self._coming.add(step.position)
            return run
        with trio.CancelScope() as self._sending:
            while not self._has_room(entry):
                await self._prefill.collected.wait()
            for stage in (self, *self._prefill.pushed_from(self)):
                stage.allotted[step.position] = len(entry.chunk.payload)
            try:
                if await run.send_ahead():
                    return run
            except ServerFailed:
                pass  # whoever waits for the answer to a step before learns why
        self.roughen(step)
        return None

    def _has_room(self, entry: Handover) -> bool:
        """Whether the server, and those that it pushes to, take one more step, and will have it in its turn."""
        if entry.asked is not None:  # it has its number; what is pushed before it must be there first
            return not self._coming
        return all(stage.takes(len(entry.chunk.payload)) for stage in (self, *self._prefill.pushed_from(self)))

    def takes(self, nbytes: int) -> bool:
        """Whether one more step of so many bytes may be under way."""
        server = self.links[0].server
        within = sum(self.allotted.values()) + nbytes <= server.bytes_in_flight and server.spare_credits > 0
        return within or not self.allotted

    async def _answer(self, step: Input, entry: Handover, run: StepRun | None) -> Handover:
        if run is not None and not run.is_current:
            self.roughen(step)
        if run is None or step.position >= self._rough_from:
            entry = replace(entry, asked=None, handed_on=False)
            entering = replace(step, chunk=entry.chunk)
            entered = None if self._first else entry
            run = StepRun(self._chain, self.links, entering, push=False, entry=entered, stage=self)
        await run.run()
        self.allotted.pop(step.position, None)
        self._coming.discard(step.position)
        self._tokens = max(0, self._tokens - step.chunk.tokens)
        self._prefill.tell()
        return run.handover

    def beyond(self) -> Sequence[ServerLink]:
        """The servers to which what leaves this one is pushed on."""
        return [link for stage in self._prefill.pushed_from(self) for link in stage.links]

    def unwanted(self, step: Input) -> ServerLink | None:
        """The server whose output for this step nobody needs."""
        return self._prefill.unwanted(step)

    def roughen(self, step: Input) -> None:
        """From this step on, the server is sent one step at a time."""
        self._rough_from = min(self._rough_from, step.position)
        self.pushed = False
        self._sending.cancel()
        self._prefill.tell()
