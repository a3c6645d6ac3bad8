"""Fine-tuning over servers, in memory, gives the gradients that plain transformers gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from petalnode import AutoDistributedModelForCausalLM, AutoDistributedModelForSequenceClassification, PromptTuning
from petalnode.node.client.api.causal_lm import DistributedModelForCausalLM
from petalnode.node.errors import BadInput, NoChainError
from tests.peft_adapters import peft
from tests.swarm.conftest import ServedInMemory
from tests.swarm.plain_tuning import PlainTuning, close
from tests.tiny_models import HIDDEN, NUM_BLOCKS, VOCABULARY, load_whole, save_tiny

ARCHITECTURES = ("llama", "bloom", "mixtral", "gemma3")
ROWS, TOKENS, PREFIX = 12, 40, 4
"""Enough for several micro-batches."""
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(served_in_memory: ServedInMemory, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a served model by its architecture: Llama is on three servers, the others on one each."""
    own = {name: tmp_path_factory.mktemp("served") / f"tiny-{name}" for name in ("bloom", "mixtral")}
    for name, folder in own.items():
        served_in_memory.serve(save_tiny(name, folder), "0:6")
    return lambda name: own.get(name) or served_in_memory.models / f"tiny-{name}"


@pytest.fixture(scope="module")
def model(served_in_memory: ServedInMemory) -> Iterator[DistributedModelForCausalLM]:
    with served_in_memory.open(AutoDistributedModelForCausalLM) as opened:
        yield opened


@pytest.fixture
def whole(served_in_memory: ServedInMemory) -> Any:
    return load_whole(served_in_memory.folder).requires_grad_(False)


