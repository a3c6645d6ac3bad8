"""Rows of a batch as several sessions, each with a loop of its own, so that no server of a chain waits for the others.

A batch that goes through the chain as a whole keeps one server busy at a time. Groups of its rows that are under way at
once, each at another server, keep all of them busy. That is recurrent pipeline parallelism (Macario 2024, section 3.2).
`groups`, a pure function, decides in how many the rows are cut.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ...swarm.routing import Hop
from ..generation.drafting import Draft, LookupDrafter
from ..session.answers import HopTiming


@dataclass(frozen=True)
class RowPolicy:
    """When the rows of a batch go through the chain apart, and what is kept of that time."""

    base: float = 0.8
    """Of a server's step of one row, what a step of several rows takes once: the weights are read for all of them. By
    the compiled kernels 0.9 with float32 weights and 0.7 with 4 bits; less where torch multiplies."""
    handling: float = 0.002
    """Seconds in which a server takes, checks, signs and sends a step; of its processor time 1.7 to 2.7 ms."""
    client: float = 0.005
    """Seconds of the client's loop for a group: embedding, head, choice, receipts. Its threads take turns."""
    worth: float = 0.8
    """Of the time as one batch: less is not sure to be a gain."""
    worth_trying: float = 0.9
    """Of the quickest that was tried: what turns out to be slower is not taken again."""
    most: int = 8
    most_drafted: int = 16
    least: float = 0.97
    """Times as quick as in one batch that rows by themselves have to be where no draft is right."""
    spare: float = 1.15
    """Times as much as they have to do then that servers can do: wrong drafts of a row take their time from the
    others."""
    first_gain: float = 2.0
    """Tokens a step that drafts are taken to bring, before any were seen."""
    longest_step: int = 16
    enough: int = 12
    """Steps of all rows together, from which on they say something."""
    enough_of_session: int = 6
    """Steps of one session behind the first one, from which on they do."""
    kept_seconds: float = 300.0
    """For which a measurement counts: servers and other clients change."""
    routes: int = 16


ROWS: Final = RowPolicy()
DRAFTED: Final = 0

Route = tuple[tuple[str, int, int], ...]
"""Peer id, first block and end of each server of a chain."""


def route_of(hops: Iterable[Hop]) -> Route:
    """As what was measured of a chain is kept."""
    return tuple((hop.peer_id, hop.span.start, hop.span.end) for hop in hops)


class Pace:
    """The decode steps of one session through its present chain. Noted in one thread at a time.

    No `Estimate`: two ways are compared by what whole answers took, pauses between their steps included.

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
        return (self._last - self._first) / steps if steps >= ROWS.enough_of_session else None

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
        rounds: by the numbers of rows and of sessions, until each row had another token; in sessions of their own with
            drafts (`DRAFTED`), until a step was answered.
    """

    computed: tuple[tuple[float, float], ...] = ()
    overhead: float | None = None
    rounds: Mapping[tuple[int, int], float] = field(default_factory=dict)


class Paces:
    """What the generations of a model have taken, by the chain. Those of long ago are forgotten.

    It is no `Estimate`: the newest figure counts alone. Each is the mean of a whole answer's steps already, and ways
    that were tried minutes apart are compared.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Route, tuple[float, Measured]] = OrderedDict()

    def measured(self, route: Route) -> Measured:
        """What is known of a chain."""
        at, known = self._known.get(route, (0.0, Measured()))
        return known if time.monotonic() - at <= ROWS.kept_seconds else Measured()

    def note(self, sessions: Sequence[tuple[int, Pace]]) -> None:
        """All rows of a batch were generated at once, in sessions of these numbers of rows."""
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
        """`rows` rows were generated at once with drafts, each in a session of its own; `seconds` of a step."""
        before = self.measured(route)
        self._keep(route, replace(before, rounds={**before.rounds, (rows, DRAFTED): seconds}))

    def _keep(self, route: Route, measured: Measured) -> None:
        self._known[route] = time.monotonic(), measured
        self._known.move_to_end(route)
        while len(self._known) > ROWS.routes:
            self._known.popitem(last=False)


def groups(rows: int, step_seconds: Sequence[float], trip_seconds: float, measured: Measured | None = None) -> int:
    """In how many groups `rows` go through servers that announce these seconds for a step of one row.

    `trip_seconds`: what a step takes on the way, through all of them and back. `measured`: what earlier batches through
    the same servers have shown, which counts more. One group, or what was quickest of what was tried with these rows,
    unless another number is clearly quicker.
    """
    if len(step_seconds) < 2:
        return 1
    measured = measured or Measured()
    steps, handling = _as_measured(measured) if measured.computed else (step_seconds, ROWS.handling)
    counts = range(1, min(rows, 2 * len(step_seconds), ROWS.most) + 1)
    tried = {count: measured.rounds[rows, count] for count in counts if (rows, count) in measured.rounds}
    best = min(tried, key=tried.__getitem__, default=1)
    one = _round_seconds(1, rows, steps, trip_seconds, handling)
    least = ROWS.worth_trying * tried[best] if tried else ROWS.worth * one
    for count in counts:
        seconds = _round_seconds(count, rows, steps, trip_seconds, handling)
        if count not in tried and seconds < least:
            best, least = count, seconds
    return best


def _as_measured(measured: Measured) -> tuple[list[float], float]:
    """Seconds of each server's step of one row, and in which a server handles it: the client is as one of them."""
    steps = [seconds / (ROWS.base + (1 - ROWS.base) * size) for seconds, size in measured.computed]
    return steps, max(ROWS.handling, (measured.overhead or 0.0) / (len(steps) + 1))


