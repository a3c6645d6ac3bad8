"""Announcements and questions that cost a node far more than they cost who makes them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.directory import Directory
from petalnode.node.swarm.versions import VERSIONS_ASKED, manifests_to_ask
from petalnode.node.testing import message_streams, run_autojumping
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, ServerState, freshened, sign_announcement
from petalnode.protocols.directory import MAX_HEADER
from petalnode.protocols.framing import MessageStream, PeerError
from petalnode.protocols.ids import Span
from tests.attacks.forger import ATTACKER, HONEST

Stream = MessageStream[wire.DirectoryFrame]


def streams() -> tuple[Stream, Stream]:
    return message_streams(wire.DirectoryFrame, HONEST.peer_id, ATTACKER.peer_id, max_header=MAX_HEADER)


def directory(stream: Stream | None = None) -> Directory:
    async def nothing(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    async def open_stream(_peer: str, _timeout: float) -> Stream:
        await trio.lowlevel.checkpoint()
        assert stream is not None
        return stream

    host: Any = SimpleNamespace(remember=lambda *_: None)
    dht: Any = SimpleNamespace(add_peer=nothing)
    return Directory(identity=HONEST, ttl=45.0, host=host, dht=dht, open_stream=open_stream, bootstrap=())


def announcement(version: bytes, identity: Identity | None = None) -> Announcement:
    peer_id = (identity or Identity.generate()).peer_id
    return Announcement(peer_id, version, "model", 10, Span(0, 1), ServerState.ONLINE)


def test_a_page_of_forged_announcements_holds_up_nobody_else() -> None:
    """Checking a signature takes 0.1 ms, and a page has room for thousands of them."""
    record = sign_announcement(HONEST, freshened(announcement(b"v" * 32, HONEST), now=time.time(), lifetime=60))
    forged = wire.SignedAnnouncement(announcement=record.announcement, signature=bytes(64))
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async def main() -> None:
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

    trio.run(main)
    assert turns >= 1000 // 32


def test_questions_are_counted_by_peer_on_however_many_streams() -> None:
    """A page costs far more to make than to ask for."""
    answered: list[str | None] = []

    async def main() -> None:
        asked = directory()
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                ours, theirs = streams()
                # The directory's end is that of a stream which the attacker opened.
                nursery.start_soon(serve, asked, ours)
                for _ in range(5):
                    try:
                        await theirs.send(wire.DirectoryFrame(query=wire.DirectoryQuery()), timeout=60)
                        answered.append((await theirs.receive(timeout=60))[0].WhichOneof("body"))
                    except PeerError:
                        break
            nursery.cancel_scope.cancel()

    async def serve(asked: Directory, stream: Stream) -> None:
        try:
            await asked.serve(stream)
        except PeerError:
            pass
        await stream.close()

    run_autojumping(main)
    assert answered[:120] == ["records"] * 120
    assert set(answered[120:]) == {"error"}


def test_servers_that_do_not_exist_delay_the_search_for_a_manifest_so_long_only() -> None:
    """The version of most servers first, and of each version few servers: they all have the same manifest."""
    real = [announcement(b"r" * 32) for _ in range(10)]
    false = [announcement(number.to_bytes(32, "big")) for number in range(1000)]
    asked = manifests_to_ask([*false, *real], connected=set())
    assert asked[0] == real[:3]
    assert len(asked) <= VERSIONS_ASKED


def test_servers_that_are_connected_are_asked_first() -> None:
    """However many others somebody announces."""
    false = [announcement(b"f" * 32) for _ in range(9)]
    here, elsewhere = announcement(b"r" * 32), announcement(b"r" * 32)
    assert manifests_to_ask([*false, elsewhere, here], connected={here.peer_id})[0] == [here, elsewhere]
