"""Noise against another end that keeps to nothing: what is sealed and opened, held back, and noticed."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing
from libp2p.io.exceptions import ConnectionClosedError

from petalnode.node.network.transport import noise
from petalnode.node.network.transport.muxed_stream import (
    DATA,
    HEADER,
    SYN,
)
from petalnode.node.network.transport.yamux import Muxer
from tests.memory_muxer import MemoryRaw, Owner, accepted, noise_session, settled

pytestmark = pytest.mark.virtual_time

MIB = 1 << 20


async def test_messages_may_be_cut_anywhere() -> None:
    raw = MemoryRaw()
    session, other = noise_session(raw)
    other.say_bytes(b"one")
    other.say_bytes(b"two")
    data = b"".join([await raw.receive() for _ in range(2)])
    for byte in data:
        other.raw.say.send_nowait(bytes([byte]))
    assert [await session.receive() for _ in range(2)] == [[b"one"], [b"two"]]
    other.say_bytes(b"three")
    other.say_bytes(b"four")
    other.raw.say.send_nowait(b"".join([await raw.receive() for _ in range(2)]))
    assert await session.receive() == [b"three", b"four"]
    await other.raw.close()
    with pytest.raises(ConnectionResetError):
        await session.receive()


async def test_what_libp2p_negotiates_before_leaves_rest_to_muxer() -> None:
    raw = MemoryRaw(room=0)
    session, other = noise_session(raw)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.write, b"question" * 10_000)  # there is no pump yet
        await settled()
        raw.make_room()
    assert other.plaintext() == b"question" * 10_000 and not session.is_stuffed
    for said in (b"a", b"bc"):
        other.say_bytes(said)
        assert await session.read() == said
    other.say_bytes(b"c")
    other.say_bytes(b"defg")
    assert await session.read(3) == b"cde" and await session.read(0) == b""
    assert session.take_plaintext() == b"fg" and session.take_plaintext() == b""
    await raw.close()
    with pytest.raises(ConnectionClosedError):
        await session.read(1)
    with pytest.raises(ConnectionClosedError):
        await session.write(b"x")


async def test_frames_that_came_with_the_negotiation_are_handled() -> None:
    session, other = noise_session(MemoryRaw())
    other.say_bytes(b"agreed" + HEADER.pack(0, DATA, SYN, 1, 5) + b"early")
    assert await session.read(6) == b"agreed"
    ours = Muxer(session, session.remote_peer, Owner())
    assert not ours.is_established
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.start)
        assert await (await ours.accept_stream()).read() == b"early"
        assert ours.is_established
        nursery.cancel_scope.cancel()


async def test_a_changed_bit_ends_the_connection() -> None:
    async with accepted() as (ours, other, _):
        other.raw.say.send_nowait((20).to_bytes(2, "big") + bytes(20))
        await settled()
        assert "authentication" in (ours.lost or "")


async def test_what_the_socket_refuses_goes_later() -> None:
    raw = MemoryRaw(room=10)
    session, other = noise_session(raw)
    data = [bytes([number]) * 100_000 for number in range(4)]
    for part in data:
        session.put(part)
    assert session.is_stuffed and not session.has_room
    raw.room = 1000
    session.put(b"")  # what waits is not overtaken
    assert len(raw.sent) == 10
    raw.room = 0

    async def pump() -> None:
        with suppress(ConnectionResetError):  # at its end
            await session.pump()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump)
        with trio.move_on_after(1) as scope:
            await session.wait_room()
        assert scope.cancelled_caught
        begun = trio.current_time()
        await session.flush(5)
        assert trio.current_time() == begun + 5
        nursery.start_soon(session.flush, 1000)
        nursery.start_soon(session.wait_room)
        await settled()
        raw.make_room()
        await session.wait_room()
        await session.flush(5)
        await settled()
        assert len(nursery.child_tasks) == 1  # the pump: nobody else waits
        assert not session.is_stuffed and session.has_room
        session.put(b"again")
        raw.room = 0
        session.put(bytes(300_000))
        nursery.start_soon(session.flush, 1000)
        nursery.start_soon(session.wait_room)
        await settled()
        await session.close()
        await settled()
        assert not nursery.child_tasks
        await session.flush(5)
        await session.wait_room()
        assert trio.current_time() == begun + 5
        nursery.cancel_scope.cancel()
    assert other.plaintext() == b"".join([*data, b"again"])


async def test_what_the_other_end_never_reads_is_bounded() -> None:
    """Answers to pings and the like do not wait for room."""
    session, _ = noise_session(MemoryRaw(room=0))
    for _ in range(noise.LIMITS.most_unsent // MIB):
        session.put(bytes(MIB))
    with pytest.raises(ConnectionAbortedError):
        session.put(b"x")


async def test_a_socket_that_takes_nothing_ends_the_connection() -> None:
    raw = MemoryRaw(room=0)
    session, _ = noise_session(raw)
    session.put(b"x")
    begun = trio.current_time()
    with pytest.raises(ConnectionAbortedError):
        await session.pump()
    assert trio.current_time() - begun == pytest.approx(noise.LIMITS.stall)
    await session.close()
    with pytest.raises(ConnectionResetError):
        session.put(b"x")
    assert raw.closed
