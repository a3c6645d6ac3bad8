"""A stream of Yamux whose other end keeps to nothing: what is granted, given back, and told to who reads or writes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from petalnode.node.network.transport import limits
from petalnode.node.network.transport.bandwidth import Throttle
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.memory import budgets_of
from petalnode.node.network.transport.muxed_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    INITIAL_WINDOW,
    PING,
    RST,
    SYN,
    WINDOW,
    WINDOW_UPDATE,
)
from petalnode.node.network.transport.stream_bytes import Connection, StreamBytes
from petalnode.node.network.transport.yamux import Muxer
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.framing import MessageStream, StreamClosed
from petalnode.protocols.wire_pb2 import DirectoryFrame, Ping
from tests.memory_muxer import MemoryRaw, accepted, muxer, read, settled

pytestmark = pytest.mark.virtual_time

MIB = 1 << 20


@pytest.fixture
def little_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB may be unread on a connection, so that tests need not send what is usual."""
    monkeypatch.setattr(limits, "own_budgets", lambda: replace(budgets_of(0), unread_of_peer=8 * MIB))


@pytest.mark.usefixtures("little_unread")
async def test_read_bytes_are_granted_again() -> None:
    """More passes through than may be unread at once."""
    async with accepted() as (ours, other, stream):
        stream.grant()
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


class TakesAll:
    def take(self, data: bytes) -> bool:
        return True


@pytest.mark.usefixtures("little_unread")
@pytest.mark.parametrize("how", ["reset by us", "closed by us and reset", "nobody reads any more", "diverted"])
async def test_what_nobody_reads_is_given_back(how: str) -> None:
    async with muxer() as (ours, other):
        for number in range(80):  # 20 MiB
            other.open(2 * number + 1)
            stream = await ours.accept_stream()
            if how == "diverted":
                stream.divert(TakesAll())
            elif how == "nobody reads any more":
                stream.discard()
            other.send(stream.stream_id, bytes(INITIAL_WINDOW))
            await trio.sleep(1.0)  # so much at once waits for its turn
            assert stream.has_unread == (how not in ("diverted", "nobody reads any more"))
            await stream.close() if how == "closed by us and reset" else None
            await stream.reset()
            other.send(stream.stream_id, bytes(10))  # was on its way
            await settled()
            assert ours.lost is None, number
        assert ours.open_streams == 0


@pytest.mark.usefixtures("little_unread")
async def test_what_nobody_reads_is_bounded() -> None:
    """The stream with the most unread bytes is reset then."""
    async with muxer() as (ours, other):
        for number in range(33):
            other.open(2 * number + 1)
            other.send(2 * number + 1, bytes(INITIAL_WINDOW))
            await trio.sleep(1.0)
            resets = [frame for frame in other.frames() if frame[1] & RST]
            assert len(resets) == (number == 32) and ours.lost is None


@pytest.mark.parametrize("beyond", [0, 1])
async def test_who_sends_beyond_the_grant_is_cut_off(beyond: int) -> None:
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


async def test_stream_is_closed_on_each_side_alone() -> None:
    async with accepted() as (ours, other, stream):
        await stream.write(b"last")
        await stream.close()
        await stream.close()
        with pytest.raises(MuxedStreamClosed):
            await stream.write(b"too late")
        with pytest.raises(MuxedStreamClosed):
            stream.write_nowait(b"too late")
        answer, data, end = other.frames()
        assert answer[:3] == (WINDOW_UPDATE, ACK, 1) and data[4] == b"last" and end[:3] == (WINDOW_UPDATE, FIN, 1)
        assert ours.open_streams == 1
        other.send(1, b"answer", FIN)
        assert await stream.read() == b"answer"
        with pytest.raises(MuxedStreamEOF):
            await stream.read()
        stream.grant()
        assert stream.has_unread and ours.open_streams == 0 and ours.lost is None and other.frames() == []


async def test_who_waits_for_bytes_learns_the_end() -> None:
    async with accepted() as (ours, other, stream):

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


async def test_reset_ends_both_directions_and_tells_other_end() -> None:
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


async def test_writing_keeps_to_the_other_end_s_window() -> None:
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


@pytest.mark.parametrize("end", ["reset", "closed", "connection"])
async def test_who_waits_for_window_is_told_of_end(end: str) -> None:
    async with accepted() as (_, other, stream):

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


async def test_stream_that_other_end_never_closes_is_reset() -> None:
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


async def test_writing_waits_for_socket_and_upload_limit() -> None:
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


async def test_node_s_share_of_stream_ends_with_stream() -> None:
    """Whoever ends it, and also with the connection."""
    node = NodeLimits()
    async with muxer(limits=node) as (ours, other):
        use = node.of(str(ours.peer_id))
        for number in range(6):
            other.send(2 * number + 1, bytes(1000), SYN)
        streams = [await ours.accept_stream() for _ in range(6)]
        own = await ours.open_stream()
        await settled()
        assert (node.streams, use.streams, node.unread, use.unread, ours.held()) == (6, 6, 6000, 6000, 6000)
        assert use.windows == WINDOW - INITIAL_WINDOW and use.connections == [ours]
        streams[1].grant()
        assert use.windows == 2 * (WINDOW - INITIAL_WINDOW)
        await streams[0].read(600)
        assert (node.unread, use.unread, ours.held()) == (5400, 5400, 5400)
        other.say(WINDOW_UPDATE, RST, 1)
        await streams[1].reset()
        await own.reset()
        await streams[2].close()
        other.say(WINDOW_UPDATE, FIN, 5)
        await settled()
        assert (node.streams, use.streams, use.windows) == (3, 3, 0)
        assert (node.unread, use.unread) == (4400, 4400)  # of the first and third, what came before can be read
        streams[3].grant()
        other.say(GO_AWAY)
        await settled()
        assert (node.streams, use.streams, use.windows, node.unread, use.unread) == (0, 0, 0, 0, 0)
        assert use.connections == []
        await streams[2].read()  # counts no more
        assert (node.unread, use.unread) == (0, 0)


