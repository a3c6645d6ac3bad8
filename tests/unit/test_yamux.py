"""Yamux over Noise against another end that keeps to nothing: what is granted, given back, refused and noticed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
import trio.testing
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from petalnode.node.network.transport import limits, noise, yamux
from petalnode.node.network.transport.bandwidth import Throttle
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.muxed_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW,
    MAX_DATA,
    PING,
    RST,
    SYN,
    WINDOW,
    WINDOW_UPDATE,
    MuxedStream,
)
from petalnode.node.network.transport.raw_connection import Path
from petalnode.node.network.transport.yamux import Muxer
from petalnode.node.testing import run_autojumping
from tests.memory_muxer import DIRECT, MemoryRaw, muxer, noise_session, settled

MIB = 1 << 20


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(3600):  # of the clock that jumps: what waits for ever fails at once
            await main()

    run_autojumping(bounded)


async def read(stream: MuxedStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await stream.read(size - len(data))
    return data


def test_frames_may_be_cut_anywhere() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            frames = HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0) + HEADER.pack(0, DATA, FIN, 1, 5) + b"hello"
            for byte in frames:
                other.say_bytes(bytes([byte]))
            stream = await ours.accept_stream()
            assert await read(stream, 5) == b"hello"
            with pytest.raises(MuxedStreamEOF):
                await stream.read()
            assert ours.lost is None

    run(main)


def test_several_frames_at_once_go_to_their_streams() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            opening = b"".join(HEADER.pack(0, DATA, SYN, stream, 3) + b"%03d" % stream for stream in (1, 3, 5))
            other.say_bytes(opening + HEADER.pack(0, DATA, 0, 3, 0) + HEADER.pack(0, DATA, 0, 3, 4) + b"more")
            streams = [await ours.accept_stream() for _ in range(3)]
            await settled()
            assert [stream.stream_id for stream in streams] == [1, 3, 5]
            assert await streams[0].read() == b"001" and await streams[2].read() == b"005"
            assert await read(streams[1], 3) == b"003" and await streams[1].read(2) == b"mo"
            assert streams[1].has_unread and not streams[0].has_unread

    run(main)


@pytest.fixture
def little_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB may be unread on a connection, so that tests need not send what is usual."""
    monkeypatch.setattr(limits, "MAX_UNREAD_OF_PEER", 8 * MIB)


@pytest.mark.usefixtures("little_unread")
def test_what_was_read_is_granted_again_and_a_long_connection_lives() -> None:
    """More passes through than may be unread at once."""

    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            stream = await ours.accept_stream()
            stream.widen()
            stream.widen(INITIAL_WINDOW)  # is less, and takes nothing back
            granted, sent, half = INITIAL_WINDOW, 0, WINDOW // 2
            while sent < 20 * MIB:
                await settled()
                granted += other.granted(1)
                assert half <= granted - sent <= WINDOW, "what was read, and no more, is granted again"
                other.send(1, bytes(half))
                sent += half
                await read(stream, half)
            assert ours.lost is None and not stream.has_unread

    run(main)


@pytest.mark.usefixtures("little_unread")
@pytest.mark.parametrize("how", ["reset by us", "closed by us and reset", "nobody reads any more", "diverted"])
def test_what_nobody_reads_is_given_back(how: str) -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            for number in range(80):  # 20 MiB
                other.open(2 * number + 1)
                stream = await ours.accept_stream()
                if how == "diverted":
                    stream.divert(lambda data: bool(data))
                elif how == "nobody reads any more":
                    stream.discard()
                other.send(stream.stream_id, bytes(INITIAL_WINDOW))
                await settled()
                assert stream.has_unread == (how not in ("diverted", "nobody reads any more"))
                await stream.close() if how == "closed by us and reset" else None
                await stream.reset()
                other.send(stream.stream_id, bytes(10))  # was on its way
                await settled()
                assert ours.lost is None, number
            assert ours.open_streams == 0

    run(main)


