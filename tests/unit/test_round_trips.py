"""Which round trips a client measures, and how long a route waits for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from petalnode.node.client.deadlines import DEADLINES, rtt_patience
from petalnode.node.client.round_trips import MEASURES, NEW, RoundTrips, measure_rtts
from petalnode.node.client.server_selection import BANDWIDTH_BYTES, ServerSelection
from petalnode.node.client.session.stream import HopTiming
from petalnode.node.swarm.config import DEFAULT_TTL
from petalnode.node.swarm.sample import SAMPLING
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.swarm.view import SwarmView
from petalnode.node.testing.memory_network import MemoryNetwork, MemoryNode, open_network
from petalnode.protocols.announcement import Announcement
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import ALIKE, Span
from tests.announcements import MODEL, plain

BLOCKS = 4
ALL = Span(0, BLOCKS)
pytestmark = pytest.mark.virtual_time


class Asker(MemoryNode):
    """A node that notes whom it asks, and to which an answer takes as long as the way."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: Counter[str] = Counter()

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        self.asked[peer_id] += 1
        link = self.network.link(self.peer_id, peer_id)
        await trio.sleep(timeout if link.frozen else 2 * link.delay)
        return await super().measure_rtt(peer_id, timeout=timeout)


class World:
    """An asker, and servers that it knows of."""

    def __init__(self, nursery: trio.Nursery, trusted: frozenset[str] = frozenset()) -> None:
        self.network = MemoryNetwork(nursery, kind=Asker)
        self.asker = self.network.node()
        self.asked = cast(Asker, self.asker).asked
        self.trips = RoundTrips(cast(Swarm, self.asker), BLOCKS, nursery, trusted)

    def server(self, seconds: float | None = 0.1, span: Span = ALL, age: float = 0.0) -> Announcement:
        """One that is `seconds` away (None: silent), and that announced itself `age` seconds ago."""
        node = self.network.node()
        link = self.network.link(self.asker.peer_id, node.peer_id)
        link.delay = (seconds or 0.0) / 2
        if seconds is None:
            link.freeze(1e6)
        sequence = int((time.time() - age) * 1e9)
        return plain(node.peer_id, span, num_blocks=BLOCKS, sequence=sequence, expires=time.time() + 3600)

    async def measure(self, *servers: Announcement, patient: bool = False, choosy: bool = False) -> float:
        """Seconds for which it was waited."""
        begun = trio.current_time()
        await self.trips.measure(servers, patient=patient, choosy=choosy)
        return trio.current_time() - begun


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(nursery, **options)
        nursery.cancel_scope.cancel()


async def test_round_trip_is_measured_once_a_minute() -> None:
    async with world() as here:
        server = here.server(0.2)
        assert here.trips.of(server.peer_id) is None
        assert await here.measure(server) == pytest.approx(0.2)
        assert here.trips.of(server.peer_id) == pytest.approx(0.2)
        await trio.sleep(DEADLINES.rtt_lifetime - 1)
        assert await here.measure(server) == 0.0 and here.asked[server.peer_id] == 1
        await trio.sleep(2)
        assert await here.measure(server) == 0.0 and here.trips.is_under_way(server.peer_id)
        await trio.sleep(1)
        assert here.asked[server.peer_id] == 2 and not here.trips.is_under_way(server.peer_id)


async def test_silent_peer_has_no_round_trip() -> None:
    async with world() as here:
        server = here.server()
        await here.measure(server)
        here.network.link(here.asker.peer_id, server.peer_id).freeze(1e6)
        await trio.sleep(DEADLINES.rtt_lifetime + 1)
        await here.measure(server)
        await trio.sleep(DEADLINES.measure + 1)
        assert here.trips.of(server.peer_id) is None


async def test_route_waits_little_for_spare_servers() -> None:
    async with world() as here:
        near, far, silent = here.server(0.05), here.server(0.3), here.server(None)
        await here.measure(near, far)
        assert await here.measure(near, far, silent) == pytest.approx(rtt_patience(0.3))
        assert await here.measure(near, far, silent) == 0.0  # not twice so soon
        others = [here.server(None) for _ in range(5)]
        assert await here.measure(near, far, *others) == 0.0
        await trio.sleep(DEADLINES.rtt_retry + DEADLINES.measure + 1)
        assert 0.0 < await here.measure(near, far, silent) <= rtt_patience(0.3)


async def test_uncovered_blocks_wait_longer_and_ask_again() -> None:
    async with world() as here:
        half, silent = here.server(0.1, Span(0, 2)), here.server(None, Span(2, 4))
        await here.measure(half)
        waited = await here.measure(half, silent, patient=True)
        assert waited == pytest.approx(DEADLINES.rtt)
        await trio.sleep(DEADLINES.measure)
        asked = here.asked[silent.peer_id]
        assert await here.measure(half, silent, patient=True) == pytest.approx(DEADLINES.rtt)
        assert here.asked[silent.peer_id] == asked + 1
        # A step that waits does not wait for it once more.
        assert await here.measure(half, silent) == 0.0


