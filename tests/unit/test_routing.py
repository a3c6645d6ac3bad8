from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.errors import NoChainError
from petalnode.node.swarm.cost import COST
from petalnode.node.swarm.routing import (
    Demand,
    Hop,
    RouteCandidate,
    chain_seconds,
    cheapest_chain,
    describe_blocks,
    missing_blocks,
    pays_again,
    second_best,
)
from petalnode.protocols.ids import Span
from tests.unit.plain_chains import (
    ALL,
    BLOCKS,
    NAMES,
    all_chains,
    asks,
    check_shape,
    cost,
    server,
    spans,
    swarms,
    way,
    work,
)

# --- the cost of a chain, and the best of all chains, written plainly


@settings(max_examples=120, deadline=None)
@given(swarms(), spans, asks)
def test_no_chain_is_cheaper_and_gaps_are_named(
    candidates: list[RouteCandidate], pair: tuple[int, int], ask: Demand
) -> None:
    wanted = Span(*pair)
    held = {block for candidate in candidates for block in range(candidate.span.start, candidate.span.end)}
    missing = tuple(block for block in range(wanted.start, wanted.end) if block not in held)
    if missing:
        with pytest.raises(NoChainError) as caught:
            cheapest_chain(candidates, wanted, ask)
        assert caught.value.missing == missing
        assert describe_blocks(missing) in str(caught.value)
        return
    chain = cheapest_chain(candidates, wanted, ask)
    check_shape(chain, candidates, wanted)
    least = min(cost(chain, candidates, ask) for chain in all_chains(candidates, wanted))
    assert cost(chain, candidates, ask) == pytest.approx(least, rel=1e-12, abs=1e-9)
    assert chain_seconds(chain, candidates, ask) == pytest.approx(least, rel=1e-12, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(swarms(), asks, st.data())
def test_no_standby_is_cheaper(candidates: list[RouteCandidate], ask: Demand, data: st.DataObject) -> None:
    candidates = [*candidates, server("whole", 0, BLOCKS, rtt=0.1)]
    chain = data.draw(st.sampled_from(all_chains(candidates, ALL)))
    index = data.draw(st.integers(0, len(chain) - 1))
    hop = chain[index]
    by_peer = {candidate.peer_id: candidate for candidate in candidates}
    before = by_peer[chain[index - 1].peer_id] if index else None
    after = by_peer[chain[index + 1].peer_id] if index + 1 < len(chain) else None
    others = [candidate for candidate in candidates if candidate.peer_id != hop.peer_id]
    possible = all_chains(others, hop.span)
    found = second_best(chain, index, candidates, ask)
    if found is None:
        assert not possible
        return
    check_shape(found, others, hop.span)
    least = min(cost(chain, others, ask, before, after) for chain in possible)
    assert cost(found, others, ask, before, after) == pytest.approx(least, rel=1e-12, abs=1e-9)


def least_of_all_pairs(candidates: Sequence[RouteCandidate], wanted: Span, ask: Demand) -> float:
    """What the cheapest chain costs, by looking at every pair of servers at every block."""
    by_peer = {candidate.peer_id: candidate for candidate in candidates}
    reached: dict[str, float] = {}
    for block in range(wanted.start, wanted.end):
        following = {}
        for candidate in candidates:
            if block in candidate.span:
                arrivals = [spent + way(by_peer[peer], candidate, ask.pushed) for peer, spent in reached.items()]
                if block == wanted.start:
                    arrivals = [way(None, candidate, ask.pushed)]
                entered = min(arrivals) + work(candidate, 0, ask)
                computing = work(candidate, 1, ask) - work(candidate, 0, ask)
                following[candidate.peer_id] = min(entered, reached.get(candidate.peer_id, math.inf)) + computing
        reached = following
    return min(spent + by_peer[peer].rtt / 2 for peer, spent in reached.items())


@pytest.mark.parametrize(("servers", "blocks", "measured", "swarms_tried"), [(8, 8, 4, 200), (100, 30, 40, 2)])
def test_swarms_nearer_to_each_other_than_the_client(
    servers: int, blocks: int, measured: int, swarms_tried: int
) -> None:
    """Here pairs decide, and most of them are passed over, which swarms of four hardly show."""
    chance = random.Random(0)
    wanted = Span(0, blocks)
    decided = 0
    for _ in range(swarms_tried):
        candidates = [server("whole", 0, blocks, rtt=1.0, step=1.0 * blocks)]
        nearest = chance.choice([0.0, 1.0])
        for number in range(servers):
            start = chance.randrange(blocks)
            length = chance.randint(1, 10)
            candidates.append(
                replace(
                    server(f"peer-{number}", start, min(start + length, blocks), rtt=chance.uniform(0.2, 2.0)),
                    step_seconds=chance.uniform(0.01, 0.2) * length,
                    rtts={f"peer-{chance.randrange(servers)}": chance.uniform(nearest, 3.0) for _ in range(measured)},
                )
            )
        pushed, relayed = Demand(pushed=True), Demand()
        chain = cheapest_chain(candidates, wanted, Demand(pushed=True))
        check_shape(chain, candidates, wanted)
        least = least_of_all_pairs(candidates, wanted, pushed)
        assert cost(chain, candidates, pushed) == pytest.approx(least, rel=1e-9)
        through_client = cheapest_chain(candidates, wanted)
        assert cost(through_client, candidates) == pytest.approx(least_of_all_pairs(candidates, wanted, relayed))
        decided += chain != through_client
    assert decided > swarms_tried / 10


@settings(deadline=None)
@given(swarms(), asks, st.randoms())
def test_equal_views_give_equal_routes(candidates: list[RouteCandidate], ask: Demand, order: random.Random) -> None:
    whole = [*candidates, server("everything", 0, BLOCKS, rtt=0.5), server("everything too", 0, BLOCKS, rtt=0.5)]
    shuffled = []
    for candidate in whole:
        rtts = list(candidate.rtts.items())
        order.shuffle(rtts)
        shuffled.append(replace(candidate, rtts=dict(rtts)))
    order.shuffle(shuffled)
    chain = cheapest_chain(whole, ALL, ask)
    assert chain == cheapest_chain(shuffled, ALL, ask)
    assert second_best(chain, 0, whole, ask) == second_best(chain, 0, shuffled, ask)


def test_of_equal_servers_smallest_peer_id_is_taken() -> None:
    assert cheapest_chain([server(name, 0, 6, rtt=0.5) for name in "bca"], ALL) == (Hop("a", ALL),)


def test_whole_server_beats_two_round_trips() -> None:
    candidates = [server("a", 0, 3, rtt=1), server("b", 3, 6, rtt=1), server("c", 0, 6, rtt=1, step=2)]
    assert cheapest_chain(candidates, ALL) == (Hop("c", ALL),)


def test_a_part_of_a_span_costs_its_share() -> None:
    candidates = [server("slow", 0, 4, step=4.0), server("fast", 2, 6, step=0.4, rtt=0.01), server("end", 4, 6, step=9)]
    assert cheapest_chain(candidates, ALL) == (Hop("slow", Span(0, 2)), Hop("fast", Span(2, 6)))


def test_chain_may_come_back_to_server_it_left() -> None:
    candidates = [server("slow", 0, 6, step=60.0), server("fast", 2, 4, step=0.1)]
    assert [hop.peer_id for hop in cheapest_chain(candidates, ALL)] == ["slow", "fast", "slow"]


def test_pushing_prefers_near_servers_and_counts_returns() -> None:
    start = replace(server("start", 0, 3, rtt=0.2), rtts={"neighbour": 0.01})
    neighbour, close = server("neighbour", 3, 6, rtt=0.22), server("close", 3, 6, rtt=0.2)
    candidates = [start, neighbour, close]
    relayed = cheapest_chain(candidates, ALL)
    pushed = cheapest_chain(candidates, ALL, Demand(pushed=True))
    assert [hop.peer_id for hop in relayed] == ["start", "close"]
    assert [hop.peer_id for hop in pushed] == ["start", "neighbour"]
    far_tail = [start, replace(neighbour, rtt=0.7), close]
    assert cheapest_chain(far_tail, ALL, Demand(pushed=True)) == relayed


def test_a_way_that_is_hardly_shorter_counts_too() -> None:
    candidates = [replace(server("a", 0, 3, rtt=1.0), rtts={"b": 1.98}), server("b", 3, 6, rtt=1.0)]
    candidates += [server("c", 3, 6, rtt=1.0, step=0.995)]
    assert [hop.peer_id for hop in cheapest_chain(candidates, ALL)] == ["a", "c"]
    assert [hop.peer_id for hop in cheapest_chain(candidates, ALL, Demand(pushed=True))] == ["a", "b"]


def test_slower_way_between_two_servers_is_not_taken() -> None:
    candidates = [replace(server("a", 0, 3, rtt=0.1), rtts={"b": 9.0}), server("b", 3, 6, rtt=0.1)]
    candidates += [server("c", 3, 6, rtt=0.2)]
    assert [hop.peer_id for hop in cheapest_chain(candidates, ALL, Demand(pushed=True))] == ["a", "b"]


def test_long_prompt_and_single_token_take_different_servers() -> None:
    near = replace(server("near", 0, 6, rtt=0.01, step=0.02), forward_tokens_per_second=100.0)
    strong = replace(server("strong", 0, 6, rtt=0.2, step=0.02), forward_tokens_per_second=10_000.0)
    assert cheapest_chain([near, strong], ALL) == (Hop("near", ALL),)
    assert cheapest_chain([near, strong], ALL, Demand(tokens=512)) == (Hop("strong", ALL),)


def test_thin_line_counts_with_both_sizes() -> None:
    thin, wide = replace(server("thin", 0, 6, rtt=0.01), seconds_per_byte=1e-5), server("wide", 0, 6, rtt=0.07)
    thin, wide = (replace(server, forward_tokens_per_second=1e6) for server in (thin, wide))
    assert cheapest_chain([thin, wide], ALL, Demand(token_bytes=1024)) == (Hop("thin", ALL),)
    assert cheapest_chain([thin, wide], ALL, Demand(token_bytes=1024, tokens=3)) == (Hop("wide", ALL),)


def test_a_busy_server_is_slower() -> None:
    busy, idle = replace(server("busy", 0, 6), queue_depth=10), server("idle", 0, 6, step=2.0)
    assert cheapest_chain([busy, idle], ALL) == (Hop("idle", ALL),)
    assert cheapest_chain([replace(busy, queue_depth=4), idle], ALL) == (Hop("busy", ALL),)


def test_failed_server_is_asked_last() -> None:
    failed, slow = replace(server("failed", 0, 6), penalty_seconds=60.0), server("slow", 0, 6, step=50.0)
    assert cheapest_chain([failed, slow], ALL) == (Hop("slow", ALL),)
    assert cheapest_chain([failed], ALL) == (Hop("failed", ALL),)


def test_a_full_server_is_the_last_resort() -> None:
    full, far = server("full", 0, 6, free=99), server("far", 0, 6, rtt=30.0)
    assert cheapest_chain([full, far], ALL, Demand(cache_tokens=100)) == (Hop("far", ALL),)
    assert cheapest_chain([full, far], ALL, Demand(cache_tokens=99)) == (Hop("full", ALL),)
    assert cheapest_chain([full], ALL, Demand(cache_tokens=100)) == (Hop("full", ALL),)


def test_no_announcement_is_worse_than_full() -> None:
    awful = RouteCandidate("awful", ALL, math.inf, math.inf, 0, 1e-300, 10**9, math.inf, {}, math.inf)
    full = server("full", 0, 6, free=-1)
    assert cheapest_chain([awful, full], ALL, Demand(tokens=10**6, token_bytes=10**6)) == (Hop("awful", ALL),)


def test_server_is_asked_for_no_longer_session() -> None:
    short, far = replace(server("short", 0, 6), max_session_length=1024), server("far", 0, 6, rtt=30.0)
    assert cheapest_chain([short, far], ALL, Demand(max_length=1024)) == (Hop("short", ALL),)
    assert cheapest_chain([short, far], ALL, Demand(max_length=1025)) == (Hop("far", ALL),)
    start = server("start", 0, 4)
    with pytest.raises(NoChainError, match=r"hold blocks 4:6 of tiny .* at most 1024 tokens, and 1025") as caught:
        cheapest_chain([short, start], ALL, model_name="tiny", demand=Demand(max_length=1025))
    assert caught.value.missing == (4, 5)
    chain = (Hop("start", Span(0, 4)), Hop("short", Span(4, 6)))
    assert second_best(chain, 0, [short, start], Demand(max_length=1025)) is None


def test_standby_may_be_several_but_never_itself() -> None:
    candidates = [server("best", 0, 6, step=0.1), server("a", 0, 3), server("b", 3, 6), server("c", 1, 6, step=9.0)]
    chain = cheapest_chain(candidates, ALL)
    assert chain == (Hop("best", ALL),)
    assert second_best(chain, 0, candidates) == (Hop("a", Span(0, 3)), Hop("b", Span(3, 6)))
    assert second_best(chain, 0, candidates[:2]) is None


def test_standby_of_pushed_chain_is_near_its_neighbours() -> None:
    chain = (Hop("first", Span(0, 2)), Hop("middle", Span(2, 3)), Hop("last", Span(3, 6)))
    candidates = [
        replace(server("first", 0, 3, rtt=0.3, step=3.0), rtts={"after-first": 0.01, "first": 0.0}),
        server("middle", 2, 3),
        server("last", 3, 6, rtt=0.3),
        server("after-first", 2, 3, rtt=0.2),
        replace(server("before-last", 2, 3, rtt=0.22), rtts={"last": 0.01}),
        server("near-client", 2, 3, rtt=0.15),
    ]

    def standby(*left_out: str, pushed: bool = True) -> str:
        known = [candidate for candidate in candidates if candidate.peer_id not in left_out]
        [hop] = second_best(chain, 1, known, Demand(pushed=pushed)) or ()
        return hop.peer_id

    assert standby(pushed=False) == "near-client"
    assert standby() == "after-first"
    assert standby("after-first") == "before-last"
    assert standby("after-first", "before-last") == "near-client"  # not "first", who cannot push to itself
    # Of a neighbour that nobody hears of any more, the ways are those through the client.
    assert standby("first") == "before-last"
    assert standby("first", "last") == "near-client"


absurd = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e-9, 0.5, 1e308])