@pytest.mark.usefixtures("little_unread")
def test_what_nobody_reads_is_bounded() -> None:
    """The stream with the most unread bytes is reset then."""

    async def main() -> None:
        async with muxer() as (ours, other):
            for number in range(33):
                other.open(2 * number + 1)
                other.send(2 * number + 1, bytes(INITIAL_WINDOW))
                await settled()
                resets = [frame for frame in other.frames() if frame[1] & RST]
                assert len(resets) == (number == 32) and ours.lost is None

    run(main)


@pytest.mark.parametrize("beyond", [0, 1])
def test_who_sends_more_than_was_granted_is_cut_off(beyond: int) -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            other.send(1, bytes(INITIAL_WINDOW))
            other.send(1, bytes(beyond))
            await settled()
            assert (ours.lost is not None) == bool(beyond)
            if not beyond:
                stream = await ours.accept_stream()
                await read(stream, INITIAL_WINDOW // 2 - 1)
                assert other.granted(1) == 0
                await read(stream, 1)
                assert other.granted(1) == INITIAL_WINDOW // 2
                other.send(1, bytes(INITIAL_WINDOW // 2))
                await settled()
                assert ours.lost is None
                other.send(1, bytes(1))
                await settled()
                assert ours.lost is not None

    run(main)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (HEADER.pack(1, DATA, 0, 0, 0), "no Yamux frame"),
        (HEADER.pack(0, GO_AWAY + 1, 0, 0, 0), "no Yamux frame"),
        (HEADER.pack(0, GO_AWAY, 0, 0, 0), "closed the connection"),
        (HEADER.pack(0, WINDOW_UPDATE, SYN, 2, 0), "not its"),
        (HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0), "not its"),
        (HEADER.pack(0, DATA, 0, 1, INITIAL_WINDOW + 1), "more than it was granted"),
    ],
)
def test_who_breaks_the_protocol_is_cut_off(frame: bytes, why: str) -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            stream = await ours.accept_stream()
            other.say_bytes(frame)
            with pytest.raises(MuxedStreamReset, match=why):
                await stream.read()
            assert ours.lost is not None and why in ours.lost and ours.open_streams == 0
            with pytest.raises(MuxedConnUnavailable, match=why):
                await ours.open_stream()
            with pytest.raises(MuxedConnUnavailable, match=why):
                await ours.accept_stream()
            with pytest.raises(MuxedStreamReset):
                await stream.write(b"x")
            await settled()
            assert other.raw.closed

    run(main)


def test_what_comes_for_a_stream_that_has_gone_is_passed_over() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.send(9, b"for nobody")
            other.say(WINDOW_UPDATE, 0, 9, 5)
            other.say(WINDOW_UPDATE, RST, 9)
            other.send(1, b"here", SYN)
            assert await (await ours.accept_stream()).read() == b"here"

    run(main)


def test_a_ping_is_answered_and_an_answer_is_not() -> None:
    async def main() -> None:
        async with muxer() as (_, other):
            other.say(PING, SYN, 0, 12345)
            other.say(PING, ACK, 0, 12345)
            await settled()
            assert other.frames() == [(PING, ACK, 0, 12345, b"")]

    run(main)


def test_a_stream_is_closed_on_one_side_and_then_on_the_other() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            stream = await ours.accept_stream()
            await stream.write(b"last")
            await stream.close()
            await stream.close()
            with pytest.raises(MuxedStreamClosed):
                await stream.write(b"too late")
            with pytest.raises(MuxedStreamClosed):
                stream.write_nowait(b"too late")
            accepted, data, end = other.frames()
            assert accepted[:3] == (WINDOW_UPDATE, ACK, 1) and data[4] == b"last" and end[:3] == (WINDOW_UPDATE, FIN, 1)
            assert ours.open_streams == 1
            other.send(1, b"answer", FIN)
            assert await stream.read() == b"answer"
            with pytest.raises(MuxedStreamEOF):
                await stream.read()
            stream.widen()
            assert stream.has_unread and ours.open_streams == 0 and ours.lost is None and other.frames() == []

    run(main)