async def test_wait_that_others_began_is_not_begun_anew() -> None:
    async with world() as here:
        near, silent = here.server(0.05, Span(0, 2)), here.server(None, Span(2, 4))
        await here.measure(near)
        patience = rtt_patience(0.05)
        assert await here.measure(near, silent) == pytest.approx(patience)
        assert await here.measure(near, silent) == 0.0


async def test_with_a_choice_measured_servers_never_suffice() -> None:
    async with world() as here:
        near, other, third = here.server(0.05), here.server(0.4), here.server(0.4)
        await here.measure(near)
        assert await here.measure(near, other, patient=True, choosy=True) == pytest.approx(0.4)
        assert await here.measure(near, third, patient=True, choosy=True) == pytest.approx(0.4)


async def test_perhaps_gone_servers_are_awaited_until_others_suffice() -> None:
    async with world() as here:
        old = DEFAULT_TTL + 60
        gone = [here.server(None, age=old) for _ in range(3)]
        near = [here.server(0.1 * (number + 1), age=old) for number in range(SAMPLING.several)]
        waited = await here.measure(*gone, *near, patient=True)
        longest = 0.1 * SAMPLING.several
        assert waited == pytest.approx(longest + rtt_patience(longest))
    async with world() as here:
        half = [here.server(0.1, Span(0, 2), age=old) for _ in range(SAMPLING.several)]
        assert await here.measure(here.server(None, age=old), *half, patient=True) == pytest.approx(DEADLINES.rtt)


async def test_trusted_servers_are_always_measured() -> None:
    async with trio.open_nursery() as nursery:
        first = World(nursery)
        trusted = first.server(0.2, age=DEFAULT_TTL + 60)
        first.trips = RoundTrips(cast(Swarm, first.asker), BLOCKS, nursery, {trusted.peer_id})
        near = first.server(0.05)
        await first.measure(near)
        many = [first.server(None) for _ in range(NEW[1])]
        await first.measure(near, *many)
        await first.measure(near, trusted, patient=True)
        await trio.sleep(1)
        assert first.asked[trusted.peer_id] == 1
        nursery.cancel_scope.cancel()


async def test_few_possibly_made_up_servers_are_dialed() -> None:
    async with world() as here:
        many = [here.server(None) for _ in range(3 * MEASURES)]
        with trio.move_on_after(0.5):
            await here.measure(*many, patient=True)
        assert here.asked.total() == MEASURES
        near = here.server(0.05)
    async with world() as here:
        near = here.server(0.05)
        await here.measure(near)
        many = [here.server(None) for _ in range(3 * MEASURES)]
        await here.measure(near, *many)
        assert NEW[1] - 1 <= here.asked.total() - 1 <= NEW[1] + 2


async def test_who_does_not_answer_is_named_with_reason() -> None:
    async with world() as here:
        near, silent = here.server(0.2), here.server(None)
        found = await measure_rtts(here.asker, [near.peer_id, silent.peer_id], timeout=5.0)
        assert found[near.peer_id] == pytest.approx(0.2) and isinstance(found[silent.peer_id], PeerError)


async def test_nothing_is_kept_of_peers_no_longer_announced() -> None:
    async with open_network(Asker) as network, trio.open_nursery() as nursery:
        here, there, gone = (network.node() for _ in range(3))
        for node in (there, gone):
            node.announce(plain(node.peer_id, ALL, num_blocks=BLOCKS))
        model: Any = SimpleNamespace(version=MODEL, num_blocks=BLOCKS, folder=SimpleNamespace(boundaries=ALIKE))
        selection = ServerSelection(cast(Swarm, here), model, nursery)
        assert {server.peer_id for server in await selection.candidates()} == {there.peer_id, gone.peer_id}
        for node in (there, gone):
            selection.suspect(node.peer_id)
            selection.note_transfer(HopTiming(node.peer_id, 1.0, 0.0, 0.1), BANDWIDTH_BYTES)
        await gone.retract()
        network.view = SwarmView()  # the retraction has expired
        assert [server.peer_id for server in await selection.candidates()] == [there.peer_id]
        assert set(selection.suspected) == {there.peer_id}
        known = {
            node: (selection.round_trip(node.peer_id), selection.seconds_per_byte(node.peer_id))
            for node in (there, gone)
        }
        assert known[gone] == (None, None) and None not in known[there]
        nursery.cancel_scope.cancel()
