"""`petalnode validate` catches servers that compute something else, and never an honest one.

What a round finds is seen on servers in memory; the command and the service run on processes.
"""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.client.core import ClientOptions, open_client
from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.models import compute_manifest, resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import open_swarm
from petalnode.node.trust.bundle import Bundle
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import encode
from tests.swarm.faulty_server import order
from tests.swarm.memory_pool import memory_pool
from tests.swarm.processes import LOOPBACK, Node, Nodes, environment, petalnode, until
from tests.swarm.server_pool import server_pool
from tests.swarm.suspects import SuspectSwarm, validated
from tests.tiny_models import HIDDEN


@pytest.fixture(scope="module")
def swarms(home: Path, models: Path) -> Iterator[dict[str, SuspectSwarm]]:
    """In memory, in float32 and once more in bfloat16."""
    folder, control = models / "tiny-llama", home / "suspect.json"
    with memory_pool(folder) as pool, memory_pool(folder) as other:
        made = {}
        for dtype, found in (("float32", pool), ("bfloat16", other)):
            servers = []
            for blocks, fault in (("0:3", None), ("3:6", control)):
                servers.append(found.start(blocks, dtype=dtype, fault=fault))
                servers[-1].ready  # noqa: B018  (one after another: see `load_now`)
            made[dtype] = SuspectSwarm(folder, control, servers[0], servers[1], memory=found.swarm)
        yield made


@pytest.fixture(scope="module")
def suspected(node_starter: Nodes, home: Path, models: Path) -> Iterator[SuspectSwarm]:
    """Of processes."""
    folder, control = models / "tiny-llama", home / "suspected.json"
    peer: str = node_starter.meeting_point().event("ready")["addrs"][0]
    with server_pool(home / "validated", folder, peer) as pool:
        made = SuspectSwarm(folder, control, pool.start("0:3"), pool.start("3:6", fault=control), peer)
        for server in (made.honest, made.suspect):
            server.ready  # noqa: B018  (waits)
        yield made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_servers_pass(swarms: dict[str, SuspectSwarm], tmp_path: Path, dtype: str) -> None:
    swarm = swarms[dtype]
    order(swarm.control)
    found = validated(swarm, tmp_path / "history.sqlite")
    assert set(found) == {swarm.honest.peer_id, swarm.suspect.peer_id}
    for verdict in found.values():
        assert verdict.verdict == "ok", verdict


@pytest.mark.parametrize(
    ("blocks", "amount", "dtype", "word"),
    [
        ("skipped", 0.0, "bfloat16", "its answer is off"),
        ("nf4", 0.0, "bfloat16", "nf4 weights"),
        ("int8", 0.0, "float32", "int8 weights"),
        ("none/activations=int8", 0.0, "float32", " is off by "),
        ("stale", 0.0, "float32", "its answer is off"),
        ("another", 0.0, "float32", "its answer is off"),
        ("gradients", 0.0, "float32", "its gradient is off"),
        ("prompts", 0.0, "float32", "its gradient of deep prompts is off"),
        ("lora", 0.0, "float32", "its gradient of LoRA's"),
    ],
)
def test_the_first_round_catches(
    swarms: dict[str, SuspectSwarm], tmp_path: Path, blocks: str, amount: float, dtype: str, word: str
) -> None:
    swarm = swarms[dtype]
    order(swarm.control, blocks=blocks, amount=amount)
    try:
        found = validated(swarm, tmp_path / "history.sqlite", evidence=tmp_path)
    finally:
        order(swarm.control)
    guilty = found[swarm.suspect.peer_id]
    assert guilty.verdict == "faulty" and word in guilty.reason, guilty
    if "weights" not in word:  # what is told by its direction only is a case for validators, not for everybody
        assert guilty.evidence is not None
        shown = check_evidence(Bundle.load(guilty.evidence), resolve(str(swarm.folder), need="all"))
        assert shown.proven and "is off" in shown.reason, shown
    assert found[swarm.honest.peer_id].verdict == "ok", found


def test_who_is_honest_to_strangers_passes(swarms: dict[str, SuspectSwarm], tmp_path: Path) -> None:
    """What probes cannot find: every probe is a stranger. Audits of clients' receipts are for that."""
    swarm = swarms["float32"]
    order(swarm.control, blocks="known")
    found = validated(swarm, tmp_path / "history.sqlite")
    order(swarm.control)
    assert found[swarm.suspect.peer_id].verdict == "ok"


