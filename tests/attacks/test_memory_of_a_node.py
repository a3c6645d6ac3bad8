"""Nobody makes a node hold more of his bytes than his share, and nobody holds what others wait for without using it."""

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.client.request import ServerFailed, WireTensor
from petalnode.node.client.session.stream import SessionSpec, SessionStream
from petalnode.node.network.shares import Turns
from petalnode.node.network.transport.limits import LIMITS
from petalnode.node.server.lifecycle.other_servers import TRANSFERS, answer_transfers
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.routing import Hop
from petalnode.node.swarm.streams import SHARES
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.node.testing import message_streams, open_network, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.directory import DIRECTORY_LIMITS, TRANSFER
from petalnode.protocols.framing import MessageStream, PeerError, StreamClosed
from petalnode.protocols.ids import Span, StreamProtocol
from petalnode.protocols.inference import EPOCH_BYTES, INFERENCE, Refusal
from petalnode.protocols.training import FORWARD, PIECE_BYTES, receive_pieces
from tests.attacks.one_server import header_of
from tests.node_inspection import raw_of

pytestmark = pytest.mark.virtual_time

TIMEOUT = 120.0
STREAMS = 12
MIB = 1 << 20
Frame = wire.PushFrame
ECHO = StreamProtocol("/petalnode/test/echo/1", Frame)
MAX_PAYLOAD = ECHO.max_payload


async def echo(stream: MessageStream[wire.PushFrame]) -> None:
    stream.grant()
    while True:
        frame, payloads = await stream.receive(timeout=None)
        await stream.send(frame, payloads, timeout=TIMEOUT)


async def echoed(swarm: Swarm, peer_id: str, nbytes: int) -> None:
    async with swarm.open_stream(peer_id, ECHO, timeout=TIMEOUT) as stream:
        async with trio.open_nursery() as nursery:
            frame = Frame(tensors=[wire.Tensor()])
            nursery.start_soon(partial(stream.send, frame, [bytes(nbytes)], timeout=TIMEOUT))
            _, [payload] = await stream.receive(timeout=TIMEOUT)
        assert len(payload) == nbytes


async def test_endless_payloads_take_no_more_than_a_share() -> None:
    """Each stream announces the largest message and sends all of it but the last byte."""
    nearly_all = bytes(MAX_PAYLOAD - 1)
    header = header_of(Frame(tensors=[wire.Tensor(nbytes=MAX_PAYLOAD)]))

    tracemalloc.start()
    try:
        async with (
            open_swarm(SwarmConfig(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))) as node,
            open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as honest,
            open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as attacker,
        ):
            node.set_handler(ECHO, echo)
            done_once, is_done = trio.open_memory_channel[None](STREAMS)

            async def fill() -> None:
                stream = await attacker.new_stream(node.peer_id, ECHO, timeout=TIMEOUT)
                raw = raw_of(stream)
                await raw.write(header)
                for start in range(0, len(nearly_all), 1 << 16):
                    await raw.write(nearly_all[start : start + (1 << 16)])
                await done_once.send(None)

            async with trio.open_nursery() as nursery:
                for _ in range(STREAMS):
                    nursery.start_soon(fill)
                await is_done.receive()
                for nbytes in (1, MIB, 6 * MIB):  # as large a share as an address of two peers has
                    await echoed(honest, node.peer_id, nbytes)
                assert node.received.of("127.0.0.1", attacker.peer_id) == MAX_PAYLOAD
                taken, _ = tracemalloc.get_traced_memory()
                nursery.cancel_scope.cancel()
    finally:
        tracemalloc.stop()
    # A bytearray that grows has an eighth more than it needs; the libraries' own is some MiB.
    assert taken < MAX_PAYLOAD * 9 / 8 + LIMITS.windows_of_peer + 32 * MIB < STREAMS * MAX_PAYLOAD / 4


def hostile_server() -> tuple[SessionStream, Any]:
    """A client's session, and the bytes that its server writes."""
    ends = stream_pair()
    peer_id = Identity.generate().peer_id
    stream, _ = message_streams(INFERENCE, "client", peer_id, ends=ends)
    hop = Hop(peer_id, Span(0, 1))
    return SessionStream(stream, hop, SessionSpec(bytes(32), Span(0, 1), 1, 64), "client"), ends[1]


LARGE = wire.Tensor(shape=[1, 1 << 18, 64], dtype="float32", codec="none", nbytes=MAX_PAYLOAD)
GRANTED = wire.Granted(session_epoch=bytes(EPOCH_BYTES), max_step_tokens=1)


