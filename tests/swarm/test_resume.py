"""A server's session outlives its stream: what is taken up on another one, at whatever moment, and what is not."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import PUSH, receipt_from_wire
from tests.attacks.one_server import OneServer, one_server, pushed
from tests.swarm.free_tokens import TOKENS, announced_free
from tests.swarm.memory_pool import MemoryPool, raw_node_of
from tests.swarm.raw import TIMEOUT, RawSession, values
from tests.tiny_models import NUM_BLOCKS, save_tiny

KEEP = 60_000
CLIENT = Identity.generate()


@pytest.fixture(scope="module")
def server(pool: MemoryPool) -> MemoryServer:
    started = pool.start("0:2", cache_tokens=100_000)
    started.ready  # noqa: B018  (waits)
    return started


async def resumed(
    swarm: Swarm, session: RawSession, *, answered: int | None = None, attempt: int = 0, epoch: bytes | None = None
) -> tuple[RawSession, wire.InferenceFrame]:
    """Another stream with a Resume of `session`, and what the server answers."""
    following = await RawSession.connect(swarm, session.ready)
    following.nonce, following.terms = session.nonce, session.terms
    resume = wire.Resume(
        nonce=session.nonce,
        session_epoch=session.granted.session_epoch if epoch is None else epoch,
        answered=answered,
        attempt=attempt,
    )
    await following.stream.send(wire.InferenceFrame(resume=resume), timeout=TIMEOUT)
    frame, _ = await following.receive()
    following.granted.CopyFrom(frame.granted)
    return following, frame


async def opened(swarm: Swarm, server: MemoryServer, **fields: Any) -> RawSession:
    return await RawSession.opened(swarm, server.ready, **{"keep_ms": KEEP} | fields)


@pytest.mark.parametrize("old", ["lost", "alive"])
async def test_a_session_goes_on_where_it_was(old: str, server: MemoryServer, raw_node: Swarm) -> None:
    whole = await opened(raw_node, server)
    await whole.step(1, 0, values(3))
    _, expected = await whole.step(2, 3, values(1, seed=1))
    await whole.close()
    session = await opened(raw_node, server)
    frame, _ = await session.step(1, 0, values(3))
    if old == "lost":
        await session.stream.reset()
    following, answer = await resumed(raw_node, session, answered=1, attempt=1)
    granted = answer.granted
    receipt = receipt_from_wire(frame.reply.receipt)
    assert (granted.position, granted.sequence, granted.last_receipt) == (3, 1, receipt.hash())
    assert granted.session_epoch == session.granted.session_epoch and granted.keep_ms == KEEP
    with pytest.raises(PeerError):
        await session.receive()  # the old stream is over
    frame, payloads = await following.step(2, 3, values(1, seed=1))
    assert payloads == expected
    assert receipt_from_wire(frame.reply.receipt).previous_receipt == receipt.hash()
    await following.close()


@pytest.mark.parametrize("wait", [True, False], ids=["done before", "under way"])
async def test_lost_replies_come_again_in_order(wait: bool, server: MemoryServer, raw_node: Swarm) -> None:
    """The steps are on their way, computing, or done when the Resume overtakes their replies."""
    session = await opened(raw_node, server)
    frame, _ = await session.step(1, 0, values(3))
    receipts = [receipt_from_wire(frame.reply.receipt)]
    for sequence in (2, 3, 4):
        await session.send_step(sequence, sequence + 1, values(1, seed=sequence))
    if wait:
        for _ in range(3):
            await session.receive()
    following, answer = await resumed(raw_node, session, answered=1, attempt=1)
    for sequence in range(answer.granted.sequence + 1, 5):
        # What the server has not got is sent again; what it gets twice is answered twice with the same.
        await following.send_step(sequence, sequence + 1, values(1, seed=sequence))
    while len(receipts) < 4:
        frame, _ = await following.receive()
        if frame.reply.sequence <= receipts[-1].sequence:
            continue
        receipt = receipt_from_wire(frame.reply.receipt)
        assert receipt.sequence == len(receipts) + 1
        assert receipt.previous_receipt == receipts[-1].hash()
        receipts.append(receipt)
    if wait:
        assert answer.granted.sequence == 4 and answer.granted.position == 6
    await following.close()


async def test_unasked_old_replies_do_not_come(server: MemoryServer, raw_node: Swarm) -> None:
    session = await opened(raw_node, server)
    await session.step(1, 0, values(3))
    following, _ = await resumed(raw_node, session)
    frame, _ = await following.step(2, 3, values(1))
    assert frame.reply.sequence == 2
    await following.close()


async def test_a_resume_that_comes_late_takes_nothing_over(server: MemoryServer, raw_node: Swarm) -> None:
    session = await opened(raw_node, server)
    await session.step(1, 0, values(3))
    following, _ = await resumed(raw_node, session, answered=1, attempt=2)
    for late in (1, 2):
        _, answer = await resumed(raw_node, session, answered=1, attempt=late)
        assert answer.error.code == wire.ERROR_BAD_REQUEST
    frame, _ = await following.step(2, 3, values(1))
    assert frame.reply.sequence == 2
    await following.close()


async def test_many_streams_one_after_the_other(server: MemoryServer, raw_node: Swarm) -> None:
    whole = await opened(raw_node, server)
    expected = [(await whole.step(n, n - 1, values(1, seed=n)))[1] for n in range(1, 21)]
    await whole.close()
    session = await opened(raw_node, server)
    for number in range(1, 21):
        _, payloads = await session.step(number, number - 1, values(1, seed=number))
        assert payloads == expected[number - 1]
        session, answer = await resumed(raw_node, session, answered=number, attempt=number)
        assert answer.granted.sequence == number
    await session.close()


async def test_what_old_stream_says_later_is_not_heard(server: MemoryServer, raw_node: Swarm) -> None:
    """Also not a goodbye: it is the new stream's session now."""
    session = await opened(raw_node, server)
    await session.step(1, 0, values(3))
    following, _ = await resumed(raw_node, session, answered=1, attempt=1)
    try:
        await session.close()
    except PeerError:
        pass  # its end is known here already
    frame, _ = await following.step(2, 3, values(1))
    assert frame.reply.position == 4
    await following.close()


