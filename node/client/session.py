"""A session of a client: a chain of servers that keep the attention caches, any of which may die.

Fault-tolerant generation of Petals (NeurIPS 2023, section 3.2, algorithms 1 and 2): the client keeps the inputs of
every junction (`history`), and when a server fails it routes the blocks that are missing over others, replays the
inputs into them and goes on at the same position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import trio

from ...protocols.ids import Span
from ..errors import BadInput, NoChainError, ServerFailed, SwarmError
from .history import History, Input
from .routing import Hop
from .server_session import Chunk, HopTiming, InferenceStream, ServerSession, SessionSpec

RECOVERY_TIMEOUT: Final = 30.0
"""Seconds of looking for other servers before the caller is told that the swarm cannot serve."""
RETRY_INTERVAL: Final = 0.5


class Router(Protocol):
    """What a session needs of the client that opens it."""

    @property
    def peer_id(self) -> str: ...

    async def route(self, spec: SessionSpec, excluded: Collection[str] = ()) -> tuple[Hop, ...]:
        """The best chain for `spec.span` without `excluded`. Raises NoChainError, BadInput."""

    async def connect(self, hop: Hop) -> InferenceStream:
        """A stream to the server of `hop`. Raises ServerFailed."""

    def suspect(self, peer_id: str) -> None:
        """Notes that a server failed."""

    async def refresh(self) -> None:
        """Asks the swarm anew who is there."""


@dataclass
class _Link:
    """One server of the chain, and the inputs that made its cache."""

    server: ServerSession
    history: History = field(default_factory=History)


class ClientSession:
    """Hidden states in, hidden states out. One call at a time; made by `open_session`.

    Attributes:
        recoveries: servers that were replaced so far.
    """

    def __init__(self, router: Router, spec: SessionSpec, wait: bool) -> None:
        self.spec = spec
        self.recoveries = 0
        self._router = router
        self._wait = wait
        self._links: list[_Link] = []
        self._position = 0
        self._route_epoch = 0
        self._torn = False

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
        return min(link.server.max_step_tokens for link in self._links)

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

    async def close(self) -> None:
        """Gives the servers their caches back. Never raises; takes a second at most."""
        links, self._links = self._links, []
        await _close(links)

    async def step(self, chunks: Sequence[Chunk], reorder: Sequence[int] = ()) -> list[Chunk]:
        """Sends chunks of hidden states, in order, through the chain; several are pipelined over the servers.

        `reorder` says for each row whose cache it continues, before the first chunk. Servers that fail are replaced.
        If the step raises or is cancelled, the session still holds what it held before, and goes on when servers are
        back; but not after a step with a reorder, which some servers have carried out then and others have not.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            BadInput: more tokens than the session was opened for.
            SwarmError: an earlier reorder was cut off.
        """
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
        self._torn = bool(reorder)
        out = [await self._through(self._links, inputs[0])] if len(inputs) == 1 else await self._pipeline(inputs)
        self._torn = False
        self._position = position
        return out

    async def _through(self, links: list[_Link], step: Input) -> Chunk:
        """Runs one step through `links`, replacing in that list whichever server fails."""
        chunk, index = step.chunk, 0
        while index < len(links):
            link = links[index]
            sent = replace(step, chunk=chunk)
            try:
                chunk = await link.server.exchange(chunk, step.position, step.reorder)
            except ServerFailed as error:
                links[index : index + 1] = await self._replacement(link, step.position, error)
                continue
            link.history.append(sent)
            index += 1
        return chunk

    async def _pipeline(self, inputs: Sequence[Input]) -> list[Chunk]:
        """Runs many steps at once, each server on another one."""
        out: list[Chunk] = []
        stages = [[link] for link in self._links]

        async def stage(
            links: list[_Link],
            source: trio.MemoryReceiveChannel[Input],
            hand_on: Callable[[Input], object],
            done: Callable[[], object],
        ) -> None:
            async for step in source:
                hand_on(replace(step, chunk=await self._through(links, step)))
            done()

        try:
            with unwrapped(NoChainError):
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
                    nursery.start_soon(
                        stage, stages[-1], receive, lambda step: out.append(step.chunk), lambda: None
                    )
        finally:
            # Also after a failure: servers that took another's place must be closed some day, and can be used again.
            self._links = [link for links in stages for link in links]
        return out

    # --- recovery

    async def _replacement(self, failed: _Link, position: int, error: ServerFailed) -> list[_Link]:
        """Other servers for the blocks of `failed`, brought to `position`.

        Raises:
            NoChainError: nobody else holds them.
        """
        self._router.suspect(error.peer_id)
        await _close([failed])
        links = await self._open_chain(failed.server.hop.span, failed.history, position, because=error)
        self.recoveries += 1
        return links

    async def _open_chain(
        self, span: Span, history: History, position: int, because: ServerFailed | None = None
    ) -> list[_Link]:
        """Links for `span` that hold what `history` says, up to `position`.

        Servers that refuse or cannot be reached are left out and the rest tried; when none is left, all are asked
        again until the deadline, because servers come and go.
        """
        deadline = trio.current_time() + (RECOVERY_TIMEOUT if because is not None else 0.0)
        refused: dict[str, ServerFailed] = {} if because is None else {because.peer_id: because}
        spec = replace(self.spec, span=span)
        fresh = False
        while True:
            try:
                route = await self._router.route(spec, refused)
            except NoChainError as error:
                if not fresh:  # what this node has heard may be old
                    fresh = True
                    await self._router.refresh()
                    continue
                if not self._wait and trio.current_time() >= deadline:
                    raise _with_refusals(error, refused) from None
                await trio.sleep(RETRY_INTERVAL)
                refused, fresh = {}, False
                continue
            links: list[_Link] = []
            try:
                await self._open_links(spec, route, links)
                await self._replay(links, history, position)
            except ServerFailed as error:
                await _close(links)
                refused[error.peer_id] = error
                self._router.suspect(error.peer_id)
            except BaseException:
                await _close(links)
                raise
            else:
                return links

    async def _open_links(self, spec: SessionSpec, route: Sequence[Hop], links: list[_Link]) -> None:
        """Opens a session at every server of `route`, side by side. `links` has those that must be closed."""
        self._route_epoch += 1
        opened: dict[Hop, _Link] = {}

        async def open_one(hop: Hop) -> None:
            stream = await self._router.connect(hop)
            server = ServerSession(stream, hop, spec, self._router.peer_id, self._route_epoch)
            opened[hop] = _Link(server)
            await server.open()

        try:
            with unwrapped(ServerFailed):
                async with trio.open_nursery() as nursery:
                    for hop in route:
                        nursery.start_soon(open_one, hop)
        finally:
            links.extend(opened[hop] for hop in route if hop in opened)

    async def _replay(self, links: Sequence[_Link], history: History, position: int) -> None:
        """Rebuilds the caches of new servers from the inputs of the one that they replace."""
        if not links:
            return
        for step in history.replay(position, min(link.server.max_step_tokens for link in links)):
            for link in links:
                chunk = await link.server.exchange(step.chunk, step.position, step.reorder)
                link.history.append(step)
                step = replace(step, chunk=chunk)


async def _close(links: Sequence[_Link]) -> None:
    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(link.server.close)


def _with_refusals(error: NoChainError, refused: dict[str, ServerFailed]) -> NoChainError:
    if not refused:
        return error
    return NoChainError(f"{error}. Tried: {'; '.join(str(each) for each in refused.values())}", error.missing)


@contextmanager
def unwrapped(kind: type[Exception]) -> Iterator[None]:
    """Raises the first error of `kind` instead of a nursery's group that holds nothing else."""
    try:
        yield
    except BaseExceptionGroup as group:
        matching, others = group.split(kind)
        if matching is None or others is not None:
            raise
        error: BaseException = matching
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
