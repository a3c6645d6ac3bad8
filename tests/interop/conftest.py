"""What these checks start. The programs of others are imported when one is asked for: `make test` passes by here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.swarm.conftest import home, models, node_starter

if TYPE_CHECKING:
    from tests.interop.go_node import GoNodes
    from tests.interop.peers import JsNodes

__all__ = ["home", "models", "node_starter"]


@pytest.fixture(scope="module")
def built() -> None:
    from tests.interop.built import bundle

    bundle()


@pytest.fixture
def js(tmp_path: Path) -> Iterator[JsNodes]:
    from tests.interop.peers import JsNodes

    nodes = JsNodes(tmp_path)
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def go(tmp_path: Path) -> Iterator[GoNodes]:
    from tests.interop.go_node import GoNodes

    nodes = GoNodes(tmp_path)
    try:
        yield nodes
    finally:
        nodes.end()
