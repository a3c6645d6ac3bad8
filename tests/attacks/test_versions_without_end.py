"""Made-up servers: many versions of a model, of most blocks, with holes. What `models show` says of it stays short."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.swarm.processes import environment, nodes, petalnode
from tests.tiny_models import save_tiny

LIAR = """
import json, random, sys, time, trio
from petalnode.crypto.identity import Identity
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.protocols.announcement import ANNOUNCEMENT, Announcement, ServerState, freshened, sign_announcement
from petalnode.protocols.ids import Span

rng = random.Random(7)

def made_up(number):
    identity = Identity.from_seed(rng.randbytes(32))
    version = rng.randbytes(32) if number % 3 else b"most" * 8
    span = Span(2 * number, 2 * number + 1)
    said = Announcement(identity.peer_id, version, sys.argv[1], ANNOUNCEMENT.max_blocks, span, ServerState.ONLINE)
    return sign_announcement(identity, freshened(said, now=time.time(), lifetime=600.0))

async def main():
    config = SwarmConfig(identity=Identity.from_seed(rng.randbytes(32)), listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_swarm(config) as swarm:
        swarm._directory.merge(map(made_up, range(600)))
        print(json.dumps({"event": "ready", "addrs": swarm.addrs}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)

trio.run(main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a path there is no name that a server can announce")
def test_announced_models_take_few_short_lines(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    with nodes(tmp_path / "nodes") as started:
        address = started.script(LIAR, str(model)).event("ready")["addrs"][0]
        asked = ("models", "show", str(model), "--peer", address)
        told = petalnode(*asked, env=environment(tmp_path / "home"))
        listed = petalnode(*asked, "--json", env=environment(tmp_path / "home"))
    lines = told.out.splitlines()
    assert told.code == listed.code == 0, told
    assert len(lines) <= 20 and max(map(len, lines)) < 300, told
    assert sum("in this swarm: version" in line for line in lines) == 8, told
    assert "more ranges missing" in told.out and lines[-1].endswith("more versions by that name")
    (found,) = listed.objects
    assert len(found["swarm"]) == 8 and found["other_versions"] > 8
    assert found["swarm"][0]["model_version"] == (b"most" * 8).hex() and found["swarm"][0]["servers"] > 8
