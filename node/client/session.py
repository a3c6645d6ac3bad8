"""A session of a client: a chain of servers that keep the attention caches, any of which may die.

Fault-tolerant generation of Petals (NeurIPS 2023, section 3.2, algorithms 1 and 2): the client keeps the inputs of
every junction (`history`), and when a server fails it routes the blocks that are missing over others, replays the
inputs into them and goes on at the same position. Servers that are slow or about to stop are replaced in the same way,
but by a standby that is prepared in the background while they still work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import trio

from ...protocols import wire_pb2 as wire
from ...protocols.ids import Span
from ...protocols.inference import pushed_step
from ..errors import BadInput, NoChainError, ServerFailed, SwarmError, unwrapped
from .deadlines import (
    PUSH_PATIENCE,
    RECOVERY_TIMEOUT,
    REOPEN_TIMEOUT,
    RETRY_INTERVAL,
    STANDBY_POLL,
    STANDBY_RETRY,
    patience,
)
from .history import History, Input
from .links import HistoryLost, Link, Standby, catch_up, close_links, replay, step_limit
from .router import Router
from .routing import Hop
from .saved_session import SavedLink, SavedSession
from .server_session import Answer, Chunk, HopTiming, ServerRefused, ServerSession, SessionSpec

MAX_FAILURES: Final = 8
"""Servers for the same blocks that may fail at one step, one after another."""
STANDBY_LAG: Final = 2
"""Tokens that a standby may be behind when it is called ready: what the switch costs at most."""


class _Overtaken(Exception):
    """A standby was ready before the server answered."""


class ClientSession:
    """Hidden states in, hidden states out. One call at a time; made by `SwarmClient.session`.

    Attributes:
        recoveries: servers that were replaced so far.
    """

    def __init__(self, router: Router, spec: SessionSpec, wait: bool) -> None:
        self.spec = spec
        self.recoveries = 0
        self._router = router
        self._wait = wait
        self._links: list[Link] = []
        self._position = 0
        self._route_epoch = 0
        self._torn = False
        self._closed = False
        self._no_push: set[tuple[str, str]] = set()

    @property
    def route(self) -> tuple[Hop, ...]:
        return tuple(link.server.hop for link in self._links)

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
        self._links = await self._open_chain(self.spec.span, History(), 0)

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
        links: list[Link] = []
        positions: list[int] = []

        async def resume_one(each: SavedLink) -> None:
            hop = Hop(each.peer_id, Span(each.start, each.end))
            server = ServerSession(await self._router.connect(hop), hop, self.spec, self._router.peer_id, each.nonce)
            links.append(Link(server))
            positions.append(await server.resume(each.epoch))

        try:
            with unwrapped(SwarmError):
                async with trio.open_nursery() as nursery:
                    for each in saved.links:
                        nursery.start_soon(resume_one, each)
        except (SwarmError, ValueError):
            await close_links(links)
            return False
        self._links = sorted(links, key=lambda link: link.server.hop.span.start)
        self._position = min(saved.position, *positions)
        self._route_epoch = saved.route_epoch + 1
        for link in self._links:
            link.history = History(start=self._position)
        return True

    def saved(self) -> SavedSession | None:
        """What another process needs to take this session up; None before it is open."""
        if not self._links:
            return None
        links = tuple(
            SavedLink(hop.peer_id, hop.span.start, hop.span.end, link.server.nonce, link.server.epoch)
            for link in self._links
            for hop in [link.server.hop]
        )
        return SavedSession(links, self.spec.max_length, self._position, self._route_epoch)

    async def close(self) -> None:
        """Gives the servers their caches back, or leaves them there for as long as `spec.keep` says. Never raises."""
        self._closed = True
        links, self._links = self._links, []
        for link in links:
            if link.standby is not None:
                link.standby.scope.cancel()
                await close_links(link.standby.links)
        if self.spec.keep:
            for link in links:
                await link.server.leave()
        else:
            await close_links(links)

    async def step(self, chunks: Sequence[Chunk], reorder: Sequence[int] = ()) -> list[Chunk]:
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
        await self._switch_to_standbys()
        self._torn = bool(reorder)
        if len(inputs) == 1:
            # Rows that change places twice are wrong: no step with a reorder may be under way where we cannot see it.
            out = [await self._through(self._links, inputs[0], self.spec.push and not reorder)]
        else:
            out = await self._pipeline(inputs)
        self._torn = False
        self._position = position
        return out

    async def _through(self, links: list[Link], step: Input, push: bool) -> Chunk:
        """Runs one step through `links`, replacing in that list whichever server fails.

        With `push` the first server is told of the others and every server hands its output to the next one itself;
        this client sends a step only where that has failed.
        """
        chunk, index = step.chunk, 0
        asked: wire.Step | None = None  # what the server at `index` is asked, if that is settled
        on_its_way = False
        receipt = b""
        failures: list[ServerFailed] = []  # of servers for the blocks at `index`, at this step
        while index < len(links):
            link = links[index]
            if asked is None:
                asked = self._asked(links, index, step, receipt, push)
            try:
                if not on_its_way:
                    await link.server.send(asked, chunk)
                answer = await self._answer(link, asked, chunk, on_its_way)
            except (ServerFailed, _Overtaken) as error:
                if isinstance(error, ServerFailed):
                    failures.append(error)
                    _give_up_on_the_step(failures)
                    await self._replace(links, index, step.position, error)
                elif not await self._switch(links, index):
                    continue
                # Sequence numbers that were given out for the servers behind may be used up: ask anew.
                asked, on_its_way = None, False
                continue
            link.history.append(replace(step, chunk=chunk))
            link.note(chunk.tokens)
            self._router.note_transfer(link.server.timing, len(chunk.payload) + len(answer.chunk.payload))
            if link.server.draining:
                self._prepare_standby(link)
            chunk, receipt = answer.chunk, answer.receipt_hash
            asked = pushed_step(asked, receipt) if asked.targets else None
            on_its_way = answer.handed_on and asked is not None
            index += 1
            failures.clear()
        return chunk

    def _asked(self, links: Sequence[Link], index: int, step: Input, receipt: bytes, push: bool) -> wire.Step:
        targets = []
        if push:
            for before, link in zip(links[index:], links[index + 1 :], strict=False):
                if (before.server.hop.peer_id, link.server.hop.peer_id) in self._no_push:
                    break
                targets.append(link.server.target())
        return wire.Step(
            sequence=links[index].server.next_sequence(),
            position=step.position,
            reorder=step.reorder,
            route_epoch=self._route_epoch,
            previous_receipt=receipt,
            targets=targets,
        )

    async def _answer(self, link: Link, asked: wire.Step, chunk: Chunk, pushed: bool) -> Answer:
        """Waits for a server's answer; when it is late, sends what may have been lost and prepares a standby.

        Raises:
            ServerFailed: there is none within the step's timeout.
            _Overtaken: the standby is ready.
        """
        patient = min(patience(link.usual, chunk.tokens), self.spec.step_timeout)
        before = link.server.pushed_steps
        at_first = min(patient, PUSH_PATIENCE) if pushed else patient
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
        """Ends the pushing between two servers if the second had to be sent by this client what the first had sent."""
        index = self._links.index(link)
        if answer is not None and link.server.pushed_steps == before and index:
            self._no_push.add((self._links[index - 1].server.hop.peer_id, link.server.hop.peer_id))

    async def _pipeline(self, inputs: Sequence[Input]) -> list[Chunk]:
        """Runs many steps at once, each server on another one."""
        out: list[Chunk] = []
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

    async def _replace(self, links: list[Link], index: int, position: int, error: ServerFailed) -> None:
        """Puts other servers in the place of one that failed, brought to `position`.

        Raises:
            NoChainError: nobody else holds its blocks.
        """
        failed = links[index]
        self._router.suspect(error.peer_id)
        if failed.standby is not None and failed.standby.ready and await self._switch(links, index):
            return
        if failed.standby is not None:
            failed.standby.scope.cancel()
        await close_links([failed])
        links[index : index + 1] = await self._open_chain(
            failed.server.hop.span, failed.history, position, because=error
        )
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
                await self._open_links(spec, route, standby.links)
                while await catch_up(link, standby, self._route_epoch) > STANDBY_LAG:
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
            await catch_up(link, standby, self._route_epoch)
        except BaseException as error:
            link.no_standby_until = trio.current_time() + STANDBY_RETRY
            self._router.start_soon(close_links, standby.links)
            if not isinstance(error, SwarmError):
                raise
            return False
        links[index : index + 1] = standby.links
        self._route_epoch += 1
        self.recoveries += 1
        self._router.start_soon(close_links, [link])
        return True

    async def _open_chain(
        self, span: Span, history: History, position: int, because: ServerFailed | None = None
    ) -> list[Link]:
        """Links for `span` that hold what `history` says, up to `position`.

        Servers that refuse or cannot be reached are left out and the rest tried; when none is left, all are asked
        again until the deadline, because servers come and go. Where nobody is known who could be asked, a new session
        does not wait.
        """
        if history.start:
            raise HistoryLost(f"{because}; what it held before this process started is not known here")
        begun = trio.current_time()
        refused: dict[str, ServerFailed] = {} if because is None else {because.peer_id: because}
        spec = replace(self.spec, span=span)
        fresh = lost = False
        while True:
            try:
                route = await self._router.route(spec, refused)
            except NoChainError as error:
                if not fresh:  # what this node has heard may be old
                    fresh = True
                    await self._router.refresh()
                    continue
                lost = lost or any(_is_lost(each) for each in refused.values())
                limit = RECOVERY_TIMEOUT if because is not None else REOPEN_TIMEOUT if lost else 0.0
                if not self._wait and trio.current_time() >= begun + limit:
                    raise _with_refusals(error, refused) from None
                await trio.sleep(RETRY_INTERVAL)
                refused, fresh = {}, False
                continue
            links: list[Link] = []
            try:
                await self._open_links(spec, route, links)
                await replay(links, history.replay(position, step_limit(links)), self._route_epoch)
            except ServerFailed as error:
                await close_links(links)
                refused[error.peer_id] = error
                self._router.suspect(error.peer_id)
            except BaseException:
                await close_links(links)
                raise
            else:
                return links

    async def _open_links(self, spec: SessionSpec, route: Sequence[Hop], links: list[Link]) -> None:
        """Opens a session at every server of `route`, side by side. `links` has those that must be closed."""
        self._route_epoch += 1
        opened: dict[Hop, Link] = {}

        async def open_one(index: int, hop: Hop) -> None:
            stream = await self._router.connect(hop)
            server = ServerSession(stream, hop, spec, self._router.peer_id)
            opened[hop] = Link(server)
            await server.open(
                self._route_epoch,
                upstream=route[index - 1].peer_id if index else None,
                downstream=route[index + 1].peer_id if spec.push and index + 1 < len(route) else None,
            )

        try:
            with unwrapped(ServerFailed):
                async with trio.open_nursery() as nursery:
                    for index, hop in enumerate(route):
                        nursery.start_soon(open_one, index, hop)
        finally:
            links.extend(opened[hop] for hop in route if hop in opened)


def _give_up_on_the_step(failures: Sequence[ServerFailed]) -> None:
    """
    Raises:
        SwarmError: when it is the step that is at fault, not the servers.
    """
    refusals = [
        error for error in failures if isinstance(error, ServerRefused) and error.code == wire.ERROR_BAD_REQUEST
    ]
    if len(refusals) > 1 or len(failures) > MAX_FAILURES:
        raise SwarmError(f"{len(failures)} servers in a row failed at one step: {failures[-1]}")


def _is_lost(error: ServerFailed) -> bool:
    """Whether a server is gone or going, so that another may come to its place; others have said no, and mean it."""
    return not isinstance(error, ServerRefused) or error.code == wire.ERROR_DRAINING


def _with_refusals(error: NoChainError, refused: dict[str, ServerFailed]) -> NoChainError:
    if not refused:
        return error
    return NoChainError(f"{error}. Tried: {'; '.join(str(each) for each in refused.values())}", error.missing)
