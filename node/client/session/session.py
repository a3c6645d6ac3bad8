"""A session of a client: a chain of servers that keep the attention caches, any of which may die.

Fault-tolerant generation of Petals (NeurIPS 2023, section 3.2, algorithms 1 and 2). The client keeps the inputs of
every junction (`history`). When a server fails it routes the missing blocks over others and replays the inputs into
them. Then it goes on at the same position (`chain`). Servers that are slow or about to stop are replaced in the same
way. Their standby is prepared in the background while they still work. Where only the way to a server failed, or a
better one is found, a reconnector takes the session up on another stream. What is done when is decided in `recovery`,
and carried out by `step`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from ....protocols.framing import wire_nbytes
from ....protocols.ids import Span
from ...errors import BadInput, SwarmError, unwrapped
from ...swarm.cost import CHUNK_TOKENS, chunk_tokens
from ...swarm.routing import Hop
from ..deadlines import DEADLINES, Waits
from ..request import WireTensor
from ..router import Router
from .chain import Chain, Interruption
from .history import Input, InputHistory, outside_groups
from .link import PathChanges, ServerLink, close_links, step_limit
from .pipeline import Pipeline
from .prefixes import Beginning, beginning_of
from .stream import HopTiming, SessionSpec, SessionStream


@dataclass(frozen=True)
class SavedLink:
    """What it takes to find a session at a server again."""

    peer_id: str
    start: int
    end: int
    nonce: bytes
    epoch: bytes


@dataclass(frozen=True)
class SavedSession:
    """A session that another process of the same client can take up, while the servers keep it."""

    links: tuple[SavedLink, ...]
    max_length: int
    position: int
    route_epoch: int
    codec: str = "none"


class ClientSession:
    """Hidden states in, hidden states out. One call at a time; made by `SwarmClient.session`."""

    def __init__(self, router: Router, spec: SessionSpec, wait: bool) -> None:
        self.spec = spec
        self._router = router
        self._chain = Chain(router, spec, wait)
        self._position = 0
        self._torn = False
        self._closed = False
        self._in_step = True  # as `Pipeline` has it
        self._first_output: WireTensor | None = None

    @property
    def route(self) -> tuple[Hop, ...]:
        return self._chain.route

    @property
    def links(self) -> tuple[ServerLink, ...]:
        """The chain, with the inputs of each server."""
        return tuple(self._chain.links)

    def junctions(self) -> list[WireTensor]:
        """The hidden states at the beginning of the session, as they entered each server and left the last one; none
        before the first step."""
        if self._first_output is None:
            return []
        first = [link.history.needed(link.history.end)[:1] for link in self._chain.links]
        return [step.chunk for steps in first for step in steps] + [self._first_output]

    @property
    def recoveries(self) -> int:
        """Servers that were replaced so far."""
        return self._chain.recoveries

    @property
    def waits(self) -> Waits:
        """What its steps have waited for so far."""
        return self._chain.waits

    @property
    def interruption(self) -> Interruption | None:
        """What its step is held up by; None while all is well."""
        return self._chain.interruption

    @property
    def coming(self) -> set[str]:
        """The servers that may come into the chain."""
        return self._chain.coming

    @property
    def paths(self) -> PathChanges:
        """How often a server's session went on over another stream instead."""
        return self._chain.paths

    @property
    def position(self) -> int:
        """Tokens that each row holds. Set it lower to roll back; the servers follow with the next step."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if not 0 <= position <= self._position:
            raise BadInput(f"a session that holds {self._position} tokens cannot go to position {position}")
        if self.spec.layout.groups and outside_groups(self._chain.links[0].history.inputs, position) != position:
            raise BadInput(f"position {position} is among tokens of a picture that see each other")
        self._position = position

    def fit(self, length: int) -> None:
        """Rolls back to the tokens with the factors of a text of `length` tokens of a row (longrope)."""
        if self._chain.links:
            wanted = self.spec.takes_long_factors(length)
            self._position = min(self._position, self._held_with(wanted))

    def _held_with(self, long_factors: bool) -> int:
        """How many of the tokens have these factors, from the first one on. Of those that were held before this process
        started it follows from their number (see `saved`)."""
        history = self._chain.links[0].history
        if history.start and self.spec.takes_long_factors(history.start) != long_factors:
            return 0
        return next((step.position for step in history.inputs if step.long_factors != long_factors), self._position)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of a row that one chunk may have."""
        return step_limit(self._chain.links)

    def chunk_tokens(self, tokens: int, values: int) -> int:
        """Tokens of a row of each chunk into which `tokens`, of `values` values each, are best cut. For any thread."""
        rows, links = self.spec.batch, tuple(self._chain.links)
        if rows * tokens <= CHUNK_TOKENS[0] or not links:
            return self.max_step_tokens
        nbytes = wire_nbytes((values,), self.spec.dtype, self.spec.codec)
        costs = self._chain.stage_costs(links, push=self.spec.push)
        return min(max(1, chunk_tokens(rows * tokens, nbytes, costs) // rows), self.max_step_tokens)

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        return tuple(link.server.timing for link in self._chain.links)

    @property
    def pushed_steps(self) -> int:
        """Steps that servers sent to each other, without the way through this client."""
        return sum(link.server.pushed_steps for link in self._chain.links)

    @property
    def traffic(self) -> tuple[tuple[int, int], ...]:
        """Tensor bytes (sent, received) between this client and each server of the present chain."""
        return tuple((link.server.bytes_sent, link.server.bytes_received) for link in self._chain.links)

    def beginning(self) -> Beginning:
        """What another session may begin with that begins as this one."""
        links = self._chain.links
        inputs = {link.server.hop.span.start: tuple(link.history.inputs) for link in links if not link.history.start}
        if not inputs or len(inputs) < len(links):  # what was held before this process started is not known
            return Beginning({}, 0)
        return beginning_of(inputs, self._position, self.route)

    async def open(self, beginning: Beginning | None = None, position: int = 0) -> None:
        """Finds servers and opens the session at them. It is brought to `position` of `beginning`, or to as much of it
        as all have kept, if more.

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
        """
        self._position = await self._chain.open(beginning, position)

    async def resume(self, saved: SavedSession) -> bool:
        """Takes up a session that an earlier process left; false if any of its servers does not hold it any more."""
        links: list[ServerLink] = []
        positions = [saved.position]

        async def resume_one(link: SavedLink) -> None:
            hop = Hop(link.peer_id, Span(link.start, link.end))
            stream, claims = await self._router.connect(hop), self._router.claims_of(hop.peer_id)
            server = SessionStream(stream, hop, self.spec, self._router.peer_id, link.nonce, claims=claims)
            links.append(ServerLink(server))
            positions.append(await server.resume(link.epoch))

        resumed = False
        try:
            with unwrapped(SwarmError), trio.move_on_after(DEADLINES.resume):
                async with trio.open_nursery() as nursery:
                    for link in saved.links:
                        nursery.start_soon(resume_one, link)
                resumed = True
        except (SwarmError, ValueError):
            pass
        except BaseException:  # the caller leaves: what is kept may be taken up later
            await close_links(links, leave=True)
            raise
        if not resumed:
            await close_links(links)
            return False
        self._position = min(positions)
        for taken in links:
            taken.history = InputHistory(start=self._position)
        self._chain.links = sorted(links, key=lambda link: link.server.hop.span.start)
        self._chain.route_epoch = saved.route_epoch + 1
        return True

    def saved(self) -> SavedSession | None:
        """What another process needs to take this session up. None before it is open, and where its tokens lack the
        factors that such a text takes."""
        links = tuple(
            SavedLink(server.hop.peer_id, server.hop.span.start, server.hop.span.end, server.nonce, server.epoch)
            for server in (link.server for link in self._chain.links)
        )
        spec, epoch = self.spec, self._chain.route_epoch
        if links and self._held_with(spec.takes_long_factors(self._position)) < self._position:
            return None
        return SavedSession(links, spec.max_length, self._position, epoch, spec.codec) if links else None

    async def close(self) -> None:
        """Gives the servers their caches back, or leaves them there for as long as `spec.keep` says. Never raises."""
        self._closed = True
        await self._chain.end()

    async def step(
        self,
        chunks: Sequence[WireTensor],
        reorder: Sequence[int] = (),
        *,
        outputs: int | None = None,
        long_factors: bool | None = None,
    ) -> list[WireTensor]:
        """Sends chunks of hidden states, in order, through the chain; several are pipelined over the servers. Returns
        what leaves the last server for each. Given `outputs`, only chunks that end in those of this number of last
        tokens of a row. What nobody asks for need not travel.

        `reorder` says for each row whose cache it continues, before the first chunk. Servers that fail are replaced.
        `long_factors`: as `wire.Step` has it, where that does not follow from the end of the chunks.
        If the step raises or is cancelled, the session holds what it held before. It goes on when servers are back. It
        does not after a step with a reorder: some servers have carried it out then and others have not.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            BadInput: more tokens than the session was opened for.
            SwarmError: the session is closed, or an earlier reorder was cut off.
        """
        tokens = sum(chunk.tokens for chunk in chunks)
        self._check_usable(tokens)
        inputs = []
        position, first = self._position, tuple(reorder)
        if long_factors is None:
            long_factors = self.spec.takes_long_factors(position + tokens)
        for chunk in chunks:
            inputs.append(Input(position, first, chunk, long_factors))
            position, first = position + chunk.tokens, ()
        wanted = _first_wanted(chunks, outputs)
        # Auditors recompute what was answered.
        known = len(inputs) if self._router.receipts.shares else int(self._first_output is None)
        receipts = {step.position for step in inputs[known:wanted]}
        # Rows that change places twice are wrong: no step with a reorder may be where we cannot see it.
        async with self.pipeline(push=not reorder) as pipeline:
            self._torn = bool(reorder)
            out = await pipeline.run(inputs, receipts)
            self._torn = False
        return out[wanted:]

    @asynccontextmanager
    async def under_way(self, chunk: WireTensor) -> AsyncIterator[Pipeline]:
        """One step, which is sent at the beginning of the block; in it, `arrive` and `answer` wait for it.

        Raises:
            NoChainError, BadInput, SwarmError: as `step` does.
        """
        self._check_usable(chunk.tokens)
        async with self.pipeline() as pipeline:
            await pipeline.send(chunk)
            try:
                yield pipeline
            finally:
                await pipeline.settle()

    def _check_usable(self, tokens: int = 0) -> None:
        """Raises: SwarmError, BadInput: the session is over, or has no room for `tokens` more tokens of a row."""
        if self._closed:
            raise SwarmError("this session is closed; open another")
        if self._torn:
            raise SwarmError("this session was cut off while its rows changed places; open another")
        if self._position + tokens > self.spec.max_length:
            raise BadInput(
                f"{self._position} tokens and {tokens} more pass the session's max_length of {self.spec.max_length}"
            )

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Steps run in this block, on the servers and streams that are best now."""
        begun = trio.current_time()
        async with self._chain.between_steps:
            await self._chain.switch_to_standbys()
            self.waits.add("turn", trio.current_time() - begun)
            for link in self._chain.links:
                self._chain.reconnector(link)
            yield

    @asynccontextmanager
    async def pipeline(self, *, push: bool = True) -> AsyncIterator[Pipeline]:
        """Steps under way through the chain, in this block; those that are not answered at its end are not wanted.

        The session holds what was answered then, and may be rolled back as after any step.

        Raises:
            SwarmError: the session is closed, or an earlier reorder was cut off.
        """
        self._check_usable()
        async with self._turn():
            pipeline = Pipeline(self._chain, self._position, push=push and self.spec.push, in_step=self._in_step)
            self._in_step = False  # until it is known
            try:
                yield pipeline
                self._in_step = pipeline.in_step
                self._first_output = self._first_output or pipeline.first_output
            finally:
                self._position = pipeline.position


def _first_wanted(chunks: Sequence[WireTensor], outputs: int | None) -> int:
    """The first of the chunks that end in the last `outputs` tokens of a row; None: all."""
    first = len(chunks) if outputs is not None else 0
    while first and sum(chunk.tokens for chunk in chunks[first:]) < (outputs or 0):
        first -= 1
    return first
