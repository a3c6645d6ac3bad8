"""Nobody may have a server hold bytes for tensors that it has not agreed to take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.server.requests.pushes import Pushes, PushStream
from petalnode.node.server.requests.service import SERVICE
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.node.testing import message_streams, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.directory import DIRECTORY, MANIFEST
from petalnode.protocols.framing import StreamClosed
from petalnode.protocols.ids import StreamProtocol
from petalnode.protocols.inference import INFERENCE, PUSH
from petalnode.protocols.training import FORWARD
from tests.attacks.granted_session import CLIENT, STRANGER, TIMEOUT, UPSTREAM
from tests.attacks.one_server import OneServer, header_of, one_server, pushed
from tests.swarm.raw import RawSession, values
from tests.tiny_models import HIDDEN

MOST = INFERENCE.max_payload
LARGE = wire.Tensor(shape=[1, MOST // (4 * HIDDEN), HIDDEN], dtype="float32", codec="none", nbytes=MOST)


async def opened(server: OneServer) -> RawSession:
    session = server.session(CLIENT)
    assert (await session.open(upstream=peer_id_to_bytes(UPSTREAM.peer_id))).HasField("granted")
    return session


def of_nobody(session: RawSession) -> wire.PushFrame:
    frame = pushed(session, CLIENT, UPSTREAM, 1, 0, values(1))
    frame.push.nonce = bytes(16)
    return frame


def of_another_client(session: RawSession) -> wire.PushFrame:
    frame = pushed(session, CLIENT, UPSTREAM, 1, 0, values(1))
    frame.push.client = peer_id_to_bytes(STRANGER.peer_id)
    return frame


@pytest.mark.parametrize(
    ("pusher", "frame", "code"),
    [
        (STRANGER, of_nobody, wire.ERROR_NOT_FOUND),
        (UPSTREAM, of_another_client, wire.ERROR_NOT_FOUND),
        (STRANGER, lambda session: pushed(session, CLIENT, STRANGER, 1, 0, values(1)), wire.ERROR_NOT_ALLOWED),
        (UPSTREAM, lambda session: pushed(session, CLIENT, UPSTREAM, 1, 0, values(1)), wire.ERROR_BAD_REQUEST),
        (STRANGER, lambda session: wire.PushFrame(error=wire.Error()), wire.ERROR_BAD_REQUEST),
    ],
    ids=["no session", "another client", "a stranger", "larger than the session's terms", "no push"],
)
async def test_a_push_is_refused_by_its_header(pusher: Identity, frame: object, code: int, blocks: BlockSpan) -> None:
    with trio.fail_after(TIMEOUT):
        async with one_server(blocks) as server:
            session = await opened(server)
            push = frame(session)  # type: ignore[operator]
            del push.tensors[:]
            push.tensors.append(LARGE)
            stream, raw = server.connect(PUSH, server.service.handle_push, pusher)
            await raw.write(header_of(push))
            answer, _ = await stream.receive(timeout=TIMEOUT)
            assert answer.error.code == code


async def test_a_step_is_refused_by_its_header(blocks: BlockSpan) -> None:
    with trio.fail_after(TIMEOUT):
        async with one_server(blocks) as server:
            stream, raw = server.connect(INFERENCE, server.service.handle_session, CLIENT)
            session = RawSession(stream, server.session(STRANGER).ready)
            await session.open()
            step = wire.InferenceFrame(step=wire.Step(sequence=1, route_epoch=1), tensors=[LARGE])
            await raw.write(header_of(step))
            answer, _ = await session.receive()
            assert answer.error.code == wire.ERROR_BAD_REQUEST


async def test_what_opens_a_stream_carries_no_tensors(blocks: BlockSpan) -> None:
    with trio.fail_after(TIMEOUT):
        async with one_server(blocks) as server:
            for protocol, handler in (
                (INFERENCE, server.service.handle_session),
                (FORWARD, server.service.handle_forward),
            ):
                stream, raw = server.connect(protocol, handler, STRANGER)  # type: ignore[type-var, arg-type]
                await raw.write(header_of(protocol.frame(tensors=[LARGE])))
                with pytest.raises(StreamClosed):
                    await stream.receive(timeout=TIMEOUT)


@pytest.mark.virtual_time
async def test_a_next_server_sends_no_tensors_back() -> None:
    class Connector:
        """Gives the pushing server one stream, whose other end is the attacker's."""

        async def open_push(self, peer_id: str, *, direct: bool = False) -> PushStream:
            return ours

        def watch_direct(self, peer_id: str) -> trio.Event:
            return trio.Event()

    ends = stream_pair()
    ours, _ = message_streams(PUSH, UPSTREAM.peer_id, STRANGER.peer_id, ends=ends)
    async with trio.open_nursery() as nursery:
        Pushes(Connector(), nursery).prepare(peer_id_to_bytes(STRANGER.peer_id))
        await ends[1].write(header_of(wire.PushFrame(error=wire.Error(), tensors=[LARGE])))
        with trio.fail_after(TIMEOUT):
            await ends[0].wait_lost()
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
@pytest.mark.parametrize("first", [b"", header_of(wire.PushFrame(push=wire.Push(nonce=bytes(99))))[:50]])
async def test_push_stream_on_which_nothing_comes_is_ended(first: bytes, blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        stream, raw = server.connect(PUSH, server.service.handle_push, STRANGER)
        await raw.write(first)
        with pytest.raises(StreamClosed):
            await stream.receive(timeout=SERVICE.first_push + 1)


@pytest.mark.parametrize("protocol", [DIRECTORY, MANIFEST])
async def test_what_has_no_tensors_takes_none(protocol: StreamProtocol[wire.DirectoryFrame]) -> None:
    with trio.fail_after(TIMEOUT):
        async with (
            open_swarm(SwarmConfig(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))) as node,
            open_swarm(SwarmConfig(Identity.generate(), peers=tuple(node.addrs))) as attacker,
        ):
            stream = await attacker.new_stream(node.peer_id, replace(protocol, max_payload=1 << 16), timeout=TIMEOUT)
            await stream.send(protocol.frame(tensors=[wire.Tensor()]), [bytes(1 << 16)], timeout=TIMEOUT)
            with pytest.raises(StreamClosed):
                await stream.receive(timeout=TIMEOUT)
            assert await attacker.measure_rtt(node.peer_id, timeout=TIMEOUT) < TIMEOUT
