"""How often servers tell and ask, by how many there are, and what a large swarm does otherwise than a small one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import Identity
from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.server_selection import ServerSelection
from petalnode.node.errors import SwarmError
from petalnode.node.placement.observed import OBSERVED, PlacedServer, pinged_at_once, sampling_noise
from petalnode.node.server.lifecycle.other_servers import ROUND_TRIPS, keep_rtts, to_measure
from petalnode.node.swarm.directory import Directory
from petalnode.node.swarm.sample import PACE, refresh_rate
from petalnode.node.swarm.view import SwarmView
from petalnode.protocols.announcement import ANNOUNCEMENT, Announcement, ServerState, SignedAnnouncement
from petalnode.protocols.ids import Boundaries, Span
from tests.announcements import MODEL, held, identity_of, plain, signed
from tests.directories import a_directory, announcer_of, answered_by, nothing

pytestmark = pytest.mark.virtual_time

BLOCKS, TTL = 10, 45.0


@given(st.integers(0, PACE.quick))
def test_a_small_swarm_is_as_quick_as_ever(known: int) -> None:
    pace = refresh_rate(known, TTL)
    assert (pace.lifetime, pace.renewal, pace.round, pace.asked, pace.max_bytes) == (TTL, TTL / 3, TTL / 3, 5, 0)
    assert pace.quick


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.sampled_from([3.0, TTL, 300.0]))
def test_a_larger_one_is_never_quicker(one: int, other: int, ttl: float) -> None:
    small, large = refresh_rate(min(one, other), ttl), refresh_rate(max(one, other), ttl)
    assert small.lifetime <= large.lifetime <= ANNOUNCEMENT.max_lifetime
    assert small.round <= large.round and small.asked >= large.asked >= 1
    assert large.lifetime >= 3 * min(large.round, large.renewal)


@given(st.integers(500, 1_000_000))
def test_many_servers_answers_stay_within_a_kilobyte(known: int) -> None:
    pace = refresh_rate(known, TTL)
    assert pace.asked * pace.max_bytes / pace.round < 1000


def test_it_has_no_jump_where_swarms_grow() -> None:
    assert refresh_rate(PACE.quick + 1, TTL).lifetime < 1.1 * TTL
    assert refresh_rate(PACE.quick + 1, TTL).asked == 5


# --- announcing in a large swarm


ADDRESS = ("/ip4/192.0.2.1/tcp/1",)


def announcement_of(identity: Identity) -> Announcement:
    return plain(identity.peer_id, Span(0, 2), cache_tokens=100, cache_tokens_free=100, addrs=ADDRESS)


def swarm_of(count: int, first: int = 1000) -> list[SignedAnnouncement]:
    return [held(first + number, addrs=ADDRESS) for number in range(count)]


async def told(
    directory: Directory, changes: Sequence[Callable[[Announcement], Announcement]]
) -> tuple[list[list[str]], SignedAnnouncement]:
    """To whom a server sends its announcement at first and after each change; and the last that it has signed."""
    rounds: list[list[str]] = []
    identity = identity_of(1)
    announcer = announcer_of(directory, identity)

    async def push(peer_id: str, record: SignedAnnouncement) -> None:
        rounds[-1].append(peer_id)

    directory.push = push  # type: ignore[method-assign]
    own = announcement_of(identity)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(announcer._publish_forever)
        for change in (lambda one: one, *changes):
            rounds.append([])
            own = change(own)
            announcer.announce(own)
            await trio.sleep(2.0)
        nursery.cancel_scope.cancel()
    assert directory.own is not None
    return rounds, directory.own


def busier(own: Announcement) -> Announcement:
    return replace(own, cache_tokens_free=own.cache_tokens_free - 1, queue_depth=own.queue_depth + 1)


def moving(own: Announcement) -> Announcement:
    return replace(own, next_span=Span(4, 6))


def draining(own: Announcement) -> Announcement:
    return replace(own, state=ServerState.DRAINING)


@pytest.mark.parametrize(("others", "of_load"), [(20, 20), (1000, 0)])
async def test_load_spreads_in_small_swarms_moves_in_all(others: int, of_load: int) -> None:
    directory = a_directory(identity_of(1), nothing)
    directory.merge(swarm_of(others))
    rounds, record = await told(directory, [busier, moving, draining])
    at_once = min(others, 32)
    assert [len(peers) for peers in rounds] == [at_once, of_load, at_once, at_once]
    # Who asks this server itself has what it says of its load, too.
    assert record.content.queue_depth == 1
    lifetime = record.content.expires - record.content.sequence / 1e9
    assert lifetime == pytest.approx(directory.refresh_rate().lifetime, abs=0.01)
    assert (lifetime > 600) == (others == 1000)


async def test_kademlia_holds_changes_soon_and_others_long() -> None:
    directory, put = a_directory(identity_of(1), nothing), []
    directory.merge(swarm_of(1000))

    async def put_announcement(record: SignedAnnouncement, **_: Any) -> None:
        put.append(record.content.next_span)

    dht: Any = SimpleNamespace(put_announcement=put_announcement, put_models=nothing)
    announcer = announcer_of(directory, identity_of(1), dht)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(announcer._put_forever)
        own = announcement_of(identity_of(1))
        for change in (lambda one: one, busier, busier, moving):
            own = change(own)
            announcer.announce(own)
            await trio.sleep(TTL)
        assert put == [None, Span(4, 6)]
        await trio.sleep(directory.refresh_rate().lifetime)
        assert put[1:] in ([Span(4, 6)] * 3, [Span(4, 6)] * 4)
        nursery.cancel_scope.cancel()


# --- asking


async def test_who_measures_the_way_learns_the_announcement() -> None:
    """Its announcement was made ten minutes ago, as in a large swarm."""
    here, server = identity_of(1), identity_of(2)
    async with trio.open_nursery() as nursery:
        there = a_directory(server, nothing)
        there.merge([signed(server, Span(5, 9), queue_depth=7, lifetime=ANNOUNCEMENT.max_lifetime)])
        asking = a_directory(here, answered_by(there.serve, nursery, here.peer_id))
        asking.merge([signed(server, now=time.time() - 600, lifetime=ANNOUNCEMENT.max_lifetime)])
        assert await asking.measure_rtt(server.peer_id, timeout=60) < 60
        known = asking.view.get(server.peer_id, time.time())
        assert known is not None and (known.span, known.queue_depth) == (Span(5, 9), 7)
        nursery.cancel_scope.cancel()


async def test_large_swarms_sample_includes_the_others_word() -> None:
    here, server = identity_of(1), identity_of(2)
    async with trio.open_nursery() as nursery:
        there = a_directory(server, nothing)
        there.own = signed(server, state=ServerState.JOINING, addrs=ADDRESS)
        others = map(identity_of, range(100, 100 + PACE.whole + 20))
        made = [signed(one, lifetime=ANNOUNCEMENT.max_lifetime, addrs=ADDRESS) for one in others]
        there.merge([*made, there.own])
        asking = a_directory(here, answered_by(there.serve, nursery, here.peer_id), listens=True)
        await asking.pull(server.peer_id, model_version=MODEL, timeout=60)
        assert len(asking.view.records) == PACE.whole and server.peer_id in asking.view.records
        await asking.pull(server.peer_id, model_version=MODEL, timeout=60)  # it knows now that the swarm is large
        assert asking.refresh_rate().max_bytes == PACE.answer_bytes
        await asking.pull(server.peer_id, model_version=MODEL, everything=True, timeout=60)
        assert len(asking.view.records) == PACE.whole + 21
        nursery.cancel_scope.cancel()


def test_who_asks_for_a_model_asks_its_servers() -> None:
    """Of a hundred models, others know a hundredth of it."""
    directory = a_directory(identity_of(1), nothing, listens=True)
    own = [held(number, addrs=ADDRESS) for number in range(10)]
    others = [held(1000 + number, addrs=ADDRESS, model_version=b"o" * 32) for number in range(500)]
    directory.merge([*own, *others])
    directory.own = own[0]
    assert [directory._asked_for(turn) for turn in range(4)] == [b"", MODEL, MODEL, MODEL]
    peers = {record.content.peer_id for record in own}
    for _ in range(20):
        assert directory._asked_now(1, MODEL)[0] in peers


def test_known_share_is_seen_from_others_words() -> None:
    directory = a_directory(identity_of(1), nothing)
    directory.own = held(1, addrs=ADDRESS)
    records = swarm_of(400)
    directory.merge([directory.own, *records[:200]])
    assert directory.view.share == 1.0
    for seed in range(9):
        directory._estimate(random.Random(seed).sample(records, 100))
    assert 0.4 < directory.view.share < 0.6
    directory.merge(records)
    for seed in range(9):
        directory._estimate(random.Random(seed).sample(records, 100))
    assert directory.view.share == 1.0


def test_a_share_seen_by_chance_moves_nobody() -> None:
    servers = [PlacedServer(f"peer {number}", Span(number % 8, number % 8 + 2), 1.0) for number in range(160)]
    assert sampling_noise(servers, 9, 1.0) == 0.0
    assert sampling_noise(servers, 9, 0.5) == pytest.approx(2 * (0.5 / 20) ** 0.5)
    assert sampling_noise([], 9, 0.5) == 0.0


def test_in_a_large_swarm_few_strangers_are_pinged() -> None:
    assert pinged_at_once(0) == pinged_at_once(PACE.quick) == OBSERVED.at_once
    assert pinged_at_once(2 * PACE.quick) == OBSERVED.at_once / 2 and pinged_at_once(10_000) < 1


def test_nearest_followers_and_some_others_are_measured() -> None:
    rtts = {f"peer {number}": number / 1000 for number in range(ROUND_TRIPS.most)}
    few = list(rtts)[:5]
    assert sorted(to_measure(few, dict(rtts))) == sorted(few)
    many = [f"peer {number}" for number in range(300)]
    chosen = to_measure(many, rtts)
    assert len(chosen) == len(set(chosen)) == ROUND_TRIPS.most
    assert list(rtts) == many[: ROUND_TRIPS.most - ROUND_TRIPS.new_ones] and set(rtts) < set(chosen)


# --- a client of a large swarm


class Pinged:
    """A swarm in which those that are `there` answer at once, and the others never."""

    def __init__(self, records: Sequence[SignedAnnouncement], there: set[str]) -> None:
        self._there = there
        self.view = SwarmView().merge(records, time.time())
        self.trust: Any = SimpleNamespace(is_banned=lambda _: False, penalty_seconds=lambda _: 0.0)

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        if peer_id in self._there:
            await trio.sleep(0.05)
            return 0.05
        await trio.sleep(timeout)
        raise SwarmError("silent")


@pytest.mark.parametrize(("age", "waits"), [(600.0, False), (0.0, True)])
async def test_long_gone_servers_cost_a_moment(age: float, waits: bool) -> None:
    records = [held(number, Span(0, BLOCKS), now=time.time() - age, addrs=ADDRESS) for number in range(20)]
    there = {record.content.peer_id for record in records[::2]}
    async with trio.open_nursery() as nursery:
        folder = SimpleNamespace(boundaries=Boundaries(64, BLOCKS))
        model: Any = SimpleNamespace(version=MODEL, num_blocks=BLOCKS, folder=folder)
        swarm: Any = Pinged(records, there)
        selection = ServerSelection(swarm, model, nursery)
        begun = trio.current_time()
        found = await selection.candidates()
        assert {candidate.peer_id for candidate in found} == there
        seconds = trio.current_time() - begun
        assert seconds == pytest.approx(DEADLINES.rtt, abs=0.01) if waits else seconds < DEADLINES.rtt / 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("comes_at", "known_at"), [(0.0, 0.0), (5.0, 20.0), (300.0, 380.0)])
async def test_server_that_follows_is_measured_soon_after_start(comes_at: float, known_at: float) -> None:
    own: Any = SimpleNamespace(model_version=b"v" * 32, span=Span(0, 3))
    other = SimpleNamespace(peer_id="other", span=Span(3, 6))
    rtts: dict[str, float] = {}
    announced: list[float] = []

    def servers(version: bytes, now: float) -> list[Any]:
        return [own, other] if trio.current_time() >= begun + comes_at else [own]

    async def measure_rtt(peer_id: str, timeout: float) -> float:
        return 0.05

    own.peer_id = "own"
    swarm: Any = SimpleNamespace(peer_id="own", view=SimpleNamespace(servers=servers), measure_rtt=measure_rtt)
    changed: Any = SimpleNamespace(set=lambda: announced.append(trio.current_time() - begun))
    begun = 0.0
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_rtts, swarm, own, rtts, changed)
        await trio.sleep(known_at + 1)
        nursery.cancel_scope.cancel()
    assert rtts == {"other": 0.05} and len(announced) <= 2
    assert announced[0] >= comes_at  # there was nothing to announce before