def _round_seconds(
    count: int, rows: int, step_seconds: Sequence[float], trip_seconds: float, handling: float = ROWS.handling
) -> float:
    """Until every row has another token: as long as the busiest has to do, or one group needs for its way."""
    size = -(-rows // count)
    stages = [seconds * (ROWS.base + (1 - ROWS.base) * size) + handling for seconds in step_seconds]
    return max(count * max(stages), count * ROWS.client, sum(stages) + ROWS.client + trip_seconds)


def draft_apart(
    rows: int, step_seconds: Sequence[float], trip_seconds: float, gain: float, measured: Measured | None = None
) -> bool:
    """Whether `rows` are quicker each in a session of its own, with drafts, than in one batch without.

    `gain`: tokens that a step with a draft brings on average. Drafts that are all wrong may make rows at most 3 %
    slower, so a wrong `gain` costs little; `DraftPlan` bounds the rest. `measured`: what earlier batches through the
    same servers took, which counts more: half of the gain has to pay then.
    """
    if not 1 < rows <= ROWS.most_drafted or not step_seconds:
        return False
    rounds = measured.rounds if measured is not None else {}
    together = rounds.get((rows, 1)) or _round_seconds(1, rows, step_seconds, trip_seconds)
    if (rows, DRAFTED) in rounds:
        step = rounds[rows, DRAFTED]
        return step / gain < ROWS.worth * together and together >= ROWS.least * step / max(1.0, gain / 2)
    alone, busy = _round_seconds(rows, rows, step_seconds, trip_seconds), rows * (max(step_seconds) + ROWS.handling)
    if together < max(ROWS.least * alone, ROWS.spare * busy):
        return False
    stages = [seconds * (ROWS.base + (1 - ROWS.base) * gain) + ROWS.handling for seconds in step_seconds]
    drafted = max(rows * max(stages), rows * ROWS.client, sum(stages) + ROWS.client + trip_seconds)
    return drafted / gain < ROWS.worth * together


def lookup_gain(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Tokens a step that drafts from the text would have brought, for (prompt, answer) of each row."""
    tokens = steps = 0
    for prompt, answer in rows:
        lookup, said, end = LookupDrafter(), list(prompt), len(prompt) + len(answer)
        whole = [*prompt, *answer]
        while len(said) < end:
            draft = next(lookup.matches(said), Draft()).tokens[: ROWS.longest_step - 1]
            right = 0
            while right < len(draft) and len(said) + right < end and draft[right] == whole[len(said) + right]:
                right += 1
            said = whole[: len(said) + right + 1]
            steps += 1
        tokens += len(answer)
    return tokens / steps if steps else 1.0


class Batches:
    """How the rows of batches go through chains, from what the batches before have shown.

    Attributes:
        paces: what their steps have taken.
        gain: tokens a step that drafts bring, or would have.
    """

    def __init__(self) -> None:
        self.paces = Paces()
        self.gain = ROWS.first_gain

    def cut(
        self, rows: int, route: Route, step_seconds: Sequence[float], trip_seconds: float, drafts: bool
    ) -> tuple[int, bool]:
        """(in how many sessions the rows go through the servers of `route`, whether they take drafts there).

        Where there are to be `drafts`, rows take them only where each has a session of its own.
        """
        measured = self.paces.measured(route)
        if drafts and draft_apart(rows, step_seconds, trip_seconds, self.gain, measured):
            return rows, True
        return groups(rows, step_seconds, trip_seconds, measured), False

    def note_drafted(self, routes: Collection[Route], seconds: Sequence[float], steps: Sequence[int]) -> None:
        """Rows were made at once with drafts, each in a session of its own, in `seconds` and `steps` steps. It says
        something where there were enough steps and all rows had one chain."""
        if len(routes) == 1 and sum(steps) >= ROWS.enough:
            longest = max(span / max(1, count) for span, count in zip(seconds, steps, strict=True))
            self.paces.note_drafted(next(iter(routes)), len(steps), longest)

    def learn(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], accepted: int | None, known: bool
    ) -> None:
        """Learns how many tokens a step drafts have brought in a batch: `accepted` of them were right. None: there were
        none, and the looked-up ones would have brought what the text shows, if it is `known`."""
        gain = ROWS.first_gain
        if accepted is not None:
            tokens = sum(map(len, answers))
            gain = tokens / max(1, tokens - accepted)
        elif known:
            gain = lookup_gain(list(zip(prompts, answers, strict=True)))
        self.gain = (self.gain + gain) / 2
