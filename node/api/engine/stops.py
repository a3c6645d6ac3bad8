"""Text as it comes, cut where a stop string begins. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first of some strings; the beginning of what may be one is held back.

    Attributes:
        found: the string that was met; None so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What of the text so far can be shown, and was not shown before."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places, key=lambda found: found[0])
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back, when no more comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, but is not."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