@settings(max_examples=80, deadline=None)
@given(st.data(), st.booleans())
def test_absurd_announcements_do_no_harm(data: st.DataObject, pushed: bool) -> None:
    candidates = [
        RouteCandidate(
            name,
            Span(*data.draw(spans)),
            rtt=data.draw(absurd),
            step_seconds=data.draw(absurd),
            cache_tokens_free=data.draw(st.sampled_from([-(2**63), 0, 2**63])),
            forward_tokens_per_second=data.draw(absurd),
            queue_depth=data.draw(st.sampled_from([-5, 0, 2**40])),
            seconds_per_byte=data.draw(absurd),
            rtts={other: data.draw(absurd) for other in NAMES},
            penalty_seconds=data.draw(absurd),
            max_session_length=data.draw(st.sampled_from([None, 10**9])),
        )
        for name in NAMES
    ]
    honest = server("honest", 0, BLOCKS, rtt=0.1)
    ask = Demand(cache_tokens=100, tokens=7, token_bytes=100, pushed=pushed)
    chain = cheapest_chain([*candidates, honest], ALL, ask)
    check_shape(chain, [*candidates, honest], ALL)
    for index, hop in enumerate(chain):
        found = second_best(chain, index, [*candidates, honest], ask)
        if found is not None:
            check_shape(found, [*candidates, honest], hop.span)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, 1e308])