def tokens(rows: int = ROWS, count: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def padded(side: str, rows: int = ROWS, count: int = TOKENS) -> torch.Tensor:
    """An attention mask for rows of different lengths."""
    padding = (3 * torch.arange(rows) % 17).unsqueeze(1)
    if side == "left":
        return (torch.arange(count) >= padding).long()
    return (torch.arange(count) < count - padding).long()


def deep_tuning(model: Any) -> PromptTuning:
    torch.manual_seed(3)  # the tokens that the prompt starts from are drawn
    tuned = PromptTuning(model, PREFIX, deep=True)
    assert tuned.deep_prompts is not None
    with torch.no_grad():
        tuned.deep_prompts.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    return tuned


def compare(tuned: PromptTuning, plain: PlainTuning, **inputs: Any) -> None:
    """One forward and backward pass each; everything that is trained has the same gradients."""
    for parameter in (*tuned.parameters(), *plain.parameters()):
        parameter.grad = None
    got, expected = tuned(**inputs), plain(**inputs)
    close(got.loss, expected.loss)
    got.loss.backward()
    expected.loss.backward()
    close(tuned.prompt_embeddings.grad, plain.prompt_embeddings.grad)
    if plain.deep_prompts is not None:
        assert tuned.deep_prompts is not None
        close(tuned.deep_prompts.grad, plain.deep_prompts.grad)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_of_a_language_model(architecture: str, folders: Folders, served_in_memory: ServedInMemory) -> None:
    folder = folders(architecture)
    whole = load_whole(folder).requires_grad_(False)
    ids = tokens()
    with served_in_memory.open(AutoDistributedModelForCausalLM, folder) as opened:
        for tuned in (PromptTuning(opened, PREFIX), deep_tuning(opened)):
            plain = PlainTuning(whole, tuned.prompt_embeddings, tuned.deep_prompts)
            compare(tuned, plain, input_ids=ids, labels=ids)
            for side in ("left", "right"):
                mask = padded(side)
                labels = ids.masked_fill(mask == 0, -100)
                compare(tuned, plain, input_ids=ids, attention_mask=mask, labels=labels)
        # All weights that are here may be trained too, the embeddings through all blocks.
        for module in (opened, whole):
            embeddings = module.get_input_embeddings().requires_grad_()
            embeddings.weight.grad = None
            module(ids, attention_mask=padded("right"), labels=ids).loss.backward()
        close(opened.get_input_embeddings().weight.grad, whole.get_input_embeddings().weight.grad)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_classifier(architecture: str, folders: Folders, served_in_memory: ServedInMemory) -> None:
    folder = folders(architecture)
    whole: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval().requires_grad_(False)
    labels = torch.arange(ROWS) % 3
    with served_in_memory.open(AutoDistributedModelForSequenceClassification, folder, num_labels=3) as opened:
        trained = [name for name, parameter in opened.named_parameters() if parameter.requires_grad]
        assert trained == ["score.weight"]
        whole.score.load_state_dict(opened.score.state_dict())
        whole.score.requires_grad_()
        for tuned in (PromptTuning(opened, PREFIX), deep_tuning(opened)):
            plain = PlainTuning(whole, tuned.prompt_embeddings, tuned.deep_prompts)
            for side in ("left", "right"):
                mask = padded(side)
                whole.score.weight.grad = opened.score.weight.grad = None
                compare(tuned, plain, input_ids=tokens() * mask, attention_mask=mask, labels=labels)
                close(opened.score.weight.grad, whole.score.weight.grad)


def test_training_learns_what_plain_training_learns(model: DistributedModelForCausalLM, whole: Any) -> None:
    tuned = deep_tuning(model)
    plain = PlainTuning(whole, tuned.prompt_embeddings, tuned.deep_prompts)
    ids, mask = tokens(6), padded("right", 6)
    losses: list[list[float]] = []
    for tuning in (tuned, plain):
        optimiser = torch.optim.SGD(tuning.parameters(), lr=0.05, momentum=0.9)
        losses.append([])
        for _ in range(5):
            optimiser.zero_grad()
            loss = tuning(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < 0.95 * losses[0][0]


def test_gradients_flow_through_slices_and_modules_between_them(model: DistributedModelForCausalLM) -> None:
    blocks = model.remote_blocks
    between = nn.Linear(HIDDEN, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = torch.randn(2, 2, 9, HIDDEN, generator=generator)
    hidden.requires_grad_()

    def run(parts: list[Any]) -> list[torch.Tensor]:
        junctions = [hidden]
        for part in parts:
            junctions.append(part(junctions[-1]))
        wanted = [*junctions[:-1], *between.parameters()]
        return [junctions[-1], *torch.autograd.grad(junctions[-1], wanted, gradient, allow_unused=True)]

    halves = run([blocks[:3], between, blocks[3:]])
    one_by_one = run([*blocks[:3], between, *blocks[3:]])
    assert len(one_by_one) == NUM_BLOCKS + 1 + 1 + 2
    close(one_by_one[0], halves[0])
    close(one_by_one[1], halves[1])  # of what entered the first block
    close(one_by_one[4], halves[2])  # of what entered the module
    close(one_by_one[-2], halves[-2])  # of its weight
    straight = run([blocks])
    close(run([blocks[:2], blocks[2:5], blocks[5]])[1], straight[1])


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def test_a_module_between_the_blocks_of_a_model(served_in_memory: ServedInMemory, whole: Any) -> None:
    ids, mask = tokens(3), padded("left", 3)
    torch.manual_seed(0)
    adapter = Adapter()
    layer = whole.model.layers[3]
    forward = layer.forward
    layer.forward = lambda hidden, *rest, **others: forward(adapter(hidden), *rest, **others)
    expected = whole(ids, attention_mask=mask, labels=ids).loss
    expected_gradients = torch.autograd.grad(expected, list(adapter.parameters()))
    with served_in_memory.open(AutoDistributedModelForCausalLM) as opened:
        blocks = opened.remote_blocks
        opened.remote_blocks = nn.Sequential(blocks[:3], adapter, blocks[3:])
        trained = [parameter for parameter in opened.parameters() if parameter.requires_grad]
        assert len(trained) == 2
        loss = opened(ids, attention_mask=mask, labels=ids).loss
        close(loss, expected)
        for got, wanted in zip(torch.autograd.grad(loss, trained), expected_gradients, strict=True):
            close(got, wanted)
        with pytest.raises(BadInput, match="use_cache=False"):
            opened.generate(ids, attention_mask=mask, max_new_tokens=2)
        out = opened.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, use_cache=False)
        expected_out = whole.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, use_cache=False)
        assert torch.equal(out, expected_out)


def test_hidden_states_between_the_blocks(model: DistributedModelForCausalLM, whole: Any) -> None:
    found, gradients = [], []
    for module in (model, whole):
        embedded = module.get_input_embeddings()(tokens(2)).detach().requires_grad_()
        output = module(inputs_embeds=embedded, attention_mask=padded("left", 2), output_hidden_states=True)
        loss = sum(state[:, -1].pow(2).mean() for state in output.hidden_states)
        gradients.append(torch.autograd.grad(loss, embedded)[0])
        found.append(output)
    seen = padded("left", 2).bool()
    assert len(found[0].hidden_states) == len(found[1].hidden_states) == 7
    for got, expected in zip(found[0].hidden_states, found[1].hidden_states, strict=True):
        close(got[seen], expected[seen])
    close(found[0].logits[seen], found[1].logits[seen])
    close(gradients[0][seen], gradients[1][seen])
    assert model(tokens(2)).hidden_states is None
    with pytest.raises(BadInput, match="use_cache=False"):
        model(tokens(1), use_cache=True, output_hidden_states=True)
    with pytest.raises(BadInput, match="call the model"):
        model.generate(tokens(1), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)


def test_prompts_of_each_row(model: DistributedModelForCausalLM) -> None:
    """Deep prompts may differ from row to row: together they are what each row gets alone."""
    blocks = model.remote_blocks[1:5]
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = torch.randn(2, 9, 60, HIDDEN, generator=generator)
    prompts = torch.randn(4, 9, PREFIX, HIDDEN, generator=generator)
    inputs = [hidden.requires_grad_(), prompts.requires_grad_()]
    together = torch.autograd.grad(blocks(hidden, prompts=prompts), inputs, gradient)
    for row in (0, 8):
        one = slice(row, row + 1)
        alone = torch.autograd.grad(blocks(hidden[one], prompts=prompts[:, one]), inputs, gradient[one])
        close(together[0][one], alone[0][one])
        close(together[1][:, one], alone[1][:, one])


def test_backward_may_run_twice_and_in_other_threads(model: DistributedModelForCausalLM) -> None:
    hidden = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = model.remote_blocks(hidden).pow(2).sum()
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, hidden, retain_graph=True)))
    thread.start()
    thread.join(600)
    found.extend(torch.autograd.grad(loss, hidden))
    assert len(found) == 2 and torch.equal(found[0], found[1])


