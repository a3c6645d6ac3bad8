"""The streams in memory that tests talk over: what the framing needs of them, and the faults of a network."""

from __future__ import annotations

import time

import pytest
import trio

from petalnode.node.testing import message_streams, open_network, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.framing import MessageStream, StreamClosed, StreamTimeout
from petalnode.protocols.ids import Span, StreamProtocol

pytestmark = pytest.mark.virtual_time

Frame = wire.InferenceFrame
ECHO = StreamProtocol("/echo/1", Frame)


def message(payload: bytes) -> Frame:
    return Frame(step=wire.Step(sequence=1), tensors=[wire.Tensor(shape=[len(payload)], dtype="int8", codec="none")])


async def test_messages_go_both_ways_and_end_is_seen() -> None:
    one, other = message_streams(ECHO, "one", "other")
    assert (one.peer_id, other.peer_id) == ("other", "one")
    for sender, receiver in ((one, other), (other, one)):
        await sender.send(message(b"abc"), [b"abc"], timeout=1)
        assert (await receiver.receive(timeout=1))[1] == [b"abc"]
    await one.send(message(b"last"), [b"last"], timeout=1)
    await one.close()
    assert (await other.receive(timeout=1))[1] == [b"last"]
    with pytest.raises(StreamClosed):
        await other.receive(timeout=1)
    await other.send(message(b"still"), [b"still"], timeout=1)


async def test_who_does_not_read_holds_up_the_writer() -> None:
    one, other = message_streams(ECHO, "one", "other", ends=stream_pair(window=1000))
    with pytest.raises(StreamTimeout):
        await one.send(message(bytes(5000)), [bytes(5000)], timeout=60)
    one, other = message_streams(ECHO, "one", "other", ends=stream_pair(window=1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: one.send(message(bytes(5000)), [bytes(5000)], timeout=60))
        assert (await other.receive(timeout=60))[1] == [bytes(5000)]


async def test_a_delay_costs_no_time_of_the_test() -> None:
    ends = stream_pair()
    one, other = message_streams(ECHO, "one", "other", ends=ends)
    ends[0].delay = 3600.0
    await one.send(message(b"late"), [b"late"], timeout=1)
    start = trio.current_time()
    assert (await other.receive(timeout=None))[1] == [b"late"]
    assert trio.current_time() - start == pytest.approx(3600.0)


async def test_a_cut_is_seen_at_both_ends() -> None:
    ends = stream_pair()
    one, other = message_streams(ECHO, "one", "other", ends=ends)
    await one.send(message(b"lost"), [b"lost"], timeout=1)
    ends[1].cut()
    for stream in (one, other):
        await stream.wait_lost()
        with pytest.raises(StreamClosed):
            await stream.receive(timeout=1)


async def test_nothing_comes_through_frozen_until_it_thaws() -> None:
    ends = stream_pair()
    one, other = message_streams(ECHO, "one", "other", ends=ends)
    ends[0].freeze()
    await one.send(message(b"held"), [b"held"], timeout=1)
    with pytest.raises(StreamTimeout):
        await other.receive(timeout=1000)
    ends[0].thaw()
    assert (await other.receive(timeout=1))[1] == [b"held"]


async def test_a_message_can_be_dropped() -> None:
    ends = stream_pair()
    one, other = message_streams(ECHO, "one", "other", ends=ends)
    ends[0].on_write = lambda data: b""
    await one.send(message(b"dropped"), [b"dropped"], timeout=1)
    ends[0].on_write = lambda data: data
    await one.send(message(b"kept"), [b"kept"], timeout=1)
    assert (await other.receive(timeout=1))[1] == [b"kept"]


async def test_nodes_open_streams_while_there_is_a_way() -> None:
    async def echo(stream: MessageStream[Frame]) -> None:
        while True:
            frame, payloads = await stream.receive(timeout=None)
            await stream.send(frame, payloads, timeout=1)

    async with open_network() as network:
        client, server = network.node(), network.node()
        server.set_handler(ECHO, echo)
        async with client.open_stream(server.peer_id, ECHO, timeout=1) as stream:
            await stream.send(message(b"abc"), [b"abc"], timeout=1)
            assert (await stream.receive(timeout=1))[1] == [b"abc"]
            network.link(client.peer_id, server.peer_id).take_down()
            with pytest.raises(StreamClosed):
                await stream.receive(timeout=1)
        with pytest.raises(StreamClosed):
            await client.new_stream(server.peer_id, ECHO, timeout=1)
        network.link(client.peer_id, server.peer_id).mend()
        stream = await client.new_stream(server.peer_id, StreamProtocol("/nobody/1", Frame), timeout=1)
        with pytest.raises(StreamClosed):
            await stream.receive(timeout=1)
        network.remove(server)
        with pytest.raises(StreamClosed):
            await client.new_stream(server.peer_id, ECHO, timeout=1)


@pytest.mark.parametrize("hours", [-1, 0.2, 1])
async def test_announcements_outlast_a_clock_that_was_wrong(hours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_network() as network:
        one, other, reader = network.node(), network.node(), network.node()
        for node in (one, other):
            node.announce(Announcement(node.peer_id, bytes(32), "tiny", 1, Span(0, 1), ServerState.ONLINE))
        right = time.time
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: right() + hours * 3600)
            assert one.announced is not None
            one.announce(one.announced)
            assert {one.peer_id, other.peer_id} == set(reader.view.records)
        assert {server.peer_id for server in reader.view.servers(now=right())} == {one.peer_id, other.peer_id}
