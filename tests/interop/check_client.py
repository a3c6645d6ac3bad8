"""The JavaScript client (clients/js) in Node, over servers of petalnode: `make interop`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from petalnode.crypto.swarm_key import load_swarm_key, make_swarm_key
from tests.greedy import prompt
from tests.import_graph import ROOT
from tests.interop.built import BUILT, NODE, built
from tests.swarm import faulty_server
from tests.swarm.conftest import home, models, node_starter
from tests.swarm.processes import LOOPBACK, WS, Nodes, ReadyNode, Running
from tests.tiny_models import load_whole

__all__ = ["built", "home", "models", "node_starter"]
SHARED: Final = ("--share-weights", "on")


def test_its_functions_give_the_test_vectors() -> None:
    shutil.copy(Path(__file__).with_name("vectors.test.mjs"), BUILT)
    env = os.environ | {"DOCS": str(ROOT / "docs")}
    done = subprocess.run([NODE, "--test", "vectors.test.mjs"], cwd=BUILT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class Client(Running):
    """generate.mjs, in Node."""

    def __init__(self, nodes: Nodes, **given: Any) -> None:
        shutil.copy(Path(__file__).with_name("generate.mjs"), BUILT)
        super().__init__([NODE, "generate.mjs", json.dumps(given)], nodes.env, BUILT)
        nodes.running.append(self)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def expected(folder: Path, ids: torch.Tensor, count: int) -> list[int]:
    torch.set_num_threads(1)
    mask = torch.ones_like(ids)
    out = load_whole(folder).generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return list(out[0, ids.shape[1] :].tolist())


@pytest.fixture
def folder(models: Path) -> Path:
    return models / "tiny-llama"


def options(count: int) -> dict[str, Any]:
    return {"maxNewTokens": count, "stopIds": []}


@pytest.mark.parametrize("listen", [WS, "/ip4/127.0.0.1/tcp/0"])
def test_tokens_are_models_also_when_server_dies(node_starter: Nodes, folder: Path, listen: str) -> None:
    at = ("--listen", listen, *SHARED)
    first = node_starter.server(folder, "0:2", *at)
    others = [node_starter.server(folder, blocks, *at, peer=first.address) for blocks in ("2:4", "4:6", "2:6")]
    named = {node.peer_id: node for node in (first, *others)}
    ids = prompt(1, 9)
    client = Client(node_starter, peers=[first.address], prompt=ids[0].tolist(), options=options(24), wait=8)
    loaded = client.event("loaded")
    assert loaded["blocks"] == 6
    for _ in range(8):
        token = client.event("token")
    route = [hop["peer"] for hop in token["route"]]
    assert token["route"][-1]["blocks"][1] == 6
    # Servers hand their outputs on: what the client sends itself is less than what they answer.
    assert all(hop["sent"] < hop["received"] for hop in token["route"][1:])
    named[route[-1]].kill()
    client.go_on()
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 24)
    assert done["recoveries"] == 1 and done["cheated"] == []


@pytest.mark.parametrize("listen", [WS, LOOPBACK])
def test_private_swarm_has_bytes_of_js_libp2p(node_starter: Nodes, folder: Path, tmp_path: Path, listen: str) -> None:
    key = tmp_path / "swarm.key"
    make_swarm_key(key)
    server = node_starter.server(folder, "0:6", "--listen", listen, *SHARED, "--swarm-key", str(key))
    ids = prompt(1, 9)
    given = {"peers": [server.address], "prompt": ids[0].tolist(), "options": options(4)}
    done = Client(node_starter, swarmKey=load_swarm_key(key), **given).event("done")
    assert done["ids"] == expected(folder, ids, 4)
    for wrong in (None, "1a" * 32):
        refused = Client(node_starter, swarmKey=wrong, **given)
        assert refused.wait() == 1 and "no peer of the swarm answers" in refused.errors


@pytest.mark.parametrize("fault", ["altered", "stranger", "shape", "previous", "nan", "error"])
def test_a_lying_server_is_noticed_and_replaced(node_starter: Nodes, folder: Path, tmp_path: Path, fault: str) -> None:
    honest = node_starter.server(folder, "0:5", "--listen", LOOPBACK, *SHARED)
    control, key = tmp_path / "control.json", str(tmp_path / "liar.key")
    serve = ["serve", str(folder), "--blocks", "0:6", "--json", "--until-eof", "--listen", LOOPBACK, "--identity", key]
    command = [sys.executable, "-m", "tests.swarm.server_pool", str(control), *serve, "--peer", honest.address]
    liar = ReadyNode(command, node_starter.env, ROOT)
    node_starter.running.append(liar)
    last = node_starter.server(folder, "5:6", "--listen", LOOPBACK, *SHARED, peer=honest.address)
    faulty_server.order(control, fault, 3)
    assert liar.ready and last.ready
    ids = prompt(1, 9)
    client = Client(node_starter, peers=[honest.address], prompt=ids[0].tolist(), options=options(8))
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 8)
    assert [hop["peer"] for hop in done["route"]] == [honest.peer_id, last.peer_id]
    assert done["recoveries"] == 1
    assert done["cheated"] == ([liar.peer_id] if fault in ("altered", "forged", "stranger") else [])
