"""Servers that announce exact-1: a validator convicts one that changes a bit, and the evidence is for everybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from petalnode.node.models import resolve
from petalnode.node.trust.bundle import Bundle
from petalnode.node.verification.evidence_check import check_evidence
from tests.swarm.faulty_server import order
from tests.swarm.memory_pool import memory_pool
from tests.swarm.processes import Nodes, petalnode
from tests.swarm.server_pool import server_pool
from tests.swarm.test_validate import SuspectSwarm, validated


def test_a_bit_convicts_and_the_honest_pass(home: Path, models: Path, tmp_path: Path) -> None:
    folder, control = models / "tiny-llama", home / "exact.json"
    with memory_pool(folder) as pool:
        honest = pool.start("0:3", exact=True, dtype="float32")
        assert honest.ready["quantisation"] == "none/exact-1"
        suspect = pool.start("3:6", exact=True, dtype="float32", fault=control)
        assert suspect.ready
        swarm = SuspectSwarm(folder, control, honest, suspect, memory=pool.swarm)
        found = validated(swarm, tmp_path / "history.sqlite")
        assert {verdict.verdict for verdict in found.values()} == {"ok"}, found
        order(control, blocks="bit")
        found = validated(swarm, tmp_path / "history.sqlite", evidence=tmp_path)
    guilty = found[suspect.peer_id]
    assert guilty.verdict == "faulty" and "exact to the bit" in guilty.reason, guilty
    assert found[honest.peer_id].verdict == "ok", found
    assert guilty.evidence is not None
    shown = check_evidence(Bundle.load(guilty.evidence), resolve(str(folder), need="all"))
    assert shown.proven and "exact to the bit" in shown.reason, shown


def test_the_commands(node_starter: Nodes, home: Path, models: Path, tmp_path: Path) -> None:
    """`serve --exact`, of processes with different instructions, `status`, `validate` and `verify-evidence`."""
    folder, control, env = models / "tiny-llama", home / "one-bit.json", node_starter.env
    peer: str = node_starter.meeting_point().event("ready")["addrs"][0]
    with server_pool(home / "exact", folder, peer) as pool:
        honest = pool.start("0:3", "--exact")
        suspect = pool.start("3:6", "--exact", fault=control)
        assert honest.ready["quantisation"] == "none/exact-1" and honest.ready["kernels"] == "native"
        assert suspect.ready
        said = petalnode("status", "--json", "--peer", honest.ready["addrs"][0], env=env)
        assert said.objects, said
        assert all(server["exact"] for server in said.objects[0]["servers"])
        order(control, blocks="bit")
        options = ("--once", "--json", "--peer", peer, "--evidence-dir", str(tmp_path))
        other = env | {"PETALNODE_KERNELS_ISA": "plainfma"}
        said = petalnode("validate", str(folder), *options, env=other, timeout=170)
    verdicts = {line["peer_id"]: line for line in said.objects}
    guilty = verdicts[suspect.peer_id]
    assert said.code == 1 and guilty["verdict"] == "faulty" and guilty["tolerance"] == 0, said
    assert verdicts[honest.peer_id]["verdict"] == "ok", verdicts
    proven = petalnode("verify-evidence", guilty["evidence"], str(folder), "--json", env=env)
    assert proven.code == 0, proven


@pytest.mark.parametrize("options", [("--dtype", "bfloat16"), ("--kernels", "torch")])
def test_what_cannot_be_exact_is_refused(node_starter: Nodes, models: Path, options: tuple[str, str]) -> None:
    said = petalnode("serve", str(models / "tiny-llama"), "--exact", *options, env=node_starter.env)
    assert said.code == 2 and "--exact" in said.err, said
