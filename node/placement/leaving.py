"""When a server may leave its blocks: a move must not open a gap. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .holder import Holder, gaps
from .plan import Move


def may_leave(move: Move, serving: Sequence[Holder], num_blocks: int) -> bool:
    """Whether the model still has a server for every block while this one moves, or has none anyhow.

    `serving` are the servers that take sessions now, where they are now, the one that moves among them or not; one that
    has said that it will move does not count.
    """
    others = [holder for holder in serving if holder.peer_id != move.peer_id]
    # With a gap no chain works as it is, and it closes soonest if all that the plan moves do so at once.
    open_now = gaps([*others, Holder(move.peer_id, move.source, 1.0)], num_blocks)
    return bool(open_now) or not gaps(others, num_blocks)