def test_who_waits_for_bytes_is_told_of_the_end_of_the_stream() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            stream = await ours.accept_stream()

            async def wait() -> None:
                with pytest.raises(MuxedStreamEOF):
                    await stream.read()
                await stream.close()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await settled()
                other.say(WINDOW_UPDATE, FIN, 1)
            assert ours.open_streams == 0
            other.open(3)
            second = await ours.accept_stream()
            other.say(WINDOW_UPDATE, FIN, 3)
            await settled()
            assert ours.open_streams == 1
            await second.close()
            assert ours.open_streams == 0
            assert other.frames()[-1] == (WINDOW_UPDATE, FIN, 3, 0, b"")

    run(main)


def test_frames_that_a_circuit_carries_are_sealed_twice_and_still_fit() -> None:
    async def main() -> None:
        relayed = Path(direct=False, relay="relay", remote_addr=None, inbound=True)
        for path, largest in ((DIRECT, MAX_DATA), (relayed, MAX_DATA - HEADER.size - 18)):
            async with muxer(MemoryRaw(path=path)) as (ours, other):
                other.open(1)
                stream = await ours.accept_stream()
                await stream.write(bytes(2 * MAX_DATA))
                assert max(frame[3] for frame in other.frames()) == largest
                assert not stream.write_nowait(bytes(largest + 1)) and stream.write_nowait(bytes(largest))

    run(main)


def test_a_reset_ends_both_directions_and_tells_the_other_end() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            for stream in (1, 3):
                other.open(stream)
            first, second = await ours.accept_stream(), await ours.accept_stream()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first.wait_lost)
                nursery.start_soon(first.wait_lost)
                await settled()
                other.send(1, b"before")
                other.say(WINDOW_UPDATE, RST, 1)
            assert await first.read() == b"before"  # what came before is read first
            with pytest.raises(MuxedStreamReset):
                await first.read()
            with pytest.raises(MuxedStreamReset):
                await first.write(b"x")
            with pytest.raises(MuxedStreamReset):
                first.write_nowait(b"x")
            await second.reset()
            await second.reset()
            await second.wait_lost()
            assert [frame[:3] for frame in other.frames() if frame[1] & RST] == [(WINDOW_UPDATE, RST, 3)]
            assert ours.open_streams == 0 and ours.lost is None

    run(main)


def test_too_many_streams_are_refused_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "MAX_STREAMS_OF_CONNECTION", 64)

    async def main() -> None:
        async with muxer() as (ours, other):
            streams = []
            for number in range(65):
                other.open(2 * number + 1)
                if number < 64:
                    streams.append(await ours.accept_stream())
            await settled()
            assert ours.open_streams == 64 and ours.lost is None
            assert [frame[:3] for frame in other.frames() if frame[1] & RST] == [(WINDOW_UPDATE, RST, 129)]
            with pytest.raises(MuxedConnUnavailable):
                await ours.open_stream()
            await streams[0].reset()
            other.open(131)
            await settled()
            assert ours.open_streams == 64

    run(main)


def test_writing_keeps_to_the_other_end_s_window() -> None:
    async def main() -> None:
        async with muxer(initiator=True) as (ours, other):
            stream = await ours.open_stream()
            assert stream.stream_id == 1 and other.frames() == []  # goes with what comes next
            data = bytes(range(256)) * 2048  # twice the window
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, data)
                await settled()
                frames = other.frames()
                assert frames[0] == (WINDOW_UPDATE, SYN, 1, WINDOW - INITIAL_WINDOW, b"")
                assert b"".join(frame[4] for frame in frames) == data[:INITIAL_WINDOW]
                assert not stream.write_nowait(b"x")
                other.say(WINDOW_UPDATE, 0, 1, 1000)
                await settled()
                assert other.frames() == [(DATA, 0, 1, 1000, data[INITIAL_WINDOW : INITIAL_WINDOW + 1000])]
                other.say(WINDOW_UPDATE, 0, 1, INITIAL_WINDOW)
            assert b"".join(frame[4] for frame in other.frames()) == data[INITIAL_WINDOW + 1000 :]
            assert (await ours.open_stream()).stream_id == 3
            assert stream.send_window == 1000
            assert stream.write_nowait(bytes(1000)) and stream.send_window == 0

    run(main)


