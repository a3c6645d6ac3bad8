"""Streams between real processes: what breaks, what must not, and how soon it is noticed."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import trio
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream, PeerError, StreamClosed, StreamTimeout
from tests.connections import connection_lost
from tests.swarm.announcer import ECHO
from tests.swarm.announcers import Node, Nodes

Frame = wire.InferenceFrame
MIB = 1024 * 1024


@pytest.fixture
def echo_node() -> Iterator[Node]:
    with Nodes() as nodes:
        yield nodes.start(role="echo").ready()


def client(node: Node):
    return open_swarm(SwarmConfig(identity=Identity.generate(), peers=(node.addr,)))


def message(payload: bytes) -> Frame:
    return Frame(step=wire.Step(sequence=1), tensors=[wire.Tensor(shape=[len(payload)], dtype="int8", codec="none")])


async def echo(stream: MessageStream[Frame], payload: bytes) -> None:
    await stream.send(message(payload), [payload], timeout=60)
    _, payloads = await stream.receive(timeout=60)
    assert payloads == [payload]


async def echo_once(swarm: Swarm, node: Node) -> None:
    async with swarm.open_stream(node.peer_id, ECHO, timeout=60) as stream:
        await echo(stream, b"still here")


async def test_messages_of_all_sizes_come_back(echo_node):
    async with (
        client(echo_node) as swarm,
        swarm.open_stream(echo_node.peer_id, ECHO, timeout=60) as stream,
    ):
        for size in (0, 1, 65507, 65508, 3 * MIB, 20 * MIB):
            await echo(stream, bytes(range(256)) * (size // 256) + bytes(size % 256))


async def test_cancelled_transfers_leave_the_connection_healthy(echo_node):
    async with client(echo_node) as swarm:
        payload = bytes(16 * MIB)
        async with swarm.open_stream(echo_node.peer_id, ECHO, timeout=60) as bystander:
            for attempt in range(12):
                stream = await swarm.new_stream(echo_node.peer_id, ECHO, timeout=60)
                # Nobody reads the echo, so it gets stuck sooner or later, wherever that is.
                with trio.move_on_after(0.002 * attempt), contextlib.suppress(StreamTimeout):
                    for _ in range(8):
                        await stream.send(message(payload), [payload], timeout=1)
                await stream.reset()
                await echo(bystander, b"unharmed")


async def test_hundreds_of_streams_share_a_connection(echo_node):
    async with client(echo_node) as swarm:
        streams = [await swarm.new_stream(echo_node.peer_id, ECHO, timeout=60) for _ in range(300)]
        async with trio.open_nursery() as nursery:
            for number, stream in enumerate(streams):
                nursery.start_soon(echo, stream, number.to_bytes(2, "big"))
        for stream in streams:
            await stream.close()
        await echo_once(swarm, echo_node)


async def test_killed_peer_ends_waiting_read_at_once(echo_node):
    async with client(echo_node) as swarm:
        lost = connection_lost(swarm.host, echo_node.peer_id)
        async with trio.open_nursery() as nursery:
            stream = await swarm.new_stream(echo_node.peer_id, ECHO, timeout=60)
            await echo(stream, b"alive")
            nursery.start_soon(trio.to_thread.run_sync, echo_node.kill)
            with pytest.raises(StreamClosed):
                await stream.receive(timeout=60)
            with trio.fail_after(60):
                await stream.wait_lost()
                await lost.wait()
            assert not swarm.is_connected(echo_node.peer_id)
            with pytest.raises(PeerError):
                await swarm.new_stream(echo_node.peer_id, ECHO, timeout=60)


async def test_frozen_peer_is_noticed_and_slow_ones_not(echo_node):
    async with client(echo_node) as swarm:
        stream = await swarm.new_stream(echo_node.peer_id, ECHO, timeout=60)
        await echo(stream, b"alive")
        echo_node.freeze()
        with pytest.raises(StreamTimeout):
            await stream.receive(timeout=0.5)
        echo_node.thaw()
        await echo(stream, b"it was a pause")

        lost = connection_lost(swarm.host, echo_node.peer_id)
        echo_node.freeze()
        # Without watching the connection, this would take 100 s and more.
        with pytest.raises(StreamClosed, match="no sign of life"):
            await stream.receive(timeout=60)
        assert lost.is_set()
        echo_node.thaw()
        await echo_once(swarm, echo_node)


async def test_strangers_who_talk_nonsense_do_not_hurt_node(echo_node):
    addr = Multiaddr(echo_node.addr)
    port = int(addr.value_for_protocol("tcp"))
    async with client(echo_node) as swarm:
        for nonsense in (
            b"",
            b"GET / HTTP/1.0\r\n\r\n",
            bytes(70_000),
            b"\x13/multistream/1.0.0\n\x07/noise\n\xff\xff",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
                stranger.sendall(nonsense)
        # On an honest connection, too: a negotiation that is no text, and a frame that is none.
        conn = swarm.host.libp2p.get_network().get_connections()[0]
        for nonsense in (b"\x02\xff\xfe", b"\x13/multistream/1.0.0\n\x04\xff\xff\xff\n"):
            stream = await conn.muxed_conn.open_stream()
            await stream.write(nonsense)
            await stream.close()
        await echo_once(swarm, echo_node)
        lost = connection_lost(swarm.host, echo_node.peer_id)
        conn.muxed_conn.secured_conn.put(b"\x77" * 64)
        with trio.fail_after(60):
            await lost.wait()
        await echo_once(swarm, echo_node)


async def test_an_unknown_protocol_is_refused_quickly(echo_node):
    async with client(echo_node) as swarm:
        stream = await swarm.new_stream(echo_node.peer_id, replace(ECHO, id="/nobody/1"), timeout=60)
        await stream.send(message(b"for nobody"), [b"for nobody"], timeout=60)
        with pytest.raises(StreamClosed, match="/nobody/1"):
            await stream.receive(timeout=60)
        await echo_once(swarm, echo_node)


async def test_a_handler_that_fails_resets_its_stream_only():
    async def fail(stream: MessageStream[Frame]) -> None:
        await stream.receive(timeout=60)
        raise RuntimeError("a bug")

    listening = SwarmConfig(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_swarm(listening) as server:
        server.set_handler(ECHO, fail)
        async with open_swarm(SwarmConfig(identity=Identity.generate(), peers=tuple(server.addrs))) as swarm:
            for _ in range(2):
                stream = await swarm.new_stream(server.peer_id, ECHO, timeout=60)
                await stream.send(message(b""), [b""], timeout=60)
                with pytest.raises(StreamClosed):
                    await stream.receive(timeout=60)
            assert await swarm.measure_rtt(server.peer_id, timeout=60) < math.inf


async def test_a_reader_that_pauses_keeps_its_stream():
    """libp2p's own Yamux resets the stream of a reader that lets a writer wait for 5 s."""
    ready = trio.Event()

    async def pause(stream: MessageStream[Frame]) -> None:
        await ready.wait()
        for _ in range(8):
            await stream.receive(timeout=60)
        await stream.send(Frame(), timeout=60)

    listening = SwarmConfig(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_swarm(listening) as server:
        server.set_handler(ECHO, pause)
        async with open_swarm(SwarmConfig(identity=Identity.generate(), peers=tuple(server.addrs))) as swarm:
            stream = await swarm.new_stream(server.peer_id, ECHO, timeout=60)
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for _ in range(8):
                        await stream.send(message(bytes(2 * MIB)), [bytes(2 * MIB)], timeout=60)

                nursery.start_soon(send)
                await trio.sleep(5.5)
                ready.set()
            await stream.receive(timeout=60)


async def test_words_before_leaving_can_still_be_read():
    said = trio.Event()

    async def say(stream: MessageStream[Frame]) -> None:
        await stream.send(message(b"last words"), [b"last words"], timeout=60)
        said.set()

    async def serve(task_status: trio.TaskStatus[Swarm]) -> None:
        listening = SwarmConfig(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))
        async with open_swarm(listening) as server:
            server.set_handler(ECHO, say)
            task_status.started(server)
            await said.wait()

    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve)
        joining = SwarmConfig(identity=Identity.generate(), peers=tuple(server.addrs))
        async with open_swarm(joining) as swarm:
            stream = await swarm.new_stream(server.peer_id, ECHO, timeout=60)
            with trio.fail_after(60):
                await connection_lost(swarm.host, server.peer_id).wait()
            _, payloads = await stream.receive(timeout=60)
            assert payloads == [b"last words"]
            with pytest.raises(StreamClosed):
                await stream.receive(timeout=60)
