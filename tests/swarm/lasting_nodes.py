"""Nodes that several files use. Those files follow each other, and the nodes end with the last of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.swarm.processes import Nodes, nodes

T = TypeVar("T")
FIXTURE = "lasting_nodes"
FILES = pytest.StashKey[set[Path]]()
"""The files that use them, of the whole run."""


class LastingNodes:
    """Starts what the first of these files wants, and keeps it for the next."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._nodes: Nodes | None = None
        self._made: dict[str, Any] = {}

    def made(self, name: str, home: Path, start: Callable[[Nodes], T]) -> T:
        """What `start` has made, now or for a file before."""
        if self._nodes is None:
            self._nodes = self._stack.enter_context(nodes(home))
        if name not in self._made:
            self._made[name] = start(self._nodes)
        made: T = self._made[name]
        return made

    def end_before(self, item: pytest.Item | None) -> None:
        """Ends all, unless the next test stands in a file that uses them: an idle node takes a hundredth of a core."""
        if item is None or item.path not in item.config.stash[FILES]:
            self._made.clear()
            self._nodes = None
            self._stack.close()
