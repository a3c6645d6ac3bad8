"""`petalnode tune`: interrupted and gone on with, without its servers, and loaded by plain peft."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from petalnode import (
    AutoDistributedModelForCausalLM,
    AutoDistributedModelForSequenceClassification,
    LoraTuning,
    PromptTuning,
    load_adapter,
)
from petalnode.node.client.batch import batch_client
from petalnode.node.errors import BadInput
from petalnode.node.models.adapter_note import AdapterNote, Method, read_note
from petalnode.node.tuning.adapter_folder import save_adapter
from petalnode.node.tuning.recipe import Evaluated, MethodOptions, Recipe, StepDone, WaitingForServers
from petalnode.node.tuning.rows import TokenRow
from petalnode.node.tuning.trainer import Training
from petalnode.node.tuning.tuned import Tuned
from tests.peft_adapters import peft
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import Nodes, Running, petalnode
from tests.swarm.server_pool import server_pool
from tests.tiny_models import VOCABULARY, load_whole

pytestmark = pytest.mark.usefixtures("dials_awaited")
METHODS: tuple[Method, ...] = ("lora", "prompt", "deep-prompt")


@contextmanager
def opened(swarm: SharedSwarm, labels: int | None = None) -> Iterator[Any]:
    where: dict[str, Any] = {"initial_peers": [swarm.peer]}
    if labels is None:
        with AutoDistributedModelForCausalLM.from_pretrained(swarm.folder, **where) as model:
            yield model
    else:
        with AutoDistributedModelForSequenceClassification.from_pretrained(
            swarm.folder, num_labels=labels, **where
        ) as model:
            yield model


def tuned_on(model: Any, method: Method) -> Tuned:
    """With weights that all matter."""
    tuned = Tuned.of(model, MethodOptions(method, virtual_tokens=3, rank=4, alpha=6), seed=0)
    generator = torch.Generator().manual_seed(1)
    for weight in tuned.weights.values():
        weight.data.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return tuned


def saved(tuned: Tuned, folder: Path, method: Method, labels: tuple[str, ...] = ()) -> Path:
    task: Any = "classification" if labels else "language"
    note = AdapterNote(method, "tiny-llama", tuned.model.version.hex(), task, labels)
    save_adapter(folder, tuned, note, "# card")
    return folder


def tokens(rows: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any, mask: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=tokens(), attention_mask=mask).logits
    return found


@pytest.mark.parametrize("method", METHODS)
def test_peft_and_the_swarm_load_what_was_tuned(method: Method, shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    mask = (torch.arange(12) < torch.tensor([[12], [9], [5]])).long()
    with opened(shared_swarm) as model:
        tuned = tuned_on(model, method)
        expected = logits(tuned.module, mask)
        saved(tuned, tmp_path, method)
        again = load_adapter(model, tmp_path)
        assert isinstance(again, LoraTuning if method == "lora" else PromptTuning)
        assert torch.equal(logits(again, mask), expected)
        if method == "deep-prompt":
            assert not list(tmp_path.glob("adapter*"))
            return
    plain = peft.PeftModel.from_pretrained(load_whole(shared_swarm.folder), str(tmp_path)).eval()
    seen = mask.bool()
    got = logits(plain, mask)[:, -12:]
    torch.testing.assert_close(got[seen], expected[:, -12:][seen], rtol=1e-4, atol=1e-4)
    # The names are those that peft itself would save.
    plain.save_pretrained(tmp_path / "peft")
    assert (
        load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
        == load_file(tmp_path / "adapter_model.safetensors").keys()
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_classifier_keeps_its_head(method: Method, shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    mask = torch.ones(3, 12, dtype=torch.long)
    with opened(shared_swarm, 4) as model:
        tuned = tuned_on(model, method)
        expected = logits(tuned.module, mask)
        saved(tuned, tmp_path, method, labels=("a", "b", "c", "d"))
    with opened(shared_swarm, 4) as model:
        assert torch.equal(logits(load_adapter(model, tmp_path), mask), expected)
    with AutoDistributedModelForSequenceClassification.from_pretrained(
        shared_swarm.folder, initial_peers=[shared_swarm.peer], adapter=tmp_path
    ) as model:
        torch.testing.assert_close(logits(model, mask), expected, rtol=1e-4, atol=1e-4)
    with opened(shared_swarm, 3) as other, pytest.raises(BadInput, match="4 labels"):
        load_adapter(other, tmp_path)
    with opened(shared_swarm) as language, pytest.raises(BadInput, match="SequenceClassification"):
        load_adapter(language, tmp_path)
    if method != "deep-prompt":
        whole = AutoModelForSequenceClassification.from_pretrained(shared_swarm.folder, num_labels=4)
        plain = peft.PeftModel.from_pretrained(whole, str(tmp_path)).eval()
        torch.testing.assert_close(logits(plain, mask), expected, rtol=1e-4, atol=1e-4)


def test_adapters_of_peft_are_loaded(shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    mask = torch.ones(3, 12, dtype=torch.long)
    configs: list[Any] = [
        peft.LoraConfig(
            r=3, target_modules=["down_proj", "k_proj"], layers_to_transform=[0, 4], init_lora_weights=False
        ),
        peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    ]
    with opened(shared_swarm) as model:
        for number, config in enumerate(configs):
            plain = peft.get_peft_model(load_whole(shared_swarm.folder), config).eval()
            plain.save_pretrained(tmp_path / str(number))
            got = logits(load_adapter(model, tmp_path / str(number)), mask)
            torch.testing.assert_close(got, logits(plain, mask), rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_loaded(shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    with opened(shared_swarm) as model:
        folder = saved(tuned_on(model, "lora"), tmp_path, "lora")
        note = read_note(folder)
        assert note is not None
        AdapterNote(note.method, note.model, "00" * 32).write(folder)
        with pytest.raises(BadInput, match="version 000000000000 of tiny-llama"):
            load_adapter(model, folder)
        note.write(folder)
        weights = load_file(folder / "adapter_model.safetensors")
        several = {
            name: weight[:2] if ".0.self_attn.q_proj.lora_A" in name else weight for name, weight in weights.items()
        }
        save_file(several, folder / "adapter_model.safetensors")
        with pytest.raises(BadInput):
            load_adapter(model, folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(7) for b in range(7)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_interrupted_and_resumed_it_learns_the_same(
    pairs: Path, shared_swarm: SharedSwarm, node_starter: Nodes, tmp_path: Path
) -> None:
    def command(out: str) -> list[str]:
        options = ["--method", "lora", "--steps", "20", "--eval-split", "0.2", "--eval-every", "8"]
        options += ["--max-length", "32", "--sample-tokens", "4", "--tag", "sums", "--json"]
        where = ["--peer", shared_swarm.peer, "--out", str(tmp_path / out)]
        return ["tune", str(shared_swarm.folder), "--data", str(pairs), *where, *options]

    def run(out: str, *options: str) -> list[dict[str, Any]]:
        done = petalnode(*command(out), *options, env=node_starter.env)
        assert done.code == 0, done
        return done.objects

    whole = run("whole")
    process = Running([sys.executable, "-m", "petalnode", *command("parts")], node_starter.env)
    first = [json.loads(process.line())]
    try:
        while first[-1].get("step") != 4:
            first.append(json.loads(process.line()))
        process.signal(signal.SIGINT)
        while first[-1]["event"] != "interrupted":
            first.append(json.loads(process.line()))
        assert process.wait() == 130
        assert "--resume" in process.errors and "Go on with" in process.errors
    finally:
        process.kill()
    refused = petalnode(*command("parts"), env=node_starter.env)
    assert refused.code == 2 and "--resume goes on" in refused.err
    second = run("parts", "--resume")

    def losses(events: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
        return [(event["event"], event["step"], event["loss"]) for event in events if "loss" in event]

    assert first[-1]["step"] >= 4 and losses(first[:-1]) + losses(second) == losses(whole)
    assert [event["event"] for event in whole].count("evaluation") == 4
    assert whole[-1] == {"event": "saved", "path": str(tmp_path / "whole")}
    assert losses(whole)[-1][2] < losses(whole)[0][2]
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "loss.svg", "petalnode.json"]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == names
    one, other = (load_file(tmp_path / name / names[2]) for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "sums" in (tmp_path / "whole" / names[0]).read_text()
    assert [event["when"] for event in whole if event["event"] == "sample"] == ["before", "after"]
    drawn = [(tmp_path / out / "loss.svg").read_text() for out in ("whole", "parts")]
    assert drawn[0] == drawn[1] and drawn[0].count("<circle") == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "what to learn from"),
        (["--data", "DATA", "--method", "magic"], "prompt, deep-prompt, lora"),
        (["--data", "DATA", "--steps", "1", "--epochs", "1"], "give one of them"),
        (["--data", "DATA", "--patience", "1"], "--eval-split"),
        (["--data", "DATA", "--resume", "--out", "nowhere"], "no nowhere/checkpoint.safetensors"),
        (["--data", "DATA", "--method", "lora", "--target-modules", "nothing"], "self_attn.q_proj"),
    ],
)
def test_wrong_use_is_one_line(
    options: list[str], says: str, pairs: Path, shared_swarm: SharedSwarm, node_starter: Nodes, tmp_path: Path
) -> None:
    given = [str(pairs) if option == "DATA" else option for option in options]
    done = petalnode(
        "tune", str(shared_swarm.folder), "--peer", shared_swarm.peer, *given, env=node_starter.env, cwd=tmp_path
    )
    assert done.code == 2 and says in done.err and "Traceback" not in done.err, done


def test_lost_servers_are_waited_for(
    home: Path, models: Path, node_starter: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_client, "DEADLINES", replace(batch_client.DEADLINES, recovery=1.0))
    monkeypatch.setattr(batch_client, "DEADLINES", replace(batch_client.DEADLINES, reopen=1.0))
    folder = models / "tiny-llama"
    peer: str = node_starter.meeting_point().event("ready")["addrs"][0]
    rows = [TokenRow(tuple(range(3 + number, 20 + number))) for number in range(12)]
    recipe = Recipe(6, batch_size=4, evaluate_every=3, method=MethodOptions("deep-prompt"))

    def training(model: Any) -> Training:
        return Training(Tuned.of(model, recipe.method, 0), recipe, rows, rows[:2], about={})

    with server_pool(home / "tuning", folder, peer) as pool:
        steady, victim = pool.start("0:3"), pool.start("3:6")
        assert steady.ready and victim.ready
        with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[peer]) as model:
            undisturbed = list(training(model).run())
            told, waited = [], 0
            for event in training(model).run():
                if isinstance(event, WaitingForServers):
                    assert "3:6" in event.reason
                    waited += 1
                    if waited == 1:
                        pool.start("3:6")
                    continue
                told.append(event)
                if len(told) == 3:
                    victim.kill()
    assert waited

    kinds = [Evaluated, *[StepDone, StepDone, StepDone, Evaluated] * 2]
    assert [type(event) for event in told] == [type(event) for event in undisturbed] == kinds
    assert [event.loss for event in told] == pytest.approx([event.loss for event in undisturbed])
