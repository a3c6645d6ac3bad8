"""Over which chains a batch goes, and how much of it over each: pure functions of what the router knows.

SWARM parallelism (Ryabinin et al. 2023) sends each micro-batch to a server in proportion to how fast it is. Here all
servers of a pass are known beforehand, so the same is planned: each micro-batch goes where it will be done first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....protocols.ids import Span
from ....protocols.training import MICRO_BATCH_TOKENS
from ...swarm.cost import COST, Estimate
from ...swarm.routing import Demand, Hop, RouteCandidate, cheapest_chain

MAX_CHAINS: Final = 8
PER_STAGE: Final = 4
"""Micro-batches for each server that works on a batch: with fewer, they wait for the first and the last too long."""
LEAST_TOKENS: Final = 256
"""Of a micro-batch: matrix products with fewer rows use a processor badly."""

Chain = tuple[Hop, ...]


@dataclass(frozen=True)
class Stage:
    """One micro-batch at one server: `work` seconds for which the server does nothing else, after `way` seconds."""

    peer_id: str
    work: float
    way: float


def choose_chains(
    candidates: Sequence[RouteCandidate], wanted: Span, *, tokens: int, token_bytes: int, length: int, model_name: str
) -> list[Chain]:
    """Chains that cover `wanted`, the best first, each with a server that the ones before it do not use.

    `tokens` is what one micro-batch has, in rows of `length`; `token_bytes` the size of a token's hidden state on the
    wire.

    Raises:
        NoChainError: naming the blocks that nobody holds.
    """
    chains: list[Chain] = []
    used: set[str] = set()
    demand = Demand(max_length=length, tokens=tokens, token_bytes=token_bytes)
    while len(chains) < MAX_CHAINS:
        dearer = [
            replace(server, penalty_seconds=server.penalty_seconds + COST.used_seconds * (server.peer_id in used))
            for server in candidates
        ]
        chain = cheapest_chain(dearer, wanted, demand, model_name)
        if all(hop.peer_id in used for hop in chain):
            break
        chains.append(chain)
        used.update(hop.peer_id for hop in chain)
    return chains


def seconds_of(server: RouteCandidate) -> float:
    """What a token takes in one block there, by the server's own measurement of a prefill."""
    speed = server.forward_tokens_per_second
    return (1 / speed if speed > 0 else server.step_seconds) / len(server.span)


def stages_of(
    chain: Chain,
    candidates: Mapping[str, RouteCandidate],
    seconds: Mapping[str, Estimate],
    *,
    tokens: int,
    token_bytes: int,
) -> list[Stage]:
    """What a micro-batch of `tokens` tokens takes at each server of a chain; `seconds` a token in a block there."""
    stages = []
    for hop in chain:
        server = candidates[hop.peer_id]
        work = tokens * len(hop.span) * seconds[hop.peer_id].value * (1 + COST.load_per_waiting * server.queue_depth)
        way = server.rtt + 2 * tokens * token_bytes * server.seconds_per_byte + server.penalty_seconds
        stages.append(Stage(hop.peer_id, work, way))
    return stages


def cut(rows: int, most: int) -> list[int]:
    """Rows of each micro-batch of a batch: `most` at most, and of the first and the last half as many.

    Servers have nothing to do until the first micro-batch reaches them, nor while the last one is at the others. These
    are therefore small; in between, larger ones use a processor better.
    """
    if rows <= most:
        return [rows]
    end = (most + 1) // 2
    between = rows - 2 * end
    count = -(-between // most)
    return [end, *(between // count + (number < between % count) for number in range(count)), end]


def apportion(count: int, chains: Sequence[Sequence[Stage]]) -> list[int]:
    """For each of `count` micro-batches the number of its chain: one after the other to where it is done first.

    Chains may share servers; a server does one micro-batch at a time.
    """
    alone = [_done(stages, {}) for stages in chains]
    usable = [number for number, seconds in enumerate(alone) if seconds <= COST.behind * min(alone)]
    free: dict[str, float] = {}
    chosen = []
    for _ in range(count):
        best = min(usable, key=lambda number: _done(chains[number], dict(free)))
        chosen.append(best)
        _done(chains[best], free)
    return chosen


def _done(stages: Sequence[Stage], free: dict[str, float]) -> float:
    """When a micro-batch is through, with servers that are `free` from then on, which is brought up to date."""
    now = 0.0
    for stage in stages:
        now = free[stage.peer_id] = max(now + stage.way, free.get(stage.peer_id, 0.0)) + stage.work
    return now


def rows_of_micro_batch(rows: int, tokens: int, servers: int) -> int:
    """Rows of one micro-batch of a batch of `rows` rows of `tokens` tokens, for `servers` servers in all.

    They are small enough that all servers have something to do most of the time, but have at least `LEAST_TOKENS`
    tokens. They never have more than `MICRO_BATCH_TOKENS`, unless one row is longer: it cannot be cut without a cache.
    """
    fair = rows // (PER_STAGE * servers)
    enough = -(-LEAST_TOKENS // tokens)
    return max(1, min(max(fair, enough), MICRO_BATCH_TOKENS // tokens, rows))
