"""The longest announcements that are allowed, of sixteen addresses, in the place of all others in a client's sample;
and announcements that outlive their servers."""

from __future__ import annotations

import random
import time

import pytest

from petalnode.node.swarm.sample import SAMPLING, sampled
from petalnode.node.swarm.view import SwarmView
from petalnode.protocols.announcement import ANNOUNCEMENT
from petalnode.protocols.directory import DIRECTORY_LIMITS
from petalnode.protocols.ids import Span
from tests.announcements import MODEL, held
from tests.directories import from_many

BLOCKS = 10
OLD = 0.6 * ANNOUNCEMENT.max_lifetime


# --- large announcements in the place of small ones


@pytest.mark.parametrize(
    ("limit", "most"),
    [(SAMPLING.servers, DIRECTORY_LIMITS.max_page), (128, DIRECTORY_LIMITS.max_page), (SAMPLING.servers, 48 * 1024)],
)
@pytest.mark.parametrize("servers", [20, 200])
def test_large_announcements_push_small_ones_from_no_answer(limit: int, most: int, servers: int) -> None:
    view = from_many(servers)
    honest = set(view.records)
    for address in range(16):
        keys = range(1000 + address, 1100, 16)
        large = [held(number, size=ANNOUNCEMENT.max_bytes - 80) for number in keys]
        view = view.merge(large, time.time(), source=f"attacker {address}", met=True)
    for seed in range(5):
        found = sampled(view.page(MODEL, b""), view.origins, limit, time.time(), random.Random(seed), max_bytes=most)
        spans = [record.content.span for record in found if record.content.peer_id in honest]
        assert all(any(block in span for span in spans) for block in range(BLOCKS))
        assert sum(len(record.announcement) for record in found) <= most


# --- servers that are gone, and clocks


def test_records_outlive_servers_for_half_their_time_only() -> None:
    there, gone = from_many(200), [held(number, now=time.time() - OLD, size=600) for number in range(500, 800)]
    view = there.merge(gone, time.time(), source="a peer")
    found = sampled(view.page(MODEL, b""), view.origins, SAMPLING.servers, time.time(), random.Random(1))
    assert {record.content.peer_id for record in found} <= there.records.keys() and len(found) == SAMPLING.servers


def test_unique_blocks_server_is_not_left_out() -> None:
    late = held(0, Span(BLOCKS - 1, BLOCKS), now=time.time() - OLD)
    fresh = [held(number, size=600) for number in range(8, 400, 8)]  # all hold blocks 0:3
    view = SwarmView().merge([*fresh, late], time.time())
    assert late in sampled(view.page(MODEL, b""), view.origins, 20, time.time())
