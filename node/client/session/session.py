"""A session of a client: a chain of servers that keep the attention caches, any of which may die.

Fault-tolerant generation of Petals (NeurIPS 2023, section 3.2, algorithms 1 and 2): the client keeps the inputs of
every junction (`history`), and when a server fails it routes the blocks that are missing over others, replays the
inputs into them and goes on at the same position. Servers that are slow or about to stop are replaced in the same way,
but by a standby that is prepared in the background while they still work. Where only the way to a server has failed, or
a better one is found, a tether takes the session up on another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import trio

from ....protocols import wire_pb2 as wire
from ....protocols.inference import pushed_step
from ...errors import BadInput, ServerFailed, SwarmError, unwrapped
from ...swarm.routing import Hop
from ..deadlines import PUSH_RETRY, STANDBY_POLL, STANDBY_RETRY, patience, push_patience
from ..request import MAX_FAILURES, StreamLost, WireTensor, blames_request
from ..router import Router, note_failure
from .history import History, Input
from .links import Link, Standby, catch_up, close_links, leave_links, open_links, step_limit
from .opening import RouteEpoch, open_chain
from .reconnector import PathChanges, SessionReconnector
from .recovery import Loss, after_loss
from .saved_session import SavedSession, resumed_links, saved_session
from .stream import Answer, HopTiming, SessionSpec

STANDBY_LAG: Final = 2
"""Tokens that a standby may be behind when it is called ready: what the switch costs at most."""


class _Overtaken(Exception):
    """A standby was ready before the server answered."""


class ClientSession:
    """Hidden states in, hidden states out. One call at a time; made by `SwarmClient.session`.

    Attributes:
        recoveries: servers that were replaced so far.
        paths: how often a server's session went on over another stream instead.
    """

    def __init__(self, router: Router, spec: SessionSpec, wait: bool) -> None:
        self.spec = spec
        self.recoveries = 0
        self.paths = PathChanges()
        self._router = router
        self._wait = wait
        self._links: list[Link] = []
        self._position = 0
        self._epoch = RouteEpoch()
        self._torn = False
        self._closed = False
        self._no_push: dict[tuple[str, str], float] = {}  # until when
        self._between_steps = trio.Lock()

    @property
    def route(self) -> tuple[Hop, ...]:
        return tuple(link.server.hop for link in self._links)

    @property
    def links(self) -> tuple[Link, ...]:
        """The chain, with the inputs of each server."""
        return tuple(self._links)

    @property
    def position(self) -> int:
        """Tokens that each row holds. Set it lower to roll back; the servers follow with the next step."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if not 0 <= position <= self._position:
            raise BadInput(f"a session that holds {self._position} tokens cannot go to position {position}")
        self._position = position

    @property
    def max_step_tokens(self) -> int:
        """Tokens of a row that one chunk may have."""
        return step_limit(self._links)

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        return tuple(link.server.timing for link in self._links)

    async def open(self) -> None:
        """Finds servers and opens the session at them.

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
        """
        self._links = await open_chain(self._router, self.spec, self._epoch, History(), 0, wait=self._wait)

    @property
    def pushed_steps(self) -> int:
        """Steps that servers sent to each other, without the way through this client."""
        return sum(link.server.pushed_steps for link in self._links)

    @property
    def traffic(self) -> tuple[tuple[int, int], ...]:
        """Tensor bytes (sent, received) between this client and each server of the present chain."""
        return tuple((link.server.bytes_sent, link.server.bytes_received) for link in self._links)

    async def resume(self, saved: SavedSession) -> bool:
        """Takes up a session that an earlier process left; false if any of its servers does not hold it any more."""
        resumed = await resumed_links(self._router, self.spec, saved)
        if resumed is None:
            return False
        self._links, self._position = resumed
        self._epoch = RouteEpoch(saved.route_epoch + 1)
        return True

    def saved(self) -> SavedSession | None:
        """What another process needs to take this session up; None before it is open."""
        if not self._links:
            return None
        return saved_session(self._links, self.spec.max_length, self._position, self._epoch.value)

    async def close(self) -> None:
        """Gives the servers their caches back, or leaves them there for as long as `spec.keep` says. Never raises."""
        self._closed = True
        links, self._links = self._links, []
        for link in links:
            if link.standby is not None:
                link.standby.scope.cancel()
                await close_links(link.standby.links)
        await (leave_links(links) if self.spec.keep else close_links(links))

    async def step(self, chunks: Sequence[WireTensor], reorder: Sequence[int] = ()) -> list[WireTensor]:
        """Sends chunks of hidden states, in order, through the chain; several are pipelined over the servers.

        `reorder` says for each row whose cache it continues, before the first chunk. Servers that fail are replaced.
        If the step raises or is cancelled, the session still holds what it held before, and goes on when servers are
        back; but not after a step with a reorder, which some servers have carried out then and others have not.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            BadInput: more tokens than the session was opened for.
            SwarmError: the session is closed, or an earlier reorder was cut off.
        """
        if self._closed:
            raise SwarmError("this session is closed; open another")
        if self._torn:
            raise SwarmError("this session was cut off while its rows changed places; open another")
        tokens = sum(chunk.tokens for chunk in chunks)
        if self._position + tokens > self.spec.max_length:
            raise BadInput(
                f"{self._position} tokens and {tokens} more pass the session's max_length of {self.spec.max_length}"
            )
        inputs = []
        position, first = self._position, tuple(reorder)
        for chunk in chunks:
            inputs.append(Input(position, first, chunk))
            position, first = position + chunk.tokens, ()
        async with self._between_steps:
            await self._switch_to_standbys()
            for link in self._links:
                self._tethered(link)
            self._torn = bool(reorder)
            if len(inputs) == 1:
                # Rows that change places twice are wrong: no step with a reorder may be where we cannot see it.
                out = [await self._through(self._links, inputs[0], self.spec.push and not reorder)]
            else:
                out = await self._pipeline(inputs)
            self._torn = False
            self._position = position
        return out

    async def _through(self, links: list[Link], step: Input, push: bool) -> WireTensor:
        """Runs one step through `links`, replacing in that list whichever server fails.

        With `push` the first server is told of the others and every server hands its output to the next one itself;
        this client sends a step only where that has failed.
        """
        chunk, index = step.chunk, 0
        asked: wire.Step | None = None  # what the server at `index` is asked, if that is settled
        on_its_way = False
        receipt = b""
        failures: list[ServerFailed] = []  # of servers for the blocks at `index`, at this step
        losses = 0  # streams to the server at `index` that have ended at this step
        while index < len(links):
            link = links[index]
            if asked is None:
                asked = self._asked(links, index, step, receipt, push)
            generation = link.server.generation
            try:
                if not on_its_way:
                    await link.server.send(asked, chunk)
                answer = await self._answer(link, asked, chunk, on_its_way)
            except (ServerFailed, _Overtaken) as error:
                if isinstance(error, ServerFailed):
                    failures.append(error)
                    if sum(map(blames_request, failures)) > 1 or len(failures) > MAX_FAILURES:
                        raise SwarmError(f"{len(failures)} servers in a row failed at one step: {error}") from None
                if isinstance(error, StreamLost):
                    losses += 1
                    if await self._rejoined(links, index, step.position, error, losses, generation):
                        # What it had done is answered once more; what it never got is sent again.
                        on_its_way = link.server.held >= asked.sequence
                        continue
                elif isinstance(error, ServerFailed):
                    await self._replace(links, index, step.position, error)
                elif not await self._switch(links, index):
                    continue
                losses = 0
                # Sequence numbers that were given out for the servers behind may be used up: ask anew.
                asked, on_its_way = None, False
                continue
            link.history.append(replace(step, chunk=chunk))
            self._router.note_tokens(link.server.hop.peer_id, chunk.tokens)
            if not losses:  # what a loss took says nothing of the server
                link.note(chunk.tokens)
                self._router.note_transfer(link.server.timing, len(chunk.payload) + len(answer.chunk.payload))
            if link.server.draining:
                self._prepare_standby(link)
            chunk, receipt = answer.chunk, answer.receipt_hash
            asked = pushed_step(asked, receipt) if asked.targets else None
            on_its_way = answer.handed_on and asked is not None
            index += 1
            losses = 0
            failures.clear()
        return chunk

    def _asked(self, links: Sequence[Link], index: int, step: Input, receipt: bytes, push: bool) -> wire.Step:
        targets = []
        if push:
            for before, link in zip(links[index:], links[index + 1 :], strict=False):
                pair = (before.server.hop.peer_id, link.server.hop.peer_id)
                if self._no_push.get(pair, 0.0) > trio.current_time():
                    break
                targets.append(link.server.target())
        return wire.Step(
            sequence=links[index].server.next_sequence(),
            position=step.position,
            reorder=step.reorder,
            route_epoch=self._epoch.value,
            previous_receipt=receipt,
            targets=targets,
        )

    async def _answer(self, link: Link, asked: wire.Step, chunk: WireTensor, pushed: bool) -> Answer:
        """Waits for a server's answer; when it is late, sends what may have been lost and prepares a standby.

        Raises:
            ServerFailed: there is none within the step's timeout.
            _Overtaken: the standby is ready.
        """
        nbytes, round_trip = len(chunk.payload), link.server.round_trip
        patient = min(patience(link.usual, chunk.tokens, nbytes, round_trip), self.spec.step_timeout)
        before = link.server.pushed_steps
        at_first = min(patient, push_patience(round_trip, nbytes)) if pushed else patient
        answer = await link.server.receive(asked, chunk, at_first)
        if answer is None and pushed:
            await link.server.send(asked, chunk)
            answer = await link.server.receive(asked, chunk, patient - at_first)
            self._judge_push(link, before, answer)
        if answer is not None:
            return answer
        deadline = trio.current_time() + self.spec.step_timeout - patient
        while trio.current_time() < deadline:
            self._prepare_standby(link)
            answer = await link.server.receive(asked, chunk, STANDBY_POLL)
            if answer is not None:
                if pushed:
                    self._judge_push(link, before, answer)
                return answer
            if link.standby is not None and link.standby.ready:
                raise _Overtaken
        raise link.server.silent(self.spec.step_timeout)

    def _judge_push(self, link: Link, before: int, answer: Answer | None) -> None:
        """Ends the pushing between two servers for a while if this client had to send the second what the first had."""
        index = self._links.index(link)
        if answer is not None and link.server.pushed_steps == before and index:
            pair = (self._links[index - 1].server.hop.peer_id, link.server.hop.peer_id)
            self._no_push[pair] = trio.current_time() + PUSH_RETRY

    async def _pipeline(self, inputs: Sequence[Input]) -> list[WireTensor]:
        """Runs many steps at once, each server on another one."""
        out: list[WireTensor] = []
        stages = [[link] for link in self._links]

        async def stage(
            links: list[Link],
            source: trio.MemoryReceiveChannel[Input],
            hand_on: Callable[[Input], object],
            done: Callable[[], object],
        ) -> None:
            async for step in source:
                hand_on(replace(step, chunk=await self._through(links, step, push=False)))
            done()

        try:
            with unwrapped(SwarmError):
                async with trio.open_nursery() as nursery:
                    # The number of steps bounds every channel, so no stage waits for the next one's room.
                    send, receive = trio.open_memory_channel[Input](len(inputs))
                    for step in inputs:
                        send.send_nowait(step)
                    send.close()
                    for links in stages[:-1]:
                        send, following = trio.open_memory_channel[Input](len(inputs))
                        nursery.start_soon(stage, links, receive, send.send_nowait, send.close)
                        receive = following
                    nursery.start_soon(stage, stages[-1], receive, lambda step: out.append(step.chunk), lambda: None)
        finally:
            # Also after a failure: servers that took another's place must be closed some day, and can be used again.
            self._links = [link for links in stages for link in links]
        return out

    # --- recovery

    def _tethered(self, link: Link) -> SessionReconnector:
        """The link's tether, which is made when the link is first used in the chain."""
        if link.tether is None:
            link.tether = SessionReconnector(self._router, link.server, self._between_steps, self.paths)
            self._router.start_soon(link.tether.run)
        return link.tether

    async def _rejoined(
        self, links: list[Link], index: int, position: int, error: StreamLost, losses: int, generation: int
    ) -> bool:
        """Whether a session whose stream was lost goes on at its server; if not, others have taken its place.

        Both are tried side by side, and what is ready first goes on.

        Raises:
            SwarmError: neither was possible.
        """
        link, server = links[index], links[index].server
        tether = self._tethered(link)
        back = server.generation != generation  # in the background, before this step noticed
        if not back:
            tether.report_lost()
        standby_ready = link.standby is not None and link.standby.ready
        plan = after_loss(Loss(server.kept, tether.gone, tether.attempts, losses, standby_ready, server.round_trip))
        if not plan.rejoin:
            await self._replace(links, index, position, error)
            return False
        if back:
            return True
        replaced = False
        failure: SwarmError | BadInput | None = None
        async with trio.open_nursery() as nursery:

            async def come_back() -> None:
                nonlocal back
                if await tether.settled():
                    back = True
                    nursery.cancel_scope.cancel()

            async def take_others() -> None:
                nonlocal replaced, failure
                with trio.move_on_after(plan.replace_after):
                    await tether.failed()
                try:
                    await self._replace(links, index, position, error)
                except (SwarmError, BadInput) as raised:
                    failure = raised
                else:
                    replaced = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(come_back)
            nursery.start_soon(take_others)
        if not (replaced or back):
            assert failure is not None
            raise failure
        return not replaced

    async def _replace(self, links: list[Link], index: int, position: int, error: ServerFailed) -> None:
        """Puts other servers in the place of one that failed, brought to `position`.

        Raises:
            NoChainError: nobody else holds its blocks.
        """
        failed = links[index]
        note_failure(self._router, error)
        if failed.standby is not None and failed.standby.ready and await self._switch(links, index):
            return
        if failed.standby is not None:
            failed.standby.scope.cancel()
        if not isinstance(error, StreamLost):
            await close_links([failed])
        links[index : index + 1] = await open_chain(
            self._router,
            replace(self.spec, span=failed.server.hop.span),
            self._epoch,
            failed.history,
            position,
            wait=self._wait,
            because=error,
            may_return=lambda: failed.tether is not None and failed.tether.may_return,
        )
        self._router.start_soon(close_links, [failed])
        self.recoveries += 1

    # --- standbys

    def _prepare_standby(self, link: Link) -> None:
        """Begins to prepare other servers for the blocks of `link`, unless that is under way or was tried just now."""
        if link.standby is None and trio.current_time() >= link.no_standby_until:
            link.standby = Standby()
            self._router.start_soon(self._prepare, link, link.standby)

    async def _prepare(self, link: Link, standby: Standby) -> None:
        with standby.scope:
            try:
                spec = replace(self.spec, span=link.server.hop.span)
                route = await self._router.standby(self.spec, self.route, self._links.index(link))
                await open_links(self._router, spec, route, self._epoch.next(), standby.links)
                while await catch_up(link, standby, self._epoch.value) > STANDBY_LAG:
                    pass
                standby.ready = True
                return
            except (SwarmError, ValueError):
                pass  # nobody else can, or the link has left the chain meanwhile
        link.standby = None
        link.no_standby_until = trio.current_time() + STANDBY_RETRY
        await close_links(standby.links)

    async def _switch_to_standbys(self) -> None:
        index = 0
        while index < len(self._links):
            standby = self._links[index].standby
            if standby is not None and standby.ready:
                await self._switch(self._links, index)
            index += 1

    async def _switch(self, links: list[Link], index: int) -> bool:
        """Puts the standby of a link in its place; false if the standby has failed in the last moment."""
        link = links[index]
        standby = link.standby
        assert standby is not None
        link.standby = None
        try:
            await catch_up(link, standby, self._epoch.value)
        except BaseException as error:
            link.no_standby_until = trio.current_time() + STANDBY_RETRY
            self._router.start_soon(close_links, standby.links)
            if not isinstance(error, SwarmError):
                raise
            return False
        links[index : index + 1] = standby.links
        self._epoch.next()
        self.recoveries += 1
        self._router.start_soon(close_links, [link])
        return True
