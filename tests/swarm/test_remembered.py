"""Peers of earlier runs: a node finds its swarm by them, and comes back to it, with real processes on loopback."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.errors import SwarmError
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.discovery import JoinResult
from petalnode.node.swarm.peer_file import PeerStore
from petalnode.node.swarm.swarm import Swarm, open_swarm
from tests.connections import free_port
from tests.swarm.announcers import Node, Nodes

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PATIENCE = 300  # seconds for what usually takes a fraction of one
NOBODY = "/ip4/127.0.0.1/tcp/1"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "peers" / "public.json"


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as started:
        yield started


def config(memory: Path, *peers: str, **options) -> SwarmConfig:
    return SwarmConfig(identity=Identity.generate(), peers=peers, remembered=memory, **options)


async def sees(swarm: Swarm, *peers: str) -> None:
    with trio.fail_after(PATIENCE):
        while not all(swarm.view.get(peer, time.time()) for peer in peers):
            await swarm.wait_changed()


async def run_once(how: SwarmConfig, *wanted: str) -> JoinResult | None:
    """A whole run of a node, which sees these servers; returns how it joined."""
    async with open_swarm(how) as swarm:
        await sees(swarm, *wanted)
        return swarm.joined


async def test_node_joins_by_earlier_peers(nodes: Nodes, memory: Path) -> None:
    bootstrap = nodes.start().ready()
    server = nodes.start(blocks=[0, 4], peers=[bootstrap.addr]).ready()
    joined = await run_once(config(memory, bootstrap.addr, listen=(LOOPBACK,)), server.peer_id)
    assert joined == JoinResult("peers", bootstrap.peer_id)

    # Whichever of the two it was connected to has to do.
    kept = {record.peer_id for record in PeerStore(memory).load()}
    assert bootstrap.peer_id in kept
    joined = await run_once(config(memory), server.peer_id)
    assert joined is not None and joined.way == "remembered" and joined.peer_id in kept


async def test_the_living_are_found_among_the_dead(nodes: Nodes, memory: Path) -> None:
    server = nodes.start(blocks=[0, 4]).ready()
    dead = {Identity.generate().peer_id: [NOBODY] for _ in range(30)}
    where = server.addr.partition("/p2p/")[0]
    PeerStore(memory).update({server.peer_id: [NOBODY, where]}, (), time.time() - 100)
    PeerStore(memory).update(dead, (), time.time())
    assert await run_once(config(memory), server.peer_id) == JoinResult("remembered", server.peer_id)
    kept = PeerStore(memory).load()
    assert kept[0].peer_id == server.peer_id and kept[0].addrs[0] == where and not kept[0].failing
    assert any(record.failing for record in kept[1:])


async def test_who_remembers_nobody_stays_alone(memory: Path) -> None:
    PeerStore(memory).update({Identity.generate().peer_id: [NOBODY]}, (), time.time())
    assert await run_once(config(memory, listen=(LOOPBACK,))) is None
    assert not any(record.failing for record in PeerStore(memory).load())


async def test_a_peer_that_was_named_has_to_answer(nodes: Nodes, memory: Path) -> None:
    """Else a person with a typo would talk to another swarm than the one meant."""
    server = nodes.start(blocks=[0, 4]).ready()
    await run_once(config(memory, server.addr), server.peer_id)
    stranger = f"{NOBODY}/p2p/{Identity.generate().peer_id}"
    with pytest.raises(SwarmError, match="no peer has answered"):
        await run_once(config(memory, stranger))


async def test_swarms_parts_meet_in_a_remembering_node(nodes: Nodes, memory: Path) -> None:
    """One part is that of the peer that was named to it, then and now."""
    bootstrap = nodes.start().ready()
    one = nodes.start(blocks=[0, 4], peers=[bootstrap.addr]).ready()
    await run_once(config(memory, bootstrap.addr), one.peer_id)
    other = nodes.start(blocks=[4, 8], seed=secrets.token_hex(32)).ready()
    # As if the bootstrap node had come back at another address, and had forgotten all.
    PeerStore(memory).update({other.peer_id: [other.addr.partition("/p2p/")[0]]}, (), time.time(), [bootstrap.peer_id])
    await run_once(config(memory, bootstrap.addr, listen=(LOOPBACK,)), one.peer_id, other.peer_id)


async def test_node_told_its_swarm_stays_out_of_others(nodes: Nodes, memory: Path) -> None:
    one, other = nodes.start(blocks=[0, 4]).ready(), nodes.start(blocks=[4, 8]).ready()
    await run_once(config(memory, one.addr), one.peer_id)
    async with open_swarm(config(memory, other.addr, listen=(LOOPBACK,))) as swarm:
        await sees(swarm, other.peer_id)
        with trio.move_on_after(2):
            await sees(swarm, one.peer_id)
        assert swarm.connected() == [other.peer_id] and swarm.view.get(one.peer_id, time.time()) is None


@pytest.mark.parametrize("way", ["peers", "remembered"])
async def test_a_node_that_loses_everybody_comes_back(way: str, nodes: Nodes, memory: Path) -> None:
    options = {"seed": secrets.token_hex(32), "listen": f"/ip4/127.0.0.1/tcp/{free_port()}", "ttl": 2.0}

    def start() -> Node:
        return nodes.start(blocks=[0, 4], **options).ready()

    server = start()
    if way == "remembered":
        await run_once(config(memory, server.addr), server.peer_id)
    peers = [server.addr] if way == "peers" else []

    async with open_swarm(config(memory, *peers, announcement_ttl=2.0)) as swarm:
        await sees(swarm, server.peer_id)
        assert swarm.joined == JoinResult(way, server.peer_id)
        server.kill()
        with trio.fail_after(PATIENCE):
            # Until it is forgotten as well, so that the announcement cannot be what leads back.
            while swarm.is_connected(server.peer_id) or swarm.view.get(server.peer_id, time.time()):  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert await trio.to_thread.run_sync(start)
        back = time.perf_counter()
        await sees(swarm, server.peer_id)
        print(f"back after {time.perf_counter() - back:.1f} s")


async def test_what_cannot_be_dialed_is_not_remembered(nodes: Nodes, memory: Path) -> None:
    """A client that came in from somewhere, as most of a meeting point's peers do."""
    clients: list[str] = []
    async with open_swarm(config(memory, listen=(LOOPBACK,))) as swarm:
        await trio.to_thread.run_sync(lambda: nodes.start(blocks=[0, 4], peers=swarm.addrs).ready())
        async with open_swarm(SwarmConfig(identity=Identity.generate(), peers=tuple(swarm.addrs))) as client:
            assert client.is_connected(swarm.peer_id)
            with trio.fail_after(PATIENCE):
                while len(swarm.view.servers(now=time.time())) < 1:
                    await swarm.wait_changed()
            clients.append(client.peer_id)
    assert len(PeerStore(memory).load()) == 2  # the server, and the node itself
    assert not {record.peer_id for record in PeerStore(memory).load()} & set(clients)


async def test_one_machines_nodes_meet_without_a_network(memory: Path) -> None:
    async with open_swarm(config(memory, listen=(LOOPBACK,))) as server:
        assert server.joined is None
        with trio.fail_after(PATIENCE):
            while not memory.exists():  # noqa: ASYNC110, ASYNC240
                await trio.sleep(0.01)
        async with open_swarm(config(memory)) as client:
            assert client.joined == JoinResult("remembered", server.peer_id)