async def test_only_its_own_client_can_take_session_up(pool: MemoryPool, server: MemoryServer, raw_node: Swarm) -> None:
    session = await opened(raw_node, server)
    for changed in ({"epoch": os.urandom(16)}, {}):
        stranger = RawSession(session.stream, session.ready)
        stranger.granted.CopyFrom(session.granted)
        if changed:
            stranger.nonce = session.nonce
        _, answer = await resumed(raw_node, stranger, **changed)
        assert answer.error.code == wire.ERROR_NOT_FOUND
    await session.step(1, 0, values(3))
    await session.close()
    _, answer = await resumed(raw_node_of(pool), await opened(raw_node, server))
    assert answer.error.code == wire.ERROR_NOT_FOUND


async def test_an_error_ends_the_session_wherever_it_is(server: MemoryServer, raw_node: Swarm) -> None:
    session = await opened(raw_node, server)
    await session.step(1, 0, values(3))
    frame, _ = await session.step(2, 9, values(1))
    assert frame.error.code == wire.ERROR_BAD_REQUEST
    _, answer = await resumed(raw_node, session, answered=1)
    assert answer.error.code == wire.ERROR_NOT_FOUND


# --- pushes


def pushed_step(swarm: Swarm, session: RawSession, sequence: int, position: int, payload: bytes) -> wire.PushFrame:
    """A step as the server before would hand it on. `swarm` plays both that server and the client."""
    version = session.terms.model_version
    return pushed(session, swarm.identity, swarm.identity, sequence, position, payload, model_version=version)


@pytest.mark.parametrize("moment", ["while nobody listens", "beside the resume"])
async def test_push_in_between_comes_on_the_next_stream(moment: str, server: MemoryServer, raw_node: Swarm) -> None:
    session = await opened(raw_node, server)
    await session.step(1, 0, values(3))
    raw_node.host.remember(server.peer_id, server.ready["addrs"])
    pusher = await raw_node.new_stream(server.peer_id, PUSH, timeout=TIMEOUT)
    payload = values(1, seed=5)
    if moment == "while nobody listens":
        await session.stream.reset()
    await pusher.send(pushed_step(raw_node, session, 2, 3, payload), [payload], timeout=TIMEOUT)
    following, _ = await resumed(raw_node, session, answered=1, attempt=1)
    frame, _ = await following.receive()
    assert frame.reply.sequence == 2 and frame.reply.pushed and frame.reply.position == 4
    frame, _ = await following.step(3, 4, values(1))
    assert frame.reply.sequence == 3
    await pusher.close()
    await following.close()


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlockSpan:
    folder = tmp_path_factory.mktemp("model")
    save_tiny("llama", folder)
    return load_span(folder, Span(0, NUM_BLOCKS))


