"""Announcements and questions that cost a node far more than they cost who makes them."""

from __future__ import annotations

import itertools
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.network.stream.net_stream import NetStream

from petalnode.crypto.identity import Identity
from petalnode.node.network.transport.limits import NodeLimits, metered
from petalnode.node.network.transport.muxed_stream import DATA
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.node.network.transport.yamux import Muxer
from petalnode.node.swarm.directory import Directory
from petalnode.node.swarm.sample import SAMPLING, sampled
from petalnode.node.swarm.streams import MessageStreams
from petalnode.node.swarm.versions import VERSIONS, manifests_to_ask
from petalnode.node.swarm.view import SwarmView
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.framing import varint
from petalnode.protocols.ids import Span
from tests.announcements import MODEL, held, plain, signed
from tests.attacks.forger import ATTACKER, HONEST
from tests.directories import Stream, a_directory
from tests.lines_run import LinesRun
from tests.memory_muxer import MemoryRaw, OtherEnd, muxer

KEYS, STEP = 20, 0.0005


def streams() -> tuple[Stream, Stream]:
    return message_streams(DIRECTORY, HONEST.peer_id, ATTACKER.peer_id)


def frame_bytes(frame: wire.DirectoryFrame) -> bytes:
    data = frame.SerializeToString()
    return varint(len(data)) + data


def directory(stream: Stream | None = None) -> Directory:
    async def open_stream(_peer: str, _timeout: float) -> Stream:
        await trio.lowlevel.checkpoint()
        assert stream is not None
        return stream

    return a_directory(HONEST, open_stream)


def announcement(version: bytes) -> Announcement:
    return plain(Identity.generate().peer_id, model_version=version)


async def test_page_of_forged_announcements_holds_up_nobody_else() -> None:
    """Checking a signature takes 0.1 ms, and a page has room for thousands of them."""
    record = signed(HONEST)
    forged = wire.SignedAnnouncement(announcement=record.announcement, signature=bytes(64))
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    ours, theirs = streams()

    async def answer() -> None:
        await theirs.receive(timeout=60)
        page = wire.DirectoryRecords(records=[forged] * 1000)
        await theirs.send(wire.DirectoryFrame(records=page), timeout=60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        nursery.start_soon(work)
        await directory(ours).pull(ATTACKER.peer_id, timeout=600)
        nursery.cancel_scope.cancel()
    assert turns >= 1000 // 32


@pytest.mark.virtual_time
async def test_questions_of_many_keys_have_one_addresss_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page costs far more to make than to ask for. Each step of a task takes 0.5 ms here."""
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * STEP)
    pages = frame_bytes(wire.DirectoryFrame(query=wire.DirectoryQuery())) * 25
    handlers: dict[str, Any] = {}
    host: Any = SimpleNamespace(set_stream_handler=handlers.__setitem__, origin_of=str)
    streams = MessageStreams(host)

    quiet = hostile = 0

    async def serve(ours: Muxer) -> None:
        async def handle(raw: NetStream) -> None:
            await handlers[DIRECTORY.id](StreamBytes(raw), str(ours.peer_id))

        async with trio.open_nursery() as nursery:
            while True:
                stream = StreamBytes(NetStream(await ours.accept_stream(), None, None))
                nursery.start_soon(stream.metered, handle)

    def answers(other: OtherEnd) -> int:
        return sum(kind == DATA and length > 0 for kind, _, _, length, _ in other.frames())

    asked, limits = directory(), NodeLimits()
    asked.own = signed(HONEST)
    streams.set_handler(DIRECTORY, asked.serve)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        others = []
        for number, origin in enumerate([*["203.0.113.7"] * KEYS, "198.51.100.1"]):
            pair = muxer(MemoryRaw(origin=origin), limits=limits, key=10 + number)
            ours, other = await stack.enter_async_context(pair)
            nursery.start_soon(serve, ours)
            others.append(other)
        for other in others[:-1]:
            for stream in range(1, 21, 2):
                other.open(stream)
                other.send(stream, pages)
        await trio.sleep(0.5)
        others[-1].open(1)
        others[-1].send(1, frame_bytes(wire.DirectoryFrame(ping=wire.Ping(payload=b"x"))))
        await trio.sleep(0.1)
        quiet = answers(others[-1])
        await trio.sleep(2.4)
        # Opening streams takes a part of it; each page one step or more.
        hostile = sum(map(answers, others[:-1]))
        nursery.cancel_scope.cancel()
    assert quiet == 1, "who is quiet goes first"
    assert 100 < hostile <= 3.5 * 0.25 / STEP


def test_made_up_servers_delay_a_manifest_little() -> None:
    """The version of most servers first, and of each version few servers: they all have the same manifest."""
    real = [announcement(b"r" * 32) for _ in range(10)]
    false = [announcement(number.to_bytes(32, "big")) for number in range(1000)]
    asked = manifests_to_ask([*false, *real], connected=set())
    assert asked[0] == real[:3]
    assert len(asked) <= VERSIONS.asked


def test_servers_that_are_connected_are_asked_first() -> None:
    """However many others somebody announces."""
    false = [announcement(b"f" * 32) for _ in range(9)]
    here, elsewhere = announcement(b"r" * 32), announcement(b"r" * 32)
    assert manifests_to_ask([*false, elsewhere, here], connected={here.peer_id})[0] == [here, elsewhere]


@pytest.mark.parametrize("limit", [SAMPLING.servers, 1000])
@pytest.mark.parametrize("own_model", [False, True])
def test_sample_of_huge_announcements_is_no_work(own_model: bool, limit: int) -> None:
    """Each block was counted for each announcement and each place of the sample: 19 s for one question."""
    view = SwarmView()
    for number in range(1200):
        version = number.to_bytes(32, "big") if own_model else MODEL
        record = held(number, Span(0, 4096), lifetime=60, size=300, model_version=version, num_blocks=4096)
        view = view.merge([record], time.time(), source=f"source {number % 16}", met=True)
    with LinesRun(1200 * 4096 // 4):  # to count the blocks of each takes one for each of them
        assert len(sampled(view.page(b"", b""), view.origins, limit, time.time())) == limit


@pytest.mark.virtual_time
async def test_announcements_of_others_make_no_seldom_asker_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,500 false announcements one question takes 15 ms; sessions of its address then waited for seconds."""
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.015)
    use = NodeLimits().of_address("192.0.2.1")

    async def ask() -> None:
        pass  # one step

    for _ in range(10):
        await metered(ask(), NodeLimits(), use)
        assert use.is_quiet
        await trio.sleep(5)
    for _ in range(6):
        await metered(ask(), NodeLimits(), use)
    assert not use.is_quiet
