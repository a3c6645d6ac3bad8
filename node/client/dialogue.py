"""The turns of a chat, and which of them fit into the context: pure, but for the tokenizer's template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Turn:
    """`role` is "system", "user" or "assistant", as chat templates call them."""

    role: str
    content: str


@dataclass(frozen=True)
class Dialogue:
    """What was said so far, oldest first; the system turn, if any, stands first and always stays."""

    turns: tuple[Turn, ...] = ()

    def plus(self, role: str, content: str) -> Dialogue:
        return replace(self, turns=(*self.turns, Turn(role, content)))

    def without_oldest(self) -> Dialogue | None:
        """Without the oldest question and its answer; None if only the newest question is left."""
        start = 1 if self.turns and self.turns[0].role == "system" else 0
        end = start + 1
        while end < len(self.turns) and self.turns[end].role != "user":
            end += 1
        if end >= len(self.turns):
            return None
        return replace(self, turns=self.turns[:start] + self.turns[end:])


def fit(
    dialogue: Dialogue, tokenize: Callable[[Sequence[Turn]], list[int]], limit: int
) -> tuple[Dialogue, list[int], int]:
    """Drops the oldest turns until the prompt has at most `limit` tokens.

    Returns:
        What is left, its tokens, and how many turns went. If the newest question alone is too long, its tokens are
        more than `limit`: the caller says so.
    """
    dropped = 0
    while True:
        tokens = tokenize(dialogue.turns)
        if len(tokens) <= limit:
            return dialogue, tokens, dropped
        shorter = dialogue.without_oldest()
        if shorter is None:
            return dialogue, tokens, dropped
        dropped += len(dialogue.turns) - len(shorter.turns)
        dialogue = shorter