def test_two_clients_train_different_things_on_same_servers(served_in_memory: ServedInMemory) -> None:
    ids = tokens(6)

    def language(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return train(deep_tuning(model), ids)

    def classes(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model.score.weight.data.normal_()
        return train(PromptTuning(model, PREFIX), torch.arange(6) % 2, *model.score.parameters())

    def train(tuned: PromptTuning, labels: torch.Tensor, *more: nn.Parameter) -> list[torch.Tensor]:
        trained = [*tuned.parameters(), *more]
        optimiser = torch.optim.Adam(trained, lr=0.01)
        for _ in range(4):
            optimiser.zero_grad()
            tuned(ids, labels=labels).loss.backward()
            optimiser.step()
        return [parameter.detach() for parameter in trained]

    with (
        served_in_memory.open(AutoDistributedModelForCausalLM) as first,
        served_in_memory.open(AutoDistributedModelForSequenceClassification) as second,
    ):
        alone = [*language(first), *classes(second)]
        results: dict[str, list[torch.Tensor]] = {}
        # The seeds are torch's own, of the whole process: so what is random is made before the threads run.
        torch.manual_seed(1)
        deep = deep_tuning(first)
        torch.manual_seed(2)
        second.score.weight.data.normal_()
        soft = PromptTuning(second, PREFIX)
        threads = [
            threading.Thread(target=lambda: results.update(language=train(deep, ids))),
            threading.Thread(
                target=lambda: results.update(classes=train(soft, torch.arange(6) % 2, *second.score.parameters()))
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    together = [*results["language"], *results["classes"]]
    assert len(together) == len(alone) == 4
    for got, expected in zip(together, alone, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("deep", [False, True])
def test_prompts_generate(deep: bool, model: DistributedModelForCausalLM) -> None:
    tuned = PromptTuning(model, PREFIX, deep=deep)
    if tuned.deep_prompts is not None:
        tuned.deep_prompts.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    ids, mask = tokens(2, 9), padded("left", 2, 9)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with_cache = tuned.generate(ids, **options)
    assert torch.equal(with_cache[:, :9], ids) and with_cache.shape == (2, 15)
    assert torch.equal(with_cache, tuned.generate(ids, use_cache=False, **options))
    soft = PromptTuning(model, PREFIX, init=tuned.prompt_embeddings).generate(ids, **options)
    assert torch.equal(soft, with_cache) != deep


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 20},
        {"min_length": 20, "max_new_tokens": 20, "eos_token_id": list(range(3, 60))},
        {"no_repeat_ngram_size": 1, "max_new_tokens": 30},
        {"return_dict_in_generate": True, "max_new_tokens": 6},
    ],
    ids=lambda options: next(iter(options)),
)
def test_prompts_generate_as_in_peft(options: dict[str, Any], model: DistributedModelForCausalLM, whole: Any) -> None:
    tuned, ids = PromptTuning(model, PREFIX), tokens(2, 9)
    plain = peft.get_peft_model(whole, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PREFIX))
    plain.prompt_encoder.default.embedding.weight.data.copy_(tuned.prompt_embeddings.data)
    given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False, **options}
    got, expected = tuned.generate(ids, **given), plain.generate(input_ids=ids, **given)
    if "return_dict_in_generate" in options:
        got, expected = got.sequences, expected.sequences
    assert torch.equal(got, expected)


