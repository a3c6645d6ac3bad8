"""Rows of a batch as several sessions, each with a loop of its own, so that no server of a chain waits for the others.

A batch that goes through the chain as a whole keeps one server busy at a time. Groups of its rows that are under way at
once, each at another server, keep all of them busy: recurrent pipeline parallelism (Macario 2024, section 3.2).
`groups`, a pure function, decides in how many the rows are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ..generation.drafting import Draft, LookupDrafter
from .pace import DRAFTED, Measured, Paces, Route

_BASE: Final = 0.8
"""Of a server's step of one row, what a step of several rows takes once: the weights are read for all of them. By the
compiled kernels 0.9 with float32 weights and 0.7 with 4 bits; less where torch multiplies."""
_HANDLING: Final = 0.002
"""Seconds in which a server takes, checks, signs and sends a step; of its processor time 1.7 to 2.7 ms."""
_CLIENT: Final = 0.005
"""Seconds of the client's loop for a group: embedding, head, choice, receipts. Its threads take turns."""
_WORTH: Final = 0.8
"""Of the time as one batch: less is not sure to be a gain."""
_WORTH_TRYING: Final = 0.9
"""Of the quickest that was tried: what turns out to be slower is not taken again."""
_MOST: Final = 8
_MOST_DRAFTED: Final = 16
_LEAST: Final = 0.97
"""Times as quick as in one batch that rows by themselves have to be where no draft is right."""
_SPARE: Final = 1.15
"""Times as much as they have to do then that servers can do: wrong drafts of a row take their time from the others."""
FIRST_GAIN: Final = 2.0
"""Tokens a step that drafts are taken to bring, before any were seen."""
_LONGEST_STEP: Final = 16
_ENOUGH: Final = 12
"""Steps of all rows together, from which on they say something."""


def groups(rows: int, step_seconds: Sequence[float], trip_seconds: float, measured: Measured | None = None) -> int:
    """In how many groups `rows` go through servers that say that they take so long for a step of one row.

    `trip_seconds`: what a step takes on the way, through all of them and back. `measured`: what earlier batches through
    the same servers have shown, which counts more. One group, or what was quickest of what was tried with so many rows,
    unless another number is clearly quicker.
    """
    if len(step_seconds) < 2:
        return 1
    measured = measured or Measured()
    steps, handling = _as_measured(measured) if measured.computed else (step_seconds, _HANDLING)
    counts = range(1, min(rows, 2 * len(step_seconds), _MOST) + 1)
    tried = {count: measured.rounds[rows, count] for count in counts if (rows, count) in measured.rounds}
    best = min(tried, key=tried.__getitem__, default=1)
    one = _round_seconds(1, rows, steps, trip_seconds, handling)
    least = _WORTH_TRYING * tried[best] if tried else _WORTH * one
    for count in counts:
        seconds = _round_seconds(count, rows, steps, trip_seconds, handling)
        if count not in tried and seconds < least:
            best, least = count, seconds
    return best


def _as_measured(measured: Measured) -> tuple[list[float], float]:
    """Seconds of each server's step of one row, and in which a server handles it: the client is as one of them."""
    steps = [seconds / (_BASE + (1 - _BASE) * size) for seconds, size in measured.computed]
    return steps, max(_HANDLING, (measured.overhead or 0.0) / (len(steps) + 1))


def _round_seconds(
    count: int, rows: int, step_seconds: Sequence[float], trip_seconds: float, handling: float = _HANDLING
) -> float:
    """Until every row has another token: as long as the busiest has to do, or one group needs for its way."""
    size = -(-rows // count)
    stages = [seconds * (_BASE + (1 - _BASE) * size) + handling for seconds in step_seconds]
    return max(count * max(stages), count * _CLIENT, sum(stages) + _CLIENT + trip_seconds)


def draft_apart(
    rows: int, step_seconds: Sequence[float], trip_seconds: float, gain: float, measured: Measured | None = None
) -> bool:
    """Whether `rows` are quicker each in a session of its own, with drafts, than in one batch without.

    `gain`: tokens that a step with a draft brings on average. Where no draft is right it is to be 0.97 times as quick
    at least, so that a wrong `gain` costs little; what wrong drafts may cost, `DraftPlan` bounds. `measured`: what
    earlier batches through the same servers took counts more; it has to pay with half of the gain then.
    """
    if not 1 < rows <= _MOST_DRAFTED or not step_seconds:
        return False
    rounds = measured.rounds if measured is not None else {}
    together = rounds.get((rows, 1)) or _round_seconds(1, rows, step_seconds, trip_seconds)
    if (rows, DRAFTED) in rounds:
        step = rounds[rows, DRAFTED]
        return step / gain < _WORTH * together and together >= _LEAST * step / max(1.0, gain / 2)
    alone, busy = _round_seconds(rows, rows, step_seconds, trip_seconds), rows * (max(step_seconds) + _HANDLING)
    if together < max(_LEAST * alone, _SPARE * busy):
        return False
    stages = [seconds * (_BASE + (1 - _BASE) * gain) + _HANDLING for seconds in step_seconds]
    drafted = max(rows * max(stages), rows * _CLIENT, sum(stages) + _CLIENT + trip_seconds)
    return drafted / gain < _WORTH * together


def lookup_gain(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Tokens a step that drafts from the text would have brought, for (prompt, answer) of each row."""
    tokens = steps = 0
    for prompt, answer in rows:
        lookup, said, end = LookupDrafter(), list(prompt), len(prompt) + len(answer)
        whole = [*prompt, *answer]
        while len(said) < end:
            draft = next(lookup.matches(said), Draft()).tokens[: _LONGEST_STEP - 1]
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
        self.gain = FIRST_GAIN

    def cut(
        self, rows: int, route: Route, step_seconds: Sequence[float], trip_seconds: float, drafts: bool
    ) -> tuple[int, bool]:
        """(in how many sessions the rows of a batch go through the servers of `route`, whether they take drafts there).

        Where there are to be `drafts`, rows take them only where each has a session of its own.
        """
        measured = self.paces.measured(route)
        if drafts and draft_apart(rows, step_seconds, trip_seconds, self.gain, measured):
            return rows, True
        return groups(rows, step_seconds, trip_seconds, measured), False

    def note_drafted(self, routes: Collection[Route], seconds: Sequence[float], steps: Sequence[int]) -> None:
        """Rows were made at once with drafts, each in a session of its own, in so many seconds and steps. It says
        something where there were enough steps and all rows had one chain."""
        if len(routes) == 1 and sum(steps) >= _ENOUGH:
            longest = max(span / max(1, count) for span, count in zip(seconds, steps, strict=True))
            self.paces.note_drafted(next(iter(routes)), len(steps), longest)

    def learn(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], accepted: int | None, known: bool
    ) -> None:
        """Learns how many tokens a step drafts have brought in a batch: `accepted` of them were right. None: there were
        none, and those that are looked up would have brought what the text shows, where these are what is `known`."""
        gain = FIRST_GAIN
        if accepted is not None:
            tokens = sum(map(len, answers))
            gain = tokens / max(1, tokens - accepted)
        elif known:
            gain = lookup_gain(list(zip(prompts, answers, strict=True)))
        self.gain = (self.gain + gain) / 2
