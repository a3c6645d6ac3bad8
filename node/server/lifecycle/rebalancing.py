"""When a server takes its blocks, and when it changes them (rebalancing, as Petals calls it).

Newcomers that see one another agree before they load: each computes where all of them go, and announces its own target.
It loads when every rival has confirmed that it knows the target, and those before it have announced theirs.

Every server makes the same plan (node/placement) from its view. A server that finds itself in it waits for a random
time and refreshes its view. Then it announces its target, waits until others know that, and refreshes once more. Of two
moves that exclude each other that of the smaller peer id goes first.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import trio

from ....protocols.announcement import Announcement
from ....protocols.framing import PeerError
from ....protocols.ids import Span
from ...errors import SwarmError
from ...placement.joining import Newcomer, SpanChoice, choice_of_newcomer, why_join
from ...placement.observed import (
    MembershipChange,
    ObservedServers,
    PlacedServer,
    gaps,
    is_overdue,
    observe_servers,
    recent,
    sampling_noise,
    turnover,
    worth_asking,
)
from ...placement.plan import DEFAULT, Move, PlacementPlan, Policy, make_plan, may_leave, why_move
from ...swarm.swarm import Swarm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObservingPolicy:
    """How a server makes sure of what others announce before it goes by that."""

    refresh_timeout: float = 5.0
    exchange_timeout: float = 5.0
    looks: int = 5  # Times that a choice is made anew because the view has changed meanwhile
    max_doubted: int = 1000
    probe_timeout: float = 3.0
    probe_rounds: int = 4
    nearly_all: float = 0.9  # Share of the servers from which it counts that one appears, or is no longer there
    plan_lasts: float = 30 * 60.0
    """Seconds after which a plan is made anew though nothing has changed. A swarm that comes to rest has more to
    gain."""


OBSERVING: Final = ObservingPolicy()


class PlacementState:
    """Gathers what node/placement decides from: the view, and who came and went. `notice` it now and then."""

    def __init__(self, swarm: Swarm, model_version: bytes, num_blocks: int, policy: Policy = DEFAULT) -> None:
        self.num_blocks = num_blocks
        self.peer_id = swarm.peer_id
        self._swarm = swarm
        self._version = model_version
        self._policy = policy
        self._changes: tuple[MembershipChange, ...] = ()
        self._there: frozenset[str] | None = None
        self._doubted: set[str] = set()
        self._planned: PlacementPlan | None = None
        self._planned_at = 0.0
        self._dead: dict[str, float] = {}
        self._reached: set[str] = set()
        self._near: set[str] = set()
        self._chance = random.Random()
        self.reason = ""
        """Of the last span that was chosen, or move that was due, for a person."""

    @property
    def is_alone(self) -> bool:
        """Whether this node is connected to nobody."""
        return not self._swarm.connected()

    async def refresh(self) -> None:
        """Asks the swarm who is there. Nobody answering is no error: what was heard has to do."""
        with suppress(SwarmError):
            await self._swarm.refresh(model_version=self._version, timeout=OBSERVING.refresh_timeout)
        self.notice()

    async def probe(self) -> None:
        """Finds out which servers are still there: who was killed has retracted nothing.

        A server that cannot be reached any more counts as gone until it announces itself anew. One that was never
        reached does if it is late with that.
        """
        asked: set[str] = set()
        for _ in range(OBSERVING.probe_rounds):
            gone = len(self._dead)
            holders = self.seen().servers
            near = {holder.peer_id for holder in holders if self._swarm.is_connected(holder.peer_id)}
            self._reached |= near
            # What we know as gone makes others the only holders of their blocks.
            chosen = worth_asking(holders, self.peer_id, near | asked, self.num_blocks, self._chance)
            asked.update(chosen)
            async with trio.open_nursery() as nursery:
                for peer_id in chosen:
                    nursery.start_soon(self._ask, peer_id)
            if len(self._dead) == gone:
                break
        self.notice()

    async def _ask(self, peer_id: str) -> None:
        record, now = self._swarm.view.records.get(peer_id), time.time()
        try:
            await self._swarm.measure_rtt(peer_id, timeout=OBSERVING.probe_timeout)
            self._reached.add(peer_id)
        except PeerError:
            if record is not None and (
                peer_id in self._reached or is_overdue(record.content.sequence / 1e9, record.content.expires, now)
            ):
                self._dead[peer_id] = now

    def missed(self) -> bool:
        """Whether the connection to a server that still counts has ended since the last time."""
        servers = {announcement.peer_id for announcement in self._announcements()}
        near = {peer_id for peer_id in servers if self._swarm.is_connected(peer_id)}
        missed = bool((self._near - near) & servers)
        self._near = near
        return missed

    def notice(self) -> None:
        """Takes note of who has come and gone since the last time."""
        known = self._swarm.view.records
        self._dead = {peer_id: at for peer_id, at in self._dead.items() if peer_id in known}
        self._reached &= known.keys()
        there = frozenset(server.peer_id for server in self._announcements()) - {self.peer_id}
        if self._there is not None:
            now = time.time()
            joined = [MembershipChange(now, True)] * len(there - self._there)
            left = [MembershipChange(now, False)] * len(self._there - there)
            self._changes = (*recent(self._changes, now), *joined, *left)
        self._there = there

    def seen(self, *, contested: bool = False) -> ObservedServers:
        """Who holds what, as far as it is believed; says once what is not."""
        seen = observe_servers(self._announcements(), self.num_blocks, self.peer_id, contested=contested)
        for peer_id, doubt in seen.doubts.items():
            if peer_id not in self._doubted and len(self._doubted) < OBSERVING.max_doubted:
                self._doubted.add(peer_id)
                log.warning("%s", doubt)
        return seen

    def gaps(self) -> tuple[Span, ...]:
        """The blocks that nobody holds or is about to hold."""
        return gaps(self.seen().servers, self.num_blocks)

    async def exchange(self, peers: Collection[str]) -> frozenset[str]:
        """Makes sure that these know what this server has announced, and learns what they know; who answered."""
        answered = await self._swarm.exchange(peers, model_version=self._version, timeout=OBSERVING.exchange_timeout)
        self.notice()
        return answered

    async def choose(self, count: int, throughput: float | None) -> SpanChoice:
        """The `count` blocks for this newcomer to take, going by `throughput` decode steps a second (None: average).

        It is made from what is known when this returns, unless that changes all the time.
        """
        for _ in range(OBSERVING.looks):
            seen = self.seen()
            decide = partial(choice_of_newcomer, turnover=self._turnover(), policy=self._policy_for(seen.servers))
            choice = await trio.to_thread.run_sync(
                decide, seen.servers, seen.newcomers, Newcomer(self.peer_id, throughput, count), self.num_blocks
            )
            now = self.seen()
            if (now.servers, now.newcomers) == (seen.servers, seen.newcomers):
                break
        self.reason = why_join(choice.others, choice.span, self.num_blocks)
        return choice

    async def due_move(self, *, contested: bool = False, by_itself: bool = False) -> Move | None:
        """Where this server should go now, None if it should stay, or must for now.

        `by_itself`: nobody else is expected to move.
        """
        seen, rate = self.seen(contested=contested), self._turnover()
        if not any(holder.peer_id == self.peer_id for holder in seen.serving):
            return None
        holders = seen.servers
        if by_itself:
            holders = tuple(
                replace(holder, movable=holder.movable and holder.peer_id == self.peer_id) for holder in holders
            )
            plan = await self._make_plan(holders, rate)
        else:
            # A plan that was begun is carried out to its end: half of it is no situation of its own.
            old = time.time() > self._planned_at + OBSERVING.plan_lasts
            rest = self._planned.rest(holders) if self._planned is not None and not old else None
            if rest is None:
                rest = self._planned = await self._make_plan(holders, rate)
                self._planned_at = time.time()
            plan = rest
        move = plan.of(self.peer_id)
        if move is None or not self.may_go(move, contested=contested):
            return None
        self.reason = why_move(plan, holders, self.num_blocks)
        return move

    def may_go(self, move: Move, *, contested: bool = False) -> bool:
        """Whether others that serve now hold all that this server would leave."""
        return may_leave(move, self.seen(contested=contested).serving, self.num_blocks)

    async def _make_plan(self, holders: tuple[PlacedServer, ...], rate: float) -> PlacementPlan:
        return await trio.to_thread.run_sync(
            lambda: make_plan(holders, self.num_blocks, turnover=rate, policy=self._policy_for(holders))
        )

    def _policy_for(self, servers: Sequence[PlacedServer]) -> Policy:
        """Who knows only some of the servers moves for no gain that chance may have made."""
        noise = sampling_noise(servers, self.num_blocks, self._swarm.view.share)
        return replace(self._policy, least_gain=max(self._policy.least_gain, noise))

    def _turnover(self) -> float:
        """In steps: all shall reckon with the same. Of a sample, nobody knows who came and who went."""
        if self._swarm.view.share < OBSERVING.nearly_all:
            return 1.0
        return round(turnover(self._changes, len(self._there or ()) + 1, time.time()), 1)

    def _announcements(self) -> list[Announcement]:
        """Of all servers but those that were found dead and have not announced themselves since."""
        servers = self._swarm.view.servers(self._version, now=time.time())
        return [server for server in servers if server.sequence / 1e9 > self._dead.get(server.peer_id, 0.0)]


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
    """Rounds, and seconds: after both a newcomer begins to load though the others do not do what it reckons."""
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
    """Waits. Ends early at a new gap, or when a server that held blocks is lost without a retraction."""
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
