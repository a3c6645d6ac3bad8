"""Chains of servers, their cost and all of them, written plainly; random swarms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from petalnode.node.swarm.cost import COST
from petalnode.node.swarm.routing import (
    NO_CACHE_SECONDS,
    ONE_TOKEN,
    Demand,
    Hop,
    RouteCandidate,
)
from petalnode.protocols.ids import Span

BLOCKS = 6
ALL = Span(0, BLOCKS)


def server(name: str, start: int, end: int, *, rtt: float = 0.0, step: float = 1.0, free: int = 1000) -> RouteCandidate:
    return RouteCandidate(name, Span(start, end), rtt, step, free)


def way(one: RouteCandidate | None, other: RouteCandidate | None, pushed: bool) -> float:
    """Seconds that a message takes; None is the client."""
    through_client = sum(server.rtt / 2 for server in (one, other) if server is not None)
    if one is None or other is None or one is other or not pushed:
        return through_client
    return min(through_client, one.rtts.get(other.peer_id, math.inf) / 2)


def work(server: RouteCandidate, blocks: int, ask: Demand) -> float:
    prefill = (
        ask.tokens / server.forward_tokens_per_second
        if server.forward_tokens_per_second
        else ask.tokens * server.step_seconds
    )
    compute = (
        max(server.step_seconds, prefill) * (1 + COST.load_per_waiting * server.queue_depth) * blocks / len(server.span)
    )
    no_room = NO_CACHE_SECONDS if server.cache_tokens_free < ask.cache_tokens else 0
    return (
        COST.handling_seconds
        + compute
        + 2 * ask.tokens * ask.token_bytes * server.seconds_per_byte
        + server.penalty_seconds
        + no_room
    )


def cost(
    chain: Sequence[Hop],
    candidates: Sequence[RouteCandidate],
    ask: Demand = ONE_TOKEN,
    before: RouteCandidate | None = None,
    after: RouteCandidate | None = None,
) -> float:
    by_peer = {candidate.peer_id: candidate for candidate in candidates}
    on_the_way = [before, *(by_peer[hop.peer_id] for hop in chain), after]
    ways = sum(way(one, other, ask.pushed) for one, other in itertools.pairwise(on_the_way))
    return ways + sum(work(by_peer[hop.peer_id], len(hop.span), ask) for hop in chain)


def all_chains(candidates: Sequence[RouteCandidate], wanted: Span) -> list[tuple[Hop, ...]]:
    """Every chain with no two hops in a row on one server."""
    found: list[tuple[Hop, ...]] = []

    def extend(hops: tuple[Hop, ...], block: int) -> None:
        if block == wanted.end:
            found.append(hops)
            return
        for candidate in candidates:
            if block in candidate.span and (not hops or hops[-1].peer_id != candidate.peer_id):
                for end in range(block + 1, min(candidate.span.end, wanted.end) + 1):
                    extend((*hops, Hop(candidate.peer_id, Span(block, end))), end)

    extend((), wanted.start)
    return found


def check_shape(chain: Sequence[Hop], candidates: Sequence[RouteCandidate], wanted: Span) -> None:
    edges = [wanted.start, *(hop.span.end for hop in chain)]
    assert [hop.span.start for hop in chain] == edges[:-1] and edges[-1] == wanted.end
    by_peer = {candidate.peer_id: candidate for candidate in candidates}
    assert all(by_peer[hop.peer_id].span.covers(hop.span) for hop in chain)
    assert all(one.peer_id != other.peer_id for one, other in itertools.pairwise(chain))


NAMES = [f"peer-{index}" for index in range(4)]
spans = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS)).filter(lambda pair: pair[0] < pair[1])
costs = st.floats(0.001, 2.0)


@st.composite
def swarms(draw: st.DrawFn) -> list[RouteCandidate]:
    names = NAMES[: draw(st.integers(0, len(NAMES)))]
    return [
        RouteCandidate(
            name,
            Span(*draw(spans)),
            rtt=draw(costs),
            step_seconds=draw(costs),
            cache_tokens_free=draw(st.sampled_from([0, 100])),
            forward_tokens_per_second=draw(st.sampled_from([0.0, 5.0, 500.0])),
            queue_depth=draw(st.integers(0, 4)),
            seconds_per_byte=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
            # Short, middling and longer than through the client; of servers that are not there, too.
            rtts=draw(st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.sampled_from([0.0, 0.01, 0.5, 5.0]))),
            penalty_seconds=draw(st.sampled_from([0.0, 0.0, 3.0])),
        )
        for name in names
    ]


asks = st.builds(
    Demand,
    cache_tokens=st.sampled_from([0, 50]),
    tokens=st.sampled_from([1, 64]),
    token_bytes=st.sampled_from([0, 1024]),
    pushed=st.booleans(),
)
