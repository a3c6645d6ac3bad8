"""Where a server lists itself in Kademlia, how often, and what is missing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.network.kad_store import LIFETIME
from petalnode.node.swarm.provider_records import (
    RECORDS,
    SEARCH,
    ProviderRecords,
    blocks_sought,
    keys_of,
    missing,
    model_sought,
    pause_after,
)
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import MAX_RANGES, Span, blocks_key, blocks_of_range, model_key, ranges_of

VERSION = bytes.fromhex("5f4e7440d715" + "01" * 26)
PEER = Identity.from_seed(bytes(32)).peer_id


def server(start: int, end: int, *, blocks: int = 30, state: ServerState = ServerState.ONLINE) -> Announcement:
    return Announcement(PEER, VERSION, "smollm2", blocks, Span(start, end), state)


@pytest.mark.parametrize("blocks", [1, 4, 30, 32, 33, 80, 126, 4096])
def test_ranges_cover_all_blocks_and_are_few(blocks: int) -> None:
    ranges = ranges_of(Span(0, blocks), blocks)
    assert ranges == range(len(ranges)) and 1 <= len(ranges) <= MAX_RANGES
    assert [*ranges_of(Span(blocks - 1, blocks), blocks)] == [ranges[-1]]
    assert blocks_of_range(blocks) * len(ranges) >= blocks


def test_server_lists_itself_for_ranges_and_model() -> None:
    digits = VERSION.hex()
    keys = [model_key("smollm2", 30), *(blocks_key(digits, number) for number in (1, 2))]
    assert keys_of(server(7, 12)) == keys == keys_of(server(4, 9, state=ServerState.JOINING))
    assert keys_of(server(7, 12, state=ServerState.DRAINING)) == keys_of(None) == []


def test_twelve_digits_of_a_version_find_it() -> None:
    sought = blocks_sought("5f4e7440d715", 30)
    assert [one.key for one in sought] == keys_of(server(0, 30))[1:]
    assert sought[1].fits(server(7, 12)) and not sought[0].fits(server(7, 12))
    assert not sought[1].fits(server(7, 12, blocks=31))
    assert not blocks_sought("5f4e7440d716", 30)[1].fits(server(7, 12))
    (named,) = model_sought("smollm2", 30)
    assert named.key == keys_of(server(0, 30))[0] and named.fits(server(7, 12))


def test_blocks_that_nobody_has_are_missing() -> None:
    assert missing([]) and missing([server(0, 29)]) and missing([server(0, 20), server(21, 30)])
    assert not missing([server(0, 20), server(15, 30)])
    assert missing([server(0, 20), server(15, 30, state=ServerState.DRAINING)])


def test_records_are_renewed_early_and_seldom() -> None:
    assert [pause_after(rounds, 0, 5) for rounds in (1, 2, 3, 4, 1000)] == [
        60,
        240,
        960,
        RECORDS.least_pause,
        RECORDS.least_pause,
    ]
    assert pause_after(50, 1 << 30, 5) == RECORDS.longest_pause <= LIFETIME / 3
    assert pause_after(50, 32_000, 5) == 2000  # 16 bytes a second
    assert pause_after(50, 32_000, 0) == 60


@pytest.mark.virtual_time
async def test_search_that_was_broken_off_begins_anew() -> None:
    asked = []

    class Silent:
        async def look_up(self, key: bytes, *, timeout: float) -> None:
            asked.append(key)
            await trio.sleep(timeout)

    nobody: Any = SimpleNamespace(host=None)
    dht: Any = Silent()
    records = ProviderRecords(streams=nobody, dht=dht, directory=nobody, ttl=45)
    for count in (1, 2):
        with trio.move_on_after(1):  # as a step does that waits for a server
            await records.find(blocks_sought("ab" * 32), timeout=SEARCH.seconds, again=SEARCH.again_quietly)
        assert len(asked) == count * SEARCH.keys_at_once
    find = partial(records.find, blocks_sought("ab" * 32), timeout=SEARCH.seconds, again=0)
    with trio.move_on_after(1):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(find)
