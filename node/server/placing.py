"""The swarm of one model as this server sees it when it chooses blocks."""

from __future__ import annotations

import logging
import random
import time
from contextlib import suppress
from typing import Final

import trio

from ...protocols.announcement import Announcement, ServerState
from ...protocols.framing import PeerError
from ...protocols.ids import Span
from ..errors import SwarmError
from ..placement.holder import Holder, gaps
from ..placement.joining import span_for_newcomer
from ..placement.leaving import may_leave
from ..placement.plan import DEFAULT, Move, Plan, Policy, make_plan
from ..placement.seen import Seen, swarm_seen
from ..placement.turnover import Change, recent, turnover
from ..swarm.swarm import Swarm

log = logging.getLogger(__name__)

REFRESH_TIMEOUT: Final = 5.0
_TOLD: Final = 1000
_PROBERS: Final = 8
_MOST_PROBED: Final = 16
_PROBE_TIMEOUT: Final = 5.0


class Placing:
    """Gathers what node/placement decides from: the view, and who came and went. `notice` it now and then."""

    def __init__(self, swarm: Swarm, model_version: bytes, num_blocks: int, policy: Policy = DEFAULT) -> None:
        self.num_blocks = num_blocks
        self.peer_id = swarm.peer_id
        self._swarm = swarm
        self._version = model_version
        self._policy = policy
        self._changes: tuple[Change, ...] = ()
        self._there: frozenset[str] | None = None
        self._told: set[str] = set()
        self._planned: tuple[tuple[Holder, ...], float, Plan] | None = None
        self._dead: dict[str, int] = {}

    async def refresh(self) -> None:
        """Asks the swarm who is there. Nobody answering is no error: what was heard has to do."""
        with suppress(SwarmError):
            await self._swarm.refresh(model_version=self._version, timeout=REFRESH_TIMEOUT)
        self.notice()

    async def probe(self) -> None:
        """Finds out whether the only holders of blocks are still there: who was killed has said no goodbye.

        In a large swarm some servers do so each time, so that nobody is asked by hundreds.
        """
        serving = self.seen().serving
        if random.random() * len(serving) > _PROBERS:
            return
        alone = [
            holder.peer_id
            for holder in serving
            if holder.peer_id != self.peer_id
            and gaps([other for other in serving if other is not holder], self.num_blocks)
            and not self._swarm.is_connected(holder.peer_id)
        ]

        async def ask(peer_id: str) -> None:
            record = self._swarm.view.records.get(peer_id)
            try:
                await self._swarm.measure_rtt(peer_id, timeout=_PROBE_TIMEOUT)
            except PeerError:
                if record is not None:
                    self._dead[peer_id] = record.content.sequence

        async with trio.open_nursery() as nursery:
            for peer_id in random.sample(alone, min(len(alone), _MOST_PROBED)):
                nursery.start_soon(ask, peer_id)

    def notice(self) -> None:
        """Takes note of who has come and gone since the last time."""
        self._dead = {peer_id: last for peer_id, last in self._dead.items() if peer_id in self._swarm.view.records}
        there = frozenset(server.peer_id for server in self._announcements()) - {self.peer_id}
        if self._there is not None:
            now = time.time()
            joined = [Change(now, True)] * len(there - self._there)
            left = [Change(now, False)] * len(self._there - there)
            self._changes = (*recent(self._changes, now), *joined, *left)
        self._there = there

    def seen(self, *, contested: bool = False) -> Seen:
        """Who holds what, as far as it is believed; says once what is not."""
        seen = swarm_seen(self._announcements(), self.num_blocks, self.peer_id, contested=contested)
        for peer_id, doubt in seen.doubts.items():
            if peer_id not in self._told and len(self._told) < _TOLD:
                self._told.add(peer_id)
                log.warning("%s", doubt)
        return seen

    def gaps(self) -> tuple[Span, ...]:
        """The blocks that nobody holds or is about to hold."""
        return gaps(self.seen().holders, self.num_blocks)

    def others_choose(self) -> bool:
        """Whether other newcomers have not begun to load yet."""
        return any(
            each.state is ServerState.JOINING and each.next_span is not None and each.peer_id != self.peer_id
            for each in self._announcements()
        )

    async def span_to_join(self, count: int, throughput: float | None) -> Span:
        """The `count` blocks to take, going by `throughput` decode steps a second (None: average)."""
        holders, rate = self.seen(contested=True).holders, self._turnover()
        return await trio.to_thread.run_sync(
            lambda: span_for_newcomer(
                holders, self.peer_id, throughput, count, self.num_blocks, turnover=rate, policy=self._policy
            )
        )

    async def due_move(self, *, contested: bool = False) -> Move | None:
        """Where this server should go now, None if it should stay, or must for now."""
        seen, rate = self.seen(contested=contested), self._turnover()
        if not any(holder.peer_id == self.peer_id for holder in seen.serving):
            return None
        if self._planned is None or self._planned[:2] != (seen.holders, rate):
            plan = await trio.to_thread.run_sync(
                lambda: make_plan(seen.holders, self.num_blocks, turnover=rate, policy=self._policy)
            )
            self._planned = seen.holders, rate, plan
        move = self._planned[2].of(self.peer_id)
        return move if move is not None and may_leave(move, seen.serving, self.num_blocks) else None

    def _turnover(self) -> float:
        """In steps, so that what was planned holds for a while."""
        return round(turnover(self._changes, len(self._there or ()) + 1, time.time()), 1)

    def _announcements(self) -> list[Announcement]:
        """Of all servers but those that were found dead and have not announced themselves since."""
        servers = self._swarm.view.servers(self._version, now=time.time())
        return [server for server in servers if server.sequence > self._dead.get(server.peer_id, -1)]
