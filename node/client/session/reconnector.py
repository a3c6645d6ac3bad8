"""What holds a client to one server: takes the session up when its stream is lost, and moves it to a better path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from ...errors import ServerFailed
from ..deadlines import KEEP_GRACE, MOVE_RETRY, MOVE_TIMEOUT
from ..request import StreamLost
from ..router import Router
from .recovery import PAUSE, attempt_timeout
from .stream import SessionStream

_REFRESH_AFTER: Final = 2
"""Failed attempts after which the swarm is asked where the server is now."""


@dataclass
class PathChanges:
    """How often sessions of one client session went on over another stream."""

    rejoined: int = 0
    moved: int = 0


class SessionReconnector:
    """Keeps one session at one server reachable, in the background; `run` is its task.

    A lost stream is replaced by another one to the same server as soon as it can be reached again, whether a step is
    under way or not, for as long as the server keeps the session. A relayed stream is replaced by a direct one as soon
    as there is a direct connection, and only between two steps, which hold `between_steps`.

    Attributes:
        gone: the session is over at the server, or was looked for long enough.
        attempts: of taking the session up that have failed since the stream was lost.
    """

    def __init__(self, router: Router, server: SessionStream, between_steps: trio.Lock, changes: PathChanges) -> None:
        self.gone = False
        self.attempts = 0
        self._router = router
        self._server = server
        self._between_steps = between_steps
        self._changes = changes
        self._scope = trio.CancelScope()
        self._lost = False
        self._reported = trio.Event()
        self._changed = trio.Event()
        self._move_after = 0.0
        self._waiting = trio.CancelScope()
        self._refreshing = False

    def cancel(self) -> None:
        """Lets go of the server."""
        self.gone = True
        self._scope.cancel()
        self._notify()

    def report_lost(self) -> None:
        """Says that a step has found the stream at its end."""
        self._lost = True
        self._reported.set()
        self._waiting.cancel()  # for the end of that very step

    @property
    def may_return(self) -> bool:
        """Whether a lost stream is being replaced."""
        return self._lost and not self.gone

    async def settled(self) -> bool:
        """Whether the session goes on at this server, once that is known."""
        while self.may_return:
            await self._changed.wait()
        return not self.gone

    async def failed(self) -> None:
        """Returns when an attempt to take the session up has failed."""
        while not self.attempts and not self.gone:
            await self._changed.wait()

    async def run(self) -> None:
        with self._scope:
            while not self.gone:
                await self._lost_or_direct()
                if self._lost:
                    await self._rejoin()
                else:
                    await self._move()

    def _go_on(self) -> None:
        self._lost, self.attempts = False, 0
        self._reported = trio.Event()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _lost_or_direct(self) -> None:
        """Returns when the stream is lost, or when a direct connection is there for a relayed one."""
        async with trio.open_nursery() as nursery:

            async def first(wait: Callable[[], Awaitable[object]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            async def lost() -> None:
                await self._server.wait_lost()
                self._lost = True

            async def direct() -> None:
                await trio.sleep_until(self._move_after)
                await self._router.watch_direct(self._server.hop.peer_id).wait()

            nursery.start_soon(first, lost)
            nursery.start_soon(first, self._reported.wait)
            if not self._server.direct:
                nursery.start_soon(first, direct)

    async def _rejoin(self) -> None:
        deadline = trio.current_time() + self._server.kept + KEEP_GRACE
        while not self.gone:
            try:
                with trio.move_on_after(attempt_timeout(self.attempts, self._server.round_trip)):
                    if await self._attempt():
                        self._changes.rejoined += 1
                        self._go_on()
                        return
            except ServerFailed:
                self.gone = True  # it has lost the session, or lies about it
            self.attempts += 1
            self.gone = self.gone or trio.current_time() >= deadline
            self._notify()
            if self.attempts >= _REFRESH_AFTER and not self._refreshing:
                self._refreshing = True
                self._router.start_soon(self._refresh)
            await trio.sleep(PAUSE)

    async def _attempt(self) -> bool:
        """
        Raises:
            ServerFailed: the server is there, and the session is not as it was left.
        """
        try:
            stream = await self._router.connect(self._server.hop)
        except ServerFailed:
            return False
        try:
            await self._server.take_up(stream)
        except StreamLost:
            return False
        return True

    async def _refresh(self) -> None:
        try:
            await self._router.refresh()
        finally:
            self._refreshing = False

    async def _move(self) -> None:
        """Goes on over a direct connection. Where that fails the stream that there is still serves."""
        self._move_after = trio.current_time() + MOVE_RETRY
        try:
            stream = await self._router.connect(self._server.hop, direct=True)
        except ServerFailed:
            return
        held = False
        try:
            with trio.CancelScope() as self._waiting:
                if self._lost:  # while we connected: a step waits for us, and must not be waited for
                    return
                await self._between_steps.acquire()
                held = True
            if held:
                with trio.move_on_after(MOVE_TIMEOUT):
                    await self._server.take_up(stream)
                    self._changes.moved += 1
                    self._go_on()
        except ServerFailed:
            return
        finally:
            if held:
                self._between_steps.release()
            if not self._server.uses(stream):
                await stream.reset()
