"""Adapters in sessions: held by servers or brought by clients, and the tokens are those of plain peft."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.client.api.inference_session import InferenceSession
from petalnode.node.errors import BadInput, NoChainError
from petalnode.node.models.adapter import read_adapter
from petalnode.node.models.adapter_note import AdapterNote
from petalnode.node.tuning.adapter_folder import save_adapter
from petalnode.node.tuning.recipe import MethodOptions
from petalnode.node.tuning.tuned import Tuned
from tests.peft_adapters import load_with, save_lora, save_prompt
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import Node, Nodes, environment, petalnode
from tests.tiny_models import VOCABULARY, load_whole

pytestmark = pytest.mark.usefixtures("dials_awaited")
NEW_TOKENS = 8


@dataclass(frozen=True)
class Adapters:
    """Of tiny-llama: `poet` is held by two of the servers' owners, `mine` by none; `soft` is a prompt."""

    poet: Path
    mine: Path
    soft: Path


@pytest.fixture(scope="module")
def adapters(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    root = tmp_path_factory.mktemp("adapters")
    model = models / "tiny-llama"
    return Adapters(
        save_lora(model, root / "poet", ["q_proj", "v_proj"], 1),
        save_lora(model, root / "mine", ["k_proj", "o_proj", "down_proj"], 2, r=2, use_rslora=True),
        save_prompt(model, root / "soft"),
    )


@dataclass(frozen=True)
class Holding:
    """Two servers that hold `poet`, in a swarm of their own with one that holds nothing."""

    peer: str
    holders: tuple[Node, Node]
    bare: Node


@pytest.fixture(scope="module")
def holding(node_starter: Nodes, models: Path, adapters: Adapters, shared_swarm: SharedSwarm) -> Holding:
    model = models / "tiny-llama"
    peer = node_starter.meeting_point().event("ready")["addrs"][0]
    first = node_starter.server(model, "0:3", "--adapter", str(adapters.poet), peer=peer)
    second = node_starter.server(model, "3:6", "--adapter", str(adapters.poet), peer=peer)
    bare = node_starter.server(model, "0:6", peer=peer)
    for node in (first, second, bare):
        node.ready  # noqa: B018  (waits)
    return Holding(peer, (first, second), bare)


def prompt(rows: int = 1, count: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def options(ids: torch.Tensor) -> dict[str, Any]:
    return {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}


def by_peft(model: Path, adapter: Path | None, ids: torch.Tensor) -> torch.Tensor:
    plain: Any = load_whole(model) if adapter is None else load_with(model, adapter)
    with torch.no_grad():
        generated: torch.Tensor = plain.generate(input_ids=ids, **options(ids))
    return generated


def opened(swarm_peer: str, model: Path, adapter: Any = None, **more: Any) -> Any:
    return AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=[swarm_peer], adapter=adapter, **more)


def test_a_client_brings_its_adapter(shared_swarm: SharedSwarm, adapters: Adapters) -> None:
    ids = prompt(2)
    with opened(shared_swarm.peer, shared_swarm.folder, adapters.mine) as model:
        assert torch.equal(model.generate(ids, **options(ids)), by_peft(shared_swarm.folder, adapters.mine, ids))
        with torch.no_grad():  # without a cache as well
            got = model(ids).logits
            expected = load_with(shared_swarm.folder, adapters.mine)(input_ids=ids).logits
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    with opened(shared_swarm.peer, shared_swarm.folder) as model:  # the servers keep nothing of it
        assert torch.equal(model.generate(ids, **options(ids)), by_peft(shared_swarm.folder, None, ids))


def test_a_name_goes_to_those_that_hold_it(holding: Holding, models: Path, adapters: Adapters) -> None:
    ids = prompt(seed=3)
    folder = models / "tiny-llama"
    expected = by_peft(folder, adapters.poet, ids)
    holders = [node.ready["peer_id"] for node in holding.holders]
    with opened(holding.peer, folder, "poet") as model:
        with model.inference_session(max_length=64) as session:
            assert torch.equal(model.generate(ids, **options(ids)), expected)
            assert [peer for peer, _ in session.route] == holders
        with pytest.raises(BadInput, match="give the path of its folder"):
            model(ids)
    with (
        opened(holding.peer, folder, "poet", blocked_servers=holders[1:]) as model,
        pytest.raises(NoChainError, match="blocks 3:6 of tiny-llama with the adapter poet"),
    ):
        model.generate(ids, **options(ids))
    with (
        opened(holding.peer, folder, "nobody-has-it") as model,
        pytest.raises(NoChainError, match="held are: poet"),
    ):
        model.generate(ids, **options(ids))


def test_sessions_of_many_adapters_share_the_servers(
    shared_swarm: SharedSwarm, holding: Holding, models: Path, adapters: Adapters
) -> None:
    folder = models / "tiny-llama"
    used = [adapters.poet, None, adapters.mine, adapters.poet]
    ids = prompt(seed=5)
    models_open = [opened(holding.peer, folder, adapter) for adapter in used]
    try:
        answers: dict[int, torch.Tensor] = {}

        def run(index: int) -> None:
            answers[index] = models_open[index].generate(ids, **options(ids))

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(used))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    finally:
        for model in models_open:
            model.close()
    for index, adapter in enumerate(used):
        assert torch.equal(answers[index], by_peft(folder, adapter, ids))


