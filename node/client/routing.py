"""Which servers a session runs through: a pure function of what the swarm announces and what was measured.

Petals (NeurIPS 2023, section 3.2) routes an inference session over the shortest path in a graph of servers; this is
that path for a client that relays every hidden state itself: each server costs a round trip and its share of compute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...protocols.ids import Span
from ..errors import NoChainError


@dataclass(frozen=True)
class Candidate:
    """A server that could take part. `rtt` and `step_seconds` (one decode step through its span) in seconds."""

    peer_id: str
    span: Span
    rtt: float
    step_seconds: float
    cache_tokens_free: int


@dataclass(frozen=True)
class Hop:
    """One server of a chain and the blocks that it computes there."""

    peer_id: str
    span: Span


def cheapest_chain(
    candidates: Sequence[Candidate], wanted: Span, *, cache_tokens: int = 0, model_name: str = "the model"
) -> tuple[Hop, ...]:
    """The chain of servers that covers `wanted` in the least time per decode step.

    Dynamic programming over block boundaries: exact, because the cost of a chain is the sum over its hops. A server
    without `cache_tokens` free is taken only where no other holds a block. Ties go to the smaller peer id, so that
    equal views give equal routes.

    Raises:
        NoChainError: naming the blocks that nobody holds.
    """
    best: dict[int, tuple[float, tuple[Hop, ...]]] = {wanted.start: (0.0, ())}
    by_peer = sorted(candidates, key=lambda candidate: candidate.peer_id)
    for block in range(wanted.start, wanted.end):
        if block not in best:
            continue
        cost, hops = best[block]
        for server in by_peer:
            # Two hops in a row on one server would be one hop with a round trip too many.
            if block not in server.span or (hops and hops[-1].peer_id == server.peer_id):
                continue
            # A full cache means waiting in its queue: worse than any detour, better than no answer.
            penalty = 0.0 if server.cache_tokens_free >= cache_tokens else 1000.0
            for end in range(block + 1, min(server.span.end, wanted.end) + 1):
                share = (end - block) / len(server.span)
                total = cost + server.rtt + penalty + server.step_seconds * share
                if total < best.get(end, (math.inf,))[0]:
                    best[end] = (total, (*hops, Hop(server.peer_id, Span(block, end))))
    if wanted.end not in best:
        missing = missing_blocks([server.span for server in candidates], wanted)
        raise NoChainError(
            f"no server of the swarm holds {describe_blocks(missing)} of {model_name} "
            f"({wanted.end} blocks are needed): start one with `petalnode serve`, or try again when one is back",
            missing,
        )
    return best[wanted.end][1]


def missing_blocks(spans: Collection[Span], wanted: Span) -> tuple[int, ...]:
    """The blocks of `wanted` that no span holds, in order."""
    return tuple(
        block for block in range(wanted.start, wanted.end) if not any(block in span for span in spans)
    )


def describe_blocks(blocks: Sequence[int]) -> str:
    """Block numbers for a person: "blocks 3, 7:12" with half-open ranges."""
    parts: list[str] = []
    start = previous = None
    for block in [*blocks, None]:
        if start is not None and previous is not None and block != previous + 1:
            parts.append(str(start) if previous == start else f"{start}:{previous + 1}")
            start = block
        elif start is None:
            start = block
        previous = block
    return ("block " if len(blocks) == 1 else "blocks ") + ", ".join(parts)
