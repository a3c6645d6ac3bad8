"""Servers that announce exact-1: a validator convicts one that changes a bit, and the evidence is for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from petalnode.node.models import resolve
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.trust.bundle import Bundle
from petalnode.node.verification.evidence_check import check_evidence
from tests.swarm.faulty_server import order
from tests.swarm.memory_pool import memory_pool
from tests.swarm.processes import Nodes, environment, petalnode
from tests.swarm.server_pool import server_pool
from tests.swarm.suspects import SuspectSwarm, validated


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


def answered(url: str, to: Path) -> Path:
    """A file with the receipts and tokens of an answer of this API."""
    asked: dict[str, Any] = {"model": "tiny-llama", "prompt": "abc", "max_tokens": 6, "temperature": 0}
    with httpx.Client(base_url=url, timeout=None, trust_env=False) as client:
        answer = client.post("/v1/completions", json=asked).json()
        receipts = client.get(f"/v1/petalnode/receipts/{answer['id']}", params={"tokens": "true"})
    to.write_bytes(receipts.content)
    return to


def room_for_a_block(folder: Path) -> str:
    """The least that may be said of the disk of a machine that fetches block after block."""
    held = Checkpoint(folder)
    return str(sum(map(held.nbytes, ("embeddings", "head", 0))))


def test_the_commands(node_starter: Nodes, home: Path, models: Path, tmp_path: Path) -> None:
    """`serve --exact`, of processes with different instructions, `status`, `validate`, also on a machine that has no
    block and room for one, `verify-evidence` and `verify-receipts`."""
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
        said = petalnode("status", "--peer", honest.ready["addrs"][0], env=env)
        assert "exact to the bit: blocks 0:6, by 2 of 2 servers" in said.out, said
        other = env | {"PETALNODE_KERNELS_ISA": "plainfma"}
        url = node_starter.api(folder, peer).ready["url"]
        receipts = answered(url, tmp_path / "right.json")
        said = petalnode("verify-receipts", str(receipts), str(folder), "--json", env=other)
        (found,) = said.objects[0]["answers"]
        assert said.code == 0 and found["verdict"] == "yes" and found["likeliest"] == found["tokens"] == 6, said
        order(control, blocks="bit")
        receipts = answered(url, tmp_path / "wrong.json")
        said = petalnode("verify-receipts", str(receipts), str(folder), "--json", env=other)
        (found,) = said.objects[0]["answers"]
        (wrong,) = found["wrong"]
        assert said.code == 1 and wrong["peer_id"] == suspect.peer_id and wrong["blocks"] == [3, 6], said
        assert wrong["proven"], said
        options = ("--once", "--json", "--peer", peer, "--evidence-dir", str(tmp_path))
        said = petalnode("validate", str(folder), *options, env=other, timeout=170)
        bare = environment(tmp_path / "bare")
        options = ("--once", "--json", "--peer", honest.ready["addrs"][0], "--max-disk", room_for_a_block(folder))
        poor = petalnode("validate", folder.name, *options, env=bare, timeout=170)
    assert poor.code == 1, poor
    found = {line["peer_id"]: line["verdict"] for line in poor.objects}
    assert found == {suspect.peer_id: "faulty", honest.peer_id: "ok"}, poor
    parts = (Path(bare["PETALNODE_CACHE"]) / "models").glob("peers-*/part-*.safetensors")
    assert len(list(parts)) == 3  # embeddings, head and one block
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