@pytest.mark.parametrize("end", ["reset", "closed", "connection"])
def test_who_waits_for_a_window_is_told_of_the_end(end: str) -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            stream = await ours.accept_stream()

            async def write() -> None:
                with pytest.raises(MuxedStreamClosed if end == "closed" else MuxedStreamReset):
                    await stream.write(bytes(2 * INITIAL_WINDOW))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await settled()
                if end == "closed":
                    await stream.close()
                else:
                    other.say(WINDOW_UPDATE, RST, 1) if end == "reset" else other.say(GO_AWAY)

    run(main)


def test_a_silent_peer_is_asked_and_then_dropped() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            stream = await ours.accept_stream()
            begun = trio.current_time()
            for _ in range(20):  # who answers stays
                await trio.sleep(1.5)
                asked = [frame for frame in other.frames() if frame[:2] == (PING, SYN)]
                assert asked
                other.say(PING, ACK)
            assert ours.lost is None and trio.current_time() - begun == pytest.approx(30)
            await settled()
            begun = trio.current_time()
            await stream.wait_lost()
            assert 3 < trio.current_time() - begun < 5.5
            assert "no sign of life" in (ours.lost or "")

    run(main)


def test_a_peer_is_not_dropped_because_we_stood_still() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            await ours.accept_stream()
            await trio.sleep(1.2)
            assert [frame[:2] for frame in other.frames() if frame[0] == PING] == [(PING, SYN)]
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, trio.testing.MockClock)
            clock.jump(60)
            await settled()
            assert ours.lost is None
            assert [frame[:2] for frame in other.frames()] == [(PING, SYN)]
            other.say(PING, ACK)
            await trio.sleep(0.5)
            assert ours.lost is None

    run(main)


def test_without_streams_a_peer_is_asked_seldom() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            await trio.sleep(7)
            assert other.frames() == []
            await trio.sleep(2)
            assert [frame[:2] for frame in other.frames()] == [(PING, SYN)]
            other.say(PING, ACK)
            await settled()
            ours.suspect()
            await trio.sleep(1.1)
            assert [frame[:2] for frame in other.frames()] == [(PING, SYN)]
            other.say(PING, ACK)
            await trio.sleep(6)
            assert other.frames() == []

    run(main)


def test_a_stream_that_the_other_end_never_closes_is_reset() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):

            async def live(seconds: int) -> None:
                for _ in range(seconds):
                    await trio.sleep(1)
                    other.say(PING, ACK)

            other.open(1)
            other.open(3)
            closed, used = await ours.accept_stream(), await ours.accept_stream()
            await live(100)
            closed.discard()
            await closed.close()
            await used.close()
            await live(27)
            assert ours.open_streams == 2
            await live(8)
            assert ours.open_streams == 1 and closed.lost is not None and used.lost is None

    run(main)


def test_after_a_large_message_no_pause_is_long_enough_for_tcp_to_forget_its_window() -> None:
    async def main() -> None:
        async with muxer(MemoryRaw(is_socket=True)) as (ours, other):

            async def pings() -> int:
                await trio.sleep(0.9)
                said = sum(frame[:2] == (PING, SYN) for frame in other.frames())
                other.say(PING, ACK)
                await settled()
                return said

            other.open(1)
            stream = await ours.accept_stream()
            stream.widen()
            await stream.write(bytes(12 * 1024))
            assert await pings() == 0
            await stream.write(bytes(12 * 1024 + 1))
            assert await pings() >= 7
            for _ in range(18):  # who says something needs no pings
                await trio.sleep(0.05)
                await stream.write(b"x")
            assert sum(frame[:2] == (PING, SYN) for frame in other.frames()) <= 1  # is the peer alive?
            for _ in range(5):
                await pings()
            assert await pings() <= 1

    run(main)


