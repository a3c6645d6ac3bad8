"""Who opens streams and resets them under many keys of one address takes its share of a node, and no more."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.lowlevel

from petalnode.crypto.identity import Identity
from petalnode.node.network.transport.limits import WORK, NodeLimits, metered
from petalnode.node.network.transport.muxed_stream import ACK, DATA, HEADER, PING, RST, SYN, WINDOW_UPDATE
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.node.network.transport.yamux import Muxer
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from tests.attacks.hosts import LOOPBACK, host, knowing
from tests.attacks.muxed_connections import ATTACKER, HONEST, connections
from tests.memory_muxer import MemoryRaw, OtherEnd, accepted, muxer, settled
from tests.node_inspection import frames_taken, limits_of
from tests.patience import eventually

KEYS = 57
PAIRS = 800
OPENED_AND_RESET = b"".join(
    HEADER.pack(0, WINDOW_UPDATE, flags, stream_id, 0)
    for stream_id in range(1, 1 + 2 * PAIRS, 2)
    for flags in (SYN, RST)
)
PINGS = HEADER.pack(0, PING, SYN, 0, 0) * 2 * PAIRS


class ProcessorClock:
    """By which only that takes time which says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(time, "thread_time", lambda: self.seconds)


class FramesPerPass(trio.abc.Instrument):
    """Counts the frames that are handled in one pass of the loop, in which nobody else has a turn."""

    def __init__(self) -> None:
        self.most = self.now = self.total = 0

    def note(self) -> None:
        self.now += 1
        self.total += 1

    def before_io_wait(self, timeout: float) -> None:
        self.most, self.now = max(self.most, self.now), 0


async def _accept(ours: Muxer) -> None:
    while True:
        await ours.accept_stream()


def _answered(other: OtherEnd) -> bool:
    return (PING, ACK, 0, 7, b"") in other.frames()