async def test_reply_ready_during_a_change_comes_once(blocks: BlockSpan) -> None:
    """The reply is made some turns of the event loop after the Resume was sent, that some fall into its midst."""

    async def once(server: OneServer, turns: int) -> None:
        compute, go = server.service.context.compute, trio.Event()

        async def held(*args: Any) -> Any:
            output = await ComputeThread.step(compute, *args)
            computed.set()
            await go.wait()
            return output

        session = server.session(CLIENT)
        await session.open(keep_ms=KEEP)
        await session.step(1, 0, values(3))
        computed = trio.Event()
        with patch.object(compute, "step", held):
            await session.send_step(2, 3, values(1))
            await computed.wait()
            following = server.session(CLIENT)
            resume = wire.Resume(
                nonce=session.nonce, session_epoch=session.granted.session_epoch, answered=1, attempt=1
            )
            await following.stream.send(wire.InferenceFrame(resume=resume), timeout=TIMEOUT)
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            go.set()
            frame, _ = await following.receive()
            assert frame.HasField("granted")
            frame, _ = await following.receive()
            assert frame.reply.sequence == 2
        frame, _ = await following.step(3, 4, values(1))
        assert frame.reply.sequence == 3
        await following.close()

    with trio.fail_after(2 * TIMEOUT):
        async with one_server(blocks) as server:
            for turns in range(24):
                for _ in range(4):  # which of two tasks is first in a turn is random
                    await once(server, turns)


# --- the cache of who is lost


@pytest.fixture(scope="module")
def small_server(pool: MemoryPool) -> MemoryServer:
    started = pool.start("0:6", cache_tokens=TOKENS)
    started.ready  # noqa: B018
    return started


async def test_lost_clients_cache_goes_to_the_next(small_server: MemoryServer, raw_node: Swarm) -> None:
    kept = await opened(raw_node, small_server, max_length=150)
    await kept.step(1, 0, values(3))
    await announced_free(raw_node, small_server, TOKENS - 150)
    await kept.stream.reset()
    small = await opened(raw_node, small_server, max_length=50, wait_ms=30_000)
    following, answer = await resumed(raw_node, kept, answered=1, attempt=1)
    assert answer.granted.sequence == 1  # that there was room for: nothing was taken
    await following.stream.reset()
    large = await opened(raw_node, small_server, max_length=100, wait_ms=30_000)
    _, answer = await resumed(raw_node, kept, answered=1, attempt=2)
    assert answer.error.code == wire.ERROR_NOT_FOUND
    frame, _ = await large.step(1, 0, values(3))
    assert frame.reply.position == 3
    await small.close()
    await large.close()
    await announced_free(raw_node, small_server, TOKENS)


async def test_who_waits_for_cache_gets_a_lost_clients(small_server: MemoryServer, raw_node: Swarm) -> None:
    kept = await opened(raw_node, small_server, max_length=150)
    waiting = await RawSession.connect(raw_node, small_server.ready)
    await waiting.send_open(max_length=100, wait_ms=40_000)
    await kept.stream.reset()
    frame, _ = await waiting.receive()
    assert frame.granted.cache_tokens == 100
    await waiting.close()


async def test_nobody_is_kept_for_ever(small_server: MemoryServer, raw_node: Swarm) -> None:
    session = await opened(raw_node, small_server, max_length=150, keep_ms=200)
    await announced_free(raw_node, small_server, TOKENS - 150)
    await session.stream.reset()
    await announced_free(raw_node, small_server, TOKENS)
    _, answer = await resumed(raw_node, session)
    assert answer.error.code == wire.ERROR_NOT_FOUND


async def test_session_not_to_be_kept_can_move(server: MemoryServer, raw_node: Swarm) -> None:
    session = await opened(raw_node, server, keep_ms=0)
    await session.step(1, 0, values(3))
    following, answer = await resumed(raw_node, session, answered=1, attempt=1)
    assert answer.granted.position == 3
    with trio.fail_after(TIMEOUT):
        await following.step(2, 3, values(1))
    await following.close()
