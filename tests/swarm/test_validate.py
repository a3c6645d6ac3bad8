"""`petalnode validate` on real processes: it catches servers that compute something else, and never an honest one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client import load_client
from petalnode.node.client.core import identify_model
from petalnode.node.client.text import Text
from petalnode.node.models import resolve
from petalnode.node.swarm.swarm import SwarmConfig, open_swarm
from petalnode.node.validator.history import History
from petalnode.node.validator.prober import Own
from petalnode.node.validator.service import Validator, ValidatorOptions
from petalnode.node.validator.verdicts import Judge, Verdict
from tests.swarm.faulty_server import order
from tests.swarm.processes import Nodes, petalnode
from tests.swarm.server_pool import PooledServer, server_pool


@dataclass(frozen=True)
class SuspectSwarm:
    """tiny-llama over an honest server and one that does what `control` says, in float32 and once more in bfloat16."""

    peer: str
    folder: Path
    control: Path
    honest: dict[str, PooledServer]
    suspect: dict[str, PooledServer]


@pytest.fixture(scope="module")
def swarms(node_starter: Nodes, home: Path, models: Path) -> Iterator[dict[str, SuspectSwarm]]:
    folder = models / "tiny-llama"
    made = {}
    control = home / "suspect.json"
    peers = {dtype: node_starter.meeting_point().event("ready")["addrs"][0] for dtype in ("float32", "bfloat16")}
    with server_pool(home / "validated", folder, peers["float32"]) as pool:
        for dtype, peer in peers.items():
            honest = pool.start("0:3", "--dtype", dtype, peer=peer)
            suspect = pool.start("3:6", "--dtype", dtype, peer=peer, fault=control)
            made[dtype] = SuspectSwarm(peer, folder, control, {dtype: honest}, {dtype: suspect})
        for each in made.values():
            for server in (*each.honest.values(), *each.suspect.values()):
                server.ready  # noqa: B018  (waits)
        yield made


def validated(swarm: SuspectSwarm, file: Path, seed: int = 0, evidence: Path | None = None) -> dict[str, Verdict]:
    """One round, by peer id."""

    async def run() -> list[Verdict]:
        torch.set_num_threads(1)
        folder = resolve(str(swarm.folder), need="all")
        config = SwarmConfig(identity=Identity.generate(), peers=(swarm.peer,), serve_dht=False)

        @asynccontextmanager
        async def validator():  # type: ignore[no-untyped-def]
            async with open_swarm(config) as own_node:
                model = await identify_model(own_node, folder)
                own = Own(model, load_client(folder.path, device="cpu"), Text(folder))
                with History(file) as history:
                    yield Validator(
                        own_node,
                        ValidatorOptions(
                            config=config,
                            own=own,
                            judge=Judge(folder.path),
                            history=history,
                            on_verdict=lambda verdict: None,
                            evidence_dir=evidence,
                            accuser=Identity.generate(),
                            random=Random(seed),
                        ),
                    )

        async with validator() as each:
            with trio.fail_after(150):
                return await each.once()

    return {each.peer_id: each for each in trio.run(run)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_servers_pass(swarms: dict[str, SuspectSwarm], tmp_path: Path, dtype: str) -> None:
    swarm = swarms[dtype]
    order(swarm.control)
    found = validated(swarm, tmp_path / "history.sqlite")
    assert set(found) == {swarm.honest[dtype].peer_id, swarm.suspect[dtype].peer_id}
    for verdict in found.values():
        assert verdict.verdict == "ok", verdict


@pytest.mark.parametrize(
    ("blocks", "amount", "dtype", "word"),
    [
        ("skipped", 0.0, "bfloat16", "its answer is off"),
        ("nf4", 0.0, "bfloat16", "nf4 weights"),
        ("int8", 0.0, "float32", "int8 weights"),
        ("stale", 0.0, "float32", "its answer is off"),
        ("another", 0.0, "float32", "its answer is off"),
        ("gradients", 0.0, "float32", "its gradient is off"),
    ],
)
def test_the_first_round_catches(
    swarms: dict[str, SuspectSwarm], tmp_path: Path, blocks: str, amount: float, dtype: str, word: str
) -> None:
    swarm = swarms[dtype]
    order(swarm.control, blocks=blocks, amount=amount)
    try:
        found = validated(swarm, tmp_path / "history.sqlite")
    finally:
        order(swarm.control)
    guilty = found[swarm.suspect[dtype].peer_id]
    assert guilty.verdict == "faulty" and word in guilty.reason, guilty
    assert found[swarm.honest[dtype].peer_id].verdict == "ok", found


def test_who_is_honest_to_strangers_passes(swarms: dict[str, SuspectSwarm], tmp_path: Path) -> None:
    """What probes cannot find: every probe is a stranger. Audits of clients' receipts are for that."""
    swarm = swarms["float32"]
    order(swarm.control, blocks="known")
    found = validated(swarm, tmp_path / "history.sqlite")
    order(swarm.control)
    assert found[swarm.suspect["float32"].peer_id].verdict == "ok"


def test_the_command(swarms: dict[str, SuspectSwarm], node_starter: Nodes, tmp_path: Path) -> None:
    """Exit codes, JSON lines, evidence that others can check."""
    swarm = swarms["float32"]
    folder, env = str(swarm.folder), node_starter.env
    order(swarm.control, blocks="skipped")
    said = petalnode(
        *("validate", folder, "--once", "--json", "--peer", swarm.peer, "--evidence-dir", str(tmp_path)),
        env=env,
        timeout=170,
    )
    order(swarm.control)
    assert said.code == 1, said
    verdicts = {each["peer_id"]: each for each in said.objects}
    guilty = verdicts[swarm.suspect["float32"].peer_id]
    assert guilty["event"] == "verdict" and guilty["blocks"] == [3, 6] and guilty["verdict"] == "faulty"
    assert guilty["error"] > guilty["tolerance"] > 0
    honest = verdicts[swarm.honest["float32"].peer_id]
    assert honest["verdict"] == "ok" and honest["error"] <= honest["tolerance"], honest
    files = list(tmp_path.glob("*.safetensors"))
    assert guilty["evidence"] in map(str, files)
    proven = petalnode("verify-evidence", guilty["evidence"], folder, "--json", env=env)
    assert proven.code == 0, proven

    said = petalnode("validate", folder, "--once", "--json", "--peer", swarm.peer, env=env, timeout=170)
    assert said.code == 0, said
    assert [each["verdict"] for each in said.objects] == ["ok", "ok"]


def test_nobody_there(node_starter: Nodes, models: Path) -> None:
    """A swarm that cannot be reached, and one in which nobody serves the model, are no verdict."""
    folder = str(models / "tiny-llama")
    gone = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWQ39kxavv1xeUBSzdJAx7Hy8whtKx3XhogHcSnyfC8d35"
    said = petalnode("validate", folder, "--once", "--json", "--peer", gone, env=node_starter.env)
    assert said.code == 3 and not said.out, said
