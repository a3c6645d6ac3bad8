"""In a large swarm announcements hold for an hour: an attacker makes it look large, or says of others
what is not so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.sample import PACE, SAMPLING, Contacts, refresh_rate, sampled
from petalnode.node.swarm.view import SwarmView
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import (
    ANNOUNCEMENT,
    BadAnnouncement,
    ServerState,
    SignedAnnouncement,
    open_signed,
)
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.framing import PeerError, StreamClosed
from petalnode.protocols.ids import Span
from tests import announcements
from tests.announcements import MODEL, identity_of, plain
from tests.attacks.forger import ATTACKER, HONEST
from tests.directories import Stream, a_directory, announcer_of, answered_by, from_many, nothing

pytestmark = pytest.mark.virtual_time

TTL = 45.0
held = partial(announcements.held, size=600, addrs=("/ip4/192.0.2.1/tcp/1",))
signed = partial(announcements.signed, lifetime=ANNOUNCEMENT.max_lifetime)


# --- a flood makes a small swarm look like a large one


async def test_server_among_many_keys_says_it_leaves() -> None:
    """The refresh rate is that of a large swarm; the drain and the retraction are told all the same."""
    told: list[ServerState] = []
    enough = trio.Event()
    directory = a_directory(HONEST, nothing)
    directory.merge([held(number) for number in range(1500)], source="attacker")
    assert directory.refresh_rate().lifetime > 1000

    async def push(_peer_id: str, record: SignedAnnouncement) -> None:
        nonlocal enough
        told.append(record.content.state)
        if told.count(record.content.state) == 32:
            enough.set()
            enough = trio.Event()

    directory.push = push  # type: ignore[method-assign]
    announcer = announcer_of(directory, HONEST)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(announcer._publish_forever)
        for state in (ServerState.ONLINE, ServerState.DRAINING):
            announcer.announce(plain(HONEST.peer_id, state=state))
            before = trio.current_time()
            await enough.wait()
            assert told.count(state) == 32
            assert trio.current_time() - before < TTL / 3
        nursery.cancel_scope.cancel()


async def test_words_in_a_flood_do_not_come_back() -> None:
    """Its retraction, made when the swarm is small again, lasts as long as the announcement of before."""
    directory = a_directory(HONEST, nothing)
    directory.merge([held(number) for number in range(1500)], source="attacker")
    dht: Any = SimpleNamespace(add_peer=nothing, put_announcement=nothing)
    announcer = announcer_of(directory, HONEST, dht)
    announcer.announce(plain(HONEST.peer_id))
    assert directory.own is not None
    before = directory.own
    assert before.content.expires > time.time() + 1000
    directory.view = SwarmView()
    assert directory.refresh_rate().lifetime == TTL
    await announcer.retract()
    gone = directory.view.records[HONEST.peer_id]
    assert gone.content.state is ServerState.OFFLINE
    assert gone.content.expires >= before.content.expires - 0.001
    view = SwarmView().merge([gone], time.time()).merge([before], before.content.expires - 1)
    assert view.get(HONEST.peer_id, before.content.expires - 1) is None


def test_no_number_of_keys_makes_nodes_tell_more() -> None:
    costs = []
    for known in (1000, 10_000, 10**9):
        pace = refresh_rate(known, TTL)
        assert pace.lifetime <= ANNOUNCEMENT.max_lifetime
        costs.append(pace.asked * pace.max_bytes / pace.round)
    assert max(costs) <= costs[0] < 1000


@pytest.mark.parametrize("answer", [40_000, 150_000, 500_000])
async def test_long_answers_cost_time_not_traffic(answer: int) -> None:
    """Of peers that fill their answers with what does not count, as far as the asking node takes it."""
    page = wire.DirectoryFrame(
        records=wire.DirectoryRecords(records=[wire.SignedAnnouncement(announcement=bytes(answer))])
    )
    async with trio.open_nursery() as nursery:

        async def serve(stream: Stream) -> None:
            frame, _ = await stream.receive(timeout=None)
            while not frame.HasField("query"):
                frame, _ = await stream.receive(timeout=None)
            await stream.send(page, timeout=5)
            await stream.receive(timeout=None)

        asking = a_directory(HONEST, answered_by(serve, nursery), listens=True)
        asking.merge([held(number) for number in range(1500)], source="attacker")
        taken = 0
        merged = asking._merge_page

        async def merge_page(told: wire.DirectoryRecords, peer_id: str) -> list[SignedAnnouncement]:
            nonlocal taken
            taken += told.ByteSize()
            return await merged(told, peer_id)

        asking._merge_page = merge_page  # type: ignore[method-assign]
        nursery.start_soon(asking._pull_forever)
        await trio.sleep(600)  # the first questions come quickly
        before = taken
        await trio.sleep(1800)
        assert taken - before < 1.3 * PACE.answer_bytes / 60 * 1800 + answer  # the last one is paid for afterwards
        assert (taken > 0) == (answer < PACE.answer_bytes + PACE.whole * 1024)
        nursery.cancel_scope.cancel()


# --- clocks


@pytest.mark.parametrize(("behind", "counts"), [(-3000.0, False), (1000.0, True), (2500.0, True), (4000.0, False)])
def test_clock_that_is_wrong_harms_its_owner_only(behind: float, counts: bool) -> None:
    """A server whose clock is `behind` by some seconds in a large swarm."""
    now = time.time()
    record = signed(HONEST, now=now - behind)
    if not counts:
        with pytest.raises(BadAnnouncement):
            open_signed(record.to_wire(), now=now)
        return
    view = from_many(100).merge([open_signed(record.to_wire(), now=now)], now, source="HONEST", met=True)
    assert view.get(HONEST.peer_id, now) is not None
    found = {one.content.peer_id for one in sampled(view.page(MODEL, b""), view.origins, SAMPLING.servers, now)}
    assert HONEST.peer_id not in found or behind < ANNOUNCEMENT.max_lifetime / 2


# --- saying of others that they are gone


def test_unreachability_is_own_experience_while_others_answer() -> None:
    contacts = Contacts()
    contacts.failed("server", 100.0)
    assert not contacts.is_unreached("server", 50.0)  # this node may have no network
    contacts.answered("another", 120.0)
    contacts.failed("server", 150.0)
    assert contacts.is_unreached("server", 140.0)
    assert not contacts.is_unreached("server", 160.0)  # it has announced itself since
    contacts.failed("third", 120.0 + 500)
    assert not contacts.is_unreached("third", 0.0)
    contacts.answered("server", 700.0)
    assert not contacts.is_unreached("server", 0.0)
    for number in range(3000):
        contacts.failed(f"peer {number}", 701.0)
    assert sum(contacts.is_unreached(f"peer {number}", 0.0) for number in range(3000)) == 1000


async def test_directorys_marks_take_nobody_out_of_a_view() -> None:
    """It leaves who it could not reach out of its answers while there are others; who asks it keeps what it had."""

    async def open_stream(peer_id: str, _timeout: float) -> Stream:
        if peer_id == HONEST.peer_id:
            raise StreamClosed("no way there", peer_id)
        return message_streams(DIRECTORY, "us", peer_id)[0]

    there = a_directory(ATTACKER, open_stream)
    record = signed(HONEST, now=time.time() - 100)
    there.merge([record, *(held(number) for number in range(300))])
    there._contacts.answered(identity_of(0).peer_id, time.time())
    with pytest.raises(PeerError):
        await there.pull(HONEST.peer_id, timeout=5)
    assert there.is_unreached(HONEST.peer_id)
    assert HONEST.peer_id in there.view.records
    answer = there._answers._page(wire.DirectoryQuery(limit=SAMPLING.servers, sample=True))
    here = SwarmView().merge([record], time.time())
    told = [open_told(message) for message in answer.records.records]
    assert HONEST.peer_id not in told and len(told) == SAMPLING.servers
    assert HONEST.peer_id in here.records
    everything = there._answers._page(wire.DirectoryQuery())
    assert HONEST.peer_id in map(open_told, everything.records.records)


def open_told(message: wire.SignedAnnouncement) -> str:
    """Whose announcement it is; those that were not signed count for nobody."""
    try:
        return open_signed(message, now=time.time()).content.peer_id
    except BadAnnouncement:
        return ""


# --- answering for another server, and making servers up


@pytest.mark.parametrize("answer", ["of another", "older", "forged"])
async def test_server_asked_for_its_announcement_speaks_for_itself(answer: str) -> None:
    now = time.time()
    held_of, honest = signed(ATTACKER, now=now - 600), signed(HONEST, now=now)
    older = signed(ATTACKER, Span(1, 2), now=now - 900)
    forged = replace(honest, signature=bytes(64))
    said = {"of another": honest, "older": older, "forged": forged}[answer]
    async with trio.open_nursery() as nursery:

        async def serve(stream: Stream) -> None:
            while True:
                frame, _ = await stream.receive(timeout=None)
                page = wire.DirectoryRecords(records=[said.to_wire()])
                await stream.send(frame if frame.HasField("ping") else wire.DirectoryFrame(records=page), timeout=5)

        asking = a_directory(Identity.generate(), answered_by(serve, nursery))
        asking.merge([held_of])
        before = asking.view
        await asking.measure_rtt(ATTACKER.peer_id, timeout=60)
        assert asking.view.records == before.records
        assert asking.view.origins[ATTACKER.peer_id].met in (None, ATTACKER.peer_id)
        nursery.cancel_scope.cancel()


def test_made_up_servers_do_not_decide_known_shares() -> None:
    directory = a_directory(HONEST, nothing)
    directory.own = announcements.signed(HONEST)
    known = [held(number) for number in range(200)]
    directory.merge(known)
    made_up: Callable[[int], Sequence[SignedAnnouncement]] = lambda turn: [  # noqa: E731
        held(1000 + turn * 100 + number) for number in range(100)
    ]
    for turn in range(9):
        directory._estimate(known[:100] if turn % 3 else made_up(turn))
    assert directory.view.share == 1.0


async def test_announced_while_dialed_in_vain_is_reached() -> None:
    async def open_stream(peer_id: str, _timeout: float) -> Stream:
        there.merge([signed(HONEST)])  # it has started again, at another address
        raise StreamClosed("no way there", peer_id)

    there = a_directory(ATTACKER, open_stream)
    there._contacts.answered(identity_of(0).peer_id, time.time())
    with pytest.raises(PeerError):
        await there.pull(HONEST.peer_id, timeout=5)
    assert not there.is_unreached(HONEST.peer_id)
