"""Nodes of js-libp2p (peer.mjs) for the tests of how others get on with petalnode's nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.interop.built import BUILT, NODE
from tests.nat.nodes import ToldNode


class JsNode(ToldNode):
    """Options and commands are those of peer.mjs; `prefix` comes before the command line."""

    def __init__(self, home: Path, prefix: Sequence[str] = (), **options: Any) -> None:
        shutil.copy(Path(__file__).with_name("peer.mjs"), BUILT / "peers")
        super().__init__([*prefix, NODE, str(BUILT / "peers/peer.mjs"), json.dumps(options)], home)


class JsNodes:
    """Starts them, and ends all of them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._started: list[JsNode] = []

    def start(self, *, prefix: Sequence[str] = (), **options: Any) -> JsNode:
        """Returns at once; its `ready` waits."""
        self._started.append(JsNode(self._home, prefix, **options))
        return self._started[-1]

    def end(self) -> None:
        for node in self._started:
            node.kill()


@pytest.fixture
def js(tmp_path: Path) -> Iterator[JsNodes]:
    nodes = JsNodes(tmp_path)
    try:
        yield nodes
    finally:
        nodes.end()
