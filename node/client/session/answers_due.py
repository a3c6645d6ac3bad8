"""How often a server may answer each step of a session: as often as it was asked. Pure."""

from __future__ import annotations

from typing import Final

_LOOK_BACK: Final = 16
"""Steps behind the last answer that are remembered; a server holds the replies to four."""


class OutstandingReplies:
    """Counts the ways on which a step comes to a server, and its answers.

    A server answers a step that it has done once more when its client sends it again, be it that another server had
    pushed it already or that a stream was lost. An answer beyond that is one that nobody asked for: it may stand in
    the place of the one that is due, and a client that went on waiting would be held up by it.
    """

    def __init__(self) -> None:
        self._due: dict[int, int] = {}

    def ask(self, sequence: int) -> None:
        """The step is sent to the server, or another one is told to push it there."""
        self._due[sequence] = self._due.get(sequence, 0) + 1

    def ask_again(self, answered: int) -> None:
        """The session goes on over another stream, on which all answers behind the step `answered` come again."""
        for sequence in self._due:
            if sequence > answered:
                self._due[sequence] += 1

    def answer(self, sequence: int) -> bool:
        """Whether this answer was due."""
        due = self._due.get(sequence, 0)
        self._due[sequence] = due - 1
        for old in [each for each in self._due if each <= sequence - _LOOK_BACK]:
            del self._due[old]
        return due > 0