@asynccontextmanager
async def flooded(
    data: bytes, limits: NodeLimits, counted: FramesPerPass, *more: OtherEnd
) -> AsyncIterator[tuple[int, Muxer]]:
    """The attacker's keys say `data`, and all the same an honest peer is answered at once: the frames that were counted
    before that, and its connection. It and `more` ask."""
    async with (
        connections(KEYS, ATTACKER, limits) as hostile,
        muxer(MemoryRaw(origin=HONEST), limits=limits, key=3) as (ours, honest),
        trio.open_nursery() as nursery,
    ):
        for end, other in hostile:
            nursery.start_soon(_accept, end)
            other.say_bytes(data)
        await settled()
        first = counted.total
        for asking in (honest, *more):
            asking.say(PING, SYN, 0, 7)
        await trio.sleep(0.1)
        assert _answered(honest)
        yield first, ours
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_many_keys_of_address_have_turns_of_one() -> None:
    counted = FramesPerPass()
    with frames_taken(counted.note):
        trio.lowlevel.add_instrument(counted)
        limits = NodeLimits()
        async with (
            connections(1, ATTACKER, limits) as [(neighbour, behind_it)],
            flooded(OPENED_AND_RESET, limits, counted, behind_it) as (first, ours),
        ):
            assert ours.lost is None
            await trio.sleep(4.9)
            assert _answered(behind_it), "a peer behind the same address waits, and is served"
            assert neighbour.lost is None
            # A pair of frames is the opening of a stream, whatever the number of keys.
            pairs = (counted.total - first) / 2
            assert pairs <= 5.5 * WORK.per_second / (WORK.stream + 2)
    assert counted.most <= 2 * KEYS * (WORK.at_once // WORK.stream + 1)


@pytest.mark.virtual_time
async def test_pings_of_many_keys_have_one_addresss_turns() -> None:
    counted = FramesPerPass()
    with frames_taken(counted.note):
        trio.lowlevel.add_instrument(counted)
        async with flooded(PINGS, NodeLimits(), counted) as (first, _):
            await trio.sleep(0.9)
            assert counted.total - first <= 1.5 * WORK.per_second
    assert counted.most <= KEYS * WORK.at_once + 1


@pytest.mark.virtual_time
async def test_who_waits_for_its_turn_is_not_dead() -> None:
    limits = NodeLimits()
    async with connections(2, ATTACKER, limits) as [(first, other), (second, quiet)]:
        quiet.open(1)
        await settled()
        limits.worked(limits.of_address(ATTACKER), 60 * WORK.per_second)
        quiet.say(PING, SYN, 0, 7)
        other.say(PING, SYN, 0, 7)
        await trio.sleep(50)
        assert not _answered(quiet)
        await trio.sleep(11)
        assert _answered(quiet) and second.lost is None and first.lost is None


@pytest.mark.virtual_time
async def test_streams_reset_at_once_start_no_task() -> None:
    async with muxer() as (ours, other):
        other.say_bytes(OPENED_AND_RESET)
        other.open(2 * PAIRS + 1)
        assert (await ours.accept_stream()).stream_id == 2 * PAIRS + 1


@pytest.mark.virtual_time
async def test_pings_of_who_does_not_read_go_unanswered() -> None:
    raw = MemoryRaw(room=0)
    async with muxer(raw) as (ours, other):
        for _ in range(8):
            other.say_bytes(HEADER.pack(0, PING, SYN, 0, 0) * 5000)
            await trio.sleep(0.6)
        raw.make_room()
        await settled()
        assert ours.lost is None
        assert len(raw.sent) < 1.1 * (1 << 20)
        other.plaintext()
        other.say(PING, SYN, 0, 7)
        await settled()
        assert _answered(other)


@pytest.mark.virtual_time
async def test_strangers_take_less_while_others_use_grants() -> None:
    """Also between two steps, which may be seconds apart."""

    async def pings_taken(since_step: float | None) -> int:
        counted = FramesPerPass()
        limits = NodeLimits()
        async with (
            connections(KEYS, ATTACKER, limits) as hostile,
            muxer(MemoryRaw(origin=HONEST), limits=limits, key=3) as (ours, honest),
        ):
            honest.open(1)
            (await ours.accept_stream()).grant()
            if since_step is not None:
                honest.send(1, b"step")
                await trio.sleep(since_step)
            for _, other in hostile:
                other.say_bytes(PINGS)
            await trio.sleep(1.0)
            with frames_taken(counted.note):
                for _ in range(20):
                    if since_step == 0.0:
                        honest.send(1, b"step")
                    await trio.sleep(0.05)
            return counted.total

    assert await pings_taken(None) > 0.9 * WORK.per_second
    assert await pings_taken(WORK.serving) > 0.9 * WORK.per_second
    for since_step in (0.0, 6.0):
        assert 0.5 * WORK.while_serving < await pings_taken(since_step) < 1.3 * WORK.while_serving, since_step


@pytest.mark.virtual_time
@pytest.mark.parametrize(("frames", "quiet"), [(5000, True), (20_000, False)])
async def test_sessions_steps_are_quiet_and_floods_are_not(frames: int, quiet: bool) -> None:
    async with accepted(MemoryRaw(origin=HONEST)) as (ours, honest, stream):
        stream.grant()
        for _ in range(200):
            honest.say_bytes((HEADER.pack(0, DATA, 0, 1, 4) + b"step") * (frames // 200))
            await trio.sleep(0.005)
        assert ours.address.is_quiet == quiet


async def test_streams_count_for_their_address_until_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """By processor time, whatever the handler does; then little of it. Who opens sessions again and again, for 5 ms
    each, would wait behind the loudest otherwise."""
    spent, clock = [], ProcessorClock(monkeypatch)
    async with host(LOOPBACK) as victim, knowing(victim) as attacker:
        use = limits_of(victim).of_address("127.0.0.1")
        use.long_steps.take_ahead(1e6)  # those that hardly count

        async def serve(raw: StreamBytes, _: str) -> None:
            for grants in (False, True):
                if grants:
                    raw.grant()
                clock.seconds += 1.0
                await trio.lowlevel.checkpoint()
                spent.append(use.recent.amount())

        victim.set_stream_handler("/busy/1", serve)
        await attacker.open_stream(victim.peer_id, "/busy/1")
        await eventually(lambda: len(spent) == 2, "the stream is served")
    assert spent[0] > 1000 and 0 < spent[1] < spent[0] / 4  # What its connection cost stays, however long it took.


@pytest.mark.virtual_time
@pytest.mark.parametrize(("sessions", "quiet"), [(4, True), (40, False)])
async def test_opening_sessions_is_quiet_and_flooding_is_not(
    sessions: int, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are granted, after 5 ms of work each."""
    limits, clock = NodeLimits(), ProcessorClock(monkeypatch)
    address = limits.of_address(ATTACKER)

    async def open_one(stream: SimpleNamespace) -> None:
        clock.seconds += 0.005
        await trio.lowlevel.checkpoint()
        stream.granted = True

    for _ in range(sessions):
        stream: Any = SimpleNamespace(waits_turn=False, granted=False)
        await metered(open_one(stream), limits, address, stream)
    assert address.is_quiet == quiet


async def test_handshakes_are_work_of_their_address() -> None:
    with trio.fail_after(600):
        async with open_swarm(SwarmConfig(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))) as node:
            port = int(node.addrs[0].split("/")[4])
            uses = [limits_of(node.host).of_address(f"127.0.0.{number}") for number in (2, 3)]
            socks = []
            for use in (uses[0], uses[0], uses[1]):
                before = use.users
                socks.append(sock := trio.socket.socket())
                await sock.bind((use.origin, 0))
                await sock.connect(("127.0.0.1", port))
                await eventually(lambda use=use, before=before: use.users > before, "the connection is accepted")
            two, one = (use.recent.amount() for use in uses)
            assert WORK.handshake * 0.9 < one < 2 * WORK.handshake
            assert two > 0
            for sock in socks:
                sock.close()
            await eventually(lambda: not any(use.users for use in uses), "the connections are closed")
