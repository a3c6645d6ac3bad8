"""Yamux over Noise against another end that keeps to nothing: what is granted, given back, refused and noticed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset

from petalnode.node.network.transport import limits, yamux
from petalnode.node.network.transport.limits import NodeLimits
from petalnode.node.network.transport.muxed_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW,
    LARGE_DATA,
    MAX_DATA,
    PING,
    RST,
    SYN,
    WINDOW,
    WINDOW_UPDATE,
)
from petalnode.node.network.transport.raw_connection import Path
from petalnode.node.network.transport.tcp_window import seconds_kept
from petalnode.node.network.transport.yamux import Muxer
from tests.memory_muxer import MemoryRaw, Owner, accepted, muxer, noise_session, read, settled

pytestmark = pytest.mark.virtual_time


async def test_frames_may_be_cut_anywhere() -> None:
    async with muxer() as (ours, other):
        frames = HEADER.pack(0, WINDOW_UPDATE, SYN, 1, 0) + HEADER.pack(0, DATA, FIN, 1, 5) + b"hello"
        for byte in frames:
            other.say_bytes(bytes([byte]))
        stream = await ours.accept_stream()
        assert await read(stream, 5) == b"hello"
        with pytest.raises(MuxedStreamEOF):
            await stream.read()
        assert ours.lost is None


async def test_several_frames_at_once_go_to_their_streams() -> None:
    async with muxer() as (ours, other):
        opening = b"".join(HEADER.pack(0, DATA, SYN, stream, 3) + b"%03d" % stream for stream in (1, 3, 5))
        other.say_bytes(opening + HEADER.pack(0, DATA, 0, 3, 0) + HEADER.pack(0, DATA, 0, 3, 4) + b"more")
        streams = [await ours.accept_stream() for _ in range(3)]
        await settled()
        assert [stream.stream_id for stream in streams] == [1, 3, 5]
        assert await streams[0].read() == b"001" and await streams[2].read() == b"005"
        assert await read(streams[1], 3) == b"003" and await streams[1].read(2) == b"mo"
        assert streams[1].has_unread and not streams[0].has_unread


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
async def test_who_breaks_the_protocol_is_cut_off(frame: bytes, why: str) -> None:
    async with accepted() as (ours, other, stream):
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


async def test_late_frames_of_a_gone_stream_pass() -> None:
    async with muxer() as (ours, other):
        other.send(9, b"for nobody")
        other.say(WINDOW_UPDATE, 0, 9, 5)
        other.say(WINDOW_UPDATE, RST, 9)
        other.send(1, b"here", SYN)
        assert await (await ours.accept_stream()).read() == b"here"


async def test_ping_is_answered_and_answer_is_not() -> None:
    async with muxer() as (_, other):
        other.say(PING, SYN, 0, 12345)
        other.say(PING, ACK, 0, 12345)
        await settled()
        assert other.frames() == [(PING, ACK, 0, 12345, b"")]


async def test_circuits_frames_are_sealed_twice_and_fit() -> None:
    relayed = Path(direct=False, relay="relay", remote_addr=None, inbound=True)
    raws = MemoryRaw(is_socket=True), MemoryRaw(), MemoryRaw(path=relayed)
    for raw, largest in zip(raws, (LARGE_DATA, MAX_DATA, MAX_DATA - HEADER.size - 18), strict=True):
        async with accepted(raw) as (_, other, stream):
            other.say(WINDOW_UPDATE, 0, 1, WINDOW)
            await settled()
            await stream.write(bytes(2 * LARGE_DATA))
            assert max(frame[3] for frame in other.frames()) == largest
            assert not stream.write_nowait(bytes(largest + 1)) and stream.write_nowait(bytes(largest))


async def test_too_many_streams_are_refused_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "LIMITS", replace(yamux.LIMITS, streams_of_connection=64))
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


async def test_a_silent_peer_is_asked_and_then_dropped() -> None:
    async with accepted() as (ours, other, stream):
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


async def test_peer_is_not_dropped_because_we_stood_still() -> None:
    async with accepted() as (ours, other, _):
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


async def test_second_of_silence_is_enough_to_be_asked() -> None:
    async with muxer() as (_, other):
        other.open(1)
        await trio.sleep(0.9)
        other.send(1, b"x")
        await trio.sleep(0.95)
        assert [frame for frame in other.frames() if frame[0] == PING] == []
        await trio.sleep(0.1)
        assert [frame[:2] for frame in other.frames() if frame[0] == PING] == [(PING, SYN)]


async def test_without_streams_a_peer_is_asked_seldom() -> None:
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


async def test_tcp_keeps_its_window_after_large_messages() -> None:
    async with muxer(MemoryRaw(is_socket=True)) as (ours, other):

        async def pings() -> int:
            await trio.sleep(0.9)
            said = sum(frame[:2] == (PING, SYN) for frame in other.frames())
            other.say(PING, ACK)
            await settled()
            return said

        other.open(1)
        stream = await ours.accept_stream()
        stream.grant()
        await stream.write(bytes(12 * 1024))
        assert await pings() == 0
        await stream.write(bytes(12 * 1024 + 1))
        assert await pings() >= 5
        for _ in range(18):  # who says something needs no pings
            await trio.sleep(0.05)
            await stream.write(b"x")
        assert sum(frame[:2] == (PING, SYN) for frame in other.frames()) <= 1  # is the peer alive?
        for _ in range(5):
            await pings()
        assert await pings() <= 1
        # Messages at intervals, as those of a fine-tuning: from the second pause on, whose length is known.
        for _ in range(60):
            await pings()
        for kept in (False, True, True):
            await stream.write(bytes(12 * 1024 + 1))
            heard = [await pings() for _ in range(14)]
            assert min(heard) >= 5 if kept else max(heard[6:]) <= 1, heard
        # And no longer than twice that pause.
        for _ in range(14):
            await pings()
        assert await pings() <= 1


@pytest.mark.parametrize("after", [0.01, 0.07, 0.14])
async def test_small_message_anywhere_leaves_pings_in_time(after: float) -> None:
    async with accepted(MemoryRaw(is_socket=True)) as (_, other, stream):
        stream.grant()
        await stream.write(bytes(12 * 1024 + 1))
        await trio.sleep(after)
        await stream.write(b"x")
        other.frames()
        await trio.sleep(0.19)  # TCP forgets after 0.2
        assert [frame[:2] for frame in other.frames()] == [(PING, SYN)]


@pytest.mark.parametrize(
    ("pause", "longest", "kept"),
    [(float("inf"), 60, 5), (0.001, 60, 5), (3, 60, 6), (29, 60, 58), (31, 60, 5), (13, 20, 5), (13, 1, 5)],
)
def test_window_is_kept_for_short_pauses(pause: float, longest: float, kept: float) -> None:
    assert seconds_kept(pause, longest) == kept


async def test_with_many_connections_windows_are_kept_for_shorter() -> None:
    many = NodeLimits()
    assert many.window_kept == 60
    many.connections = 160
    assert many.window_kept == 6


async def test_circuits_bytes_are_handled_where_they_come() -> None:
    async with muxer(MemoryRaw(diverting=True)) as (ours, other):
        await settled()
        other.open(1)
        other.send(1, b"at once")
        assert ours.open_streams == 1
        assert await (await ours.accept_stream()).read() == b"at once"
        other.say(GO_AWAY)
        assert ours.lost is not None


async def test_closing_connection_says_so_and_sends_on() -> None:
    async with accepted(MemoryRaw(room=0)) as (ours, other, stream):
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


@pytest.mark.parametrize(("said", "agreed"), [(b"\x07/yamux\n", True), (b"\x03na\n", False)])
async def test_what_does_not_speak_yamux_is_cut_off(said: bytes, agreed: bool) -> None:
    async with muxer(initiator=True, answer=b"\x07/yamux\n") as (ours, other):
        for byte in said:
            other.say_bytes(bytes([byte]))
        other.say(PING, SYN, 0, 1)
        await settled()
        assert (ours.lost is None) == agreed
        assert (other.frames() == [(PING, ACK, 0, 1, b"")]) == agreed


async def test_one_peer_may_exceed_the_usual_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "LIMITS", replace(yamux.LIMITS, windows_of_peer=2 * (WINDOW - INITIAL_WINDOW)))
    async with muxer(initiator=True) as (ours, other):
        streams = [await ours.open_stream() for _ in range(3)]
        await streams[0].write(b"x")
        assert [frame[3] for frame in other.frames() if frame[1] & SYN] == [WINDOW - INITIAL_WINDOW] * 2 + [0]
        streams[2].grant()
        assert other.frames() == []
        await streams[0].reset()
        assert other.frames() == [(WINDOW_UPDATE, RST, 1, 0, b"")]
        streams[2].grant()
        streams[2].grant()
        assert other.frames() == [(WINDOW_UPDATE, 0, 5, WINDOW - INITIAL_WINDOW, b"")]
        other.send(5, bytes(WINDOW))
        await settled()
        assert ours.lost is None


async def test_ended_unaccepted_streams_take_no_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yamux, "LIMITS", replace(yamux.LIMITS, streams_of_connection=4))
    node = NodeLimits()
    async with muxer(limits=node) as (ours, other):
        for number in range(5):
            other.open(2 * number + 1)
            other.say(WINDOW_UPDATE, RST, 2 * number + 1)
        await settled()
        assert ours.open_streams == 0 and node.streams == 0 and ours.lost is None
        assert [frame[:3] for frame in other.frames() if frame[1] & RST] == [(WINDOW_UPDATE, RST, 9)]


async def test_frames_that_wait_for_others_are_few() -> None:
    """A peer opens streams and never has an answer on them."""
    async with muxer() as (_, other):
        for number in range(85):
            other.open(2 * number + 1)
        await settled()
        assert other.frames() == []
        for number in range(85, 87):
            other.open(2 * number + 1)
        await settled()
        assert len(other.frames()) == 87


async def test_small_frames_and_new_streams_are_counted_apart() -> None:
    async with accepted() as (ours, other, stream):
        for _ in range(2 * limits.LIMITS.opened_at_once):
            other.send(1, b"x")
            await stream.read()
            other.say(PING, SYN)
        assert ours.lost is None
        for number in range(1, 2 * limits.LIMITS.opened_at_once):
            other.open(2 * number + 1)
            other.say(WINDOW_UPDATE, RST, 2 * number + 1)
        with suppress(MuxedConnUnavailable):
            while True:
                await ours.accept_stream()
        assert ours.lost is not None and "more streams than any session needs" in ours.lost


async def test_who_breaks_the_protocol_is_told_so() -> None:
    for frame, told in (
        (HEADER.pack(1, DATA, 0, 0, 0), [(GO_AWAY, 0, 0, 1, b"")]),
        (HEADER.pack(0, GO_AWAY, 0, 0, 0), []),
    ):
        async with muxer() as (ours, other):
            other.say_bytes(frame)
            await settled()
            assert ours.lost is not None and other.frames() == told


class Failing:
    def take(self, data: bytes) -> bool:
        raise ZeroDivisionError


async def test_our_own_failure_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with accepted() as (ours, other, stream):
        stream.divert(Failing())
        other.send(1, b"x")
        await settled()
        assert ours.lost == "internal error"
    assert "ZeroDivisionError" in caplog.text


async def test_connection_closed_before_it_runs_is_not_counted() -> None:
    session, other = noise_session(MemoryRaw())
    owner = Owner()
    ours = Muxer(session, session.remote_peer, owner)
    await ours.close()
    await ours.start()
    assert owner.limits.connections == ours.address.users == 0 and other.raw.closed


@pytest.mark.parametrize("diverting", [False, True], ids=["of a socket", "of a circuit"])
async def test_messages_without_frames_are_work(diverting: bool) -> None:
    """Each takes as long as a small frame; a peer could hold the loop with nothing else."""
    async with muxer(MemoryRaw(diverting=diverting)) as (ours, other):
        await settled()
        before = ours.address.recent.amount()
        sealed = [other._cipher.encrypt(b"") for _ in range(1000)]
        said = b"".join(len(message).to_bytes(2, "big") + message for message in sealed)
        if diverting:
            assert other.raw.sink is not None and other.raw.sink.take(said)
        else:
            other.raw.say.send_nowait(said)
        await settled()
        assert ours.address.recent.amount() - before > 500 and ours.lost is None
