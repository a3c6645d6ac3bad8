from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.placement.observed import OBSERVED, PlacedServer, gaps, is_overdue, worth_asking
from petalnode.protocols.ids import Span

BLOCKS = 12
holders = st.lists(
    st.builds(
        lambda number, start, length: PlacedServer(f"peer {number}", Span(start, min(BLOCKS, start + length)), 1.0),
        st.integers(0, 40),
        st.integers(0, BLOCKS - 1),
        st.integers(1, BLOCKS),
    ),
    unique_by=lambda holder: holder.peer_id,
)


@given(holders, st.sets(st.integers(0, 40).map("peer {}".format)), st.integers(0, 99))
def test_only_holders_are_asked_first_and_nobody_twice(found, sure, seed) -> None:
    asked = worth_asking(found, "peer 0", sure, BLOCKS, random.Random(seed))
    assert len(asked) == len(set(asked)) <= OBSERVED.at_once
    assert not set(asked) & (sure | {"peer 0"})
    able = {holder.peer_id for holder in found} - sure - {"peer 0"}
    assert set(asked) <= able and (set(asked) == able or len(asked) == OBSERVED.at_once)
    alone = {
        server.peer_id
        for server in found
        if server.peer_id in able
        and len(gaps([other for other in found if other is not server], BLOCKS)) > 0
        and sum(map(len, gaps([other for other in found if other is not server], BLOCKS)))
        > sum(map(len, gaps(found, BLOCKS)))
    }
    assert alone <= set(asked) or set(asked[: len(alone)]) <= alone


def test_lonely_server_is_asked_by_some() -> None:
    swarm = [PlacedServer(f"peer {number}", Span(0, 6), 1.0) for number in range(300)] + [
        PlacedServer("alone", Span(6, 12), 1.0)
    ]
    chance = random.Random(1)
    askers = sum("alone" in worth_asking(swarm, f"peer {index}", (), BLOCKS, chance) for index in range(300))
    assert OBSERVED.askers / 2 < askers < 2 * OBSERVED.askers


def test_who_has_not_repeated_itself_is_overdue() -> None:
    assert not is_overdue(1000.0, 1045.0, 1020.0)
    assert is_overdue(1000.0, 1045.0, 1023.0)
