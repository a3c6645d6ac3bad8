"""Which servers a session runs through: a pure function of what the swarm announces and what was measured.

Petals (NeurIPS 2023, section 3.2) takes the shortest path in a graph of servers, and replans with D* Lite. Here the
whole path is computed anew each time, exactly, in a few milliseconds: docs/routing.md.

**Cost** of one request, in seconds, with what one server takes as in cost.py. A message takes half a round
trip. A chain c -> s1 -> s2 -> c costs

    half(s1) + work(s1) + way(s1, s2) + work(s2) + half(s2)

where half(s) is half the round trip between client and s. work(s) adds up what its blocks compute, the handling of a
step, input and output at its seconds per byte, and its penalties. Through the client, way(a, b) = half(a) + half(b).
Pushed, way(a, b) is half of the servers' own round trip where a measured it. It is never more than through the client,
who can always hand everything on. So a pair that nobody measured counts as relayed.

**Algorithm.** Let reached[k, s] be the least time in which the first k blocks are done, the last of them by s. Then
reached[k + 1, s] = min(reached[k, s], min over a of reached[k, a] + way(a, s) + work of arriving) + time of a block.
That is exact. Costs are sums over hops, and no two hops in a row are on one server: staying there is never dearer than
leaving and coming back. Without measured pairs the inner minimum is one number for all s. A measured pair counts only
if it beats that number. Whether any pair of a sender can is one comparison. So of all pairs only the few that can
change the result are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as chained
from itertools import pairwise, repeat
from typing import Final

import numpy as np

from ...protocols.ids import Span
from ..errors import NoChainError
from . import cost
from .cost import Floats, Ints, bounded, one_way

NO_CACHE_SECONDS: Final = 1e7
"""Penalty of a server without cache: more than any chain of 4,096 blocks costs with the bounds above."""


_NAMED_RANGES: Final = 8
NOBODY_HOLDS: Final = "no server of the swarm holds"
"""How the text of a NoChainError begins whose blocks no candidate holds."""


@dataclass(frozen=True)
class RouteCandidate:
    """A server that could take part; one per peer. Times in seconds.

    `rtt` is between client and server. `rtts` are from this server to those that may follow it, by peer id, as it
    measured them. `step_seconds` is one decode step through the whole span with an empty queue,
    `forward_tokens_per_second` a long prefill (0: not measured, a token is as long as a step). `seconds_per_byte` is
    what a byte into or out of the server takes beyond the round trip. `penalty_seconds` makes a server that failed
    lately a last resort. A session longer than `max_session_length` tokens (None: no limit known) is never routed
    there. Within a span of `undivided` no chain goes from one server to another: the server holds all of these blocks
    of the model or none.
    """

    peer_id: str
    span: Span
    rtt: float
    step_seconds: float
    cache_tokens_free: int
    forward_tokens_per_second: float = 0.0
    queue_depth: int = 0
    seconds_per_byte: float = 0.0
    rtts: Mapping[str, float] = field(default_factory=dict, hash=False)
    penalty_seconds: float = 0.0
    max_session_length: int | None = None
    undivided: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Hop:
    """One server of a chain and the blocks that it computes there."""

    peer_id: str
    span: Span


@dataclass(frozen=True)
class Demand:
    """What a request asks of a route.

    It has `tokens` tokens (all rows), each of `token_bytes` on the wire. A session of `max_length` tokens is never
    routed to a server that takes only shorter ones. One without `cache_tokens` free is taken only where there is no
    other way. With `pushed`, servers send their outputs to one another.
    """

    cache_tokens: int = 0
    max_length: int = 0
    tokens: int = 1
    token_bytes: int = 0
    pushed: bool = False


ONE_TOKEN: Final = Demand()


def cheapest_chain(
    candidates: Sequence[RouteCandidate], wanted: Span, demand: Demand = ONE_TOKEN, model_name: str = "the model"
) -> tuple[Hop, ...]:
    """The chain of servers that covers `wanted` in the least time.

    Equal views give equal routes: of equal chains the one with the smallest peer ids, from the last server backwards,
    each beginning early.

    Raises:
        NoChainError: naming the blocks that nobody holds, or only servers that take shorter sessions.
    """
    servers = _usable(candidates, wanted, demand.max_length)
    graph = _graph(servers, wanted, demand)
    pairs = _measured_pairs(servers, graph) if demand.pushed else None
    found = _shortest(servers, wanted, graph, pairs, graph.half, graph.half)
    if found is None:
        raise _no_chain(candidates, servers, wanted, demand.max_length, model_name)
    return found


def second_best(
    chain: Sequence[Hop], hop_index: int, candidates: Sequence[RouteCandidate], demand: Demand = ONE_TOKEN
) -> tuple[Hop, ...] | None:
    """The cheapest servers for the blocks of one hop without that hop's peer; None if there are none.

    The other hops stay as they are: with `pushed`, the ways from and to the neighbours are counted. A neighbour may
    stand by too (in a session of its own), if it holds the blocks.
    """
    wanted = chain[hop_index].span
    others = [candidate for candidate in candidates if candidate.peer_id != chain[hop_index].peer_id]
    servers = _usable(others, wanted, demand.max_length)
    graph = _graph(servers, wanted, demand)
    if not demand.pushed:
        return _shortest(servers, wanted, graph, None, graph.half, graph.half)
    by_peer = {candidate.peer_id: candidate for candidate in candidates}
    arriving = leaving = graph.half
    # The neighbour's own half of a way is the same for all, so it is left out.
    if hop_index > 0 and (before := by_peer.get(chain[hop_index - 1].peer_id)):
        measured = one_way([_measured(before, server) for server in servers])
        arriving = np.minimum(graph.half, measured - bounded([before.rtt]) / 2)
    if hop_index + 1 < len(chain) and (after := by_peer.get(chain[hop_index + 1].peer_id)):
        measured = one_way([_measured(server, after) for server in servers])
        leaving = np.minimum(graph.half, measured - bounded([after.rtt]) / 2)
    return _shortest(servers, wanted, graph, _measured_pairs(servers, graph), arriving, leaving)


def chain_seconds(chain: Sequence[Hop], candidates: Sequence[RouteCandidate], demand: Demand = ONE_TOKEN) -> float:
    """What a request over `chain` is expected to take, as `cheapest_chain` reckons; all of its peers are candidates."""
    by_peer = {candidate.peer_id: candidate for candidate in candidates}
    servers = [by_peer[hop.peer_id] for hop in chain]
    graph = _graph(servers, Span(chain[0].span.start, chain[-1].span.end), demand)
    ways = graph.half[:-1] + graph.half[1:]
    if demand.pushed:
        ways = np.minimum(ways, one_way([_measured(one, other) for one, other in pairwise(servers)]))
    computing = graph.block @ np.array([len(hop.span) for hop in chain], float) + graph.hop.sum()
    return float(graph.half[0] + computing + ways.sum() + graph.half[-1])


def pays_again(
    chain: Sequence[Hop],
    best: Sequence[Hop],
    candidates: Sequence[RouteCandidate],
    held: int,
    steps: int,
    demand: Demand = ONE_TOKEN,
) -> bool:
    """Whether a session of `steps` decode steps is over sooner on `chain` than on the `best` one. The servers of
    `chain` have kept its first `held` tokens, which the best one would compute.

    Never if a server of it holds other blocks now, is full, or takes no session so long.
    """
    by_peer = {candidate.peer_id: candidate for candidate in candidates}
    for hop in chain:
        server = by_peer.get(hop.peer_id)
        if server is None or not server.span.covers(hop.span) or server.cache_tokens_free < demand.cache_tokens:
            return False
        if server.max_session_length is not None and server.max_session_length < demand.max_length:
            return False

    computing = 0.0
    for hop in best:
        server = by_peer[hop.peer_id]
        speed = server.forward_tokens_per_second
        token = min(server.step_seconds, 1 / speed) if speed > 0 else server.step_seconds
        computing += held * token * len(hop.span) / len(server.span)
    longer = chain_seconds(chain, candidates, demand) - chain_seconds(best, candidates, demand)
    return steps * longer <= computing


@dataclass(frozen=True)
class _RouteGraph:
    """Arrays over the usable servers, in order of peer id."""

    start: Ints  # first block
    end: Ints  # block after the last
    half: Floats  # half the round trip to the client
    hop: Floats  # what a hop costs there beside its blocks and ways: handling, bytes, penalties
    block: Floats  # seconds per block


def _usable(candidates: Sequence[RouteCandidate], wanted: Span, max_length: int) -> list[RouteCandidate]:
    """Those that hold a wanted block and take sessions so long, in order of peer id."""
    return sorted(
        (
            candidate
            for candidate in candidates
            if candidate.span.overlaps(wanted)
            and (candidate.max_session_length is None or candidate.max_session_length >= max_length)
        ),
        key=lambda candidate: candidate.peer_id,
    )


def _graph(servers: Sequence[RouteCandidate], wanted: Span, demand: Demand) -> _RouteGraph:
    computing = cost.span_seconds(
        [server.step_seconds for server in servers],
        [server.forward_tokens_per_second for server in servers],
        [server.queue_depth for server in servers],
        demand.tokens,
    )
    in_and_out = cost.transfer_seconds(
        demand.tokens, demand.token_bytes, [server.seconds_per_byte for server in servers]
    )
    full = np.array([server.cache_tokens_free < demand.cache_tokens for server in servers], float)
    return _RouteGraph(
        start=np.array([max(server.span.start, wanted.start) for server in servers], np.intp),
        end=np.array([min(server.span.end, wanted.end) for server in servers], np.intp),
        half=bounded([server.rtt for server in servers]) / 2,
        hop=cost.COST.handling_seconds
        + in_and_out
        + bounded([server.penalty_seconds for server in servers])
        + NO_CACHE_SECONDS * full,
        block=cost.block_seconds(computing, [len(server.span) for server in servers]),
    )


def _measured(sender: RouteCandidate, receiver: RouteCandidate) -> float:
    """Their round trip, NaN if it is not known. Nobody pushes to itself."""
    return math.nan if sender.peer_id == receiver.peer_id else sender.rtts.get(receiver.peer_id, math.nan)


@dataclass(frozen=True)
class _Pairs:
    """Ways between servers that are shorter than through the client, in order of the sender.

    `seconds` is the way less the receiver's `half`. So the way from any sender to any receiver is the receiver's `half`
    and either this or the sender's `half`. The two compare without the receiver.
    """

    sender: Ints
    receiver: Ints
    seconds: Floats
    first: Ints  # per server: where its pairs begin
    count: Ints  # per server: how many
    least: Floats  # per server: the least of its `seconds`


def _measured_pairs(servers: Sequence[RouteCandidate], graph: _RouteGraph) -> _Pairs | None:
    """The pairs that can matter: measured, quicker than through the client, and the one can follow the other."""
    measured = [len(server.rtts) for server in servers]
    total = sum(measured)
    if not total:
        return None
    index = {server.peer_id: number for number, server in enumerate(servers)}
    names = chained.from_iterable(server.rtts for server in servers)
    receiver = np.fromiter(map(index.get, names, repeat(-1)), np.intp, total)  # -1: not usable
    seconds = one_way(np.fromiter(chained.from_iterable(server.rtts.values() for server in servers), float, total))
    seconds -= graph.half[receiver]
    sender = np.repeat(np.arange(len(servers)), measured)
    earliest = np.maximum(graph.start[sender] + 1, graph.start[receiver])
    latest = np.minimum(graph.end[sender], graph.end[receiver] - 1)
    usable = (receiver >= 0) & (receiver != sender)
    kept = np.flatnonzero(usable & (earliest <= latest) & (seconds < graph.half[sender]))
    sender, receiver, seconds = sender[kept], receiver[kept], seconds[kept]
    count = np.bincount(sender, minlength=len(servers))
    least = np.full(len(servers), np.inf)
    np.minimum.at(least, sender, seconds)
    return _Pairs(sender, receiver, seconds, np.cumsum(count) - count, count, least)


def _shortest(
    servers: Sequence[RouteCandidate],
    wanted: Span,
    graph: _RouteGraph,
    pairs: _Pairs | None,
    arriving: Floats,
    leaving: Floats,
) -> tuple[Hop, ...] | None:
    """The algorithm of the module's docstring; `arriving` and `leaving` are the ways before and after the chain."""
    if not servers:
        return None
    numbers = np.arange(wanted.start, wanted.end)[:, None]
    per_block = np.where((graph.start <= numbers) & (numbers < graph.end), graph.block, np.inf)
    reached = np.empty((len(wanted) + 1, len(servers)))
    reached[1] = arriving + graph.hop + per_block[0]
    handed_over = graph.half + graph.hop
    undivided = {span for server in servers for span in server.undivided}
    inside = {block for span in undivided for block in range(span.start + 1, span.end)}
    for done in range(1, len(wanted)):
        at = reached[done]
        if wanted.start + done in inside:
            reached[done + 1] = at + per_block[done]
            continue
        through_client = (at + graph.half).min()
        arrival = through_client if pairs is None else _through_pairs(at, through_client, pairs)
        np.minimum(at, arrival + handed_over, out=reached[done + 1])
        reached[done + 1] += per_block[done]

    server = int(np.argmin(reached[-1] + leaving))
    if np.isinf(reached[-1, server]):
        return None
    hops: list[Hop] = []
    end = wanted.end
    for done in range(len(wanted) - 1, 0, -1):
        if reached[done + 1, server] == reached[done, server] + per_block[done, server]:
            continue  # it was there before
        hops.append(Hop(servers[server].peer_id, Span(wanted.start + done, end)))
        end = wanted.start + done
        ways = graph.half
        if pairs is not None:
            ways = ways.copy()
            into = pairs.receiver == server
            np.minimum.at(ways, pairs.sender[into], pairs.seconds[into])
        server = int(np.argmin(reached[done] + ways))
    hops.append(Hop(servers[server].peer_id, Span(wanted.start, end)))
    return tuple(reversed(hops))


