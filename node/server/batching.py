"""What the compute thread does next: a pure decision over the steps that wait.

Every turn runs all waiting decode steps as one ragged batch (the largest single gain when several people talk to one
server), and between turns at most one chunk of one prefill, so that nobody's next token waits for somebody's long
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PREFILL_CHUNK: Final = 256
"""Tokens (rows times positions) of a prefill between two turns of decode steps."""
MAX_DECODE_ROWS: Final = 256


@dataclass(frozen=True)
class Waiting:
    """A step that waits: `rows` of `tokens` each, `done` tokens a row of it already computed."""

    rows: int
    tokens: int
    done: int = 0

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1


@dataclass(frozen=True)
class Turn:
    """Indices into the waiting steps: all of `decode` in one batch, then `chunk` tokens a row of `prefill`."""

    decode: tuple[int, ...]
    prefill: int | None
    chunk: int = 0


def next_turn(waiting: Sequence[Waiting]) -> Turn:
    """Decides one turn. `waiting` is in order of arrival; earlier steps go first within their kind."""
    decode: list[int] = []
    rows = 0
    for index, step in enumerate(waiting):
        if step.is_decode and (not decode or rows + step.rows <= MAX_DECODE_ROWS):
            decode.append(index)
            rows += step.rows
    prefill = next((index for index, step in enumerate(waiting) if not step.is_decode), None)
    if prefill is None:
        return Turn(tuple(decode), None)
    step = waiting[prefill]
    return Turn(tuple(decode), prefill, min(step.tokens - step.done, max(1, PREFILL_CHUNK // step.rows)))
