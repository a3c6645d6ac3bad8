"""How long a client waits, for whom, and why: all of its deadlines, in seconds, and the histogram of its waits.

A dead connection is noticed by itself, a killed server's at once and a frozen one's after about 4 s. What stands here
is for peers that are connected and silent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import trio


@dataclass(frozen=True)
class Deadlines:
    """How long a client waits, in seconds."""

    refresh: float = 5.0  # For peers to say which servers they know
    rtt: float = 3.0  # For an answer to a ping, connection included. Who takes longer is not considered for the chain
    measure: float = 10.0
    """For the same in the background, so that a peer far away is connected when it is looked at again."""
    rtt_lifetime: float = 60.0  # After which a round trip is measured anew, while the old figure is used
    rtt_retry: float = 15.0  # For which nobody waits for a measurement of a peer that has not answered the last one
    open: float = 10.0  # For a stream to a server, connection included
    send: float = 30.0  # For a server to read a step, and beyond its cache queue to answer an Open
    close: float = 1.0  # For a Close to leave this machine
    recovery: float = 30.0  # Of looking for other servers, before the caller gets an error
    reopen: float = 10.0  # The same for a new session, when servers that should be there are not
    retry_interval: float = 0.5  # Between two looks
    look: float = 1.0
    """Of one look for servers while a step waits. Directories that answer later are heard by the next look."""
    resume: float = 5.0
    """For servers to take up a session that an earlier process left there, before another one is opened."""
    suspect: float = 15.0  # For which a server that failed is a last resort only
    path_keep: float = 15.0
    """For which servers are asked to keep a session whose stream was lost. Whoever needs the cache gets it before."""
    keep_grace: float = 5.0  # By which a server may notice a loss later than the client
    move: float = 3.0  # For a session to change to another stream between two steps, while the old one lives
    move_retry: float = 20.0  # After which that is tried again where it has failed
    not_allowed: float = 600.0  # For which a server whose owner has not listed this client is a last resort only
    standby_poll: float = 0.05  # Between two looks whether a standby has overtaken a late server
    standby_retry: float = 30.0
    """After which a standby is tried again where none could be had, unless a step waits for it (`retry_interval`)."""
    push_patience: float = 2.0
    """At least, until a step that a server was pushed is sent by the client too: a repeated step is answered once."""
    push_retry: float = 60.0  # After which two servers between which a push was lost may push again
    open_round_trips: int = 8  # For a dial (TCP, Noise, Yamux; a circuit's two more) and the grant
    open_at_least: float = 0.5
    open_at_most: float = 2.0
    rtt_factor: float = 4.0
    rtt_at_least: float = 0.25
    batch_open: float = 5.0  # For a server to grant a stream of batches, for which it reserves nothing
    batch_factor: float = 10.0
    batch_at_least: float = 60.0


DEADLINES: Final = Deadlines()


@dataclass(frozen=True)
class Patience:
    """When an answer is late, so that a standby is prepared while it is waited for.

    Attributes:
        factor: times what such a step usually takes.
        least: seconds at least: other sessions' prompts and a busy machine hold a step up for less (nearly always).
        most_factor, more: of a step that usually takes long, the factor of that and the seconds beside it.
        pushed_factor, pushed_least: the same for a step that this client has sent after it waited for it as a pushed
            one: the server had the time to be slow, and what was lost is answered at once.
        first_least, first_most: seconds for a first answer, within which the announced speed says when it is due.
        poor_line: bytes a second through a busy relay, where none was measured.
    """

    factor: float = 10.0
    least: float = 0.4
    most_factor: float = 2.0
    more: float = 4.0
    pushed_factor: float = 4.0
    pushed_least: float = 0.1
    first_least: float = 2.0
    first_most: float = 15.0
    poor_line: float = float(1 << 19)


PATIENCE: Final = Patience()


def patience(usual: float | None, tokens: int, nbytes: int, round_trip: float, announced: float | None = None) -> float:
    """Seconds after which the answer to a step of `tokens` positions is late, and a standby is prepared.

    Ten times what such a step usually takes, but at least 0.4 s: `round_trip`, and `usual` for each position beyond
    that (both in seconds). Of a step that usually takes half a second or more: twice that and 4 s.

    While no answer has come, ten times what the step should take by the `announced` seconds, from 2 to 15 s. 15 s if it
    announced nothing. What `nbytes` take there and back on a poor line is added.
    """
    due = PATIENCE
    if usual is None:
        line = 2 * nbytes / due.poor_line
        if announced is None:
            return due.first_most + line
        return min(due.first_most, max(due.first_least, due.factor * (round_trip + announced))) + line
    expected = round_trip + usual * tokens
    return max(due.least, min(due.factor * expected, due.most_factor * expected + due.more))


def patience_once_more(usual: float, tokens: int, round_trip: float) -> float:
    """The same for a step that a server should have been pushed, and that this client has sent after a wait."""
    return max(PATIENCE.pushed_least, PATIENCE.pushed_factor * (round_trip + usual * tokens))


def open_patience(round_trip: float) -> float:
    """Seconds after which servers that were asked to take some blocks are overdue, and others are asked beside them.
    Eight round trips, from half a second to two."""
    return min(DEADLINES.open_at_most, max(DEADLINES.open_at_least, DEADLINES.open_round_trips * round_trip))


def rtt_patience(known: float | None) -> float:
    """Seconds for which a route waits for round trips that were never measured; `known` is the longest that was.

    A step waits for that route: servers so much farther away than those that are known would not be chosen.
    """
    return (
        DEADLINES.rtt
        if known is None
        else min(DEADLINES.rtt, max(DEADLINES.rtt_at_least, DEADLINES.rtt_factor * known))
    )


def push_patience(round_trip: float, nbytes: int) -> float:
    """Seconds after which a step of `nbytes` that one server should have pushed to the next counts as lost.

    The client does not know the way between the servers. It makes room for a few times its own way to the second of
    them (`round_trip`, in seconds).
    """
    return DEADLINES.push_patience + 4 * min(round_trip, 1.0) + nbytes / PATIENCE.poor_line


def batch_patience(usual: float) -> float:
    """Seconds for the answer to one micro-batch that should take `usual` seconds there.

    Chats and other clients' micro-batches go before it, so a long time says little: ten times that, and a minute.
    """
    return DEADLINES.batch_at_least + DEADLINES.batch_factor * usual


# --- what was waited for

WaitCause = Literal[
    "step",
    "send",
    "answer",
    "push",
    "late",
    "reconnect",
    "race",
    "replace",
    "switch",
    "turn",
    "route",
    "open",
    "replay",
    "look",
]
"""`step` is a whole step of a session. What a step waits for, one after another: `turn` (a session that moves to a
better connection, a standby that takes its place before the step), `send`, `answer`, `push` (an answer to what another
server should have pushed), `late` (an answer that is overdue, or a standby), `reconnect`, `replace`, `race` (both) and
`switch`. Parts of `replace` and of preparing a standby, side by side: `route`, `open`, `replay`, `look` (no server is
known)."""

WAIT_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the buckets of a histogram, in seconds; the last bucket has none."""


