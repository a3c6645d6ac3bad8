"""When a server takes its blocks, and when it changes them (rebalancing, as Petals calls it).

Newcomers that see one another agree before they load: each computes where all of them go, announces its own target, and
loads when every rival has confirmed that it knows the target, and those before it have announced what was computed.

Every server makes the same plan (node/placement) from its view. A server that finds itself in it waits for a random
time, refreshes its view, announces its target, waits until others know that, and refreshes once more. Of two moves that
exclude each other that of the smaller peer id goes first.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from ....protocols.ids import Span
from ...placement.plan import Move
from .placement_state import PlacementState


@dataclass(frozen=True)
class RebalancingPolicy:
    """When a server looks for better blocks, and how it agrees with others that do."""

    check_interval: float = 15.0  # Seconds between two looks at the plan. A gap that is heard of is looked at at once
    gap_check_interval: float = 1.0  # Seconds between two looks for gaps, and
    gap_check_cost: float = 20.0  # The pause between two looks is at least this factor times what a look takes
    delay: float = 5.0
    delay_for_gap: float = 1.0
    settle: float = 1.0  # Seconds in which an announcement has reached those that it concerns
    start_delay: float = 0.5
    max_silences: int = 3  # Times that a newcomer asks another in vain before it goes on without
    max_rounds: int = 8
    max_negotiation: float = 30.0
    """Rounds, and seconds, after both of which a newcomer begins to load though the others do not do what it
    reckons."""
    max_tries: int = 4
    """Times that a server that should close a gap tries to come to terms with others before its next check."""
    rest_factor: float = 5.0
    """Who has moved stays for this factor times what loading took, and for `min_rest_checks` checks, unless
    there is a gap."""
    min_rest_checks: int = 2
    gap_patience: float = 1.5
    """Checks for which a gap is left to those that the plan moves there. After that, whoever can closes it."""


REBALANCING: Final = RebalancingPolicy()
AnnounceTarget = Callable[[Span | None], None]


async def join_where_needed(
    placement: PlacementState, count: int, throughput: float | None, announce: Callable[[Span], None]
) -> Span:
    """The span that this newcomer takes, settled with others that join at the same time.

    `announce` is called with a span that it means to take; `throughput` is in decode steps a second, None if not known.
    The caller announces that it loads, without awaiting anything before: from then on others reckon with that.
    """
    if placement.is_alone:  # nobody is there to be waited for
        return (await placement.choose(count, throughput)).span
    await trio.sleep(random.uniform(0, REBALANCING.start_delay))
    await placement.refresh()
    await placement.probe()
    begun = trio.current_time()
    announced: Span | None = None
    confirmed: frozenset[str] = frozenset()
    silences: Counter[str] = Counter()
    for turn in itertools.count(1):
        choice = await placement.choose(count, throughput)
        silent = {peer_id for peer_id in choice.rivals if silences[peer_id] >= REBALANCING.max_silences}
        heard = bool(confirmed) or turn > REBALANCING.max_silences
        if heard and choice.stands(announced, confirmed, silent):
            break
        if turn > REBALANCING.max_rounds and trio.current_time() > begun + REBALANCING.max_negotiation:
            break  # a rival contradicts itself; what is not well placed moves later
        if choice.span != announced:
            announced = choice.span
            announce(announced)
        # For those that we have not heard of, a while, however quickly the others answer.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, REBALANCING.settle * random.uniform(0.7, 1.3))
            confirmed = await placement.exchange(choice.rivals)
        silences.update(choice.rivals - confirmed)
        for peer_id in confirmed:
            del silences[peer_id]
    return choice.span


async def next_move(
    placement: PlacementState, load_seconds: float, announce: AnnounceTarget, *, interval: float | None = None
) -> Move:
    """Returns when this server, which has just begun to serve, should go elsewhere, and has announced that.

    `load_seconds` is what loading took; `announce` announces where this server will go, or that it stays after all.
    `interval` is `REBALANCING.check_interval`; the variable PETALNODE_CHECK_INTERVAL is for tests.
    """
    interval = interval or float(os.environ.get("PETALNODE_CHECK_INTERVAL", REBALANCING.check_interval))
    rested = trio.current_time() + max(REBALANCING.min_rest_checks * interval, REBALANCING.rest_factor * load_seconds)
    open_since = float("inf")
    while True:
        await _pause(placement, interval * random.uniform(0.8, 1.2))
        await placement.probe()
        for _ in range(REBALANCING.max_tries):
            now, gap = trio.current_time(), bool(placement.gaps())
            open_since = min(open_since, now) if gap else float("inf")
            if not gap and now < rested:
                break
            by_itself = now > open_since + REBALANCING.gap_patience * interval
            move, wanted = await _agreed_move(placement, announce, gap=gap, by_itself=by_itself)
            if move is not None:
                return move
            if not wanted or not placement.gaps():
                break


async def _agreed_move(
    placement: PlacementState, announce: AnnounceTarget, *, gap: bool, by_itself: bool
) -> tuple[Move | None, bool]:
    """The move that this server should make now and that nobody else's excludes; and whether it would make any."""
    first = await placement.due_move(by_itself=by_itself)
    if first is None:
        return None, False
    await trio.sleep(random.uniform(0, REBALANCING.delay_for_gap if gap else REBALANCING.delay))
    await placement.refresh()
    if await placement.due_move(by_itself=by_itself) != first:
        return None, True
    announce(first.target)
    await trio.sleep(REBALANCING.settle)
    await placement.refresh()
    if await placement.due_move(contested=True, by_itself=by_itself) == first:
        return first, True
    announce(None)
    return None, True


async def _pause(placement: PlacementState, seconds: float) -> None:
    """Waits, or until there is a gap that was not there, or a server that held blocks is lost without a retraction."""
    before = placement.gaps()
    placement.missed()
    begun = trio.current_time()
    pause, missed = min(REBALANCING.gap_check_interval, seconds), False
    with trio.move_on_after(seconds):
        while True:
            await trio.sleep(pause)
            looked = trio.current_time()
            now = placement.gaps()
            missed = placement.missed() or missed
            pause = max(pause, REBALANCING.gap_check_cost * (trio.current_time() - looked))
            if (now and now != before) or (missed and looked > begun + seconds / 5):
                return
            before = now
