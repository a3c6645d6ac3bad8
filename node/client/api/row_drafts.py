"""Rows of a batch that take drafts, each in a session of its own.

In one session all rows would wait for the one that was guessed worst. Without drafts they stay in one: a step of
several rows reads the weights once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...swarm.cost import Estimate, EstimateRule
from ..generation.drafting import Draft, LookupDrafter


@dataclass(frozen=True)
class RowPolicy:
    """When the rows of a batch go through the chain apart."""

    base: float = 0.8
    """Of a server's step of one row, what a step of several rows takes once: the weights are read for all of them. By
    the compiled kernels 0.9 with float32 weights and 0.7 with 4 bits; less where torch multiplies."""
    handling: float = 0.002
    """Seconds in which a server takes, checks, signs and sends a step; of its processor time 1.7 to 2.7 ms."""
    client: float = 0.005
    """Seconds of the client's loop for a session: embedding, head, choice, receipts. Its threads take turns."""
    worth: float = 0.8
    """Of the time as one batch: less is not sure to be a gain."""
    most_drafted: int = 16
    least: float = 0.97
    """Times as quick as in one batch that rows by themselves have to be where no draft is right."""
    spare: float = 1.15
    """Times as much as they have to do then that servers can do: wrong drafts of a row take their time from the
    others."""
    first_gain: float = 2.0
    """Tokens a step that drafts are taken to bring, before any were seen."""
    longest_step: int = 16


ROWS: Final = RowPolicy()


def draft_apart(rows: int, step_seconds: Sequence[float], trip_seconds: float, gain: float) -> bool:
    """Whether `rows` are quicker each in a session of its own, with drafts, than in one batch without.

    `step_seconds`: what servers announce for a step of one row; `trip_seconds`: on the way through all and back.
    `gain`: tokens that a step with a draft brings on average. Drafts that are all wrong may make rows at most 3 %
    slower, so a wrong `gain` costs little; `DraftPlan` bounds the rest.
    """
    if not 1 < rows <= ROWS.most_drafted or not step_seconds:
        return False
    together = sum(_stages(step_seconds, rows)) + ROWS.client + trip_seconds
    alone, busy = _apart_seconds(rows, step_seconds, trip_seconds), rows * (max(step_seconds) + ROWS.handling)
    if together < max(ROWS.least * alone, ROWS.spare * busy):
        return False
    return _apart_seconds(rows, step_seconds, trip_seconds, gain) / gain < ROWS.worth * together


def _stages(step_seconds: Sequence[float], size: float) -> list[float]:
    """Seconds of each server for a step of `size` rows, or tokens of one."""
    return [seconds * (ROWS.base + (1 - ROWS.base) * size) + ROWS.handling for seconds in step_seconds]


def _apart_seconds(rows: int, step_seconds: Sequence[float], trip_seconds: float, size: float = 1) -> float:
    """Until a step of `size` tokens of every row is answered: as long as the busiest has to do, or one row is on its
    way."""
    stages = _stages(step_seconds, size)
    return max(rows * max(stages), rows * ROWS.client, sum(stages) + ROWS.client + trip_seconds)


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


def first_gain() -> Estimate:
    """Tokens a step that drafts bring to the rows of batches; each batch counts as much as all before it."""
    return Estimate(EstimateRule(newest=1 / 2, most=math.inf), ROWS.first_gain, count=1)


def seen_gain(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], accepted: int | None, known: bool
) -> float:
    """Tokens a step that drafts have brought in a batch: `accepted` of them were right. None: there were none, and the
    looked-up ones would have brought what the text shows, if it is `known`."""
    if accepted is not None:
        tokens = sum(map(len, answers))
        return tokens / max(1, tokens - accepted)
    return lookup_gain(list(zip(prompts, answers, strict=True))) if known else ROWS.first_gain
