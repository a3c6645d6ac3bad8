"""What a directory gives to a client that wants some servers of each block only."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.client.server_selection import ServerLimits, ServerSelection
from petalnode.node.swarm.sample import SAMPLING, in_turn, known_well, sampled
from petalnode.node.swarm.trusted_servers import TrustedServers
from petalnode.node.swarm.view import SwarmView
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import ServerState, SignedAnnouncement
from petalnode.protocols.ids import Span
from tests.announcements import MODEL, held, identity_of, signed
from tests.directories import Stream, a_directory, answered_by

pytestmark = pytest.mark.virtual_time

NOW = 1_800_000_000.0
OTHER = b"o" * 32
BLOCKS = 30


def announced(number: int, span: Span, **fields: Any) -> SignedAnnouncement:
    return held(number, span, now=NOW, lifetime=45.0, num_blocks=BLOCKS, **fields)


def spread(count: int, first: int = 0, length: int = 3) -> list[SignedAnnouncement]:
    return [
        announced(first + number, Span(number % (BLOCKS - length + 1), number % (BLOCKS - length + 1) + length))
        for number in range(count)
    ]


def servers_of_blocks(records: list[SignedAnnouncement]) -> Counter[int]:
    return Counter(block for record in records for block in range(record.content.span.start, record.content.span.end))


def sample_of(view: SwarmView, limit: int = SAMPLING.servers, seed: int = 1) -> list[SignedAnnouncement]:
    return sampled(view.records.values(), view.origins, limit, NOW, random.Random(seed))


def test_a_small_swarm_is_given_as_it_is() -> None:
    records = [*spread(50), announced(99, Span(0, 1), state=ServerState.OFFLINE)]
    assert len(sample_of(SwarmView().merge(records, NOW))) == 51


def test_of_large_one_every_block_gets_its_share() -> None:
    view = SwarmView().merge(spread(600), NOW)
    for seed in range(5):
        chosen = sample_of(view, seed=seed)
        assert len(chosen) == SAMPLING.servers == len({record.content.peer_id for record in chosen})
        assert min(servers_of_blocks(chosen)[block] for block in range(BLOCKS)) >= 3


def test_single_servers_block_is_not_left_out() -> None:
    records = [announced(number, Span(0, BLOCKS - 1)) for number in range(500)]
    rare = announced(1000, Span(BLOCKS - 1, BLOCKS))
    assert rare in sample_of(SwarmView().merge([*records, rare], NOW), limit=10)


def test_retracted_joining_and_expired_servers_take_no_places() -> None:
    gone = [announced(2000 + number, Span(0, BLOCKS), state=ServerState.OFFLINE) for number in range(300)]
    loading = [announced(3000 + number, Span(0, BLOCKS), state=ServerState.JOINING) for number in range(300)]
    view = SwarmView().merge([*spread(200), *gone, *loading], NOW)
    assert {record.content.state for record in sample_of(view)} == {ServerState.ONLINE}
    assert sampled(view.records.values(), view.origins, SAMPLING.servers, NOW + 100) == []


def test_it_goes_around_addresses_whatever_their_keys() -> None:
    """100 servers of as many addresses, and 2,000 keys of 16."""
    view = SwarmView()
    honest = spread(100)
    for number, record in enumerate(honest):
        view = view.merge([record], NOW, source=f"server {number}", met=True)
    false = spread(2000, first=10_000, length=BLOCKS)
    for address in range(16):
        view = view.merge(false[address::16], NOW, source=f"attacker {address}", met=True)
    peers = {record.content.peer_id for record in honest}
    for seed in range(5):
        chosen = [record for record in sample_of(view, seed=seed) if record.content.peer_id in peers]
        assert min(servers_of_blocks(chosen)[block] for block in range(BLOCKS)) >= 1


def test_most_keys_do_not_decide_whom_to_ask() -> None:
    addrs = ("/ip4/192.0.2.1/tcp/1",)
    honest = [replace(one, content=replace(one.content, addrs=addrs)) for one in spread(50)]
    false = [replace(one, content=replace(one.content, addrs=addrs)) for one in spread(450, first=10_000)]
    view = SwarmView()
    for number, record in enumerate(honest):
        view = view.merge([record], NOW, source=f"server {number}", met=True)
    view = view.merge([*false, *spread(5, first=20_000)], NOW, source="attacker", met=True)
    order = [content.peer_id for content in in_turn(view, 1000, NOW, random.Random(1))]
    assert len(order) == len(set(order)) == 500
    assert {record.content.peer_id for record in honest} <= set(order[:51])
    assert len(list(in_turn(view, 20, NOW, random.Random(1)))) <= 20


def test_nor_by_who_makes_most_connections() -> None:
    """A hundred keys of one address are connected, and five honest peers."""
    addrs = ("/ip4/192.0.2.1/tcp/1",)
    records = [
        replace(one, content=replace(one.content, addrs=addrs, expires=time.time() + 3000)) for one in spread(105)
    ]
    peers = [record.content.peer_id for record in records]
    honest = dict(zip(peers[:5], map(str, range(5)), strict=True))
    asking = a_directory(
        Identity.generate(), connected=lambda: peers, origin_of=lambda peer: honest.get(peer, "attacker")
    )
    asking.merge(records)
    for _ in range(5):
        assert honest.keys() <= set(asking.peers_to_ask(6))


def test_when_a_client_knows_enough() -> None:
    view = SwarmView().merge([announced(number, Span(0, BLOCKS)) for number in range(2)], NOW)
    assert not known_well(view, MODEL, now=NOW)
    view = view.merge([announced(5, Span(0, BLOCKS - 1)), announced(6, Span(0, BLOCKS), model_version=OTHER)], NOW)
    assert not known_well(view, MODEL, now=NOW)
    view = view.merge([announced(7, Span(BLOCKS - 1, BLOCKS))], NOW)
    assert known_well(view, MODEL, now=NOW)
    assert not known_well(view, OTHER, now=NOW)
    assert not known_well(SwarmView(), MODEL, now=NOW)
    assert not known_well(view, b"", now=NOW)
    assert known_well(view.merge(spread(SAMPLING.servers, first=100), NOW), b"", now=NOW)


# --- between two directories


@pytest.fixture(scope="module")
def records() -> list[SignedAnnouncement]:
    numbers = range(SAMPLING.servers + 50)
    return [signed(identity_of(number), Span(number % 10, number % 10 + 1), lifetime=3000) for number in numbers]


@pytest.mark.parametrize(("sample", "known"), [(True, SAMPLING.servers), (False, SAMPLING.servers + 50)])
async def test_client_takes_page_and_server_everything(
    sample: bool, known: int, records: list[SignedAnnouncement]
) -> None:
    queries: list[wire.DirectoryQuery] = []
    async with trio.open_nursery() as nursery:
        there = a_directory(Identity.generate())
        there.merge(records)
        asked = Identity.generate().peer_id

        open_there = answered_by(there.serve, nursery)

        async def open_stream(peer_id: str, timeout: float) -> Stream:
            assert peer_id == asked
            ours = await open_there(peer_id, timeout)
            send = ours.send

            async def told(frame: wire.DirectoryFrame, *args: Any, **how: Any) -> None:
                queries.append(frame.query)
                await send(frame, *args, **how)

            ours.send = told  # type: ignore[method-assign]
            return ours

        here = a_directory(Identity.generate(), open_stream, [asked])
        await here.refresh(nursery, model_version=MODEL, sample=sample, timeout=60)
        assert len(here.view.records) == known
        nursery.cancel_scope.cancel()
    assert queries and all(query.sample == sample for query in queries)


@pytest.mark.parametrize(
    ("limits", "sample"),
    [
        ({}, True),
        ({"blocked": ["a peer"]}, True),
        ({"allowed": ["a peer"]}, False),
        ({"trusted": TrustedServers(frozenset({"a peer"}))}, False),
        ({"require_pledge": 0}, False),
    ],
)
async def test_who_wants_certain_servers_asks_for_all(limits: dict[str, Any], sample: bool) -> None:
    asked: list[bool] = []

    async def refresh(*, sample: bool, **_: object) -> None:
        asked.append(sample)

    swarm: Any = SimpleNamespace(refresh=refresh)
    model: Any = SimpleNamespace(version=MODEL, num_blocks=4)
    nursery: Any = None
    await ServerSelection(swarm, model, nursery, ServerLimits(**limits)).refresh()
    assert asked == [sample]


def test_one_liar_does_not_end_a_search() -> None:
    """Its model has one block, and it comes first in the order of spans."""
    half = [announced(number, Span(0, BLOCKS // 2)) for number in range(3)]
    liar = held(9, Span(0, 1), now=NOW, lifetime=45.0, num_blocks=1)
    assert not known_well(SwarmView().merge([*half, liar], NOW), MODEL, now=NOW)
