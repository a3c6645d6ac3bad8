"""Which blocks a new server takes, and how many: pure functions of the swarm's view and of this machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...protocols.ids import Span
from ..errors import MachineError

CACHE_SHARE: Final = 0.25
"""Part of the free memory that attention caches may take when nobody says otherwise."""
WEIGHT_SHARE: Final = 0.6
MAX_CACHE_TOKENS: Final = 1 << 17
MIN_CACHE_TOKENS: Final = 512


@dataclass(frozen=True)
class Held:
    """A span that somebody serves; `throughput` in decode steps per second."""

    span: Span
    throughput: float


def most_needed(held: Sequence[Held], num_blocks: int, count: int) -> Span:
    """The span of `count` blocks that the swarm needs most.

    Petals (NeurIPS 2023, appendix D, equation 1): the window whose sorted throughputs are the smallest in
    lexicographic order, so that gaps come first and the weakest blocks next. Ties go to the lowest start.
    """
    count = min(count, num_blocks)
    throughput = [0.0] * num_blocks
    for server in held:
        for block in range(server.span.start, min(server.span.end, num_blocks)):
            throughput[block] += server.throughput
    start = min(range(num_blocks - count + 1), key=lambda at: (sorted(throughput[at : at + count]), at))
    return Span(start, start + count)


def blocks_that_fit(free_bytes: int, block_bytes: int, num_blocks: int) -> int:
    """How many blocks of `block_bytes` this machine holds beside caches, activations and everything else.

    Raises:
        MachineError: if not even one fits.
    """
    count = min(num_blocks, int(free_bytes * WEIGHT_SHARE) // max(1, block_bytes))
    if count < 1:
        raise MachineError(
            f"one block of this model takes {block_bytes / 2**20:.0f} MiB and {free_bytes / 2**20:.0f} MiB of memory "
            "are free: close other programs, or serve a smaller model"
        )
    return count


def cache_tokens_that_fit(free_bytes: int, bytes_per_token: int) -> int:
    """The attention cache that a server offers by default, in tokens through all of its blocks."""
    fitting = int(free_bytes * CACHE_SHARE) // max(1, bytes_per_token)
    return max(MIN_CACHE_TOKENS, min(MAX_CACHE_TOKENS, fitting))