async def test_client_waits_for_no_tensors_with_grant() -> None:
    session, server = hostile_server()
    await server.write(header_of(wire.InferenceFrame(granted=GRANTED, tensors=[LARGE])))
    with pytest.raises(ServerFailed, match="none are due"):
        await session.open(1, None, None)


@pytest.mark.parametrize(
    "answer",
    [
        wire.InferenceFrame(reply=wire.Reply(sequence=1), tensors=[LARGE]),
        wire.InferenceFrame(reply=wire.Reply(sequence=0), tensors=[LARGE]),
        wire.InferenceFrame(error=wire.Error(code=wire.ERROR_BUSY), tensors=[LARGE]),
        wire.InferenceFrame(granted=GRANTED, tensors=[wire.Tensor(nbytes=1)]),
    ],
    ids=["its answer", "an earlier one", "an error", "a grant"],
)
async def test_client_waits_for_no_oversized_answer(answer: wire.InferenceFrame) -> None:
    session, server = hostile_server()
    tensor = wire.Tensor(shape=[1, 1, 64], dtype="float32", codec="none", nbytes=256)
    step, chunk = wire.Step(sequence=1), WireTensor(tensor, bytes(256))
    await session.send(step, chunk)
    await server.write(header_of(answer))
    with pytest.raises(ServerFailed, match="bytes to a step of 256"):
        await session.receive(step, chunk, timeout=1000)


async def test_one_peer_leaves_streams_of_protocol_for_others() -> None:
    async with open_network() as network:
        node, honest, attacker = network.node(), network.node(), network.node()
        node.set_handler(ECHO, echo, max_streams=4 * SHARES.least_served)
        for _ in range(100):
            await attacker.new_stream(node.peer_id, ECHO, timeout=1)
        refused = await attacker.new_stream(node.peer_id, ECHO, timeout=1)
        with pytest.raises(StreamClosed):
            await refused.receive(timeout=1)
        streams = [await honest.new_stream(node.peer_id, ECHO, timeout=1) for _ in range(SHARES.least_served)]
        for stream in streams:
            await stream.send(Frame(), timeout=1)
            await stream.receive(timeout=1)


# --- turns for measuring


@pytest.mark.parametrize(
    "begun", [b"", b"\x20", header_of(wire.TransferFrame(wanted=1, tensors=[wire.Tensor(nbytes=9)]))]
)
async def test_peers_that_stand_still_keep_no_turns(begun: bytes) -> None:
    """Two peers with many streams, which say nothing or begin to, and never go on."""
    turns = Turns(TRANSFERS.at_once, TRANSFERS.contended)

    async def serve(peer_id: str, ends: Any) -> None:
        _, stream = message_streams(TRANSFER, peer_id, "node", ends=ends)
        try:
            await answer_transfers(turns, stream)
        except PeerError:
            await stream.reset()

    async with trio.open_nursery() as nursery:
        for peer_id in ["one", "two"] * 40:
            ends = stream_pair()
            nursery.start_soon(serve, peer_id, ends)
            await ends[0].write(begun)
        await trio.sleep(0.1)
        ends = stream_pair()
        nursery.start_soon(serve, "honest", ends)
        ours, _ = message_streams(TRANSFER, "honest", "node", ends=ends)
        for size in (1, 1, DIRECTORY_LIMITS.transfer_bytes):
            await ours.send(wire.TransferFrame(wanted=size, tensors=[wire.Tensor()]), [bytes(size)], timeout=3)
            _, [payload] = await ours.receive(timeout=3)
            assert len(payload) == size
        nursery.cancel_scope.cancel()


# --- pieces


async def test_pieces_of_one_byte_end_at_last() -> None:
    """A server has memory reserved for a batch from when its pieces begin to come."""
    ends = stream_pair()
    ours, theirs = message_streams(FORWARD, "one", "other", ends=ends)
    start = trio.current_time()

    async def trickle() -> None:
        frame = wire.BatchFrame(piece=wire.Piece(), tensors=[wire.Tensor()])
        while True:
            await ours.send(frame, [b"x"], timeout=5)
            await trio.sleep(29)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        with pytest.raises((PeerError, Refusal)):
            await receive_pieces(theirs, [3 * PIECE_BYTES], timeout=30)
        nursery.cancel_scope.cancel()
    assert trio.current_time() - start <= 4 * 30
