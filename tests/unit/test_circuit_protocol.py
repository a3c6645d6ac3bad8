"""HOP and STOP: what is said, and what is not taken for an answer or a request."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.identity import Identity
from petalnode.node.testing import stream_pair
from petalnode.protocols import standard_pb2 as pb
from petalnode.protocols.circuit import (
    CircuitLimit,
    HopRequest,
    RelayRefused,
    Terms,
    answer_connected,
    answer_refused,
    answer_reserved,
    answer_stop,
    ask_connection,
    ask_reservation,
    ask_stop,
    binary_addrs,
    receive_hop,
    receive_stop,
)
from petalnode.protocols.delimited import MAX_MESSAGE, DelimitedStream
from petalnode.protocols.framing import PeerError, ProtocolError, StreamClosed, StreamTimeout, varint
from tests.node_inspection import raw_of

pytestmark = pytest.mark.virtual_time

PEER, RELAY = Identity.generate().peer_id, Identity.generate().peer_id


def ends() -> tuple[DelimitedStream, DelimitedStream]:
    left, right = stream_pair()
    return DelimitedStream(left, RELAY), DelimitedStream(right, PEER)


async def converse(asking, answering):
    """Runs both sides; returns what each returned or raised."""
    results = {}

    async def side(name, function, stream):
        try:
            results[name] = await function(stream)
        except PeerError as error:
            results[name] = error

    left, right = ends()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side, "asked", asking, left)
            nursery.start_soon(side, "answered", answering, right)
    return results["asked"], results["answered"]


async def test_a_reservation_is_asked_for_and_granted():
    terms = Terms(1_800_000_000, (b"\x04\x7f\x00\x00\x01\x06\x00\x01",), b"signed", CircuitLimit(3600, 1 << 40))

    async def grant(stream):
        request = await receive_hop(stream, timeout=5)
        await answer_reserved(stream, terms, timeout=5)
        return request

    assert await converse(lambda stream: ask_reservation(stream, timeout=5), grant) == (terms, HopRequest(None))


async def test_circuit_is_asked_for_without_reading_further():
    async def ask(stream):
        limit = await ask_connection(stream, PEER, timeout=5)
        return limit, await raw_of(stream).read(100)

    async def connect(stream):
        request = await receive_hop(stream, timeout=5)
        await answer_connected(stream, CircuitLimit(60, 0), timeout=5)
        await raw_of(stream).write(b"the peer speaks")
        return request

    assert await converse(ask, connect) == ((CircuitLimit(60, 0), b"the peer speaks"), HopRequest(PEER))


@pytest.mark.parametrize("status", [pb.RESERVATION_REFUSED, pb.PERMISSION_DENIED, pb.NO_RESERVATION])
async def test_a_refusal_says_why(status):
    async def refuse(stream):
        await receive_hop(stream, timeout=5)
        await answer_refused(stream, status, timeout=5)

    refused, _ = await converse(lambda stream: ask_reservation(stream, timeout=5), refuse)
    assert isinstance(refused, RelayRefused)
    assert refused.status == status
    assert RELAY in str(refused)


async def test_the_target_is_asked_and_may_refuse():
    async def accept(stream):
        source = await receive_stop(stream, timeout=5)
        await answer_stop(stream, pb.OK, timeout=5)
        return source

    assert await converse(lambda stream: ask_stop(stream, RELAY, CircuitLimit(), timeout=5), accept) == (None, RELAY)

    async def decline(stream):
        await receive_stop(stream, timeout=5)
        await answer_stop(stream, pb.RESOURCE_LIMIT_EXCEEDED, timeout=5)

    refused, _ = await converse(lambda stream: ask_stop(stream, RELAY, CircuitLimit(), timeout=5), decline)
    assert refused.status == pb.RESOURCE_LIMIT_EXCEEDED


@pytest.mark.parametrize(
    ("receive", "said", "status"),
    [
        (receive_hop, pb.HopMessage(type=pb.HopMessage.STATUS), pb.UNEXPECTED_MESSAGE),
        (receive_hop, pb.HopMessage(), pb.UNEXPECTED_MESSAGE),
        (receive_hop, pb.HopMessage(type=pb.HopMessage.CONNECT), pb.MALFORMED_MESSAGE),
        (receive_hop, pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.RelayPeer(id=b"x")), pb.MALFORMED_MESSAGE),
        (receive_stop, pb.StopMessage(type=pb.StopMessage.STATUS), pb.UNEXPECTED_MESSAGE),
        (receive_stop, pb.StopMessage(type=pb.StopMessage.CONNECT), pb.MALFORMED_MESSAGE),
    ],
)
async def test_invalid_request_is_answered_and_given_up(receive, said, status):
    async def ask(stream):
        await stream.send(said, timeout=5)
        return await stream.receive(type(said), timeout=5)

    answer, error = await converse(ask, lambda stream: receive(stream, timeout=5))
    assert answer.status == status
    assert isinstance(error, ProtocolError)


@pytest.mark.parametrize(
    "said",
    [
        pb.HopMessage(type=pb.HopMessage.RESERVE),
        pb.HopMessage(type=pb.HopMessage.RESERVE, status=pb.OK, reservation=pb.RelayReservation(expire=5)),
        pb.HopMessage(type=pb.HopMessage.STATUS),
        pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK),  # no reservation in it
    ],
)
async def test_invalid_answer_is_not_taken_for_one(said):
    async def answer(stream):
        await receive_hop(stream, timeout=5)
        await stream.send(said, timeout=5)

    error, _ = await converse(lambda stream: ask_reservation(stream, timeout=5), answer)
    assert isinstance(error, PeerError)


async def test_a_target_that_asks_has_not_accepted():
    async def answer(stream):
        await receive_stop(stream, timeout=5)
        await stream.send(pb.StopMessage(type=pb.StopMessage.CONNECT, status=pb.OK), timeout=5)

    error, _ = await converse(lambda stream: ask_stop(stream, RELAY, CircuitLimit(), timeout=5), answer)
    assert isinstance(error, ProtocolError)


@given(st.binary(max_size=200), st.sampled_from([receive_hop, receive_stop]))
async def test_nonsense_is_the_peers_error_and_never_more(said, receive):
    left, right = stream_pair()
    await left.write(said)
    await left.close()
    with trio.fail_after(5):
        try:
            await receive(DelimitedStream(right, PEER), timeout=3)
        except PeerError:
            pass


async def test_long_message_is_refused_before_it_is_read():
    left, right = stream_pair()
    await left.write(b"\xff\x7f")
    with trio.fail_after(5), pytest.raises(ProtocolError, match=str(MAX_MESSAGE)):
        await receive_hop(DelimitedStream(right, PEER), timeout=3)


async def test_messages_in_pieces_end_where_they_end():
    left, right = stream_pair()
    messages = [bytes([n]) * n for n in (0, 1, 127, 128, 200, 255)]
    data = b"".join(varint(len(message)) + message for message in messages)

    async def write() -> None:
        for start in range(0, len(data), 50):
            await left.write(data[start : start + 50])
            await wait_all_tasks_blocked()
        await left.write(b"\x80\x80\x80")

    stream = DelimitedStream(right, PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        assert [await stream.receive_bytes(timeout=3) for _ in messages] == messages
        with pytest.raises(ProtocolError, match="no length"):
            await stream.receive_bytes(timeout=3)


async def test_a_peer_that_reads_nothing_loses_the_stream():
    left, right = stream_pair(100)
    stream, message = DelimitedStream(left, PEER), pb.HopMessage(peer=pb.RelayPeer(id=bytes(200)))
    with pytest.raises(StreamTimeout):
        await stream.send(message, timeout=3)
    assert right.is_lost
    with pytest.raises(StreamClosed):
        await stream.send(message, timeout=3)


def test_addresses_are_given_as_far_as_they_fit():
    addrs = [bytes([n]) * 100 for n in range(50)]
    assert binary_addrs(addrs, 1000) == tuple(addrs[:9])
    assert len(binary_addrs(addrs, 10**6)) == 32