def test_what_comes_through_a_circuit_is_handled_where_it_comes() -> None:
    async def main() -> None:
        async with muxer(MemoryRaw(diverting=True)) as (ours, other):
            await settled()
            other.open(1)
            other.send(1, b"at once")
            assert ours.open_streams == 1
            assert await (await ours.accept_stream()).read() == b"at once"
            other.say(GO_AWAY)
            assert ours.lost is not None

    run(main)


def test_a_connection_that_we_close_says_so_and_sends_the_rest() -> None:
    async def main() -> None:
        async with muxer(MemoryRaw(room=0)) as (ours, other):
            other.open(1)
            stream = await ours.accept_stream()
            await stream.write(b"last")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.close)
                await settled()
                other.raw.make_room()
            frames = other.frames()
            assert [frame[0] for frame in frames] == [WINDOW_UPDATE, DATA, GO_AWAY]
            assert frames[-1] == (GO_AWAY, 0, 0, 0, b"")
            assert ours.lost is not None and ours.is_closed and not ours.is_established and other.raw.closed
            assert ours.peer_id == ours.secured_conn.remote_peer

    run(main)


def test_writing_waits_for_the_socket_and_for_the_limit_of_the_upload() -> None:
    async def main() -> None:
        async def live() -> None:
            while True:
                other.say(PING, ACK)
                await trio.sleep(1)

        raw = MemoryRaw(room=0, upload=Throttle(1_000_000))
        async with muxer(raw) as (ours, other), trio.open_nursery() as nursery:
            nursery.start_soon(live)
            other.open(1)
            other.open(3)
            first, second = await ours.accept_stream(), await ours.accept_stream()
            other.say(WINDOW_UPDATE, 0, 1, 10 * MIB)
            with trio.move_on_after(5) as scope:
                while True:
                    await first.write(bytes(20_000))
            assert scope.cancelled_caught and 250_000 < first.send_window < 11 * MIB - 250_000
            assert not second.write_nowait(b"x")
            with trio.move_on_after(2) as scope:
                await second.write(b"x")
            assert scope.cancelled_caught
            raw.make_room()
            await second.write(b"x")
            await first.write(bytes(500_000))
            assert not second.write_nowait(bytes(40_000)) and not ours.secured_conn.is_stuffed
            begun = trio.current_time()
            await second.write(bytes(100_000))
            assert trio.current_time() > begun
            await trio.sleep(1)
            assert second.write_nowait(bytes(40_000))
            nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.parametrize(("said", "agreed"), [(b"\x07/yamux\n", True), (b"\x03na\n", False)])
def test_what_does_not_speak_yamux_is_cut_off(said: bytes, agreed: bool) -> None:
    async def main() -> None:
        async with muxer(initiator=True, answer=b"\x07/yamux\n") as (ours, other):
            for byte in said:
                other.say_bytes(bytes([byte]))
            other.say(PING, SYN, 0, 1)
            await settled()
            assert (ours.lost is None) == agreed
            assert (other.frames() == [(PING, ACK, 0, 1, b"")]) == agreed

    run(main)


