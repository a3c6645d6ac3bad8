"""Who connects again and again is refused before there is a task for it, and that counts for its address."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
import trio
import trio.lowlevel

from petalnode.crypto.identity import Identity
from petalnode.node.network.transport.bandwidth import Bandwidth
from petalnode.node.network.transport.connections import Network
from petalnode.node.network.transport.limits import LIMITS, WORK, NodeLimits
from petalnode.node.network.transport.raw_connection import Listener
from tests.attacks.hosts import LOOPBACK, host
from tests.memory_muxer import MemoryRaw
from tests.node_inspection import limits_of
from tests.patience import eventually

ATTACKER, HONEST = "203.0.113.7", "198.51.100.1"


class Passes(trio.abc.Instrument):
    """Counts what is refused in one pass of the loop, and the tasks that were started."""

    def __init__(self) -> None:
        self.most = self.now = self.total = self.tasks = 0

    def note_refused(self) -> None:
        self.now += 1
        self.total += 1

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.tasks += 1

    def before_io_wait(self, timeout: float) -> None:
        self.most, self.now = max(self.most, self.now), 0


class Refusing(NodeLimits):
    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self._passes = passes

    def admit(self, origin: str) -> bool:
        self._passes.note_refused()
        return False


class Dialed:
    """A listening socket, to which somebody has connected some times, `BlockingIOError` after that."""

    def __init__(self, made: socket.socket, connections: int) -> None:
        self._made, self.connections, self.closed = made, connections, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._made, name)

    def accept(self) -> tuple[Dialed, tuple[str, int]]:
        if not self.connections:
            raise BlockingIOError
        self.connections -= 1
        return self, (ATTACKER, 1)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.virtual_time
async def test_refused_connections_start_no_task() -> None:
    passes = Passes()
    with socket.socket() as made:
        dialed = Dialed(made, 100_000)
        trio.lowlevel.add_instrument(passes)
        listener = Listener(made, Refusing(passes))
        listener._listening = dialed  # type: ignore[assignment]
        before = passes.tasks
        with trio.move_on_after(2.0):
            await listener.accept()
        assert passes.tasks == before
    assert dialed.closed == passes.total
    assert passes.most <= 2 * LIMITS.refused_at_once
    assert 1.8 * LIMITS.refused_per_second < passes.total < 2.2 * LIMITS.refused_per_second


@pytest.mark.virtual_time
async def test_loud_address_has_few_handshakes_while_others_wait() -> None:
    limits = NodeLimits()

    def admitted(origin: str) -> int:
        count = 0
        while limits.admit(origin):
            limits.handshakes.add(origin)
            count += 1
        for _ in range(count):
            limits.handshakes.remove(origin)
        return count

    assert admitted(ATTACKER) == LIMITS.handshakes // 2
    assert not limits.of_address(ATTACKER).is_quiet, "accepting is work"
    limits.served_at = trio.current_time()
    assert admitted(ATTACKER) == LIMITS.handshakes_of_loud
    assert limits.admit(HONEST)
    assert limits.of_address(HONEST).recent.amount() == WORK.accepted
    for _ in range(LIMITS.inbound // 2):
        limits.inbound.add(HONEST)
    assert not limits.admit(HONEST)
    assert limits.of_address(HONEST).recent.amount() == WORK.accepted + WORK.refused


async def test_loud_address_alone_is_refused_at_the_socket() -> None:
    async with host(LOOPBACK) as victim:
        limits = limits_of(victim)
        port = int(victim.addrs()[0].split("/")[4])
        loud = limits.of_address("127.0.0.2")

        async def dial(source: str) -> trio.SocketStream:
            return await trio.open_tcp_stream("127.0.0.1", port, local_address=source)

        held = []
        for _ in range(2 * LIMITS.handshakes_of_loud):
            limits.worked(loud, WORK.per_second / 100)
            limits.served_at = trio.current_time()
            held.append(await dial("127.0.0.2"))
        before = limits.of_address("127.0.0.3").users
        limits.served_at = trio.current_time()
        held.append(await dial("127.0.0.3"))
        await eventually(lambda: limits.of_address("127.0.0.3").users > before, "the other one is accepted")
        assert loud.users <= LIMITS.handshakes_of_loud
        for stream in held:
            await trio.aclose_forcefully(stream)


class Faulty(Dialed):
    """A listening socket whose first connection is `first`, or fails so; the next one is sound."""

    def __init__(self, made: socket.socket, first: OSError | None) -> None:
        super().__init__(made, 1)
        self._first = [first]

    def accept(self) -> Any:
        if self._first:
            if (fault := self._first.pop()) is not None:
                raise fault
            return self._made.dup(), None
        return self._made.dup(), (HONEST, 1)


@pytest.mark.parametrize(
    "first", [OSError(errno.ENETDOWN, "down"), OSError(errno.EPERM, "filtered"), OSError(errno.ECONNABORTED, "gone")]
)
async def test_connection_that_fails_does_not_end_the_host(first: OSError) -> None:
    with socket.socket() as made:
        listener = Listener(made, NodeLimits())
        listener._listening = Faulty(made, first)  # type: ignore[assignment]
        await (await listener.accept()).aclose()
        listener._listening = Faulty(made, OSError(errno.EMFILE, "too many files"))  # type: ignore[assignment]
        with pytest.raises(OSError, match="too many"):  # which trio waits out
            await listener.accept()


async def test_connection_without_an_address_is_accepted() -> None:
    """macOS gives none of a peer that has gone meanwhile, as a port scanner does."""
    with socket.socket() as made:
        listener = Listener(made, NodeLimits())
        listener._listening = Faulty(made, None)  # type: ignore[assignment]
        await (await listener.accept()).aclose()


@pytest.mark.virtual_time
async def test_who_never_had_its_turn_is_closed() -> None:
    """The listener of WebRTC closes nothing itself: its places would be held for ever."""
    network = Network(Identity.generate(), None, Bandwidth(), on_loopback=True)
    network.limits.work.spend(1e9)
    raw: Any = MemoryRaw(origin=ATTACKER)
    await network._handle_inbound_connection(raw, LOOPBACK[0])
    assert raw.closed and network.limits.handshakes.total == network.limits.inbound.total == 0
