"""The round trips from a client to the servers of its model: which are measured, when, and who waits for them."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from ...protocols.announcement import Announcement
from ...protocols.framing import PeerError
from ...protocols.ids import Span
from ..errors import SwarmError
from ..network.shares import TokenBucket
from ..swarm.config import DEFAULT_TTL
from ..swarm.routing import missing_blocks
from ..swarm.sample import SAMPLING, round_robin
from ..swarm.swarm import Swarm
from .deadlines import DEADLINES, rtt_patience

NEW: Final = (4, 32)
"""A second, and at once: servers that were never measured, and are asked though measured ones hold all blocks."""
MEASURES: Final = 64
"""Under way, and servers that were never measured are asked though measured ones do not hold all blocks: as many as a
client asks a directory for."""


@dataclass(frozen=True)
class _RoundTrip:
    """Of a round trip that is under way since `begun`; `done` when it is known, or cannot be."""

    begun: float
    done: trio.Event = field(default_factory=trio.Event)


class RoundTrips:
    """Those to the servers of a model of `num_blocks`; `swarm` is where they announce themselves.

    `trusted` peers are always measured.
    """

    def __init__(self, swarm: Swarm, num_blocks: int, nursery: trio.Nursery, trusted: Collection[str]) -> None:
        self._swarm = swarm
        self._num_blocks = num_blocks
        self._nursery = nursery
        self._trusted = trusted
        self._rtts: dict[str, tuple[float, float]] = {}  # seconds, and when they were measured
        self._measures: dict[str, _RoundTrip] = {}
        self._unmeasured: dict[str, float] = {}  # when a peer did not answer
        self._new = TokenBucket(*NEW)
        self._next_wait = -math.inf  # when a route may wait again for a server that it could do without

    def of(self, peer_id: str) -> float | None:
        """Seconds, as they were measured last; None if they never were, or the peer is silent."""
        measured = self._rtts.get(peer_id)
        return None if measured is None else measured[0]

    def keep_only(self, peers: Container[str]) -> None:
        """Forgets those to all others."""
        self._rtts = {peer_id: measured for peer_id, measured in self._rtts.items() if peer_id in peers}

    def is_under_way(self, peer_id: str) -> bool:
        """Whether the round trip to this peer is being measured."""
        return peer_id in self._measures

    async def measure(self, servers: Sequence[Announcement], *, patient: bool, choosy: bool) -> None:
        """Measures round trips that are old or unknown, and waits for some of the unknown ones.

        If a step waits for the route (not `patient`) or measured servers hold all blocks, each measurement is waited
        for once, and peers that were silent the last time are not. In the second case that peer is not even asked again
        so soon, and others are waited for only now and then: whoever announces servers that are not there would else
        delay every session. With `choosy` not any server of a block will do, so that measured ones never suffice.
        Servers that were announced long ago may be gone: they are waited for as long as others do not suffice.
        """
        now = trio.current_time()
        spans = [server.span for server in servers if server.peer_id in self._rtts]
        covered = not missing_blocks(spans, Span(0, self._num_blocks))
        suffice = covered and not choosy
        hurried = suffice or not patient
        known = [self._rtts[server.peer_id][0] for server in servers if server.peer_id in self._rtts]
        unknown, doubtful = [], []
        for server in self._due(servers, now, covered=covered):
            peer_id = server.peer_id
            measurement = self._measuring(peer_id)
            if peer_id in self._rtts:
                continue
            if patient and peer_id not in self._trusted and time.time() - server.sequence / 1e9 > DEFAULT_TTL:
                doubtful.append(measurement)
            elif not (hurried and self._was_silent(peer_id, now)):
                unknown.append(measurement)
        patience = rtt_patience(max(known, default=None)) if hurried else DEADLINES.rtt
        if suffice and unknown:
            if now < self._next_wait:
                return
            self._next_wait = now + DEADLINES.rtt_retry
        for measurement in unknown:
            with trio.move_on_at((measurement.begun if hurried else now) + patience):
                await measurement.done.wait()
        with trio.move_on_at(now + patience) as scope:
            async with trio.open_nursery() as nursery:
                for measurement in doubtful:
                    nursery.start_soon(self._until_enough, measurement, servers, scope)

    def _due(self, servers: Sequence[Announcement], now: float, *, covered: bool) -> list[Announcement]:
        """Those whose round trip is old or unknown. Of the unknown ones few, of each source of announcements in turn:
        who announces thousands would have all dialed. Fewer where measured servers hold all blocks (`covered`)."""
        due, new = [], []
        for server in servers:
            peer_id = server.peer_id
            measured = self._rtts.get(peer_id)
            if measured is not None or peer_id in self._trusted or peer_id in self._measures:
                if measured is None or now - measured[1] > DEADLINES.rtt_lifetime:
                    due.append(server)
            elif not (covered and self._was_silent(peer_id, now)):
                new.append(server)
        in_turn = round_robin(((self._swarm.view.source_of(one.peer_id), one) for one in new), random.Random())
        if covered:
            return [*due, *itertools.takewhile(lambda _: self._new.take(), in_turn)]
        return [*due, *itertools.islice(in_turn, max(0, MEASURES - len(self._measures)))]

    def _was_silent(self, peer_id: str, now: float) -> bool:
        return now - self._unmeasured.get(peer_id, -math.inf) <= DEADLINES.rtt_retry

    async def _until_enough(
        self, measurement: _RoundTrip, servers: Sequence[Announcement], scope: trio.CancelScope
    ) -> None:
        """Waits for a measurement, and lets `scope` end soon if each block has several measured servers then."""
        await measurement.done.wait()
        measured = [server for server in servers if server.peer_id in self._rtts]
        held = Counter(block for server in measured for block in range(server.span.start, server.span.end))
        if all(held[block] >= SAMPLING.several for block in range(self._num_blocks)):
            longest = max(self._rtts[server.peer_id][0] for server in measured)
            scope.deadline = min(scope.deadline, trio.current_time() + rtt_patience(longest))

    def _measuring(self, peer_id: str) -> _RoundTrip:
        """The measurement of the round trip to a peer that is under way. It goes on when nobody waits for it any more:
        where a connection takes long, through a relay far away, the next look finds it made."""
        measurement = self._measures.get(peer_id)
        if measurement is None:
            measurement = self._measures[peer_id] = _RoundTrip(trio.current_time())
            self._nursery.start_soon(self._ping, peer_id, measurement.done)
        return measurement

    async def _ping(self, peer_id: str, done: trio.Event) -> None:
        try:
            rtt = await self._swarm.measure_rtt(peer_id, timeout=DEADLINES.measure)
        except (PeerError, SwarmError):
            self._rtts.pop(peer_id, None)
            now = trio.current_time()
            for peer in [peer for peer, since in self._unmeasured.items() if now - since > DEADLINES.rtt_retry]:
                del self._unmeasured[peer]
            self._unmeasured[peer_id] = now
        else:
            self._rtts[peer_id] = (rtt, trio.current_time())
            self._unmeasured.pop(peer_id, None)
        finally:
            del self._measures[peer_id]
            done.set()


async def measure_rtts(swarm: Swarm, peer_ids: Iterable[str], *, timeout: float) -> dict[str, float | PeerError]:
    """`Swarm.measure_rtt` of several peers, 32 side by side: seconds by peer id, or why there is no answer."""
    found: dict[str, float | PeerError] = {}
    limiter = trio.CapacityLimiter(32)
    async with trio.open_nursery() as nursery:
        for peer_id in peer_ids:
            nursery.start_soon(_note_rtt, swarm, peer_id, timeout, found, limiter)
    return found


async def _note_rtt(
    swarm: Swarm, peer_id: str, timeout: float, found: dict[str, float | PeerError], limiter: trio.CapacityLimiter
) -> None:
    async with limiter:
        try:
            found[peer_id] = await swarm.measure_rtt(peer_id, timeout=timeout)
        except PeerError as error:
            found[peer_id] = error
