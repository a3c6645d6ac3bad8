"""Trusted blocks: the first and the last blocks of a model, where one's own servers compute and nobody else.

The prompt can be recovered from hidden states near the embeddings, the answer from those near the head (figures:
docs/privacy.md). So a person may name servers of his own for both ends, while strangers serve the middle.

A server that is not trusted takes part in planning with what is left of its span (`restrict`). Routes, standbys,
replacements, compared chains and batches are all planned from such candidates, so none can have it elsewhere; and
`permits` is asked again before a stream to a server is opened.

Trusted servers do not push to others (`may_push`): the receipt that comes with a push has the hash of the pusher's
input. In a decode step that is one of as many embeddings as the model has tokens, which are soon tried. The client
sends such an output itself. It names the receipt by a hash that covers two numbers which nobody else knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...protocols.ids import Span
from ..errors import BadInput
from .routing import Hop, RouteCandidate

TRUSTED_BLOCKS: Final = 2
"""At each end, unless told otherwise."""


@dataclass(frozen=True)
class TrustedServers:
    """`peers` (peer ids) alone compute the first and the last `blocks` blocks of a model. Without `peers`, all servers
    may compute all blocks.

    Raises:
        BadInput: fewer than one block.
    """

    peers: frozenset[str] = frozenset()
    blocks: int = TRUSTED_BLOCKS

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise BadInput(f"{self.blocks} trusted blocks at each end: give 1 or more")

    def middle(self, num_blocks: int) -> Span | None:
        """The blocks that every server may compute; None if there are none."""
        if not self.peers:
            return Span(0, num_blocks)
        return Span(self.blocks, num_blocks - self.blocks) if num_blocks > 2 * self.blocks else None

    def usable(self, peer_id: str, span: Span, num_blocks: int) -> Span | None:
        """What this server may compute of the blocks that it holds; None for nothing."""
        if peer_id in self.peers:
            return span
        middle = self.middle(num_blocks)
        if middle is None or not middle.overlaps(span):
            return None
        return Span(max(span.start, middle.start), min(span.end, middle.end))

    def permits(self, hop: Hop, num_blocks: int) -> bool:
        """Whether the hidden states that go in and out of `hop` may be seen there."""
        return not self.peers or self.usable(hop.peer_id, hop.span, num_blocks) == hop.span

    def may_push(self, sender: str, receiver: str) -> bool:
        """Whether one server may send its output, and its receipt, to another."""
        return sender not in self.peers or receiver in self.peers

    def restrict(self, candidates: Iterable[RouteCandidate], num_blocks: int) -> tuple[RouteCandidate, ...]:
        """The candidates with the blocks that they may compute; those without any are left out.

        A block takes them as long as before; what may not be pushed goes through the client.
        """
        if not self.peers:
            return tuple(candidates)
        found = []
        for candidate in candidates:
            usable = self.usable(candidate.peer_id, candidate.span, num_blocks)
            if usable is None:
                continue
            if candidate.peer_id in self.peers:
                candidate = replace(candidate, rtts={to: rtt for to, rtt in candidate.rtts.items() if to in self.peers})
            if usable != candidate.span:
                part = len(usable) / len(candidate.span)
                candidate = replace(
                    candidate,
                    span=usable,
                    step_seconds=candidate.step_seconds * part,
                    forward_tokens_per_second=candidate.forward_tokens_per_second / part,
                )
            found.append(candidate)
        return tuple(found)

    def closed(self, blocks: Collection[int], num_blocks: int) -> tuple[int, ...]:
        """Those of `blocks` that only trusted servers may compute, in order."""
        middle = self.middle(num_blocks)
        return tuple(sorted(block for block in blocks if middle is None or block not in middle))


def trusted_servers(
    peers: Sequence[str], blocks: int | None, *, allowed: Collection[str] = (), blocked: Collection[str] = ()
) -> TrustedServers:
    """What a person has asked for; `blocks` is None where nothing was said. No `allowed` allows everybody.

    Raises:
        BadInput: blocks without servers, or servers that may not be used at all.
    """
    if blocks is not None and not peers:
        raise BadInput("trusted blocks need trusted servers: name the peer ids of your own servers")
    for peer in peers:
        if peer in blocked or (allowed and peer not in allowed):
            raise BadInput(f"the server {peer} is trusted, and may not be used: allow it, or do not name it as trusted")
    return TrustedServers(frozenset(peers), TRUSTED_BLOCKS if blocks is None else blocks)
