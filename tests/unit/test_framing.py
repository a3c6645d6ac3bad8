from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MAX_TENSORS, MessageStream, ProtocolError, StreamClosed, StreamTimeout
from petalnode.protocols.ids import StreamProtocol
from tests.unit.memory_ends import PEER, ends

pytestmark = pytest.mark.virtual_time

Frame = wire.InferenceFrame
PROTOCOL = StreamProtocol("/petalnode/test/1", Frame)


def streams(**limits: int) -> tuple[MessageStream[Frame], MessageStream[Frame]]:
    a, b = ends()
    protocol = replace(PROTOCOL, **limits)
    return MessageStream(a, protocol, PEER), MessageStream(b, protocol, PEER)


def step(sequence: int, sizes: list[int]) -> Frame:
    tensors = [wire.Tensor(shape=[size], dtype="int8", codec="none") for size in sizes]
    return Frame(step=wire.Step(sequence=sequence), tensors=tensors)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 200_000), max_size=4), min_size=1, max_size=4))
async def test_messages_arrive_as_they_were_sent(messages):
    a, b = streams()
    async with trio.open_nursery() as nursery:

        async def send_all() -> None:
            for number, sizes in enumerate(messages):
                await a.send(step(number, sizes), [bytes([number]) * size for size in sizes], timeout=9)

        nursery.start_soon(send_all)
        for number, sizes in enumerate(messages):
            frame, payloads = await b.receive(timeout=9)
            assert frame.step.sequence == number
            assert payloads == [bytes([number]) * size for size in sizes]
            assert [tensor.nbytes for tensor in frame.tensors] == sizes


async def test_small_message_is_one_write_and_large_several():
    a, b = ends()
    sender, receiver = MessageStream(a, PROTOCOL, PEER), MessageStream(b, PROTOCOL, PEER)
    await sender.send(step(1, [2048]), [bytes(2048)], timeout=1)
    assert len(a.writes) == 1
    a.writes.clear()
    await sender.send(step(2, [200_000]), [bytes(200_000)], timeout=1)
    assert a.writes[:-1] == [65477, 2 * 65477]  # what is whole frames is not copied
    for _ in range(2):
        await receiver.receive(timeout=1)


@pytest.mark.parametrize(
    ("cuts", "large"),
    [((1,), 5_000), ((3, 5000), 100_000), ((65_477,), 100_000), ((16_384, 70_000, 2), 100_000), ((400_000,), 100_000)],
)
async def test_payloads_are_whole_however_they_come(cuts, large):
    sent, got = ends()
    theirs, receiver = MessageStream(sent, PROTOCOL, PEER), MessageStream(got, PROTOCOL, PEER)
    contents = [
        [os.urandom(size) for size in sizes] for sizes in ((large, 7, large // 2), (large,), (5,), (large // 5,))
    ]
    said = b""
    for number, payloads in enumerate(contents):
        views, _ = theirs._encode(step(number, [0] * len(payloads)), payloads)
        said += b"".join(views)

    async def say() -> None:
        start = 0
        for size in cycle(cuts):
            await sent.write(said[start : start + size])
            start += size
            if start >= len(said):
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say)
        for number, payloads in enumerate(contents):
            frame, came = await receiver.receive(timeout=60)
            assert (frame.step.sequence, came) == (number, payloads)
    assert not receiver._buffer


async def test_payloads_may_be_views_of_any_item_size():
    a, b = streams()
    floats = memoryview(bytes(range(64))).cast("f")
    await a.send(step(1, [0]), [floats], timeout=1)
    _, payloads = await b.receive(timeout=1)
    assert payloads == [bytes(range(64))]


async def test_payloads_unlike_the_header_are_our_mistake():
    a, _ = streams(max_payload=100)
    with pytest.raises(ValueError, match="1 payloads for 0 tensors"):
        await a.send(Frame(), [b"x"], timeout=1)
    frame = step(1, [0])
    frame.tensors[0].nbytes = 5
    with pytest.raises(ValueError, match="1 bytes for a tensor of 5"):
        await a.send(frame, [b"x"], timeout=1)
    with pytest.raises(ValueError, match="this stream takes"):
        await a.send(step(1, [0]), [bytes(101)], timeout=1)
    await a.send(step(1, [0]), [b"x"], timeout=1)  # nothing of that hurt the stream


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (b"\xff\xff\xff\xff", "no length"),
        (b"\xff\xff\x7f", "a header of"),
        (b"\x03\xff\xff\xff", "no message"),
        (b"\x05\x01", "cut short"),
        (b"\x80", "cut short"),
    ],
)
async def test_garbage_is_a_protocol_error_and_resets(sent, what):
    a, b = ends()
    stream = MessageStream(b, replace(PROTOCOL, max_header=1000), PEER)
    await a.write(sent)
    await a.close()
    for _ in range(2):
        with pytest.raises(ProtocolError, match=what):
            await stream.receive(timeout=1)
    assert b.was_reset


