"""When a server takes its blocks and when it changes them: who goes first, and what is said before.

Newcomers that see one another agree before they load: each works out where all of them go, says where it will go
itself, and goes when each has answered that it knows, and those before it have said what was worked out.

Every server makes the same plan (node/placement) from what it knows. Who finds itself in it waits for a random time,
looks again, says where it will go, waits until the others have heard of that, and looks once more. Of two whose moves
exclude each other the smaller peer id goes first.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Final

import trio

from ....protocols.ids import Span
from ...placement.plan import Move
from ...swarm.swarm import Swarm
from .placing import Placing

CHECK_INTERVAL: Final = 15.0
"""Seconds between two looks at the plan. A gap that is heard of is looked at at once."""
_GLANCE: Final = 1.0
"""Seconds between two looks for gaps, and"""
_GLANCE_COST: Final = 20.0
"""at least so many times what a look takes."""
_DELAY: Final = 5.0
_DELAY_FOR_GAP: Final = 1.0
_SETTLE: Final = 1.0
"""Seconds in which an announcement has reached those that it concerns."""
_START_DELAY: Final = 0.5
_SILENCES: Final = 3
"""Times that a newcomer asks another in vain before it goes on without."""
_MOST_ROUNDS: Final = 8
_LONGEST_TALK: Final = 30.0
"""Rounds, and seconds, after both of which a newcomer begins to load though the others do not do what it reckons."""
_TRIES: Final = 4
"""Times that a server that should close a gap tries to come to terms with others before its next check."""
_REST: Final = 5.0
"""Who has moved stays for so many times what loading took, and for `_LEAST_REST` checks, unless there is a gap."""
_LEAST_REST: Final = 2
_PATIENCE: Final = 1.5
"""Checks for which a gap is left to those that the plan moves there. After that, whoever can closes it."""

Say = Callable[[Span | None], None]


async def join_where_needed(
    swarm: Swarm, placing: Placing, count: int, throughput: float | None, say: Callable[[Span], None]
) -> Span:
    """The span that this newcomer takes, settled with others that join at the same time.

    `say` announces that it means to take a span; `throughput` is in decode steps a second, None if not known yet. The
    caller announces that it loads, without awaiting anything before: from then on others reckon with that.
    """
    if not swarm.connected():  # nobody is there to be waited for
        return (await placing.choose(count, throughput)).span
    await trio.sleep(random.uniform(0, _START_DELAY))
    await placing.refresh()
    await placing.probe()
    begun = trio.current_time()
    announced: Span | None = None
    told: frozenset[str] = frozenset()
    silences: Counter[str] = Counter()
    for turn in itertools.count(1):
        choice = await placing.choose(count, throughput)
        silent = {peer_id for peer_id in choice.rivals if silences[peer_id] >= _SILENCES}
        heard = bool(told) or turn > _SILENCES
        if heard and choice.stands(announced, told, silent):
            break
        if turn > _MOST_ROUNDS and trio.current_time() > begun + _LONGEST_TALK:
            break  # somebody talks nonsense; what is not well placed moves later
        if choice.span != announced:
            announced = choice.span
            say(announced)
        # For those that we have not heard of, a while, however quickly the others answer.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, _SETTLE * random.uniform(0.7, 1.3))
            told = await placing.exchange(choice.rivals)
        silences.update(choice.rivals - told)
        for peer_id in told:
            del silences[peer_id]
    return choice.span


async def next_move(
    swarm: Swarm, placing: Placing, load_seconds: float, say: Say, *, interval: float | None = None
) -> Move:
    """Returns when this server, which has just begun to serve, should go elsewhere, and has told the swarm.

    `load_seconds` is what loading took; `say` announces where this server will go, or that it stays after all.
    `interval` is `CHECK_INTERVAL`; the variable PETALNODE_CHECK_INTERVAL is for tests.
    """
    interval = interval or float(os.environ.get("PETALNODE_CHECK_INTERVAL", CHECK_INTERVAL))
    rested = trio.current_time() + max(_LEAST_REST * interval, _REST * load_seconds)
    open_since = float("inf")
    while True:
        await _pause(swarm, placing, interval * random.uniform(0.8, 1.2))
        await placing.probe()
        for _ in range(_TRIES):
            now, gap = trio.current_time(), bool(placing.gaps())
            open_since = min(open_since, now) if gap else float("inf")
            if not gap and now < rested:
                break
            by_itself = now > open_since + _PATIENCE * interval
            move, wanted = await _agreed_move(placing, say, gap=gap, by_itself=by_itself)
            if move is not None:
                return move
            if not wanted or not placing.gaps():
                break


async def _agreed_move(placing: Placing, say: Say, *, gap: bool, by_itself: bool) -> tuple[Move | None, bool]:
    """The move that this server should make now and that nobody else's excludes; and whether it would make any."""
    first = await placing.due_move(by_itself=by_itself)
    if first is None:
        return None, False
    await trio.sleep(random.uniform(0, _DELAY_FOR_GAP if gap else _DELAY))
    await placing.refresh()
    if await placing.due_move(by_itself=by_itself) != first:
        return None, True
    say(first.target)
    await trio.sleep(_SETTLE)
    await placing.refresh()
    if await placing.due_move(contested=True, by_itself=by_itself) == first:
        return first, True
    say(None)
    return None, True


async def _pause(swarm: Swarm, placing: Placing, seconds: float) -> None:
    """Waits, or until a gap is heard of that was not there, or a server that held blocks has gone without a word."""
    before = placing.gaps()
    placing.missed()
    begun = trio.current_time()
    pause, missed = min(_GLANCE, seconds), False
    with trio.move_on_after(seconds):
        while True:
            await trio.sleep(pause)
            looked = trio.current_time()
            now = placing.gaps()
            missed = placing.missed() or missed
            pause = max(pause, _GLANCE_COST * (trio.current_time() - looked))
            if (now and now != before) or (missed and looked > begun + seconds / 5):
                return
            before = now
