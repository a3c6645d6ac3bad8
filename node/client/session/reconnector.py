"""Keeps one session reachable at one server: reconnects a lost stream, and moves it to a better path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from ...errors import ServerFailed
from ..deadlines import DEADLINES
from ..request import StreamLost
from ..router import Router
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


@dataclass
class PathChanges:
    """How often sessions of one client session went on over another stream."""

    rejoined: int = 0
    moved: int = 0


class SessionReconnector:
    """Carries out `recovery.next_path_action` for one server of a session, in the background; `run` is its task.

    A lost stream is replaced by another one to the same server as soon as it can be reached again, whether a step is
    under way or not, for as long as the server keeps the session. A relayed stream is replaced by a direct one as soon
    as there is a direct connection, and only between two steps, which hold `between_steps`.

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

            async def first(wait: Callable[[], Awaitable[object]], event: Callable[[], PathEvent]) -> None:
                await wait()
                events.append(event())
                nursery.cancel_scope.cancel()

            async def direct() -> None:
                await trio.sleep_until(self._move_after)
                await self._router.watch_direct(self._server.hop.peer_id).wait()

            nursery.start_soon(first, self._server.wait_lost, self._lost)
            nursery.start_soon(first, self._reported.wait, self._lost)
            if not self._server.direct:
                nursery.start_soon(first, direct, lambda: PathSignal.DIRECT)
        return next((event for event in events if isinstance(event, PathLost)), events[0])

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
