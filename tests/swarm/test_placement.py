"""Servers that choose and change their blocks by themselves: processes, servers in memory, and what of a server chooses
its blocks, on nodes whose announcements travel over a network in memory or a real one.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.placement.plan import Policy
from petalnode.node.server.lifecycle.other_servers import measure_network, serve_transfers
from petalnode.node.server.lifecycle.rebalancing import PlacementState, join_where_needed, next_move
from petalnode.node.server.lifecycle.source import ModelSource
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.directory import Directory
from petalnode.node.swarm.swarm import open_swarm
from petalnode.node.testing import MemoryNetwork
from petalnode.node.testing.memory_servers import memory_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import DOMAIN, Announcement, ServerState, SignedAnnouncement
from petalnode.protocols.directory import DIRECTORY, DIRECTORY_LIMITS, TRANSFER
from petalnode.protocols.framing import PeerError, StreamTimeout
from petalnode.protocols.ids import Span
from tests.connections import connection_lost
from tests.directory_node import DirectoryNode
from tests.model_hub import serve_hub
from tests.swarm.processes import LOOPBACK, nodes, until
from tests.tiny_models import save_tiny

BLOCKS = 6
MODEL = b"m" * 32
DEADLINE = 150.0


class Server:
    """What of a server chooses its blocks, without any model."""

    def __init__(self, swarm: Any, throughput: float, blocks: int = BLOCKS, identity: Identity | None = None) -> None:
        self.swarm = swarm
        self.identity = identity
        self.throughput = throughput
        self.num_blocks = blocks
        self.model = MODEL
        self.placement = PlacementState(swarm, MODEL, blocks)

    async def join(self, count: int) -> Span:
        def choosing(span: Span) -> None:
            self.announce(span, ServerState.JOINING, span)

        span = await join_where_needed(self.placement, count, self.throughput, choosing)
        self.announce(span)
        return span

    async def move(self, interval: float) -> Span:
        own = self.swarm.view.get(self.swarm.peer_id, time.time())
        assert own is not None

        def say(span: Span | None) -> None:
            self.announce(own.span, next_span=span)

        move = await next_move(self.placement, 0.0, say, interval=interval)
        self.announce(move.target)
        return move.target

    def announce(self, span: Span, state: ServerState = ServerState.ONLINE, next_span: Span | None = None) -> None:
        own = Announcement(
            self.swarm.peer_id,
            self.model,
            "model",
            self.num_blocks,
            span,
            state,
            step_seconds=1 / self.throughput,
            next_span=next_span,
        )
        self.swarm.announce(own)


@asynccontextmanager
async def servers_of(
    *throughputs: float, blocks: int = BLOCKS, kind: type[DirectoryNode] = DirectoryNode
) -> AsyncIterator[Any]:
    """Runs `scenario` with servers that have met one another, on a network in memory and in virtual time."""
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(nursery, kind)
            found = []
            for throughput in throughputs:
                node = network.node()
                await node.start(nursery)
                found.append(Server(node, throughput, blocks, node.identity))
            yield found
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def hosts(*throughputs: float) -> AsyncIterator[list[Server]]:
    """As the servers of `run`, on real connections."""
    async with contextlib.AsyncExitStack() as stack:
        first: list[str] = []
        found = []
        for throughput in throughputs:
            config = SwarmConfig(Identity.generate(), listen=(LOOPBACK,), peers=tuple(first), relay="off")
            swarm = await stack.enter_async_context(open_swarm(config))
            first = first or swarm.addrs[:1]
            found.append(Server(swarm, throughput, BLOCKS, config.identity))
        yield found


def held(spans: list[Span], blocks: int = BLOCKS) -> list[int]:
    return [sum(block in span for span in spans) for block in range(blocks)]


async def until_all_know(every: list[Server], known: dict[str, Span]) -> None:
    """Returns when each of them knows of these spans, by peer id, and of no others."""
    for server in every:
        while {
            announced.peer_id: announced.span for announced in server.swarm.view.servers(MODEL, now=time.time())
        } != known:
            await trio.sleep(0.1)
            await server.placement.refresh()


class LateDirectory(Directory):
    """Half of what it pushes is lost, the rest comes late; a tenth of those that it asks with news are not reached."""

    chance = random.Random(1)

    async def push(self, peer_id: str, record: SignedAnnouncement) -> None:
        if self.chance.random() < 0.5:
            await trio.sleep(self.chance.uniform(0, 6))
            await super().push(peer_id, record)

    async def pull(self, peer_id: str, *, publish: bool = False, **options: Any) -> int:
        if publish and self.chance.random() < 0.1:
            raise StreamTimeout(f"{peer_id} is not asked", peer_id)
        return await super().pull(peer_id, publish=publish, **options)


class LateNode(DirectoryNode):
    directory_kind = LateDirectory


@pytest.mark.virtual_time
@pytest.mark.parametrize("kind", [DirectoryNode, LateNode], ids=["all is heard", "announcements are late or lost"])
async def test_ten_that_join_at_once_spread_over_model(kind: type[DirectoryNode]) -> None:
    async with servers_of(*[5.0] * 10, kind=kind) as every:
        spans: list[Span] = []

        async def join(server: Server) -> None:
            spans.append(await server.join(2))

        async with trio.open_nursery() as nursery:
            for server in every:
                nursery.start_soon(join, server)
        assert sorted(held(spans)) == [3, 3, 3, 3, 4, 4], spans


@pytest.mark.virtual_time
async def test_last_holder_leaves_and_a_spare_one_follows() -> None:
    async with servers_of(5.0, 5.0, 5.0) as every:
        first, second, leaving = every
        known = {}
        for server, span in ((first, Span(0, 3)), (second, Span(0, 3)), (leaving, Span(3, 6))):
            server.announce(span)
            known[server.swarm.peer_id] = span
        await until_all_know([first, second, leaving], known)
        moved = []

        async def move(server: Server) -> None:
            moved.append(await server.move(interval=DEADLINE))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, first)
            nursery.start_soon(move, second)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await leaving.swarm.retract()
        assert moved == [Span(3, 6)]


@pytest.mark.virtual_time
async def test_two_moving_to_the_same_blocks_settle_it() -> None:
    async with servers_of(5.0, 5.0, 5.0, blocks=4) as every:
        for server in every:
            server.announce(Span(0, 2))
        await until_all_know(every, {server.swarm.peer_id: Span(0, 2) for server in every})
        for server in every:  # all mean to go where nobody is
            server.announce(Span(0, 2), next_span=Span(2, 4))
        for server in every:
            while not all(announced.next_span for announced in server.swarm.view.servers(MODEL, now=time.time())):
                await trio.sleep(0.1)
                await server.placement.refresh()
        due = {server.swarm.peer_id: await server.placement.due_move(contested=True) for server in every}
        going = {peer for peer, move in due.items() if move is not None}
        assert going and len(going) < 3
        assert min(due) in going or len(going) == 1


@pytest.mark.virtual_time
async def test_begun_plan_stands_however_often_looked() -> None:
    async with servers_of(5.0, 2.0, 20.0, 5.0) as every:
        known = {}
        for server, span in zip(every, (Span(1, 4), Span(2, 5), Span(0, 4), Span(0, 6)), strict=True):
            server.placement = PlacementState(server.swarm, MODEL, BLOCKS, Policy(gain=0.4))
            server.announce(span)
            known[server.swarm.peer_id] = span
        await until_all_know(every, known)
        first, second = every[:2]
        move = await second.placement.due_move()
        assert move is not None and move.target == Span(3, 6)
        first.announce(Span(3, 6))
        await until_all_know([second], known | {first.swarm.peer_id: Span(3, 6)})
        for _ in range(3):  # alone it would not pay
            assert await second.placement.due_move() == move


@pytest.mark.virtual_time
async def test_joining_fast_server_moves_nobody_else() -> None:
    async with servers_of(1.0, 1.1, 0.9, 1.2, 300.0) as every:
        known = {}
        for server, span in zip(every, (Span(0, 3), Span(3, 6), Span(0, 3), Span(3, 6), None), strict=True):
            if span is None:
                span = await server.join(BLOCKS)
            server.announce(span)
            known[server.swarm.peer_id] = span
        await until_all_know(every, known)
        assert [await server.placement.due_move() for server in every] == [None] * 5


@pytest.mark.virtual_time
async def test_absurd_announcement_is_told_once_and_moves_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with servers_of(1.0, 1.0, 1.0, 1000000.0, 1.0) as every:
        *usual, liar, other = every
        known = {}
        for server, span in zip([*usual, liar], [Span(0, 6)] * 4, strict=True):
            server.announce(span)
            known[server.swarm.peer_id] = span
        other.num_blocks = 4096
        other.announce(Span(0, 4000))
        known[other.swarm.peer_id] = Span(0, 4000)
        await until_all_know([usual[0]], known)
        for _ in range(3):
            assert await usual[0].placement.due_move() is None
        texts = [record.getMessage() for record in caplog.records]
        assert sum(liar.swarm.peer_id in text for text in texts) == 1
        assert sum(f"{other.swarm.peer_id} announces blocks 0:4000 of 4096" in text for text in texts) == 1


@pytest.mark.virtual_time
async def test_impossible_announcement_is_told_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async with servers_of(1.0, 1.0) as every:
        usual, liar = every
        usual.announce(Span(0, 6))
        for _ in range(3):
            for span, blocks in ((wire.Span(start=5, end=2), 6), (wire.Span(start=0, end=10**6), 10**6)):
                content = wire.Announcement(
                    peer_id=peer_id_to_bytes(liar.swarm.peer_id),
                    sequence=time.time_ns(),
                    expires_ms=round(time.time() * 1000) + 45_000,
                    model_version=MODEL,
                    num_blocks=blocks,
                    span=span,
                    state=wire.STATE_ONLINE,
                ).SerializeToString()
                signed = wire.SignedAnnouncement(announcement=content, signature=liar.identity.sign(DOMAIN, content))
                async with liar.swarm.open_stream(usual.swarm.peer_id, DIRECTORY, timeout=DEADLINE) as stream:
                    await stream.send(wire.DirectoryFrame(publish=signed), timeout=DEADLINE)
                    with pytest.raises(PeerError):
                        await stream.receive(timeout=DEADLINE)
        seen = usual.placement.seen()
        assert [holder.peer_id for holder in seen.servers] == [usual.swarm.peer_id]
        texts = [record.getMessage() for record in caplog.records]
        assert sum(liar.swarm.peer_id in text and "cannot be" in text for text in texts) == 1


@pytest.mark.virtual_time
async def test_servers_of_another_model_count_for_nothing() -> None:
    async with servers_of(1.0, 1.0, 1.0) as every:
        first, other, newcomer = every
        first.announce(Span(0, 3))
        other.model = b"o" * 32
        other.announce(Span(3, 6))
        while len(newcomer.swarm.view.servers(now=time.time())) < 2:
            await newcomer.swarm.wait_changed()
        assert await newcomer.join(3) == Span(3, 6)
        assert newcomer.placement.reason == "nobody holds blocks 3:6"


@pytest.mark.virtual_time
async def test_gap_left_to_an_idle_server_is_closed() -> None:
    async with servers_of(5.0, 5.0) as every:
        idle, able = every
        known = {idle.swarm.peer_id: Span(0, 3), able.swarm.peer_id: Span(0, 3)}
        for server in (idle, able):
            server.announce(Span(0, 3))
        await until_all_know([idle, able], known)
        due = [server for server in (idle, able) if await server.placement.due_move()]
        assert len(due) == 1
        other = able if due == [idle] else idle
        assert await other.move(interval=0.5) == Span(3, 6)


async def test_killed_server_is_missed_by_those_who_knew(tmp_path: Path) -> None:
    with nodes(tmp_path) as started, trio.fail_after(DEADLINE):
        async with hosts(5.0, 5.0) as (first, second):
            options = {"blocks": [3, 6], "num_blocks": BLOCKS, "model_version": MODEL.hex(), "model_name": "model"}
            killed = started.announcer(**options, peers=first.swarm.addrs[:1])
            peer_id = (await trio.to_thread.run_sync(killed.event, "ready"))["peer_id"]
            known = {first.swarm.peer_id: Span(0, 3), second.swarm.peer_id: Span(0, 3), peer_id: Span(3, 6)}
            for server in (first, second):
                server.announce(Span(0, 3))
            await until_all_know([first, second], known)
            for server in (first, second):
                await server.placement.probe()
                server.placement.missed()
                assert server.swarm.is_connected(peer_id) and not server.placement.gaps()
            gone = [connection_lost(server.swarm.host, peer_id) for server in (first, second)]
            await trio.to_thread.run_sync(killed.kill)
            for server, lost in zip((first, second), gone, strict=True):
                await lost.wait()
                assert server.swarm.view.get(peer_id, time.time()) is not None and not server.placement.gaps()
                assert server.placement.missed() and not server.placement.missed()
                await server.placement.probe()
                assert server.placement.gaps() == (Span(3, 6),)


@pytest.mark.virtual_time
async def test_restarted_while_asked_in_vain_is_there() -> None:
    async with servers_of(5.0, 5.0) as (first, restarted):
        peer_id = restarted.swarm.peer_id
        first.announce(Span(0, 3))
        restarted.announce(Span(3, 6))
        await until_all_know([first], {first.swarm.peer_id: Span(0, 3), peer_id: Span(3, 6)})
        await first.placement.probe()

        async def ask_in_vain(peer_id: str, *, timeout: float) -> float:
            before = first.swarm.view.records[peer_id]
            restarted.announce(Span(3, 6))
            while first.swarm.view.records[peer_id] is before:
                await first.swarm.wait_changed()
            await trio.sleep(1)
            raise StreamTimeout("at the old address", peer_id)

        first.swarm.is_connected = lambda _: False
        first.swarm.measure_rtt = ask_in_vain
        await first.placement.probe()
        assert not first.placement.gaps()


@pytest.mark.virtual_time
async def test_survivor_closes_the_gap_at_its_first_check() -> None:
    async with servers_of(5.0, 5.0, 5.0) as every:
        *survivors, killed = every
        peer_id = killed.swarm.peer_id
        killed.announce(Span(3, 6))
        for server in survivors:
            server.announce(Span(0, 3))
        await until_all_know(
            survivors, {survivor.swarm.peer_id: Span(0, 3) for survivor in survivors} | {peer_id: Span(3, 6)}
        )
        for server in survivors:
            await server.placement.probe()
            assert server.swarm.is_connected(peer_id)
        checks: list[Server] = []
        moved: list[Server] = []

        async def move(server: Server) -> None:
            probe = server.placement.probe  # once in every check

            async def counted() -> None:
                if not server.swarm.is_connected(peer_id):
                    checks.append(server)
                await probe()

            server.placement.probe = counted  # type: ignore[method-assign]
            assert await server.move(interval=20.0) == Span(3, 6)
            moved.append(server)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for server in survivors:
                nursery.start_soon(move, server)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not moved
            killed.swarm.end()
        assert [checks.count(server) for server in moved] == [1]


async def test_the_network_is_measured_with_those_that_answer() -> None:
    with trio.fail_after(DEADLINE):
        async with hosts(1.0, 1.0, 1.0) as (first, second, silent):
            for server in (second, silent):
                server.announce(Span(0, 6))
            while len(first.swarm.view.servers(MODEL, now=time.time())) < 2:
                await first.swarm.wait_changed()
            assert await measure_network(first.swarm, MODEL, timeout=DEADLINE) == 0
            serve_transfers(second.swarm)
            begun = time.perf_counter()
            a_byte = await measure_network(first.swarm, MODEL, timeout=DEADLINE)
            assert 0 < a_byte * DIRECTORY_LIMITS.transfer_bytes < time.perf_counter() - begun
            assert await measure_network(first.swarm, b"o" * 32, timeout=DEADLINE) == 0
            greedy = await first.swarm.new_stream(
                second.swarm.peer_id, replace(TRANSFER, max_payload=1 << 30), timeout=DEADLINE
            )
            await greedy.send(wire.TransferFrame(wanted=1 << 29), timeout=DEADLINE)
            with pytest.raises(PeerError):
                await greedy.receive(timeout=DEADLINE)


# --- with blocks


def test_blocks_that_cannot_be_had_are_tried_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CHECK_INTERVAL", "0.5")
    loaded: list[Span] = []

    def computing(blocks: Any) -> Any:
        loaded.append(blocks.span)
        if blocks.span == Span(0, 3):
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        return blocks

    with memory_swarm() as swarm:
        leaving = swarm.start(models / "tiny-llama", "0:3")
        assert leaving.ready
        server = swarm.start(models / "tiny-llama", num_blocks=3, computing=computing)
        assert server.span == (3, 6)
        assert swarm.start(models / "tiny-llama", "3:6").ready
        leaving.terminate()
        until(lambda: not server.alive or len(loaded) == 3, "it has its blocks again")

        def stays() -> bool:
            said = swarm.network.view.get(server.peer_id, time.time())
            return said is not None and said.fixed

        until(lambda: not server.alive or stays(), "it stays")
        assert server.alive and loaded == [Span(3, 6), Span(0, 3), Span(3, 6)]
        assert "cannot change to blocks 0:3, stays with 3:6: CUBLAS_STATUS_ALLOC_FAILED" in server.errors


def test_only_holder_by_now_does_not_leave(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CHECK_INTERVAL", "0.5")
    fetching, fetched = threading.Event(), trio.Event()
    weights = ModelSource.weights

    async def slow(source: ModelSource, span: Span) -> Path:
        path = await weights(source, span)
        if span == Span(0, 3) and source.options.num_blocks == 3:
            fetching.set()
            await fetched.wait()
        return path

    monkeypatch.setattr(ModelSource, "weights", slow)
    with memory_swarm() as swarm:
        assert swarm.start(models / "tiny-llama", "0:3", throughput=10.0).ready
        server = swarm.start(models / "tiny-llama", num_blocks=3)
        assert server.span == (3, 6)
        leaving = swarm.start(models / "tiny-llama", "3:6")
        until(fetching.is_set, "it fetches blocks 0:3")
        leaving.terminate()

        held: list[Span] = []

        def decided() -> bool:
            said = swarm.network.view.get(server.peer_id, time.time())
            if said is not None and said.state is ServerState.ONLINE and said.next_span is None:
                held.append(said.span)
            return bool(held)

        until(lambda: swarm.network.view.get(leaving.peer_id, time.time()) is None, "it is alone")
        swarm.change(lambda network: fetched.set())
        until(decided, "it has decided")
        assert held == [Span(3, 6)]


# --- processes


def test_server_fetches_only_blocks_it_chooses(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "hub" / "model", shards="60KB")
    with serve_hub(folder) as hub, nodes(tmp_path / "first") as first, nodes(tmp_path / "second") as second:
        for starter in (first, second):
            starter.env |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(starter.home / "hub")}
        whole = first.server("org/tiny", "0:4")
        whole.ready  # noqa: B018  (the manifest takes all of the model once)
        hub.gets.clear()
        node = second.server("org/tiny", None, "--num-blocks", "2", "--max-disk", "1G", peer=whole.address)
        assert node.ready["blocks"] == [4, 6] and node.ready["count_reason"] == ""
        assert node.ready["blocks_reason"] == "nobody holds blocks 4:6"
        weights = {name for name, _ in hub.gets if name.endswith(".safetensors")}
        assert weights and weights < {file.name for file in folder.glob("*.safetensors")}
        every = second.server("org/tiny", None, "--num-blocks", "auto", "--cache-tokens", "1000", peer=whole.address)
        assert every.ready["blocks"] == [0, 6]
        assert "1000 tokens" in every.ready["count_reason"] and "the whole model" in every.ready["count_reason"]
