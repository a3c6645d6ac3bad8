from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.placement.observed import LEAST, MOST, OBSERVED, MembershipChange, observe_servers, turnover
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.announcements import plain

BLOCKS = 12
ONLINE, JOINING, DRAINING = ServerState.ONLINE, ServerState.JOINING, ServerState.DRAINING


def said(peer_id: str, start: int = 0, end: int = 4, state: ServerState = ONLINE, **fields) -> Announcement:
    return plain(peer_id, Span(start, end), **{"num_blocks": BLOCKS, "state": state, "step_seconds": 0.1} | fields)


def test_who_counts_where() -> None:
    seen = observe_servers(
        [
            said("online"),
            said("fixed", fixed=True),
            said("joining", 4, 8, JOINING),
            said("leaving", state=DRAINING),
            said("moving", state=DRAINING, next_span=Span(8, 12)),
            said("about to move", next_span=Span(5, 9)),
            said("choosing", 2, 6, JOINING, next_span=Span(2, 6)),
        ],
        BLOCKS,
    )
    assert {server.peer_id: (server.span, server.movable) for server in seen.servers} == {
        "online": (Span(0, 4), True),
        "fixed": (Span(0, 4), False),
        "joining": (Span(4, 8), False),
        "moving": (Span(8, 12), False),
        "about to move": (Span(5, 9), False),
        "choosing": (Span(2, 6), False),
    }
    assert [server.peer_id for server in seen.serving] == ["online", "fixed"]
    assert seen.of("moving") is not None and seen.of("leaving") is None


def test_smaller_peer_id_of_two_movers_goes_first() -> None:
    swarm = [said("a", next_span=Span(8, 12)), said("b", next_span=Span(8, 12)), said("c", 4, 8)]
    first, second = (
        observe_servers(swarm, BLOCKS, "a", contested=True),
        observe_servers(swarm, BLOCKS, "b", contested=True),
    )
    assert [(server.peer_id, server.span.start) for server in first.servers] == [("a", 0), ("b", 0), ("c", 4)]
    assert [(server.peer_id, server.span.start) for server in second.servers] == [("a", 8), ("b", 0), ("c", 4)]
    assert [server.peer_id for server in second.serving] == ["b", "c"]


def test_begun_move_goes_on_whatever_its_id() -> None:
    swarm = [said("a"), said("b", state=DRAINING, next_span=Span(8, 12)), said("c", 4, 8)]
    seen = observe_servers(swarm, BLOCKS, "a", contested=True)
    assert [(server.peer_id, server.span.start) for server in seen.servers] == [("a", 0), ("b", 8), ("c", 4)]
    assert [server.peer_id for server in seen.serving] == ["a", "c"]


def test_of_two_newcomers_smaller_peer_id_chooses_first() -> None:
    choosing = [said(peer, 4, 8, JOINING, next_span=Span(4, 8)) for peer in "ab"]
    assert not observe_servers(choosing, BLOCKS, "a", contested=True).servers
    assert [server.peer_id for server in observe_servers(choosing, BLOCKS, "b", contested=True).servers] == ["a"]
    loading = [choosing[0], replace(choosing[1], next_span=None)]
    assert [server.peer_id for server in observe_servers(loading, BLOCKS, "a", contested=True).servers] == ["b"]


def test_the_slower_of_computing_and_network_counts() -> None:
    holders = observe_servers(
        [said("a", network_seconds=0.5), said("b", network_seconds=0.01), said("c")], BLOCKS
    ).servers
    assert [holder.throughput for holder in holders] == [2.0, 10.0, 10.0]


def test_unmeasured_server_is_taken_for_average() -> None:
    holders = observe_servers([said("a", step_seconds=0.5), said("b", state=JOINING, step_seconds=0)], BLOCKS).servers
    assert [holder.throughput for holder in holders] == [2.0, 2.0]
    assert observe_servers([said("b", state=JOINING, step_seconds=0)], BLOCKS).servers[0].throughput == 1.0


def test_loading_and_caches_make_a_move_dearer() -> None:
    swarm = [said("a"), said("b", load_seconds=20.0), said("c", cache_tokens=100, cache_tokens_free=50)]
    assert [server.reload_weight for server in observe_servers(swarm, BLOCKS).servers] == [1.0, 2.0, 1.5]
    fuller = [said("d", cache_tokens=100, cache_tokens_free=25), said("e", cache_tokens=100, cache_tokens_free=100)]
    assert [server.reload_weight for server in observe_servers(fuller, BLOCKS).servers] == [1.75, 1.0]


def test_absurd_announcements_are_corrected_or_named() -> None:
    usual = [said(f"usual {number}") for number in range(5)]
    seen = observe_servers(
        [
            *usual,
            said("liar", step_seconds=1e-6),
            said("endless", step_seconds=float("nan")),
            said("another size", num_blocks=1_000_000, end=1_000_000),
            said("too far", 8, 13),
        ],
        BLOCKS,
    )
    speeds = {server.peer_id: server.throughput for server in seen.servers}
    assert speeds["liar"] == OBSERVED.most_of_median * 10.0
    assert 0 < speeds["endless"] < 1
    assert "another size" not in speeds and "too far" not in speeds
    assert set(seen.doubts) == {"liar", "another size", "too far"}
    assert "1000 times the middle" not in seen.doubts["liar"] and "taken for 1000" in seen.doubts["liar"]


@given(
    st.lists(
        st.builds(
            said,
            st.sampled_from("abcdefgh"),
            st.integers(0, 5),
            st.integers(6, 40),
            st.sampled_from(list(ServerState)),
            num_blocks=st.sampled_from([BLOCKS, 4096]),
            step_seconds=st.floats(),
            network_seconds=st.floats(),
            load_seconds=st.floats(0, 1e9),
            cache_tokens=st.integers(0, 9),
            next_span=st.sampled_from([None, Span(0, 3), Span(3, 90)]),
        ),
        unique_by=lambda server: server.peer_id,
    ),
    st.booleans(),
)
def test_whatever_is_announced_makes_usable_holders(announcements, contested) -> None:
    seen = observe_servers(announcements, BLOCKS, "c", contested=contested)
    for holder in seen.servers:
        assert holder.span.end <= BLOCKS
        assert 0 < holder.throughput < float("inf") and 1 <= holder.reload_weight <= 20


def test_turnover_is_one_for_usual_changes() -> None:
    now, servers = 1e9, 60
    count = round(OBSERVED.usual_per_hour * servers * OBSERVED.window / 3600)
    usual = [MembershipChange(now - OBSERVED.window * (index + 0.5) / count, bool(index % 2)) for index in range(count)]
    assert turnover(usual, servers, now) == pytest.approx(1.0, abs=0.2)
    assert turnover([], servers, now) == LEAST
    assert turnover(usual * 9, servers, now) == MOST
    leaving = [replace(change, joined=False) for change in usual]
    joining = [replace(change, joined=True) for change in usual]
    assert turnover(joining, servers, now) < turnover(usual, servers, now) < turnover(leaving, servers, now)
    assert turnover([replace(change, at=change.at - OBSERVED.window) for change in usual], servers, now) == LEAST
