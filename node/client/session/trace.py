"""What a session was, for traces: how long it was open, and what each server of it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ....protocols.ids import TraceIds, new_seed, trace_ids, traced_nonce

if TYPE_CHECKING:
    from ...swarm.routing import Hop

MAX_HOPS: Final = 64
"""Servers of one session that are kept, those included that had its blocks before others took their place."""


@dataclass(eq=False)
class HopTrace:
    """One server's part in a session. Times in seconds since 1970, durations in seconds.

    Attributes:
        begun, ended: when the session there was asked for, and when its last answer came.
        steps, tokens: that were answered, replays for a lost server included; `tokens` of one row.
        waited: what the client waited for the answers, of which `queue` and `compute` are the server's own.
    """

    nonce: bytes
    hop: Hop
    begun: float
    ended: float
    steps: int = 0
    tokens: int = 0
    waited: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0

    def add(self, tokens: int, *, waited: float, queue: float, compute: float) -> None:
        """Counts an answer."""
        self.ended = time.time()
        self.steps += 1
        self.tokens += tokens
        self.waited += waited
        self.queue += queue
        self.compute += compute


@dataclass(eq=False)
class SessionTrace:
    """One session of a client that makes traces."""

    model: str
    seed: bytes = field(default_factory=new_seed)
    begun: float = field(default_factory=time.time)
    ended: float = 0.0
    recoveries: int = 0
    failed: bool = False
    hops: list[HopTrace] = field(default_factory=list)

    @property
    def ids(self) -> TraceIds:
        """Of the session; those of its hops stand for a nonce each."""
        return trace_ids(traced_nonce(self.seed))

    def hop(self, hop: Hop) -> HopTrace:
        """A part for the server of `hop`, which has to be opened with this nonce."""
        now = time.time()
        made = HopTrace(traced_nonce(self.seed), hop, now, now)
        if len(self.hops) < MAX_HOPS:
            self.hops.append(made)
        return made


OnSession = Callable[[SessionTrace], None]
"""What is called when a session is over."""
