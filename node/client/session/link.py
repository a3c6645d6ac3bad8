"""One server of a chain: its stream, the inputs that made its cache, and those that may take its place.

`SessionReconnector` keeps the session reachable: it replaces a lost stream, and moves it to a better path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from ....crypto.evidence import NotProven, check_equivocation
from ....crypto.receipts import Receipt
from ....protocols import wire_pb2 as wire
from ...errors import ServerCheated, ServerFailed
from ...swarm.cost import Estimate, StageCost
from ..deadlines import DEADLINES, patience, patience_once_more
from ..request import StreamLost, WireTensor, has_code
from ..router import Router
from .history import Input, InputHistory
from .recovery import (
    AttemptFailed,
    PathAction,
    PathEvent,
    PathLost,
    PathSignal,
    PathState,
    PathWork,
    TakeUp,
    attempt_timeout,
    next_path_action,
)
from .stream import SessionStream
from .trace import HopTrace


@dataclass
class PathChanges:
    """How often sessions of one client session went on over another stream."""

    rejoined: int = 0
    moved: int = 0


class SessionReconnector:
    """Carries out `recovery.next_path_action` for one server of a session, in the background; `run` is its task.

    A lost stream is replaced as soon as the server can be reached again, also during a step, while the server keeps the
    session. A relayed stream gives way to a direct one as soon as that can be had between two steps, which hold
    `between_steps`.

    Attributes:
        state: what is known of the stream.
    """

    def __init__(self, router: Router, server: SessionStream, between_steps: trio.Lock, changes: PathChanges) -> None:
        self.state = PathState()
        self._router = router
        self._server = server
        self._between_steps = between_steps
        self._changes = changes
        self._scope = trio.CancelScope()
        self._reported = trio.Event()
        self._changed = trio.Event()
        self._move_after = 0.0
        self._waiting = trio.CancelScope()
        self._refreshing = False

    def cancel(self) -> None:
        """Lets go of the server."""
        self._take(PathSignal.DISMISSED)
        self._scope.cancel()

    async def close_session(self) -> None:
        """Ends the session of a stream that was abandoned, by another one. Never raises."""
        with trio.CancelScope(shield=True), trio.move_on_after(DEADLINES.close), suppress(ServerFailed):
            await self._server.close_on(await self._router.connect(self._server.hop))

    def report_lost(self) -> None:
        """Says that a step has found the stream at its end."""
        self._take(self._lost())
        self._reported.set()
        self._waiting.cancel()  # for the end of that very step

    async def settled(self) -> bool:
        """Whether the session goes on at this server, once that is known."""
        while self.state.may_return:
            await self._changed.wait()
        return not self.state.gone

    async def settled_or_failed(self) -> None:
        """Returns once that is known, or an attempt to take the session up has failed."""
        while self.state.may_return and not self.state.attempts:
            await self._changed.wait()

    async def run(self) -> None:
        action: PathAction = PathWork.WATCH
        with self._scope:
            while action is not PathWork.STOP:
                action = self._take(await self._carry_out(action))

    def _take(self, event: PathEvent) -> PathAction:
        self.state, action = next_path_action(self.state, event)
        self._changed.set()
        self._changed = trio.Event()
        return action

    async def _carry_out(self, action: PathAction) -> PathEvent:
        if isinstance(action, TakeUp):
            return await self._take_up(action)
        return await (self._move() if action is PathWork.MOVE else self._watch())

    def _lost(self) -> PathLost:
        return PathLost(trio.current_time() + self._server.kept + DEADLINES.keep_grace)

    async def _watch(self) -> PathEvent:
        """Returns when the stream is lost, or when a direct connection is there for a relayed one."""
        events: list[PathEvent] = []
        async with trio.open_nursery() as nursery:
            if not self._server.direct:
                nursery.start_soon(self._wait_direct, events, nursery.cancel_scope)
            nursery.start_soon(self._wait_reported, events, nursery.cancel_scope)
            await self._server.wait_lost()
            events.append(self._lost())
            nursery.cancel_scope.cancel()
        return next((event for event in events if isinstance(event, PathLost)), events[0])

    async def _wait_reported(self, events: list[PathEvent], scope: trio.CancelScope) -> None:
        await self._reported.wait()
        events.append(self._lost())
        scope.cancel()

    async def _wait_direct(self, events: list[PathEvent], scope: trio.CancelScope) -> None:
        await trio.sleep_until(self._move_after)
        await self._router.watch_direct(self._server.hop.peer_id).wait()
        events.append(PathSignal.DIRECT)
        scope.cancel()

    async def _take_up(self, action: TakeUp) -> PathEvent:
        if action.refresh and not self._refreshing:
            self._refreshing = True
            self._router.start_soon(self._refresh)
        await trio.sleep(action.pause)
        with trio.move_on_after(attempt_timeout(action.attempts, self._server.round_trip)):
            try:
                stream = await self._router.connect(self._server.hop)
            except ServerFailed:
                return AttemptFailed(trio.current_time())
            try:
                await self._server.take_up(stream)
            except ServerFailed as error:  # else it has lost the session, or lies about it
                return AttemptFailed(trio.current_time(), refused=not isinstance(error, StreamLost))
            self._changes.rejoined += 1
            return self._restored()
        return AttemptFailed(trio.current_time())

    def _restored(self) -> PathEvent:
        self._reported = trio.Event()
        return PathSignal.RESTORED

    async def _refresh(self) -> None:
        try:
            await self._router.refresh()
        finally:
            self._refreshing = False

    async def _move(self) -> PathEvent:
        """Goes on over a direct connection. Where that fails the stream that there is still serves."""
        self._move_after = trio.current_time() + DEADLINES.move_retry
        try:
            stream = await self._router.connect(self._server.hop, direct=True)
        except ServerFailed:
            return PathSignal.NOT_MOVED
        held = False
        try:
            with trio.CancelScope() as self._waiting:
                if self.state.lost:  # while we connected: a step waits for us, and must not be waited for
                    return PathSignal.NOT_MOVED
                await self._between_steps.acquire()
                held = True
            if held:
                with trio.move_on_after(DEADLINES.move):
                    await self._server.take_up(stream)
                    self._changes.moved += 1
                    return self._restored()
        except ServerFailed:
            pass
        finally:
            if held:
                self._between_steps.release()
            if not self._server.uses(stream):
                await stream.reset()
        return PathSignal.NOT_MOVED


UNKNOWN_STEP: Final = 0.01
UNKNOWN_TOKEN: Final = 0.001
"""Seconds of a step, and of each token of a prompt, at a server that announces nothing."""


@dataclass(eq=False)
class ServerLink:
    """One server of the chain, and the inputs that made its cache.

    `usual`: what its last answers took per token, beyond the round trip. `reconnector`: once it is in the
    chain. `standby_failed`: when no standby could be had. `trace`: where its answers are counted for a trace.
    """

    server: SessionStream
    history: InputHistory = field(default_factory=InputHistory)
    usual: Estimate = field(default_factory=Estimate)
    standby: Standby | None = None
    reconnector: SessionReconnector | None = None
    standby_failed: float = -math.inf
    trace: HopTrace | None = None

    def count(self, tokens: int) -> None:
        """Notes for the trace that the server has answered a step of `tokens` tokens."""
        if self.trace is not None:
            timing = self.server.timing
            self.trace.add(tokens, waited=timing.total, queue=timing.queue, compute=timing.compute)
            self.trace.bytes_sent, self.trace.bytes_received = self.server.bytes_sent, self.server.bytes_received

    def note(self, tokens: int) -> None:
        """Learns from the last answer, to a step of `tokens` tokens."""
        self.usual.note(max(0.0, self.server.timing.total - self.server.round_trip) / tokens)

    async def replay(self, step: Input, epoch: int) -> Input:
        """Runs an input through the server, which has had those before; returns that of the server behind it.

        Raises:
            ServerFailed: it failed.
        """
        answer = await self.server.exchange(step, epoch)
        self.history.append(replace(step, answered=answer.receipt.reply_hash))
        self.count(step.chunk.tokens)
        return replace(step, chunk=answer.chunk, answered=b"")

    def has_lost(self, position: int, error: ServerFailed) -> bool:
        """Whether the server says by `error` that it does not hold what it has answered for last. Nothing may be under
        way then but the step behind `position`, and nothing rolled back by it."""
        return has_code(error, wire.ERROR_NOT_FOUND) and position >= self.history.end and self.server.is_in_step

    def patience(self, chunk: WireTensor, before: int = 0) -> float:
        """Seconds after which the answer to a step with this input is late. `before` tokens of a row are under way
        before it."""
        tokens = before + chunk.tokens
        announced = self.server.announced_seconds(tokens * chunk.tensor.shape[0])
        usual = self.usual.value if self.usual.count else None
        return patience(usual, tokens, len(chunk.payload), self.server.round_trip, announced)

    def patience_once_more(self, chunk: WireTensor) -> float:
        """The same for a step that was waited for as a pushed one, and was then sent from here."""
        if not self.usual.count:
            return math.inf
        return patience_once_more(self.usual.value, chunk.tokens, self.server.round_trip)

    def cost(self, per_byte: float | None, *, pushed: bool) -> StageCost:
        """What steps of a prompt cost here, by what the server has announced."""
        server, many = self.server, 256
        one, more = server.announced_seconds(1), server.announced_seconds(1 + many)
        if one is None or more is None:
            one, more = UNKNOWN_STEP, UNKNOWN_STEP + many * UNKNOWN_TOKEN
        credits, in_flight = server.credits, server.bytes_in_flight
        return StageCost(one, (more - one) / many, server.round_trip, per_byte, pushed, in_flight, credits)

    def expected(self, chunk: WireTensor) -> float:
        """Seconds that a server may compute for several tokens, twice what is known of it; 0 of one token."""
        if chunk.tokens == 1:
            return 0.0
        announced = self.server.announced_seconds(chunk.tokens * chunk.tensor.shape[0]) or 0.0
        return 2 * (self.usual.value * chunk.tokens if self.usual.count else announced)

    @property
    def standby_ready(self) -> bool:
        return self.standby is not None and self.standby.ready


def proven_lie(pusher: str, told: Receipt, pushed: Receipt) -> ServerCheated | None:
    """What two receipts of one server prove, one for this client and one for the next server; None: nothing."""
    try:
        what = check_equivocation(pusher, told, pushed)
    except NotProven:
        return None
    what = f"server {pusher} cannot be believed: {what}, one for this client and one for the next server"
    return ServerCheated(what, pusher, (told, pushed))


@dataclass(eq=False)
class Standby:
    """Servers that are brought to where a link is, to take its place. `applied`: the link's inputs they have."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    links: list[ServerLink] = field(default_factory=list)
    applied: list[Input] = field(default_factory=list)
    ready: bool = False


def step_limit(links: Sequence[ServerLink]) -> int:
    """Tokens of a row that one step through all of `links` may have."""
    return min((link.server.max_step_tokens for link in links), default=1)


async def close_links(links: Sequence[ServerLink], leave: bool = False) -> None:
    """Ends the sessions of `links`, side by side, or leaves them at their servers. Never raises."""
    async with trio.open_nursery() as nursery:
        for link in links:
            end = link.server.leave if leave else link.server.close
            if link.reconnector is not None:
                link.reconnector.cancel()
                if link.server.abandoned and not leave:
                    end = link.reconnector.close_session
            nursery.start_soon(end)
