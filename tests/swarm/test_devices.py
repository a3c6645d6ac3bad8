"""One server with two devices: a process whose blocks are in two parts, each with its own caches, on the processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode import AutoDistributedModelForCausalLM, PromptTuning
from petalnode.node.client.api.causal_lm import DistributedModelForCausalLM
from tests.greedy import generate, prompt
from tests.swarm.deep_drafts import LOOKUP
from tests.swarm.plain_tuning import PlainTuning
from tests.swarm.processes import Node, Nodes, nodes, petalnode
from tests.tiny_models import HIDDEN, load_whole

pytestmark = pytest.mark.usefixtures("dials_awaited")
BOTH = ("--device", "cpu", "--device", "cpu", "--cache-tokens", "20000")
Model = DistributedModelForCausalLM


@pytest.fixture(scope="module")
def server(node_starter: Nodes, folder: Path) -> Node:
    return node_starter.server(folder, None, *BOTH)


@pytest.fixture(scope="module")
def model(server: Node, folder: Path) -> Iterator[Model]:
    with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[server.address]) as opened:
        yield opened


def test_ready_server_names_its_devices(server: Node) -> None:
    ready = server.ready
    assert ready["blocks"] == [0, 6] and ready["device"] == "cpu+cpu"
    assert ready["devices"] == [{"device": "cpu", "blocks": [0, 3]}, {"device": "cpu", "blocks": [3, 6]}]
    assert ready["cache_tokens"] == 20000 and ready["throughput"] > 0
    assert ready["count_reason"] == "6 of 6 blocks: 3 on cpu, 3 on cpu"


WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "a prompt in chunks": (1, 700, {}),
    "rows": (3, 9, {}),
    "beams": (1, 9, {"num_beams": 4}),
    "drafts that are undone": (1, 9, {**LOOKUP, "max_new_tokens": 40}),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(way: str, model: Model, whole: Any) -> None:
    rows, length, options = WAYS[way]
    ids = prompt(rows, length)
    plain = {name: value for name, value in options.items() if name not in LOOKUP}
    assert torch.equal(generate(model, ids, **options), generate(whole, ids, **plain))


def test_a_session_goes_back_and_on(model: Model) -> None:
    hidden = torch.randn(2, 300, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = model.remote_blocks(hidden)
    with model.inference_session(max_length=300) as session:
        given = [session.step(part) for part in torch.split(hidden, [280, 1, 5, 14], dim=1)]
        torch.testing.assert_close(torch.cat(given, dim=1), expected, atol=1e-4, rtol=1e-4)
        session.position = 270
        torch.testing.assert_close(session.step(hidden[:, 270:]), expected[:, 270:], atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_transformers(model: Model, folder: Path) -> None:
    tuned = PromptTuning(model, 4, deep=True)
    with torch.no_grad():
        tuned.deep_prompts.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    plain = PlainTuning(load_whole(folder).requires_grad_(False), tuned.prompt_embeddings, tuned.deep_prompts)
    ids = prompt(4, 20)
    for passed in (tuned, plain):
        passed(input_ids=ids, labels=ids).loss.backward()
    for got, wanted in zip(tuned.parameters(), plain.parameters(), strict=True):
        assert float((got.grad - wanted.grad).abs().max() / wanted.grad.abs().max()) < 1e-4


def test_a_validator_finds_nothing_wrong(server: Node, folder: Path, node_starter: Nodes) -> None:
    arguments = "validate", str(folder), "--peer", server.address, "--once", "--json"
    outcome = petalnode(*arguments, env=node_starter.env)
    verdicts = [one for one in outcome.objects if one["event"] == "verdict"]
    assert outcome.code == 0 and {one["verdict"] for one in verdicts} == {"ok"}, outcome
    assert all(one["peer_id"] == server.peer_id for one in verdicts), outcome


def test_moved_blocks_are_cut_anew(folder: Path, tmp_path: Path, whole: Any) -> None:
    with nodes(tmp_path) as started:
        gone = started.server(folder, "3:6", *BOTH)
        moving = started.server(folder, None, "--num-blocks", "3", *BOTH, peer=gone.address)
        assert moving.ready["devices"] == [{"device": "cpu", "blocks": [0, 2]}, {"device": "cpu", "blocks": [2, 3]}]
        staying = started.server(folder, "0:3", peer=gone.address)
        assert staying.ready["device"] == "cpu"
        gone.process.kill()
        assert moving.event("moved")["devices"] == [
            {"device": "cpu", "blocks": [3, 5]},
            {"device": "cpu", "blocks": [5, 6]},
        ]
        with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[staying.address]) as opened:
            assert torch.equal(generate(opened, prompt(1, 9)), generate(whole, prompt(1, 9)))
