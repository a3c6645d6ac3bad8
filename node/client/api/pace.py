"""What steps of batches have taken, for the decision how the rows of later ones go through the same servers."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ...swarm.routing import Hop
from ..session.answers import HopTiming

_ENOUGH: Final = 6
"""Steps behind the first one, from which on they say something."""
_KEPT: Final = 300.0
"""Seconds for which a measurement counts: servers and other clients change."""
_ROUTES: Final = 16
DRAFTED: Final = 0

Route = tuple[tuple[str, int, int], ...]
"""Peer id, first block and end of each server of a chain."""


def route_of(hops: Iterable[Hop]) -> Route:
    """As what was measured of a chain is kept."""
    return tuple((hop.peer_id, hop.span.start, hop.span.end) for hop in hops)


class Pace:
    """The decode steps of one session through its present chain. Noted in one thread at a time.

    Attributes:
        route: the chain; empty before the first step.
    """

    def __init__(self) -> None:
        self.route: Route = ()
        self._first = self._last = 0.0
        self._computed: list[Sequence[float]] = []

    def note(self, now: float, route: Route, hops: Sequence[HopTiming]) -> None:
        """A step was answered. What a server says that it computed counts up to the time in which its answer came."""
        if route != self.route:
            self.route, self._first, self._computed = route, now, []
        self._last = now
        self._computed.append([min(hop.compute, hop.total) for hop in hops])

    @property
    def seconds(self) -> float | None:
        """From one step to the next; None as long as there were few."""
        steps = len(self._computed) - 1
        return (self._last - self._first) / steps if steps >= _ENOUGH else None

    @property
    def computed(self) -> list[float]:
        """The middle one of each server's steps behind the first one."""
        return [statistics.median(server) for server in zip(*self._computed[1:], strict=True)]


@dataclass(frozen=True)
class Measured:
    """What is known of one chain. Times in seconds.

    Attributes:
        computed: of each server, and with how many rows; empty if nothing is known.
        overhead: of a step that was alone on its way, what none of the servers has computed.
        rounds: until each of so many rows, in so many sessions, had another token; in sessions of their own with drafts
            (`DRAFTED`), until a step was answered.
    """

    computed: tuple[tuple[float, float], ...] = ()
    overhead: float | None = None
    rounds: Mapping[tuple[int, int], float] = field(default_factory=dict)


class Paces:
    """What the generations of a model have taken, by the chain. Those of long ago are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Route, tuple[float, Measured]] = OrderedDict()

    def measured(self, route: Route) -> Measured:
        """What is known of a chain."""
        at, known = self._known.get(route, (0.0, Measured()))
        return known if self._clock() - at <= _KEPT else Measured()

    def note(self, sessions: Sequence[tuple[int, Pace]]) -> None:
        """All rows of a batch were generated at once, in sessions of so many rows each."""
        route = sessions[0][1].route
        speeds = [rows / pace.seconds for rows, pace in sessions if pace.seconds]
        if len(speeds) < len(sessions) or any(pace.route != route for _, pace in sessions):
            return
        rows = sum(count for count, _ in sessions)
        before = self.measured(route)
        computed = [statistics.mean(server) for server in zip(*(pace.computed for _, pace in sessions), strict=True)]
        seconds = rows / sum(speeds)
        self._keep(
            route,
            Measured(
                tuple((one, rows / len(sessions)) for one in computed),
                max(0.0, seconds - sum(computed)) if len(sessions) == 1 else before.overhead,
                {**before.rounds, (rows, len(sessions)): seconds},
            ),
        )

    def note_drafted(self, route: Route, rows: int, seconds: float) -> None:
        """So many rows were generated at once with drafts, each in a session of its own; `seconds` of a step."""
        before = self.measured(route)
        self._keep(route, replace(before, rounds={**before.rounds, (rows, DRAFTED): seconds}))

    def _keep(self, route: Route, measured: Measured) -> None:
        self._known[route] = self._clock(), measured
        self._known.move_to_end(route)
        while len(self._known) > _ROUTES:
            self._known.popitem(last=False)