@dataclass
class WaitHistogram:
    """How often something was waited for, and how long (seconds)."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS) + 1))

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)
        self.buckets[bisect_left(WAIT_BOUNDS, seconds)] += 1

    def merge(self, other: WaitHistogram) -> None:
        self.count += other.count
        self.total += other.total
        self.longest = max(self.longest, other.longest)
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]

    def fields(self) -> dict[str, Any]:
        """As it stands in JSON: the buckets by their upper bound in milliseconds."""
        bounds = [*(f"{bound * 1000:g}" for bound in WAIT_BOUNDS), "more"]
        return {
            "count": self.count,
            "total_ms": round(self.total * 1000, 1),
            "max_ms": round(self.longest * 1000, 1),
            "buckets": dict(zip(bounds, self.buckets, strict=True)),
        }


class Waits:
    """What a session has waited for so far, by cause."""

    def __init__(self) -> None:
        self.by_cause: dict[WaitCause, WaitHistogram] = {}

    def add(self, cause: WaitCause, seconds: float) -> None:
        self.by_cause.setdefault(cause, WaitHistogram()).add(seconds)

    @contextmanager
    def timed(self, cause: WaitCause) -> Iterator[None]:
        """Counts how long the block takes, also if it is left by an error."""
        begun = trio.current_time()
        try:
            yield
        finally:
            self.add(cause, trio.current_time() - begun)

    @classmethod
    def of(cls, *parts: Waits) -> Waits:
        """All of them together."""
        waits = cls()
        for part in parts:
            for cause, histogram in list(part.by_cause.items()):
                waits.by_cause.setdefault(cause, WaitHistogram()).merge(histogram)
        return waits

    def fields(self) -> dict[str, Any]:
        """As it stands in JSON. May be called from any thread."""
        return {cause: histogram.fields() for cause, histogram in list(self.by_cause.items())}


class _Counted(Protocol):
    @property
    def waits(self) -> Waits: ...
    @property
    def recoveries(self) -> int: ...


class SessionTotals:
    """What the sessions of a client have waited for, and the servers that were replaced in them, altogether.

    Attributes:
        opened: sessions so far.
        open: those that are.
    """

    def __init__(self) -> None:
        self.opened = 0
        self.open: list[_Counted] = []
        self._waits = Waits()
        self._recoveries = 0

    @property
    def waits(self) -> Waits:
        return Waits.of(self._waits, *(session.waits for session in self.open))

    @property
    def recoveries(self) -> int:
        return self._recoveries + sum(session.recoveries for session in self.open)

    @contextmanager
    def counted(self, session: _Counted) -> Iterator[None]:
        """For as long as the session lives."""
        self.opened += 1
        self.open.append(session)
        try:
            yield
        finally:
            self.open.remove(session)
            self._waits = Waits.of(self._waits, session.waits)
            self._recoveries += session.recoveries