def test_a_prompt_stays_with_the_client(shared_swarm: SharedSwarm, adapters: Adapters) -> None:
    ids = prompt(seed=7)
    plain = load_with(shared_swarm.folder, adapters.soft)
    with torch.no_grad():
        expected = plain.generate(input_ids=ids, **options(ids))
        logits = plain(input_ids=ids).logits
    with opened(shared_swarm.peer, shared_swarm.folder, adapters.soft) as model:
        assert torch.equal(model.generate(ids, **options(ids)), expected)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["prompt", "deep-prompt", "lora"])
def test_what_was_tuned_is_opened(method: Any, shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    ids = prompt(2, seed=11)
    folder = tmp_path / "tuned"
    with opened(shared_swarm.peer, shared_swarm.folder) as model:
        tuned = Tuned.of(model, MethodOptions(method, virtual_tokens=3, rank=2), seed=0)
        generator = torch.Generator().manual_seed(0)
        for weight in tuned.weights.values():
            weight.data.normal_(0, 0.3, generator=generator)
        expected = tuned.module.generate(ids, **options(ids))
        with torch.no_grad():
            logits = tuned.module(ids).logits
        save_adapter(folder, tuned, AdapterNote(method, "tiny-llama", model.version.hex()), "")
    with opened(shared_swarm.peer, shared_swarm.folder, folder) as model:
        assert torch.equal(model.generate(ids, **options(ids)), expected)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-4)


def chat(swarm: SharedSwarm, peer: str, home: Path, *arguments: str) -> Any:
    return petalnode(
        *("chat", str(swarm.folder), "--peer", peer, "--prompt", "one two", "--json", "--max-new-tokens", "6"),
        *arguments,
        env=environment(home),
    )


def test_on_the_command_line(
    shared_swarm: SharedSwarm, holding: Holding, adapters: Adapters, home: Path, tmp_path: Path
) -> None:
    answers = {}
    for adapter in ("poet", str(adapters.mine), str(adapters.soft)):
        outcome = chat(shared_swarm, holding.peer, home, "--adapter", adapter)
        assert outcome.code == 0, outcome
        answers[adapter] = outcome.objects[0]["text"]
    assert len(set(answers.values())) == 3
    outcome = chat(shared_swarm, holding.peer, home, "--adapter", "prose")
    assert outcome.code == 3
    assert "held are: poet" in outcome.err
    outcome = petalnode("status", "--peer", holding.peer, "--json", env=environment(home))
    assert sorted(server["adapters"] for server in outcome.objects[0]["servers"]) == [[], ["poet"], ["poet"]]
    digits = read_adapter(adapters.poet).hash.hex()[:8]
    outcome = petalnode("status", "--peer", holding.peer, env=environment(home))
    assert f"adapter poet@{digits}: blocks 0:6" in outcome.out + outcome.err


def test_an_adapter_of_another_version(
    shared_swarm: SharedSwarm, adapters: Adapters, models: Path, home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    for file in adapters.mine.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    note = {"format": 1, "method": "lora", "model": "tiny-llama", "model_version": "ab" * 32, "task": "language"}
    (folder / "petalnode.json").write_text(json.dumps(note | {"labels": [], "tags": [], "results": {}}))
    with pytest.raises(BadInput, match="trained for version abababababab of tiny-llama"):
        opened(shared_swarm.peer, shared_swarm.folder, folder).close()
    outcome = petalnode(
        *("serve", str(models / "tiny-llama"), "--blocks", "0:1", "--adapter", str(folder), "--new-swarm"),
        env=environment(home),
    )
    assert outcome.code == 2 and "trained for version abababababab" in outcome.err


class Kill(LogitsProcessor):
    """Kills the first server of a session's route when the third token is chosen."""

    def __init__(self, session: InferenceSession, nodes: dict[str, Node]) -> None:
        self._session = session
        self._nodes = nodes
        self._tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self._tokens += 1
        if self._tokens == 3:
            self._nodes[self._session.route[0][0]].kill()
        return scores


@pytest.mark.usefixtures("patient")
def test_server_dies_in_middle_of_answer(holding: Holding, models: Path, adapters: Adapters) -> None:
    """The last test here: the swarm is one server short behind it, but what is left still covers the model."""
    ids = prompt(seed=9)
    folder = models / "tiny-llama"
    expected = by_peft(folder, adapters.mine, ids)
    nodes = {node.ready["peer_id"]: node for node in (*holding.holders, holding.bare)}
    with (
        opened(holding.peer, folder, adapters.mine) as model,
        model.inference_session(max_length=64) as session,
    ):
        kill = Kill(session, nodes)
        assert torch.equal(model.generate(ids, logits_processor=[kill], **options(ids)), expected)
        assert session.recoveries == 1
