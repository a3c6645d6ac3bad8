"""What strangers may send at an address of WebSocket: the bounds are those of TCP, and others are served meanwhile."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from petalnode.node.network.host import Host
from petalnode.node.network.transport import connections
from petalnode.node.network.transport.limits import LIMITS, WORK, NodeLimits
from petalnode.node.network.transport.raw_connection import READ_SIZE, RawConnection
from petalnode.node.network.transport.websocket import accept
from petalnode.protocols.directory import DIRECTORY
from tests.attacks.hosts import host
from tests.attacks.websocket_frames import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, UPGRADE, frame
from tests.memory_muxer import MemoryRaw
from tests.node_inspection import handshakes_of
from tests.patience import eventually

WS = [Multiaddr("/ip4/127.0.0.1/tcp/0/ws")]
ATTACKER = "203.0.113.7"
TIMEOUT = 300.0


@asynccontextmanager
async def stranger(server: Host, *, upgraded: bool = True) -> AsyncIterator[trio.SocketStream]:
    async with await trio.open_tcp_stream("127.0.0.1", server.listen_ports()[0][1]) as stream:
        if upgraded:
            await stream.send_all(UPGRADE + b"\r\n")
            assert b"101" in await stream.receive_some(4096)
        yield stream


async def said_until_dropped(stream: trio.SocketStream) -> bytes:
    said = b""
    with trio.fail_after(TIMEOUT), suppress(trio.BrokenResourceError):
        while part := await stream.receive_some(65536):
            said = (said + part)[-4096:]
    return said


BAD_FRAMES = {
    "unmasked": frame(BINARY, b"x" * 64, masked=False),
    "text": frame(TEXT, b"\x13/multistream/1.0.0\n"),
    "a continuation of nothing": frame(CONTINUATION, b"x" * 64),
    "a message within a message": frame(BINARY, b"x", fin=False) + frame(BINARY, b"x"),
    "a long ping": frame(PING, b"x" * 200),
    "a ping in parts": frame(PING, b"x", fin=False),
    "a kind that is none": frame(0x3, b"x"),
    "compressed, which nobody agreed on": b"\xc2" + frame(BINARY, b"x")[1:],
    "longer than any": frame(BINARY, b"x", size=1 << 63),
    "no first words": frame(BINARY, b"\xff" * 64),
    "goodbye": frame(CLOSE, b"\x03\xe8bye"),
    "goodbye for no reason": frame(CLOSE, b"\xff\xff"),
    "no frame": b"\x13/multistream/1.0.0\n",
}


@pytest.mark.parametrize("said", BAD_FRAMES.values(), ids=BAD_FRAMES)
async def test_frames_of_no_use_end_the_connection(said: bytes) -> None:
    async with host(WS) as server, stranger(server) as stream:
        await stream.send_all(said)
        await said_until_dropped(stream)
        assert not server.connected()


BAD_REQUESTS = {
    "an old version": (UPGRADE.replace(b": 13", b": 8") + b"\r\n", b"426"),
    "another method": (UPGRADE.replace(b"GET", b"POST") + b"\r\n", b"400"),
    "no host": (UPGRADE.replace(b"Host: a.example\r\n", b"") + b"\r\n", b"400"),
    "a page": (b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", b"400"),
    "a host that is none": (UPGRADE.replace(b"a.example", b"\xff\xfe" + b"x" * 300) + b"\r\n", b""),
    "a path that is none": (UPGRADE.replace(b"GET /", b"GET /\xff") + b"\r\n", b""),
    "no HTTP": (b"\x13/multistream/1.0.0\n" * 4 + b"\r\n\r\n", b"400"),
    "noise": (b"\xff" + os.urandom(64) + b"\r\n\r\n", b""),
}


@pytest.mark.parametrize(("said", "status"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_requests_of_no_use_are_answered_and_dropped(said: bytes, status: bytes) -> None:
    async with host(WS) as server, stranger(server, upgraded=False) as stream:
        await stream.send_all(said)
        assert status in await said_until_dropped(stream)


@pytest.mark.parametrize("origin", [b"https://elsewhere.example", b"null"])
async def test_page_of_any_origin_is_a_stranger(origin: bytes) -> None:
    """Below Noise it hears of nothing, whatever it brings along."""
    asked = b"\x13/multistream/1.0.0\n" + bytes([len(DIRECTORY.id) + 1]) + DIRECTORY.id.encode() + b"\n"
    async with host(WS) as server, stranger(server, upgraded=False) as stream:
        await stream.send_all(UPGRADE + b"Origin: " + origin + b"\r\nCookie: key=abc\r\n\r\n" + frame(BINARY, asked))
        await stream.send_eof()
        said = await said_until_dropped(stream)
        assert b" 101 " in said and DIRECTORY.id.encode() not in said and not server.connected()
        assert not any(word in said.lower() for word in (b"access-control", b"set-cookie", b"a.example"))


async def test_headers_without_end_are_bounded() -> None:
    class Endless(MemoryRaw):
        size = 0

        async def receive(self, n: int = READ_SIZE) -> bytes:
            self.size += 4010
            return b"X-More: " + b"y" * 4000 + b"\r\n" if self.size > 4010 else UPGRADE

    raw = Endless()
    with pytest.raises(ConnectionAbortedError):
        await accept(raw, ("ws",), None, NodeLimits())
    assert raw.closed and raw.size < 65536


async def test_silent_handshakes_have_places_and_deadline_of_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LIMITS", replace(connections.LIMITS, patience=5.0))
    async with host(WS) as server:
        async with (
            stranger(server, upgraded=False) as one,
            stranger(server) as other,
            stranger(server) as third,
        ):
            await one.send_all(b"GET / HT")
            await third.send_all(frame(BINARY, size=1000))
            await eventually(lambda: handshakes_of(server) == 3, "all are counted")
            for stream in (one, other, third):
                await said_until_dropped(stream)
        await eventually(lambda: handshakes_of(server) == 0, "none is left")


@asynccontextmanager
async def accepted(limits: NodeLimits) -> AsyncIterator[tuple[RawConnection, MemoryRaw]]:
    """A connection after its handshake, and what the stranger says on it."""
    below = MemoryRaw(origin=ATTACKER)
    below.say.send_nowait(UPGRADE + b"\r\n")
    above = await accept(below, ("ws",), None, limits)
    assert b"101" in below.sent
    below.sent.clear()
    yield above, below
    await above.close()


FLOODS: dict[str, tuple[bytes, Iterable[bytes]]] = {
    "pings": (b"", [frame(PING, b"x" * 125)]),
    "answers to nothing": (b"", [frame(PONG, b"x")]),
    "empty messages": (b"", [frame(BINARY)]),
    "empty continuations": (frame(BINARY, b"x", fin=False), [frame(CONTINUATION, fin=False)]),
    "a byte a frame": (b"", [frame(BINARY, b"x")]),
    "pings within a message": (frame(BINARY, b"x", fin=False), [frame(PING), frame(CONTINUATION, b"x", fin=False)]),
}


async def read_all(connection: RawConnection) -> None:
    while await connection.receive():
        pass


class Turns(trio.abc.Instrument):
    """Counts those of the loop."""

    turns = 0

    def before_io_wait(self, timeout: float) -> None:
        self.turns += 1


@pytest.mark.parametrize(("first", "said"), FLOODS.values(), ids=FLOODS)
@pytest.mark.virtual_time
async def test_floods_of_small_frames_end_their_connection(first: bytes, said: Iterable[bytes]) -> None:
    limits, turns = NodeLimits(), Turns()
    async with accepted(limits) as (above, below):
        below.room = 0  # it reads nothing
        if first:
            below.say.send_nowait(first)
        flood = b"".join(said) * 1000
        for _ in range(1 + 4 * LIMITS.frames_at_once // 1000):
            below.say.send_nowait(flood)
        trio.lowlevel.add_instrument(turns)
        begun = trio.current_time()
        with pytest.raises(ConnectionAbortedError, match="small frames"):
            await read_all(above)
        trio.lowlevel.remove_instrument(turns)
        taken = LIMITS.frames_at_once + LIMITS.frames_per_second * (trio.current_time() - begun)
        assert turns.turns > 0.9 * LIMITS.frames_at_once / WORK.at_once
        # A quarter of a core for all strangers together.
        assert trio.current_time() - begun > 0.5 * LIMITS.frames_at_once / WORK.per_second
        left = below.say.statistics().current_buffer_used * 1000
        assert 4 * LIMITS.frames_at_once - left < 3 * taken
        assert len(below.sent) == 0


@pytest.mark.virtual_time
async def test_pings_that_came_together_are_answered_once() -> None:
    async with accepted(NodeLimits()) as (above, below):
        below.say.send_nowait(b"".join(frame(PING, bytes([number])) for number in range(50)) + frame(BINARY, b"hello"))
        assert await above.receive() == b"hello"
        assert bytes(below.sent) == frame(PONG, bytes([49]), masked=False)


@pytest.mark.virtual_time
async def test_frames_of_every_size_pass_whole() -> None:
    async with accepted(NodeLimits()) as (above, below):
        for size in (1, 125, 126, 127, 65535, 65536, 1 << 20):
            data = os.urandom(size)
            message = frame(BINARY, data[: size // 2], fin=False) + frame(PING) + frame(CONTINUATION, data[size // 2 :])
            for start in range(0, len(message), READ_SIZE):
                below.say.send_nowait(message[start : start + READ_SIZE])
            got = b""
            while len(got) < size:
                part = await above.receive(100_000)
                assert 0 < len(part) <= 100_000
                got += part
            assert got == data


@pytest.mark.virtual_time
async def test_begun_frame_goes_on_where_it_stopped() -> None:
    async with accepted(NodeLimits()) as (above, below):
        for room in range(12):
            below.sent.clear()
            below.room = room
            below.say.send_nowait(frame(PING, b"?") + frame(BINARY, b"x"))
            await above.receive()
            with trio.move_on_after(1):
                if not above.send_nowait(b"message"):
                    below.make_room()
                    await above.send(b"message")
            expected = frame(PONG, b"?", masked=False) + frame(BINARY, b"message", masked=False)
            assert bytes(below.sent) == expected, room
