"""The stream to one server: taken up again when it is lost, and moved to a direct connection when there is one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.request import StreamLost
from petalnode.node.client.session.link import PathChanges, SessionReconnector
from petalnode.node.client.session.recovery import RECOVERY
from petalnode.node.errors import ServerFailed
from petalnode.node.swarm.routing import Hop
from petalnode.protocols.ids import Span


class Stream:
    def __init__(self, *, direct: bool) -> None:
        self.direct = direct
        self.was_reset = False

    async def reset(self) -> None:
        self.was_reset = True


class World:
    """A server and the way to it; in place of a `SessionStream` and of a `Router`.

    Attributes:
        connects, takes: what comes of the next attempts to connect and to take the session up: None, seconds that it
            takes, or an error. When none is left, it succeeds at once.
    """

    hop = Hop("server", Span(0, 1))
    kept = 30.0
    round_trip = 0.1

    def __init__(self, nursery: trio.Nursery, *, direct: bool = False) -> None:
        self._nursery = nursery
        self.stream = Stream(direct=direct)
        self.lost = trio.Event()
        self.way = trio.Event()
        self.connects: list[float | Exception] = []
        self.takes: list[float | Exception] = []
        self.made: list[Stream] = []
        self.refreshes = 0
        self.between_steps = trio.Lock()
        self.changes = PathChanges()
        server: Any = self
        self.reconnector = SessionReconnector(server, server, self.between_steps, self.changes)
        nursery.start_soon(self.reconnector.run)

    @property
    def direct(self) -> bool:
        return self.stream.direct

    def uses(self, stream: Any) -> bool:
        return self.stream is stream

    async def wait_lost(self) -> None:
        await self.lost.wait()

    def watch_direct(self, peer_id: str) -> trio.Event:
        assert peer_id == "server"
        return self.way

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._nursery.start_soon(function, *args)

    async def refresh(self) -> None:
        self.refreshes += 1
        await trio.sleep(100)

    async def connect(self, hop: Hop, *, direct: bool = False) -> Any:
        assert hop == self.hop
        await self._outcome(self.connects)
        self.made.append(Stream(direct=direct))
        return self.made[-1]

    async def take_up(self, stream: Any) -> None:
        await self._outcome(self.takes)
        self.stream = stream
        self.lost = trio.Event()

    async def _outcome(self, outcomes: list[float | Exception]) -> None:
        await trio.lowlevel.checkpoint()
        outcome = outcomes.pop(0) if outcomes else 0.0
        if isinstance(outcome, Exception):
            raise outcome
        await trio.sleep(outcome)


@asynccontextmanager
async def a_world(**options: Any) -> AsyncIterator[Any]:
    with trio.fail_after(3600):
        async with trio.open_nursery() as nursery:
            yield World(nursery, **options)
            nursery.cancel_scope.cancel()


settled = trio.testing.wait_all_tasks_blocked
FAILED, REFUSED = ServerFailed("gone", "server"), ServerFailed("it holds no such session", "server")
LOST = StreamLost("lost", "server")


@pytest.mark.virtual_time
async def test_a_lost_stream_is_replaced_at_once() -> None:
    async with a_world() as world:
        await settled()
        assert not world.made and not world.reconnector.state.lost
        world.lost.set()
        await settled()
        assert world.uses(world.made[0]) and world.changes == PathChanges(rejoined=1)
        assert trio.current_time() < 1 and await world.reconnector.settled()
        world.reconnector.report_lost()  # by a step, which saw it first
        await settled()
        assert world.uses(world.made[1]) and world.changes.rejoined == 2


@pytest.mark.virtual_time
async def test_attempts_go_on_while_the_swarm_is_asked() -> None:
    async with a_world() as world:
        world.connects, world.takes = [FAILED, FAILED, FAILED], [LOST]
        begun = trio.current_time()
        world.lost.set()
        await settled()
        assert world.reconnector.state.attempts == 1 and world.reconnector.state.may_return
        await world.reconnector.settled_or_failed()
        assert await world.reconnector.settled()
        assert trio.current_time() - begun == pytest.approx(4 * RECOVERY.pause)
        assert world.refreshes == 1 and RECOVERY.refresh_after == 2  # one at a time
        assert world.changes.rejoined == 1 and world.reconnector.state.attempts == 0
        await trio.sleep(200)  # it has been answered
        world.connects = [FAILED, FAILED, FAILED]
        world.lost.set()
        await settled()
        assert await world.reconnector.settled()
        assert world.refreshes == 2


@pytest.mark.virtual_time
async def test_stalled_attempt_is_given_up() -> None:
    async with a_world() as world:
        world.connects = [1000.0]
        world.lost.set()
        begun = trio.current_time()
        await settled()
        await world.reconnector.settled_or_failed()
        assert trio.current_time() - begun == pytest.approx(2.0 + 8 * world.round_trip)
        assert await world.reconnector.settled()


@pytest.mark.virtual_time
async def test_server_without_the_session_is_not_asked_again() -> None:
    async with a_world() as world:
        world.takes = [REFUSED]
        world.lost.set()
        await settled()
        assert not await world.reconnector.settled()
        assert world.reconnector.state.gone and len(world.made) == 1 and world.changes.rejoined == 0
        await trio.sleep(100)
        assert len(world.made) == 1


@pytest.mark.virtual_time
async def test_server_is_sought_while_it_keeps_the_session() -> None:
    async with a_world() as world:
        world.connects = [FAILED] * 1000
        begun = trio.current_time()
        world.lost.set()
        await settled()
        assert not await world.reconnector.settled()
        assert trio.current_time() - begun == pytest.approx(world.kept + DEADLINES.keep_grace, abs=2 * RECOVERY.pause)


@pytest.mark.virtual_time
async def test_who_needs_server_no_more_looks_no_longer() -> None:
    async with a_world() as world:
        world.connects = [FAILED] * 1000
        world.lost.set()
        await trio.sleep(1)
        world.reconnector.cancel()
        assert not await world.reconnector.settled()
        left = len(world.connects)
        await trio.sleep(10)
        assert len(world.connects) == left


@pytest.mark.virtual_time
async def test_a_relayed_stream_moves_between_two_steps() -> None:
    async with a_world() as world:
        relayed = world.stream
        await world.between_steps.acquire()
        world.way.set()
        await settled()
        assert len(world.made) == 1 and world.stream is relayed  # a step is under way
        world.between_steps.release()
        await settled()
        assert world.stream is world.made[0] and world.direct and not world.made[0].was_reset
        assert world.changes == PathChanges(moved=1) and not world.between_steps.locked()
        await trio.sleep(2 * DEADLINES.move_retry)
        assert len(world.made) == 1  # it is direct now


@pytest.mark.virtual_time
async def test_a_direct_stream_stays() -> None:
    async with a_world(direct=True) as world:
        world.way.set()
        await trio.sleep(2 * DEADLINES.move_retry)
        assert not world.made


@pytest.mark.virtual_time
@pytest.mark.parametrize("failure", [LOST, REFUSED, DEADLINES.move + 1.0])
async def test_failed_move_leaves_the_old_stream_serving(failure: Any) -> None:
    async with a_world() as world:
        relayed = world.stream
        world.takes = [failure]
        world.way.set()
        await trio.sleep(DEADLINES.move + 2)
        assert world.stream is relayed and world.made[0].was_reset and not world.between_steps.locked()
        assert world.changes == PathChanges() and not world.reconnector.state.lost
        await trio.sleep(DEADLINES.move_retry)
        assert world.stream is world.made[1] and world.changes.moved == 1


@pytest.mark.virtual_time
async def test_unusable_connection_is_tried_again_later() -> None:
    async with a_world() as world:
        world.connects = [FAILED]
        world.way.set()
        await trio.sleep(DEADLINES.move_retry - 1)
        assert not world.made
        await trio.sleep(2)
        assert world.stream is world.made[0]


@pytest.mark.virtual_time
async def test_step_waiting_for_the_session_is_not_awaited() -> None:
    """It holds the lock, and finds the stream at its end."""

    async with a_world() as world:
        await world.between_steps.acquire()
        world.way.set()
        await settled()
        world.reconnector.report_lost()
        await settled()
        assert world.made[0].was_reset and world.stream is world.made[1]
        assert world.changes == PathChanges(rejoined=1) and world.between_steps.locked()
        world.between_steps.release()
    async with a_world() as world:
        world.connects = [5.0]  # the stream is lost while the other one is made
        await world.between_steps.acquire()
        world.way.set()
        await settled()
        world.reconnector.report_lost()
        await trio.sleep(10)
        assert world.made[0].was_reset and world.stream is world.made[1]
        world.between_steps.release()
