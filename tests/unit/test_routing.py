from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.routing import Candidate, Hop, cheapest_chain, describe_blocks, missing_blocks
from petalnode.node.errors import NoChainError
from petalnode.protocols.ids import Span

BLOCKS = 6


def server(name: str, start: int, end: int, *, rtt: float = 0.0, step: float = 1.0, free: int = 1000) -> Candidate:
    return Candidate(name, Span(start, end), rtt, step, free)


def cost(chain: tuple[Hop, ...], candidates: list[Candidate]) -> float:
    by_peer = {each.peer_id: each for each in candidates}
    return sum(
        by_peer[hop.peer_id].rtt
        + by_peer[hop.peer_id].step_seconds * len(hop.span) / len(by_peer[hop.peer_id].span)
        for hop in chain
    )


def cheapest_by_trying_all(candidates: list[Candidate], wanted: Span) -> float:
    best = math.inf

    def extend(block: int, spent: float, last: str) -> None:
        nonlocal best
        if block == wanted.end:
            best = min(best, spent)
            return
        for each in candidates:
            if block in each.span and each.peer_id != last:
                for end in range(block + 1, min(each.span.end, wanted.end) + 1):
                    share = (end - block) / len(each.span)
                    extend(end, spent + each.rtt + each.step_seconds * share, each.peer_id)

    extend(wanted.start, 0.0, "")
    return best


spans = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS)).filter(lambda pair: pair[0] < pair[1])
costs = st.floats(0.001, 2.0)
swarms = st.lists(st.tuples(spans, costs, costs), max_size=5).map(
    lambda rows: [
        server(f"peer-{index}", *span, rtt=rtt, step=step) for index, (span, rtt, step) in enumerate(rows)
    ]
)


@given(swarms, spans)
def test_no_chain_is_cheaper_and_what_is_missing_is_named(candidates: list[Candidate], pair: tuple[int, int]) -> None:
    wanted = Span(*pair)
    held = {block for each in candidates for block in range(each.span.start, each.span.end)}
    missing = tuple(block for block in range(wanted.start, wanted.end) if block not in held)
    if missing:
        with pytest.raises(NoChainError) as caught:
            cheapest_chain(candidates, wanted)
        assert caught.value.missing == missing
        assert describe_blocks(missing) in str(caught.value)
        return
    chain = cheapest_chain(candidates, wanted)
    edges = [wanted.start, *(hop.span.end for hop in chain)]
    assert [hop.span.start for hop in chain] == edges[:-1] and edges[-1] == wanted.end
    by_peer = {each.peer_id: each for each in candidates}
    assert all(by_peer[hop.peer_id].span.covers(hop.span) for hop in chain)
    assert all(one.peer_id != other.peer_id for one, other in zip(chain, chain[1:], strict=False))
    assert cost(chain, candidates) == pytest.approx(cheapest_by_trying_all(candidates, wanted))


@given(swarms, st.randoms())
def test_equal_views_give_equal_routes(candidates: list[Candidate], order: random.Random) -> None:
    whole = [*candidates, server("everything", 0, BLOCKS, rtt=0.5), server("everything too", 0, BLOCKS, rtt=0.5)]
    shuffled = list(whole)
    order.shuffle(shuffled)
    assert cheapest_chain(whole, Span(0, BLOCKS)) == cheapest_chain(shuffled, Span(0, BLOCKS))


def test_one_server_with_all_blocks_beats_two_round_trips() -> None:
    candidates = [server("a", 0, 3, rtt=1), server("b", 3, 6, rtt=1), server("c", 0, 6, rtt=1, step=2)]
    assert cheapest_chain(candidates, Span(0, 6)) == (Hop("c", Span(0, 6)),)


def test_a_part_of_a_span_costs_its_share() -> None:
    candidates = [server("slow", 0, 4, step=4.0), server("fast", 2, 6, step=0.4, rtt=0.01), server("end", 4, 6, step=9)]
    assert cheapest_chain(candidates, Span(0, 6)) == (Hop("slow", Span(0, 2)), Hop("fast", Span(2, 6)))


def test_a_full_server_is_the_last_resort() -> None:
    full, far = server("full", 0, 6, free=99), server("far", 0, 6, rtt=30.0)
    assert cheapest_chain([full, far], Span(0, 6), cache_tokens=100) == (Hop("far", Span(0, 6)),)
    assert cheapest_chain([full, far], Span(0, 6), cache_tokens=99) == (Hop("full", Span(0, 6)),)
    assert cheapest_chain([full], Span(0, 6), cache_tokens=100) == (Hop("full", Span(0, 6)),)


def test_nobody_at_all() -> None:
    with pytest.raises(NoChainError, match=r"blocks 0:6 of tiny \(6 blocks are needed\)"):
        cheapest_chain([], Span(0, 6), model_name="tiny")


@pytest.mark.parametrize(
    ("blocks", "text"),
    [((3,), "block 3"), ((3, 4, 5), "blocks 3:6"), ((0, 2, 3, 9), "blocks 0, 2:4, 9"), ((0, 1), "blocks 0:2")],
)
def test_blocks_in_words(blocks: tuple[int, ...], text: str) -> None:
    assert describe_blocks(blocks) == text


def test_missing_blocks_of_overlapping_spans() -> None:
    assert missing_blocks([Span(1, 3), Span(2, 4)], Span(0, 6)) == (0, 4, 5)
