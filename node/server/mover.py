"""When a server takes its blocks and when it changes them: who goes first, and what is said before.

Every server makes the same plan (node/placement) from what it knows. Who finds itself in it waits for a random time,
looks again, says where it will go, waits until the others have heard of that, and looks once more. Of two whose moves
exclude each other the smaller peer id goes first.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Final

import trio

from ...protocols.ids import Span
from ..placement.plan import Move
from ..swarm.swarm import Swarm
from .placing import Placing

CHECK_INTERVAL: Final = float(os.environ.get("PETALNODE_CHECK_INTERVAL", "15"))
"""Seconds between two looks at the plan. A gap that is heard of is looked at at once."""
_DELAY: Final = 5.0
_DELAY_FOR_GAP: Final = 1.0
_SETTLE: Final = 1.0
"""Seconds in which an announcement has reached those that it concerns."""
_START_DELAY: Final = 0.5
_MOST_ROUNDS: Final = 8
_REST: Final = 5.0
"""Who has moved stays for so many times what loading took, and for `_LEAST_REST` checks, unless there is a gap."""
_LEAST_REST: Final = 2

Say = Callable[[Span | None], None]


async def join_where_needed(
    swarm: Swarm, placing: Placing, count: int, throughput: float | None, say: Callable[[Span], None]
) -> Span:
    """The span that this newcomer takes, settled with others that join at the same time.

    `say` announces that it means to take a span; `throughput` is in decode steps a second, None if not known yet.
    """
    if not swarm.connected():  # nobody is there to be waited for
        return await placing.span_to_join(count, throughput)
    await trio.sleep(random.uniform(0, _START_DELAY))
    span: Span | None = None
    same = 0
    for _ in range(_MOST_ROUNDS):
        await placing.refresh()
        chosen = await placing.span_to_join(count, throughput)
        if chosen == span:
            same += 1
            if same == 2 or not placing.others_choose():
                break
        else:
            span, same = chosen, 0
            say(chosen)
        await trio.sleep(_SETTLE * random.uniform(0.7, 1.3))
    assert span is not None
    return span


async def next_move(
    swarm: Swarm, placing: Placing, load_seconds: float, say: Say, *, interval: float = CHECK_INTERVAL
) -> Move:
    """Returns when this server, which has just begun to serve, should go elsewhere, and has told the swarm.

    `load_seconds` is what loading took; `say` announces where this server will go, or that it stays after all.
    """
    rested = trio.current_time() + max(_LEAST_REST * interval, _REST * load_seconds)
    while True:
        await _pause(swarm, placing, interval * random.uniform(0.8, 1.2))
        await placing.probe()
        placing.notice()
        gap = bool(placing.gaps())
        if not gap and trio.current_time() < rested:
            continue
        first = await placing.due_move()
        if first is None:
            continue
        await trio.sleep(random.uniform(0, _DELAY_FOR_GAP if gap else _DELAY))
        await placing.refresh()
        if await placing.due_move() != first:
            continue
        say(first.target)
        await trio.sleep(_SETTLE)
        await placing.refresh()
        if await placing.due_move(contested=True) == first:
            return first
        say(None)


async def _pause(swarm: Swarm, placing: Placing, seconds: float) -> None:
    """Waits, or until a gap is heard of that was not there."""
    before = placing.gaps()
    with trio.move_on_after(seconds):
        while True:
            await swarm.wait_changed()
            now = placing.gaps()
            if now and now != before:
                return
            before = now