def test_what_is_no_time_is_the_longest(nonsense: float) -> None:
    slow = server("slow", 0, 6, step=COST.max_seconds - 1)
    assert cheapest_chain([server("nonsense", 0, 6, step=nonsense), slow], ALL) == (Hop("slow", ALL),)
    assert cheapest_chain([server("nonsense", 0, 6, rtt=nonsense, step=0.0), slow], ALL) == (Hop("slow", ALL),)


def test_nobody_computes_in_no_time() -> None:
    boaster = server("boaster", 0, 6, rtt=1.0, step=0.0)
    plain = server("plain", 0, 6, rtt=1.0 - 6 * COST.min_block_seconds, step=11 * COST.min_block_seconds)
    assert cheapest_chain([boaster, plain], ALL) == (Hop("plain", ALL),)


def test_nobody_at_all() -> None:
    with pytest.raises(NoChainError, match=r"blocks 0:6 of tiny \(6 blocks are needed\)"):
        cheapest_chain([], ALL, model_name="tiny")


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((3,), "block 3"),
        ((3, 4, 5), "blocks 3:6"),
        ((0, 2, 3, 9), "blocks 0, 2:4, 9"),
        ((0, 1), "blocks 0:2"),
        (range(0, 4096, 2), "blocks 0, 2, 4, 6, 8, 10, 12, 14 and 2040 more ranges"),
    ],
)
def test_blocks_in_words(blocks: Sequence[int], text: str) -> None:
    assert describe_blocks(blocks) == text


