"""Servers come, die, freeze and leave while two clients generate, in an order by chance that a seed gives again.

PETALNODE_CHAOS_SECONDS=300 PETALNODE_CHAOS_SEED=7 PETALNODE_CHAOS_CLIENTS=8 pytest -s tests/swarm/test_chaos.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm.chaos import run_chaos
from tests.swarm.processes import Nodes
from tests.swarm.server_pool import ServerPool, server_pool

SECONDS = float(os.environ.get("PETALNODE_CHAOS_SECONDS", "12"))
SEED = int(os.environ.get("PETALNODE_CHAOS_SEED", "1"))
CLIENTS = int(os.environ.get("PETALNODE_CHAOS_CLIENTS", "2"))


@pytest.fixture(scope="module")
def pool(home: Path, models: Path, node_starter: Nodes) -> Iterator[ServerPool]:
    peer = node_starter.meeting_point().event("ready")["addrs"][0]
    with server_pool(home / "chaos", models / "tiny-llama", peer) as started:
        yield started


@pytest.mark.timeout(SECONDS + 900)
def test_nothing_is_lost_in_chaos(pool: ServerPool, models: Path) -> None:
    print(f"\nPETALNODE_CHAOS_SEED={SEED} PETALNODE_CHAOS_SECONDS={SECONDS:g}", flush=True)
    report = run_chaos(pool, models / "tiny-llama", seconds=SECONDS, seed=SEED, clients=CLIENTS)
    print(report.fields(), flush=True)
    assert not any(report.left.values())
