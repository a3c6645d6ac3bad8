"""Progress callbacks of downloads, imports and hashing."""

from __future__ import annotations

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
