"""Servers that choose and change their blocks by themselves: real processes, and real hosts within one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.server.mover import join_where_needed, next_move
from petalnode.node.server.network_speed import network_seconds, serve_transfers
from petalnode.node.server.placing import Placing
from petalnode.node.swarm.swarm import Swarm, SwarmConfig, open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import TRANSFER, Span
from tests.swarm.processes import LOOPBACK, Node, Nodes, nodes, petalnode, until

BLOCKS = 6
MODEL = b"m" * 32
DEADLINE = 60.0


class Server:
    """What of a server chooses its blocks, without any model."""

    def __init__(self, swarm: Swarm, throughput: float, blocks: int = BLOCKS) -> None:
        self.swarm = swarm
        self.throughput = throughput
        self.num_blocks = blocks
        self.placing = Placing(swarm, MODEL, blocks)

    async def join(self, count: int) -> Span:
        def choosing(span: Span) -> None:
            self.announce(span, ServerState.JOINING, span)

        span = await join_where_needed(self.swarm, self.placing, count, self.throughput, choosing)
        self.announce(span)
        return span

    async def move(self, interval: float) -> Span:
        own = self.swarm.view.get(self.swarm.peer_id, time.time())
        assert own is not None

        def say(span: Span | None) -> None:
            self.announce(own.span, next_span=span)

        move = await next_move(self.swarm, self.placing, 0.0, say, interval=interval)
        self.announce(move.target)
        return move.target

    def announce(self, span: Span, state: ServerState = ServerState.ONLINE, next_span: Span | None = None) -> None:
        own = Announcement(
            self.swarm.peer_id,
            MODEL,
            "model",
            self.num_blocks,
            span,
            state,
            step_seconds=1 / self.throughput,
            next_span=next_span,
        )
        self.swarm.announce(own)


@contextlib.asynccontextmanager
async def servers(*throughputs: float, blocks: int = BLOCKS):
    """Servers that have met one another."""
    async with contextlib.AsyncExitStack() as stack:
        first: list[str] = []
        found = []
        for throughput in throughputs:
            config = SwarmConfig(Identity.generate(), listen=(LOOPBACK,), peers=tuple(first), relay="off")
            swarm = await stack.enter_async_context(open_swarm(config))
            first = first or swarm.addrs[:1]
            found.append(Server(swarm, throughput, blocks))
        yield found


def held(spans: list[Span], blocks: int = BLOCKS) -> list[int]:
    return [sum(block in span for span in spans) for block in range(blocks)]


async def until_all_know(every: list[Server], known: dict[str, Span]) -> None:
    """Returns when each of them knows of these spans, by peer id, and of no others."""
    for server in every:
        while {each.peer_id: each.span for each in server.swarm.view.servers(MODEL, now=time.time())} != known:
            await trio.sleep(0.1)
            await server.placing.refresh()


def test_ten_that_join_at_once_spread_over_the_model() -> None:
    async def scenario() -> None:
        spans: list[Span] = []

        async def join(server: Server) -> None:
            spans.append(await server.join(2))

        with trio.fail_after(DEADLINE):
            async with servers(*[5.0] * 10) as every, trio.open_nursery() as nursery:
                for server in every:
                    nursery.start_soon(join, server)
        assert min(held(spans)) >= 3, spans

    trio.run(scenario)


def test_the_last_holder_says_goodbye_and_one_that_can_be_spared_takes_its_place() -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with servers(5.0, 5.0, 5.0) as (first, second, leaving):
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

    trio.run(scenario)


def test_two_that_would_move_to_the_same_blocks_settle_who_does() -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with servers(5.0, 5.0, 5.0, blocks=4) as every:
                a, b, c = every
                known = {a.swarm.peer_id: Span(0, 2), b.swarm.peer_id: Span(0, 2), c.swarm.peer_id: Span(0, 2)}
                for server in every:
                    server.announce(Span(0, 2))
                await until_all_know(every, known)
                for server in every:  # all mean to go where nobody is
                    server.announce(Span(0, 2), next_span=Span(2, 4))
                for server in every:
                    while not all(each.next_span for each in server.swarm.view.servers(MODEL, now=time.time())):
                        await trio.sleep(0.1)
                        await server.placing.refresh()
                due = {server.swarm.peer_id: await server.placing.due_move(contested=True) for server in every}
                going = {peer for peer, move in due.items() if move is not None}
                assert going and len(going) < 3
                assert min(due) in going or len(going) == 1

    trio.run(scenario)


def test_a_fast_server_joins_and_nobody_else_is_moved_by_it() -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with servers(1.0, 1.1, 0.9, 1.2, 300.0) as every:
                known = {}
                for server, span in zip(every, (Span(0, 3), Span(3, 6), Span(0, 3), Span(3, 6), None), strict=True):
                    if span is None:
                        span = await server.join(BLOCKS)
                    server.announce(span)
                    known[server.swarm.peer_id] = span
                await until_all_know(every, known)
                assert [await server.placing.due_move() for server in every] == [None] * 5

    trio.run(scenario)


def test_an_absurd_announcement_is_told_once_and_moves_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with servers(1.0, 1.0, 1.0, 1e6, 1.0) as (*usual, liar, other):
                known = {}
                for server, span in zip([*usual, liar], [Span(0, 6)] * 4, strict=True):
                    server.announce(span)
                    known[server.swarm.peer_id] = span
                other.num_blocks = 4096
                other.announce(Span(0, 4000))
                known[other.swarm.peer_id] = Span(0, 4000)
                await until_all_know([usual[0]], known)
                for _ in range(3):
                    assert await usual[0].placing.due_move() is None
                texts = [record.getMessage() for record in caplog.records]
                assert sum(liar.swarm.peer_id in text for text in texts) == 1
                assert sum(f"{other.swarm.peer_id} announces blocks 0:4000 of 4096" in text for text in texts) == 1

    trio.run(scenario)


def test_the_network_is_measured_with_those_that_answer() -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with servers(1.0, 1.0, 1.0) as (first, second, silent):
                serve_transfers(second.swarm)
                peers = [second.swarm.peer_id, silent.swarm.peer_id]
                for server in (second, silent):
                    server.announce(Span(0, 6))
                while len(first.swarm.view.servers(MODEL, now=time.time())) < 2:
                    await first.swarm.wait_changed()
                seconds = await network_seconds(first.swarm, peers, 1000)
                assert seconds is not None and 0 < seconds < 1
                assert await network_seconds(first.swarm, peers[1:], 1000) is None
                greedy = await first.swarm.new_stream(
                    second.swarm.peer_id, TRANSFER, wire.TransferFrame, timeout=DEADLINE, max_payload=1 << 30
                )
                await greedy.send(wire.TransferFrame(wanted=1 << 29), timeout=DEADLINE)
                with pytest.raises(PeerError):
                    await greedy.receive(timeout=DEADLINE)

    trio.run(scenario)


# --- processes


@pytest.fixture(scope="module")
def quick_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with nodes(tmp_path_factory.mktemp("placement")) as started:
        started.env["PETALNODE_CHECK_INTERVAL"] = "1"
        yield started


class Spans:
    """Where servers are, by their own words."""

    def __init__(self, started: list[Node]) -> None:
        self.of = {node: Span(*node.ready["blocks"]) for node in started}
        self.changes = 0

    def listen(self) -> None:
        for node in self.of:
            for event in node.events_so_far():
                if event["event"] == "moved":
                    self.of[node] = Span(*event["blocks"])
                    self.changes += 1

    def held(self) -> list[int]:
        self.listen()
        return held(list(self.of.values()))


def test_ten_servers_spread_the_only_holders_are_killed_and_a_fast_one_unsettles_nobody(
    quick_nodes: Nodes, models: Path
) -> None:
    peer: str = quick_nodes.meeting_point().event("ready")["addrs"][0]
    folder = models / "tiny-llama"
    started = [quick_nodes.server(folder, None, "--num-blocks", "2", "--throughput", "5", peer=peer) for _ in range(10)]
    spans = Spans(started)
    assert min(spans.held()) >= 2, spans.of

    # All holders of block 0 at once, without a goodbye.
    for node in [node for node, span in spans.of.items() if 0 in span]:
        node.kill()
        del spans.of[node]
    assert 4 <= len(spans.of) <= 8
    until(lambda: min(spans.held()) > 0, "the gap is closed", 90)

    def chat() -> None:
        outcome = petalnode(
            *("chat", "tiny-llama", "--prompt", "hi", "--json", "--max-new-tokens", "4", "--peer", peer),
            env=quick_nodes.env,
            cwd=models,
        )
        assert outcome.code == 0, outcome

    chat()
    fast = quick_nodes.server(folder, None, "--num-blocks", "6", "--throughput", "500", peer=peer)
    assert fast.ready["blocks"] == [0, 6]
    spans.listen()
    changes = spans.changes
    chat()  # takes several times as long as the servers' checks are apart
    spans.listen()
    assert spans.changes == changes