def test_a_node_s_share_of_a_stream_ends_with_the_stream() -> None:
    """Whoever ends it, and also with the connection."""

    async def main() -> None:
        node = NodeLimits()
        async with muxer(limits=node) as (ours, other):
            use = node.of(str(ours.peer_id))
            for number in range(6):
                other.send(2 * number + 1, bytes(1000), SYN)
            streams = [await ours.accept_stream() for _ in range(6)]
            own = await ours.open_stream()
            await settled()
            assert (node.streams, use.streams, node.unread, use.unread, ours.buffered) == (6, 6, 6000, 6000, 6000)
            assert use.windows == WINDOW - INITIAL_WINDOW and use.connections == [ours]
            streams[1].widen()
            assert use.windows == 2 * (WINDOW - INITIAL_WINDOW)
            await streams[0].read(600)
            assert (node.unread, use.unread, ours.buffered) == (5400, 5400, 5400)
            other.say(WINDOW_UPDATE, RST, 1)
            await streams[1].reset()
            await own.reset()
            await streams[2].close()
            other.say(WINDOW_UPDATE, FIN, 5)
            await settled()
            assert (node.streams, use.streams, use.windows) == (3, 3, 0)
            assert (node.unread, use.unread) == (4400, 4400)  # of the first and third, what came before can be read
            streams[3].widen()
            other.say(GO_AWAY)
            await settled()
            assert (node.streams, use.streams, use.windows, node.unread, use.unread) == (0, 0, 0, 0, 0)
            assert use.connections == []
            await streams[2].read()  # counts no more
            assert (node.unread, use.unread) == (0, 0)

    run(main)


def test_one_peer_may_send_so_much_beyond_the_usual_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "MAX_WINDOWS_OF_PEER", 2 * (WINDOW - INITIAL_WINDOW))

    async def main() -> None:
        async with muxer(initiator=True) as (ours, other):
            streams = [await ours.open_stream() for _ in range(3)]
            await streams[0].write(b"x")
            assert [frame[3] for frame in other.frames() if frame[1] & SYN] == [WINDOW - INITIAL_WINDOW] * 2 + [0]
            streams[2].widen()
            assert other.frames() == []
            await streams[0].reset()
            assert other.frames() == [(WINDOW_UPDATE, RST, 1, 0, b"")]
            streams[2].widen()
            streams[2].widen()
            assert other.frames() == [(WINDOW_UPDATE, 0, 5, WINDOW - INITIAL_WINDOW, b"")]
            other.send(5, bytes(WINDOW))
            await settled()
            assert ours.lost is None

    run(main)


def test_streams_that_ended_before_they_were_accepted_take_no_more_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "MAX_STREAMS_OF_CONNECTION", 4)

    async def main() -> None:
        node = NodeLimits()
        async with muxer(limits=node) as (ours, other):
            for number in range(5):
                other.open(2 * number + 1)
                other.say(WINDOW_UPDATE, RST, 2 * number + 1)
            await settled()
            assert ours.open_streams == 0 and node.streams == 0 and ours.lost is None
            assert [frame[:3] for frame in other.frames() if frame[1] & RST] == [(WINDOW_UPDATE, RST, 9)]

    run(main)


def test_frames_that_wait_for_others_are_few() -> None:
    """A peer opens streams and never has an answer on them."""

    async def main() -> None:
        async with muxer() as (_, other):
            for number in range(85):
                other.open(2 * number + 1)
            await settled()
            assert other.frames() == []
            for number in range(85, 87):
                other.open(2 * number + 1)
            await settled()
            assert len(other.frames()) == 87

    run(main)


def test_the_fullest_stream_is_dropped_and_its_reader_told_why() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            ours.drop_fullest()  # nothing is unread
            for number, size in ((1, 10), (3, 30), (5, 20)):
                other.send(number, bytes(size), SYN)
            streams = [await ours.accept_stream() for _ in range(3)]
            other.open(7)
            ours.drop_fullest()
            assert [stream.lost is None for stream in streams] == [True, False, True]
            with pytest.raises(MuxedStreamReset, match="too much came"):
                await streams[1].read()
            assert ours.buffered == 30 and (WINDOW_UPDATE, RST, 3, 0, b"") in other.frames()

    run(main)