def _through_pairs(at: Floats, through_client: float, pairs: _Pairs) -> Floats:
    """Per receiver, when the blocks done so far are there at the earliest, less its `half`."""
    arrival = np.full(len(at), through_client)
    senders = np.flatnonzero(at + pairs.least < through_client)
    if senders.size:
        count = pairs.count[senders]
        # Positions of all pairs of these senders: a range for each, one behind the other.
        chosen = np.repeat(pairs.first[senders] - np.cumsum(count) + count, count) + np.arange(count.sum())
        np.minimum.at(arrival, pairs.receiver[chosen], np.repeat(at[senders], count) + pairs.seconds[chosen])
    return arrival


def _no_chain(
    candidates: Sequence[RouteCandidate],
    usable: Sequence[RouteCandidate],
    wanted: Span,
    max_length: int,
    model_name: str,
) -> NoChainError:
    missing = missing_blocks([server.span for server in usable], wanted)
    if not missing:  # each is held, and some that go together nowhere
        undivided = sorted({span for server in usable for span in server.undivided})
        apart = [span for span in undivided if not any(server.span.covers(span) for server in usable)]
        missing = tuple(block for span in apart for block in range(span.start, span.end))
    elif not missing_blocks([candidate.span for candidate in candidates], wanted):
        longest = min(
            max(candidate.max_session_length or 0 for candidate in candidates if block in candidate.span)
            for block in missing
        )
        return NoChainError(
            f"the servers that hold {describe_blocks(missing)} of {model_name} take sessions of at most {longest} "
            f"tokens, and {max_length} are wanted: ask for less",
            missing,
        )
    return NoChainError(
        f"{NOBODY_HOLDS} {describe_blocks(missing)} of {model_name} "
        f"({wanted.end} blocks are needed): start one with `petalnode serve`, or try again when one is back",
        missing,
    )


def missing_blocks(spans: Collection[Span], wanted: Span) -> tuple[int, ...]:
    """The blocks of `wanted` that no span holds, in order."""
    return tuple(block for block in range(wanted.start, wanted.end) if not any(block in span for span in spans))


def describe_blocks(blocks: Sequence[int]) -> str:
    """Block numbers for a person: "blocks 3, 7:12" with half-open ranges, of which the first eight are named. What
    servers announce can have holes at every other block."""
    parts: list[str] = []
    start = previous = None
    for block in [*blocks, None]:
        if start is not None and previous is not None and block != previous + 1:
            parts.append(str(start) if previous == start else f"{start}:{previous + 1}")
            start = block
        elif start is None:
            start = block
        previous = block
    more = f" and {len(parts) - _NAMED_RANGES} more ranges" if len(parts) > _NAMED_RANGES else ""
    return ("block " if len(blocks) == 1 else "blocks ") + ", ".join(parts[:_NAMED_RANGES]) + more