def test_what_cannot_be_sent_is_said(model: DistributedModelForCausalLM) -> None:
    blocks = model.remote_blocks
    hidden = torch.randn(2, 5, HIDDEN)
    wrong: dict[str, Callable[[], object]] = {
        "NaN": lambda: blocks(hidden * float("nan")),
        r"\[batch, tokens, 64\]": lambda: blocks(hidden[..., :63]),
        "shape": lambda: blocks(hidden[0]),
        "float64": lambda: blocks(hidden.double()),
        "attention mask": lambda: blocks(hidden, attention_mask=torch.ones(2, 6)),
        "position_ids": lambda: blocks(hidden, position_ids=torch.zeros(3, 5)),
        "hides all": lambda: blocks(hidden, attention_mask=torch.tensor([[1] * 5, [0] * 5])),
        "deep prompts": lambda: blocks(hidden, prompts=torch.zeros(NUM_BLOCKS, 1, 6, HIDDEN)),
        "the prompts hold NaN": lambda: blocks(hidden, prompts=torch.full((NUM_BLOCKS, 1, 2, HIDDEN), float("inf"))),
        "virtual tokens": lambda: PromptTuning(model, 0),
        "init": lambda: PromptTuning(model, 3, init=torch.zeros(2, HIDDEN)),
    }
    for says, call in wrong.items():
        with pytest.raises(BadInput, match=says):
            call()
    with pytest.raises(BadInput, match="from the loss hold NaN"):
        (blocks(hidden.requires_grad_()) * float("inf")).sum().backward()


def test_a_model_that_nobody_serves(served_in_memory: ServedInMemory) -> None:
    other = served_in_memory.models / "other-llama"
    with (
        served_in_memory.open(AutoDistributedModelForCausalLM, other) as opened,
        pytest.raises(NoChainError, match="it serves"),
    ):
        opened(tokens(1), labels=tokens(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_travel(dtype: torch.dtype, model: DistributedModelForCausalLM) -> None:
    hidden = torch.randn(1, 6, HIDDEN, generator=torch.Generator().manual_seed(0))
    exact = hidden.clone().requires_grad_()
    model.remote_blocks(exact).sum().backward()
    half = hidden.to(dtype).requires_grad_()
    out = model.remote_blocks(half)
    out.sum().backward()
    assert out.dtype == dtype and half.grad is not None and half.grad.dtype == dtype
    assert exact.grad is not None
    assert (half.grad.float() - exact.grad).norm() < 0.05 * exact.grad.norm()