def test_the_command(suspected: SuspectSwarm, node_starter: Nodes, tmp_path: Path) -> None:
    """Exit codes, JSON lines, evidence that others can check."""
    swarm = suspected
    folder, env = str(swarm.folder), node_starter.env
    order(swarm.control, blocks="skipped")
    said = petalnode(
        *("validate", folder, "--once", "--json", "--peer", swarm.peer, "--evidence-dir", str(tmp_path)),
        env=env,
        timeout=170,
    )
    order(swarm.control)
    assert said.code == 1, said
    verdicts = {line["peer_id"]: line for line in said.objects}
    guilty = verdicts[swarm.suspect.peer_id]
    assert guilty["event"] == "verdict" and guilty["blocks"] == [3, 6] and guilty["verdict"] == "faulty"
    assert guilty["error"] > guilty["tolerance"] > 0
    honest = verdicts[swarm.honest.peer_id]
    assert honest["verdict"] == "ok" and honest["error"] <= honest["tolerance"], honest
    files = list(tmp_path.glob("*.safetensors"))
    assert guilty["evidence"] in map(str, files)
    proven = petalnode("verify-evidence", guilty["evidence"], folder, "--json", env=env)
    assert proven.code == 0, proven

    said = petalnode("validate", folder, "--once", "--json", "--peer", swarm.peer, env=env, timeout=170)
    assert said.code == 0, said
    assert [line["verdict"] for line in said.objects] == ["ok", "ok"]


async def talk(swarm: SuspectSwarm, identity: Identity, auditor: str | None) -> None:
    """A conversation of one who keeps its key, over the whole chain; its receipts are shown when it ends."""
    folder = resolve(str(swarm.folder), need="all")
    config = SwarmConfig(identity=identity, peers=(swarm.peer,), serve_dht=False)
    async with open_swarm(config) as node:
        model = await identify_model(node, folder)
        async with open_client(node, model, ClientOptions(share_receipts=[auditor] if auditor else ())) as client:
            spec = SessionSpec(model.version, Span(0, 6), batch=1, max_length=16)
            async with client.session(spec) as session:
                for seed, tokens in enumerate((6, 1, 1)):
                    hidden = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
                    await session.step([WireTensor(*encode(hidden, "none"))])


def test_the_service_finds_who_is_honest_to_strangers(suspected: SuspectSwarm, tmp_path: Path) -> None:
    """Its probes find nothing; what a client shows does: a JSON line, evidence that others can check, and history."""
    swarm = suspected
    suspect = swarm.suspect.peer_id
    env, client = environment(tmp_path), Identity.generate()
    order(swarm.control, blocks="known")
    options = ("--json", "--interval", "1", "--evidence-dir", str(tmp_path / "evidence"), "--listen", LOOPBACK)
    validator = Node("validate", str(swarm.folder), *options, "--peer", swarm.peer, env=env)
    verdicts: list[dict[str, object]] = []
    try:
        trio.run(talk, swarm, client, None)  # so that the server knows it
        auditor = validator.address
        assert validator.event("link")["link"].startswith("petalnode:")

        def audited(least: int) -> bool:
            verdicts.extend(validator.events_so_far())
            return sum(verdict["kind"] == "receipts" for verdict in verdicts) >= least

        def probed() -> bool:
            verdicts.extend(validator.events_so_far())
            return any(verdict["peer_id"] == suspect and verdict["kind"] != "receipts" for verdict in verdicts)

        talks = 0
        while not any(verdict["verdict"] == "faulty" for verdict in verdicts):
            trio.run(talk, swarm, client, auditor)
            talks += 1  # each time two answers are picked, of either server
            until(partial(audited, 2 * talks), "two audits")
        until(probed, "a probe of the server that is at fault")
        validator.signal(signal.SIGTERM)
        assert validator.wait() == 0
    finally:
        validator.kill()
        order(swarm.control)
    for verdict in verdicts:
        audited = verdict["peer_id"] == suspect and verdict["kind"] == "receipts"
        assert verdict["event"] == "verdict" and (verdict["verdict"] == "faulty") == audited, verdict
    guilty = next(verdict for verdict in verdicts if verdict["verdict"] == "faulty")
    assert guilty["blocks"] == [3, 6] and guilty["evidence"] is not None
    bundle = Bundle.load(Path(str(guilty["evidence"])))
    assert bundle.accused == suspect and bundle.accuser == validator.peer_id
    folder = resolve(str(swarm.folder), need="all")
    assert check_evidence(bundle, folder).proven
    of_suspect = "SELECT verdict, kind FROM verdicts WHERE model_version = ? AND peer_id = ?"
    with closing(sqlite3.connect(tmp_path / "data" / "petalnode" / "validator" / "history.sqlite")) as history:
        kept = history.execute(of_suspect, (compute_manifest(folder).version, suspect)).fetchall()
    assert {verdict for verdict, kind in kept if kind == "receipts"} == {"faulty"}
    assert "faulty" not in {verdict for verdict, kind in kept if kind != "receipts"}


def test_nobody_there(node_starter: Nodes, models: Path) -> None:
    """A swarm that cannot be reached, and one in which nobody serves the model, are no verdict."""
    folder = str(models / "tiny-llama")
    gone = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWQ39kxavv1xeUBSzdJAx7Hy8whtKx3XhogHcSnyfC8d35"
    said = petalnode("validate", folder, "--once", "--json", "--peer", gone, env=node_starter.env)
    assert said.code == 3 and not said.out, said
