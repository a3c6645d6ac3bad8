"""A swarm that is cut in two and comes together again, and whose bootstrap node is replaced: who knows whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import trio

from petalnode.node.testing import MemoryNetwork, open_network
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.directory_node import DirectoryNode

pytestmark = pytest.mark.virtual_time

VERSION = bytes(32)
SERVERS = 9
LONG = 1000.0  # seconds: more than an announcement of these nodes counts


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcements expire by the clock that jumps."""
    started = time.time()

    def now() -> float:
        # Threads of libraries ask too, and have no virtual clock.
        return started + (trio.current_time() if trio.lowlevel.in_trio_run() else 0)

    monkeypatch.setattr(time, "time", now)


async def joined(network: MemoryNetwork) -> DirectoryNode:
    node = cast(DirectoryNode, network.node())
    await node.start(network.nursery)
    return node


def announce(node: DirectoryNode) -> None:
    span = Span(0, 1)
    node.announce(Announcement(node.peer_id, VERSION, "tiny", 1, span, ServerState.ONLINE, step_seconds=0.01))


def known(node: DirectoryNode) -> set[str]:
    return {server.peer_id for server in node.view.servers(VERSION, now=time.time())}


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Looks each virtual second."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  (several nodes have to change)
            await trio.sleep(1)


def all_know(nodes: Sequence[DirectoryNode], servers: Sequence[DirectoryNode]) -> bool:
    return all(known(node) == {server.peer_id for server in servers} for node in nodes)


async def swarm_of(network: MemoryNetwork) -> tuple[DirectoryNode, list[DirectoryNode]]:
    bootstrap = await joined(network)
    servers = [await joined(network) for _ in range(SERVERS)]
    for server in servers:
        announce(server)
    await until(lambda: all_know([bootstrap, *servers], servers), LONG)
    return bootstrap, servers


async def test_halves_of_a_swarm_come_together_again(virtual_time: None) -> None:
    async with open_network(DirectoryNode) as network:
        bootstrap, servers = await swarm_of(network)
        with_it, without = servers[: SERVERS // 2], servers[SERVERS // 2 :]
        lines = [network.link(one.peer_id, other.peer_id) for one in (bootstrap, *with_it) for other in without]
        for line in lines:
            line.take_down()
        await until(lambda: all_know([bootstrap, *with_it], with_it) and all_know(without, without), LONG)
        newcomer = await joined(network)  # at the bootstrap node: it hears of that side only
        announce(newcomer)
        for line in lines:
            line.mend()
        await until(lambda: all_know([bootstrap, newcomer, *servers], [newcomer, *servers]), LONG)


async def test_bootstrap_node_is_replaced_through_any_server(virtual_time: None) -> None:
    async with open_network(DirectoryNode) as network:
        bootstrap, servers = await swarm_of(network)
        bootstrap.end()
        await trio.sleep(LONG)
        assert all_know(servers, servers)
        replaced = await joined(network)
        assert all_know([replaced], servers)  # with its first look
        newcomer = await joined(network)
        announce(newcomer)
        await until(lambda: all_know([newcomer, replaced, *servers], [newcomer, *servers]), LONG)
