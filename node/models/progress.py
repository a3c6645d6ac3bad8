"""Progress callbacks of downloads, imports and hashing."""

from __future__ import annotations

import threading
from typing import Protocol


class Progress(Protocol):
    """Called while something long runs.

    `what` is a short phrase such as "Downloading model.safetensors"; `done` and `total` count bytes, `total`
    is None while it is unknown. The last call for a `what` has `done == total`. Calls may come from any
    thread, but never two at a time.
    """

    def __call__(self, what: str, done: int, total: int | None) -> None: ...


def no_progress(what: str, done: int, total: int | None) -> None:
    """Shows nothing."""


class ProgressSum:
    """Adds up what several threads have done, and reports it one call at a time."""

    def __init__(self, what: str, total: int, progress: Progress) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._what, self._done, self._total)
