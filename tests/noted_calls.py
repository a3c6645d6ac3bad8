"""What is called while a test runs, without anything in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def calls_of(*functions: Callable[..., Any]) -> Iterator[list[dict[str, Any]]]:
    """The arguments of each call of these functions of Python in this thread, by name."""
    watched, calls = {function.__code__ for function in functions}, list[dict[str, Any]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in watched:
            calls.append(dict(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
