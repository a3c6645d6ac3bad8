"""Keys cost nothing: an attacker announces more servers and models than a directory holds, for as long as it may."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.kad_store import MODELS_KEY, ValueStore, models_value, open_value
from petalnode.node.swarm import view as view_module
from petalnode.node.swarm.view import SwarmView
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import (
    ANNOUNCEMENT,
    SignedAnnouncement,
    is_expired,
    sign_announcement,
)
from petalnode.protocols.directory import DIRECTORY
from petalnode.protocols.ids import Span
from tests.announcements import MODEL, held, signed
from tests.attacks.forger import ATTACKER, HONEST
from tests.directories import Stream, a_directory
from tests.noted_calls import calls_of
from tests.origins import Backed

NOW = time.time()


def announced(number: int, version: bytes = MODEL, lifetime: float = 45.0, now: float = NOW) -> SignedAnnouncement:
    return held(number, Span(number % 10, number % 10 + 1), now=now, lifetime=lifetime, model_version=version)


def flood(count: int, version: bytes = MODEL) -> list[SignedAnnouncement]:
    return [announced(1_000_000 + number, version, ANNOUNCEMENT.max_lifetime) for number in range(count)]


HONEST_SERVERS = [announced(number) for number in range(100)]
FLOOD = flood(1000)


def left(view: SwarmView) -> int:
    return sum(record.content.peer_id in view.records for record in HONEST_SERVERS)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_RECORDS", 256)


# --- what stays


def test_thousand_keys_of_one_address_push_nobody_out() -> None:
    """They last longest, come last, and come again."""
    view = SwarmView().merge(HONEST_SERVERS, NOW, source="a peer")
    for _ in range(3):
        view = view.merge(FLOOD, NOW + 1, source="attacker")
        assert len(view.records) <= 256
    assert left(view) == 100


def test_nor_if_they_were_there_before_everybody_else() -> None:
    view = SwarmView().merge(FLOOD, NOW, source="attacker").merge(HONEST_SERVERS, NOW + 1, source="a peer")
    assert left(view) == 100


def test_self_announced_servers_stay_beside_many_addresses() -> None:
    """Each has an address of its own, the attacker 16."""
    view = SwarmView()
    for number, record in enumerate(HONEST_SERVERS):
        view = view.merge([record], NOW, source=f"server {number}", met=True)
    for address in range(16):
        view = view.merge(FLOOD[address::16], NOW, source=f"attacker {address}", met=True)
    assert left(view) == 100


@pytest.mark.parametrize(("addresses", "least"), [(1, 100), (4, 100), (16, 240 * 4 // 20)])
def test_passed_on_records_stay_in_proportion(addresses: int, least: int) -> None:
    """Four honest peers pass on the same servers; the attacker has some addresses, all with different keys. A full
    view has room for 240: four sources of twenty keep a fifth of that."""
    view = SwarmView()
    for address in range(addresses):
        view = view.merge(FLOOD[address::addresses], NOW, source=f"attacker {address}")
    for peer in range(4):
        view = view.merge(HONEST_SERVERS, NOW, source=f"peer {peer}")
        for address in range(addresses):
            view = view.merge(FLOOD[address::addresses], NOW, source=f"attacker {address}")
    assert left(view) >= least


def test_passing_on_honest_servers_takes_none_along() -> None:
    """A flood behind honest announcements: they count for who sends fewer."""
    view = SwarmView().merge([*HONEST_SERVERS, *FLOOD], NOW, source="attacker")
    for _ in range(2):
        view = view.merge(HONEST_SERVERS, NOW + 1, source="a peer").merge(FLOOD, NOW + 1, source="attacker")
    assert left(view) == 100


def test_who_has_served_this_node_stays_whatever_comes() -> None:
    served = {record.content.peer_id for record in HONEST_SERVERS[:50]}
    view = SwarmView().merge(HONEST_SERVERS, NOW, source="attacker 0", keep=served.__contains__)
    for address in range(100):
        view = view.merge(FLOOD, NOW + 1, source=f"attacker {address}", keep=served.__contains__)
    assert served <= view.records.keys()


# --- what it costs


def test_another_announcement_costs_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_RECORDS", 10_000)
    view = SwarmView().merge([*HONEST_SERVERS, *FLOOD], NOW)
    with calls_of(is_expired) as looks:
        for number in range(50):
            view = view.merge([announced(number, now=NOW + 0.5)], NOW + 0.5)
            view.servers(MODEL, now=NOW + 0.5)
    assert 0 < len(looks) <= 2 * 50


def test_servers_are_not_sorted_anew_for_other_models() -> None:
    view = SwarmView().merge(HONEST_SERVERS, NOW)
    before = view.servers(MODEL, now=NOW)
    for number in range(100):
        view = view.merge([announced(2_000_000 + number, number.to_bytes(32, "big"))], NOW)
    assert view.servers(MODEL, now=NOW) is before


# --- a directory that hears it


def of_servers(count: int, lifetime: float) -> list[SignedAnnouncement]:
    return [signed(Identity.generate(), lifetime=lifetime) for _ in range(count)]


@pytest.mark.virtual_time
async def test_asking_an_attacker_keeps_what_honest_peers_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_RECORDS", 64)
    pages = {HONEST.peer_id: of_servers(30, 1000.0), ATTACKER.peer_id: of_servers(100, ANNOUNCEMENT.max_lifetime)}
    async with trio.open_nursery() as nursery:

        async def open_stream(peer_id: str, _timeout: float) -> Stream:
            ours, theirs = message_streams(DIRECTORY, "us", peer_id)
            nursery.start_soon(answer, theirs, pages[peer_id])
            return ours

        async def answer(stream: Stream, records: Sequence[SignedAnnouncement]) -> None:
            await stream.receive(timeout=60)
            page = wire.DirectoryRecords(records=[record.to_wire() for record in records])
            await stream.send(wire.DirectoryFrame(records=page), timeout=60)

        node = a_directory(Identity.generate(), open_stream)
        for peer_id in (HONEST.peer_id, ATTACKER.peer_id, ATTACKER.peer_id):
            await node.pull(peer_id, timeout=600)
        assert {record.content.peer_id for record in pages[HONEST.peer_id]} <= node.view.records.keys()
        assert len(node.view.records) <= 64
        nursery.cancel_scope.cancel()


# --- the list of models in Kademlia


def test_made_up_versions_displace_no_served_model() -> None:
    """The list has room for 32. The attacker has 32 versions from one address, the model two servers from two."""
    view = SwarmView()
    for number in range(2):
        view = view.merge([HONEST_SERVERS[number]], NOW, source=f"server {number}", met=True)
    false = [
        announced(3_000_000 + number, number.to_bytes(32, "big"), ANNOUNCEMENT.max_lifetime) for number in range(40)
    ]
    view = view.merge(false, NOW, source="attacker", met=True)
    known = Backed(
        {
            record.content.model_version: view.backing(record.content.model_version, now=NOW)
            for record in view.records.values()
        }
    )
    listed = wire.DirectoryRecords.FromString(models_value(view.records.values(), known)).records
    assert len(listed) == 32
    assert {record.signature for record in listed} & {record.signature for record in HONEST_SERVERS[:2]}


async def test_storing_node_keeps_the_list_with_more_addresses() -> None:
    now = time.time()
    honest, false = (of_servers(1, ANNOUNCEMENT.max_lifetime) for _ in range(2))
    made_up = [
        sign_announcement(one, replace(false[0].content, peer_id=one.peer_id, model_version=bytes([number]) * 32))
        for number, one in ((number, Identity.generate()) for number in range(32))
    ]
    lists = [models_value(made_up), models_value([*honest, *made_up[:31]])]
    kept = ValueStore(lambda: now)
    kept.models = Backed({MODEL: 2}, others=1)
    for value in lists:
        assert kept.put(MODELS_KEY, await open_value(MODELS_KEY, value, now), "11.0.0.1")
    assert not kept.put(MODELS_KEY, await open_value(MODELS_KEY, lists[0], now), "11.0.0.1")


def test_keys_and_passed_on_records_are_no_backing() -> None:
    view = SwarmView().merge(FLOOD, NOW, source="attacker", met=True)
    for peer in range(8):
        view = view.merge(FLOOD, NOW, source=f"peer {peer}")
    assert view.backing(MODEL, now=NOW) == 1