async def test_fullest_stream_is_dropped_with_a_reason() -> None:
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
        assert ours.held() == 30 and (WINDOW_UPDATE, RST, 3, 0, b"") in other.frames()


async def test_an_end_that_is_known_gets_no_window() -> None:
    async with muxer() as (ours, other):
        other.send(1, bytes(INITIAL_WINDOW), SYN | FIN)
        other.send(3, bytes(INITIAL_WINDOW), SYN)
        closed, reset = await ours.accept_stream(), await ours.accept_stream()
        other.say(WINDOW_UPDATE, RST, 3)
        await settled()
        for stream in (closed, reset):
            await read(stream, INITIAL_WINDOW)
            stream.grant()
        assert [frame for frame in other.frames() if not frame[1]] == []


@pytest.mark.parametrize(("ours_ended", "theirs_ended"), [(True, True), (True, False), (False, True), (False, False)])
async def test_stream_not_closed_in_order_is_reset(ours_ended: bool, theirs_ended: bool) -> None:
    async with accepted() as (ours, other, muxed):
        stream: Any = SimpleNamespace(muxed_stream=muxed, close=muxed.close, reset=muxed.reset)
        held = StreamBytes(stream)
        if ours_ended:
            await held.close_write()
        if theirs_ended:
            other.say(WINDOW_UPDATE, FIN, 1)
        await settled()
        await held.end()
        assert held.is_lost == (not (ours_ended and theirs_ended)) and ours.open_streams == 0
        with pytest.raises(ConnectionResetError):
            await held.write(b"late")


async def test_suspected_peer_must_show_life_in_seconds() -> None:
    async with muxer() as (ours, _):
        conn: Any = SimpleNamespace(muxed_conn=ours)
        connection = Connection(conn)
        assert connection == Connection(conn) and connection != conn
        await trio.sleep(5)
        assert not connection.is_lost
        connection.suspect()
        await trio.sleep(5)
        assert connection.is_lost


async def test_bytes_before_a_peers_reset_are_held() -> None:
    async with muxer() as (ours, other):
        other.send(1, bytes(1000), SYN)
        stream = await ours.accept_stream()
        other.say(WINDOW_UPDATE, RST, 1)
        await settled()
        assert stream.lost is not None and stream.unread == ours.held() == 1000
        await stream.reset()
        assert stream.unread == ours.held() == 0


async def test_small_pieces_are_kept_together() -> None:
    """Each alone would take 20 times what is counted."""
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


def swarm_conn(ours: Muxer) -> SwarmConn:
    """libp2p's connection above ours, with nobody who is told of streams."""

    async def notify(_: object) -> None:
        pass

    swarm: Any = SimpleNamespace(notify_opened_stream=notify, notify_closed_stream=notify)
    return SwarmConn(ours, swarm)


async def test_cancelled_opening_leaves_no_stream() -> None:
    async with muxer(MemoryRaw(room=0), initiator=True) as (ours, _):
        conn = swarm_conn(ours)
        held = await Connection(conn).open_stream("/held")
        while ours.has_room:  # for the socket takes nothing
            ours.put(PING, SYN, 0, 0)
        with trio.move_on_after(1) as scope:
            await Connection(conn).open_stream("/given up")
        assert scope.cancelled_caught
        assert ours.open_streams == 1 and conn.get_streams() == (held._stream,)


async def test_closing_lost_stream_leaves_nothing_of_it() -> None:
    async with muxer(initiator=True) as (ours, other):
        conn = swarm_conn(ours)
        stream = MessageStream(await Connection(conn).open_stream(DIRECTORY.id), DIRECTORY, "peer")
        other.send(1, bytes(1000))
        other.say(WINDOW_UPDATE, RST, 1)
        await settled()
        with pytest.raises(StreamClosed):
            await stream.send(DirectoryFrame(ping=Ping(payload=b"1")), timeout=1)
        assert ours.held() == 1000
        await stream.close()
        assert ours.held() == 0 and not conn.get_streams()


async def test_reader_whose_wait_is_too_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others have unread bytes at this moment: none of them waits for its peer."""
    monkeypatch.setattr(limits, "LIMITS", replace(limits.LIMITS, negotiating=2))
    async with muxer(MemoryRaw(origin="203.0.113.7")) as (ours, other):
        streams = []
        for number in (1, 3, 5):
            other.open(number)
            streams.append(await ours.accept_stream())
        for stream in streams[:2]:
            with trio.move_on_after(1):
                await stream.read()
        for number in (1, 3):
            other.send(number, b"x")
        await settled()
        with pytest.raises(MuxedStreamReset, match="protocol to be named"):
            await streams[2].read()