def test_who_breaks_the_protocol_is_told_so_and_who_leaves_is_not() -> None:
    async def main() -> None:
        for frame, told in (
            (HEADER.pack(1, DATA, 0, 0, 0), [(GO_AWAY, 0, 0, 1, b"")]),
            (HEADER.pack(0, GO_AWAY, 0, 0, 0), []),
        ):
            async with muxer() as (ours, other):
                other.say_bytes(frame)
                await settled()
                assert ours.lost is not None and other.frames() == told

    run(main)


def test_our_own_failure_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            (await ours.accept_stream()).divert(lambda data: bool(1 // 0))
            other.send(1, b"x")
            await settled()
            assert ours.lost == "internal error"

    run(main)
    assert "ZeroDivisionError" in caplog.text


def test_an_end_that_is_known_gets_no_window() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.send(1, bytes(INITIAL_WINDOW), SYN | FIN)
            other.send(3, bytes(INITIAL_WINDOW), SYN)
            closed, reset = await ours.accept_stream(), await ours.accept_stream()
            other.say(WINDOW_UPDATE, RST, 3)
            await settled()
            for stream in (closed, reset):
                await read(stream, INITIAL_WINDOW)
                stream.widen()
            assert [frame for frame in other.frames() if not frame[1]] == []

    run(main)


def test_small_pieces_are_kept_together() -> None:
    """Each alone would take 20 times what is counted."""

    async def main() -> None:
        async with muxer() as (ours, other):
            other.send(1, b"first", SYN)
            for _ in range(20):
                other.send(1, bytes(4095))
            other.send(1, bytes(4096))
            other.send(1, b"last")
            stream = await ours.accept_stream()
            await settled()
            sizes = []
            while stream.unread:
                sizes.append(len(await stream.read()))
            assert sum(sizes) == 5 + 20 * 4095 + 4096 + 4
            assert sizes == [5 + 17 * 4095, 3 * 4095, 4100]

    run(main)


# --- Noise


def test_messages_may_be_cut_anywhere() -> None:
    async def main() -> None:
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

    run(main)


def test_what_libp2p_negotiates_before_leaves_the_rest_to_the_muxer() -> None:
    async def main() -> None:
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

    run(main)


def test_frames_that_came_with_the_negotiation_are_handled() -> None:
    async def main() -> None:
        session, other = noise_session(MemoryRaw())
        other.say_bytes(b"agreed" + HEADER.pack(0, DATA, SYN, 1, 5) + b"early")
        assert await session.read(6) == b"agreed"
        ours = Muxer(session, session.remote_peer, lambda lost: None, NodeLimits())
        assert not ours.is_established
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.start)
            assert await (await ours.accept_stream()).read() == b"early"
            assert ours.is_established
            nursery.cancel_scope.cancel()

    run(main)


def test_a_changed_bit_ends_the_connection() -> None:
    async def main() -> None:
        async with muxer() as (ours, other):
            other.open(1)
            await ours.accept_stream()
            other.raw.say.send_nowait((20).to_bytes(2, "big") + bytes(20))
            await settled()
            assert "authentication" in (ours.lost or "")

    run(main)


def test_what_the_socket_does_not_take_goes_later_and_in_order() -> None:
    async def main() -> None:
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

    run(main)


def test_what_the_other_end_never_reads_is_bounded() -> None:
    """Answers to pings and the like do not wait for room."""

    async def main() -> None:
        session, _ = noise_session(MemoryRaw(room=0))
        for _ in range(noise.OUT_HARD_LIMIT // MIB):
            session.put(bytes(MIB))
        with pytest.raises(ConnectionAbortedError):
            session.put(b"x")

    run(main)


def test_a_socket_that_takes_nothing_ends_the_connection() -> None:
    async def main() -> None:
        raw = MemoryRaw(room=0)
        session, _ = noise_session(raw)
        session.put(b"x")
        begun = trio.current_time()
        with pytest.raises(ConnectionAbortedError):
            await session.pump()
        assert trio.current_time() - begun == pytest.approx(noise.STALL_LIMIT)
        await session.close()
        with pytest.raises(ConnectionResetError):
            session.put(b"x")
        assert raw.closed

    run(main)