async def test_an_announced_payload_is_refused_before_it_comes():
    a, b = ends()
    frame = step(1, [0])
    frame.tensors[0].nbytes = 2**60
    data = frame.SerializeToString()
    await a.write(bytes([len(data)]) + data)
    with pytest.raises(ProtocolError, match="allowed"):
        await MessageStream(b, PROTOCOL, PEER).receive(timeout=1)


async def test_payload_that_is_cut_short_is_protocol_error():
    a, b = ends()
    frame = step(1, [0])
    frame.tensors[0].nbytes = 10
    data = frame.SerializeToString()
    await a.write(bytes([len(data)]) + data + b"12345")
    await a.close()
    with pytest.raises(ProtocolError, match="cut short"):
        await MessageStream(b, PROTOCOL, PEER).receive(timeout=1)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
async def test_no_bytes_raise_anything_but_peer_errors(data):
    a, b = ends()
    await a.write(data)
    await a.close()
    stream = MessageStream(b, PROTOCOL, PEER)
    with contextlib.suppress(ProtocolError, StreamClosed):
        while True:
            await stream.receive(timeout=1)


async def test_clean_end_is_stream_closed_after_last_message():
    a, b = streams()
    await a.send(step(7, []), timeout=1)
    await a.close()
    frame, _ = await b.receive(timeout=1)
    assert frame.step.sequence == 7
    with pytest.raises(StreamClosed, match=PEER):
        await b.receive(timeout=1)
    with pytest.raises(StreamClosed, match="closed on this side"):
        await a.send(step(8, []), timeout=1)


async def test_receive_cancelled_in_a_message_loses_nothing():
    a, b = ends()
    sender_frame = step(3, [0])
    sender_frame.tensors[0].nbytes = 6
    data = sender_frame.SerializeToString()
    wire_bytes = bytes([len(data)]) + data + b"abcdef"
    stream = MessageStream(b, PROTOCOL, PEER)
    for byte in wire_bytes[:-1]:
        await a.write(bytes([byte]))
        with pytest.raises(StreamTimeout):
            await stream.receive(timeout=0.1)
    await a.write(wire_bytes[-1:])
    frame, payloads = await stream.receive(timeout=0.1)
    assert frame.step.sequence == 3
    assert payloads == [b"abcdef"]


async def test_send_that_nobody_reads_times_out_and_resets():
    a, _ = ends(lockstep=True)
    stream = MessageStream(a, PROTOCOL, PEER)
    with pytest.raises(StreamTimeout, match="did not read"):
        await stream.send(step(1, [10]), [bytes(10)], timeout=2)
    assert a.was_reset
    with pytest.raises(StreamClosed, match="middle of a message"):
        await stream.send(step(2, []), timeout=2)


async def test_waiting_for_another_sender_does_not_reset():
    a, b = ends(lockstep=True)
    stream = MessageStream(a, PROTOCOL, PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: stream.send(step(1, [10]), [bytes(10)], timeout=math.inf))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StreamTimeout):
            await stream.send(step(2, []), timeout=1)
        assert not a.was_reset
        frame, _ = await MessageStream(b, PROTOCOL, PEER).receive(timeout=1)
        assert frame.step.sequence == 1


async def test_messages_of_several_senders_are_not_mixed():
    a, b = streams()
    async with trio.open_nursery() as nursery:
        for number in range(8):
            payload = bytes([number]) * 150_000
            nursery.start_soon(lambda n=number, p=payload: a.send(step(n, [0]), [p], timeout=9))
        seen = set()
        for _ in range(8):
            frame, payloads = await b.receive(timeout=9)
            assert payloads == [bytes([frame.step.sequence]) * 150_000]
            seen.add(frame.step.sequence)
    assert seen == set(range(8))


class Unread(list[object]):
    """Nobody looks through all of it."""

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("each of them takes a while")


class Crowded:
    """A header in which are more tensors than a message may have."""

    def __init__(self) -> None:
        self.tensors = Unread([wire.Tensor()] * (MAX_TENSORS + 1))

    def ParseFromString(self, data: bytes) -> None:
        pass


async def test_too_many_tensors_are_not_looked_through():
    sent, got = ends()
    receiver = MessageStream(got, StreamProtocol("/petalnode/test/1", Crowded), PEER)
    await sent.write(b"\0")
    with pytest.raises(ProtocolError, match=f"{MAX_TENSORS + 1} tensors"):
        await receiver.receive(timeout=1)
