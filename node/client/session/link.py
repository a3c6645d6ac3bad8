"""One server of a chain: its stream, the inputs that made its cache, and those that may take its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from ....crypto.evidence import NotProven, check_equivocation
from ....crypto.receipts import Receipt
from ...errors import ServerCheated
from ...swarm.cost import Estimate, StageCost
from ..deadlines import patience, patience_once_more
from ..request import WireTensor
from .history import Input, InputHistory
from .reconnector import SessionReconnector
from .stream import SessionStream
from .trace import HopTrace

UNKNOWN_STEP: Final = 0.01
UNKNOWN_TOKEN: Final = 0.001
"""Seconds of a step, and of each token of a prompt, at a server that announces nothing."""


@dataclass(eq=False)
class ServerLink:
    """One server of the chain, and the inputs that made its cache.

    `usual`: what its last answers took per token, beyond the round trip. `reconnector`: once it is in the
    chain. `standby_failed`: when no standby could be had. `trace`: where its answers are counted for a trace.
    """

    server: SessionStream
    history: InputHistory = field(default_factory=InputHistory)
    usual: Estimate = field(default_factory=Estimate)
    standby: Standby | None = None
    reconnector: SessionReconnector | None = None
    standby_failed: float = -math.inf
    trace: HopTrace | None = None

    def count(self, tokens: int) -> None:
        """Notes for the trace that the server has answered a step of so many tokens."""
        if self.trace is not None:
            timing = self.server.timing
            self.trace.add(tokens, waited=timing.total, queue=timing.queue, compute=timing.compute)
            self.trace.bytes_sent, self.trace.bytes_received = self.server.bytes_sent, self.server.bytes_received

    def note(self, tokens: int) -> None:
        """Learns from the last answer, to a step of so many tokens."""
        self.usual.note(max(0.0, self.server.timing.total - self.server.round_trip) / tokens)

    async def replay(self, step: Input, epoch: int) -> Input:
        """Runs an input through the server, which has had those before; returns that of the server behind it.

        Raises:
            ServerFailed: it failed.
        """
        chunk = await self.server.exchange(step, epoch)
        self.history.append(step)
        self.count(step.chunk.tokens)
        return replace(step, chunk=chunk)

    def patience(self, chunk: WireTensor, before: int = 0) -> float:
        """Seconds after which the answer to a step with this input is late, with so many tokens of a row under way
        before it."""
        tokens = before + chunk.tokens
        announced = self.server.announced_seconds(tokens * chunk.tensor.shape[0])
        usual = self.usual.value if self.usual.count else None
        return patience(usual, tokens, len(chunk.payload), self.server.round_trip, announced)

    def patience_once_more(self, chunk: WireTensor) -> float:
        """The same for a step that was waited for as a pushed one, and was then sent from here."""
        if not self.usual.count:
            return math.inf
        return patience_once_more(self.usual.value, chunk.tokens, self.server.round_trip)

    def cost(self, per_byte: float | None, *, pushed: bool) -> StageCost:
        """What steps of a prompt cost here, by what the server has announced."""
        server, many = self.server, 256
        one, more = server.announced_seconds(1), server.announced_seconds(1 + many)
        if one is None or more is None:
            one, more = UNKNOWN_STEP, UNKNOWN_STEP + many * UNKNOWN_TOKEN
        credits, in_flight = server.credits, server.bytes_in_flight
        return StageCost(one, (more - one) / many, server.round_trip, per_byte, pushed, in_flight, credits)

    def expected(self, chunk: WireTensor) -> float:
        """Seconds that a server may compute for several tokens, twice what is known of it; 0 of one token."""
        if chunk.tokens == 1:
            return 0.0
        announced = self.server.announced_seconds(chunk.tokens * chunk.tensor.shape[0]) or 0.0
        return 2 * (self.usual.value * chunk.tokens if self.usual.count else announced)

    @property
    def standby_ready(self) -> bool:
        return self.standby is not None and self.standby.ready


def proven_lie(pusher: str, told: Receipt, pushed: Receipt) -> ServerCheated | None:
    """What two receipts of one server prove, one for this client and one for the next server; None: nothing."""
    try:
        what = check_equivocation(pusher, told, pushed)
    except NotProven:
        return None
    what = f"server {pusher} cannot be believed: {what}, one for this client and one for the next server"
    return ServerCheated(what, pusher, (told, pushed))


@dataclass(eq=False)
class Standby:
    """Servers that are brought to where a link is, to take its place. `applied`: the link's inputs they have."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    links: list[ServerLink] = field(default_factory=list)
    applied: list[Input] = field(default_factory=list)
    ready: bool = False


def step_limit(links: Sequence[ServerLink]) -> int:
    """Tokens of a row that one step through all of `links` may have."""
    return min((link.server.max_step_tokens for link in links), default=1)


async def close_links(links: Sequence[ServerLink], leave: bool = False) -> None:
    """Ends the sessions of `links`, side by side, or leaves them at their servers. Never raises."""
    async with trio.open_nursery() as nursery:
        for link in links:
            end = link.server.leave if leave else link.server.close
            if link.reconnector is not None:
                link.reconnector.cancel()
                if link.server.abandoned and not leave:
                    end = link.reconnector.close_session
            nursery.start_soon(end)