def test_blocks_held_in_parts_only_are_missing() -> None:
    together = (Span(1, 4),)
    parts = [replace(one, undivided=together) for one in (server("a", 0, 3), server("b", 2, 6))]
    with pytest.raises(NoChainError, match="no server of the swarm holds blocks 1:4 ") as caught:
        cheapest_chain(parts, Span(0, 6))
    assert caught.value.missing == (1, 2, 3)


def test_missing_blocks_of_overlapping_spans() -> None:
    assert missing_blocks([Span(1, 3), Span(2, 4)], ALL) == (0, 4, 5)


def test_prompts_keepers_are_asked_where_that_saves() -> None:
    slow, quick = server("slow", 0, 4, step=0.06), server("quick", 0, 4, step=0.05)
    again, best = (Hop("slow", Span(0, 4)),), (Hop("quick", Span(0, 4)),)
    # 100 tokens take the quick one 5 s to compute; 10 ms a step are lost in 500 steps.
    assert pays_again(again, best, [slow, quick], held=100, steps=499)
    assert not pays_again(again, best, [slow, quick], held=100, steps=501)
    prefilling = replace(quick, forward_tokens_per_second=100.0)
    assert pays_again(again, best, [slow, prefilling], held=100, steps=99)
    assert not pays_again(again, best, [slow, prefilling], held=100, steps=101)
    assert pays_again(best, best, [quick], held=0, steps=1000)


def test_prompts_keepers_that_cannot_serve_are_not() -> None:
    quick, again, best = server("quick", 0, 4), (Hop("slow", Span(0, 4)),), (Hop("quick", Span(0, 4)),)
    slow = server("slow", 0, 4, free=100)
    for other in (
        None,
        server("slow", 0, 3),
        replace(slow, cache_tokens_free=99),
        replace(slow, max_session_length=9),
        replace(slow, penalty_seconds=60.0),
    ):
        candidates = [quick] if other is None else [quick, other]
        assert not pays_again(again, best, candidates, 20, 10, Demand(cache_tokens=100, max_length=10))
    assert pays_again(again, best, [quick, slow], 20, 10, Demand(cache_tokens=100, max_length=10))
