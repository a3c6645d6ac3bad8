"""What the compute thread does next: a pure decision over the steps that wait.

Every turn runs all waiting decode steps as one ragged batch (the largest single gain when several people talk to one
server), and between turns at most one chunk of one prefill, so that nobody's next token waits for somebody's long
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..blocks.span import PREFILL_CHUNK
from .budget import next_in_line, now_overtaken

MAX_DECODE_ROWS: Final = 256


@dataclass(frozen=True)
class Waiting:
    """A step that waits: `rows` of `tokens` each, `done` tokens a row of it already computed. `paid`: has priority."""

    rows: int
    tokens: int
    done: int = 0
    paid: bool = False

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1


@dataclass(frozen=True)
class Turn:
    """Indices into the waiting steps: all of `decode` in one batch, then `chunk` tokens a row of `prefill`. `overtaken`
    is for the turn after it."""

    decode: tuple[int, ...]
    prefill: int | None
    chunk: int = 0
    overtaken: int = 0


def next_turn(waiting: Sequence[Waiting], overtaken: int = 0) -> Turn:
    """Decides one turn. `waiting` is in order of arrival; earlier steps go first within their kind, and among prefills
    those with priority, as `next_in_line` has it."""
    decode: list[int] = []
    rows = 0
    for index, step in enumerate(waiting):
        if step.is_decode and (not decode or rows + step.rows <= MAX_DECODE_ROWS):
            decode.append(index)
            rows += step.rows
    prefills = [index for index, step in enumerate(waiting) if not step.is_decode]
    if not prefills:
        return Turn(tuple(decode), None)
    paid = [waiting[index].paid for index in prefills]
    place = next_in_line(paid, overtaken)
    step = waiting[prefills[place]]
    chunk = min(step.tokens - step.done, max(1, PREFILL_CHUNK // step.rows))
    return Turn(tuple(decode), prefills[place], chunk, now_overtaken(paid, place, overtaken))
