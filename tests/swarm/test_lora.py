"""LoRA inside the servers' blocks trains as LoRA inside the blocks of plain transformers does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from petalnode import AutoDistributedModelForCausalLM, LoraTuning, PromptTuning
from petalnode.node.client.api.causal_lm import DistributedModelForCausalLM
from petalnode.node.errors import BadInput
from tests.swarm.conftest import ServedInMemory
from tests.swarm.plain_tuning import PlainTuning, close
from tests.tiny_models import NUM_BLOCKS, VOCABULARY, load_whole

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(served_in_memory: ServedInMemory) -> Iterator[DistributedModelForCausalLM]:
    with served_in_memory.open(AutoDistributedModelForCausalLM) as opened:
        yield opened


def tokens(rows: int = 12, count: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def tuning(model: Any, **options: Any) -> LoraTuning:
    """With B that is not zero, so that A has gradients as well."""
    torch.manual_seed(0)
    tuned = LoraTuning(model, **options)
    for parameter in tuned.parameters():
        parameter.data.normal_(0, 0.2)
    return tuned


def copied(tuned: LoraTuning) -> Weights:
    """The weights by peft's names, to be trained apart."""
    return {name: weight.clone().requires_grad_() for name, weight in tuned.peft_state_dict().items()}


@contextmanager
def inside(whole: Any, weights: Weights, scaling: float) -> Iterator[None]:
    """The whole model with these weights in it, put there by their names."""
    with ExitStack() as hooks:
        for name, a in weights.items():
            if name.endswith(".lora_A.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = weights[name.replace(".lora_A.", ".lora_B.")]
                hooks.callback(whole.get_submodule(path).register_forward_hook(_plus(a, b, scaling)).remove)
        yield


def _plus(a: torch.Tensor, b: torch.Tensor, scaling: float) -> Callable[..., torch.Tensor]:
    return lambda module, args, output: output + args[0] @ a.T @ b.T * scaling


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-gemma3"])
def test_gradients_are_the_same(name: str, served_in_memory: ServedInMemory) -> None:
    folder = served_in_memory.models / name
    whole: Any = load_whole(folder).requires_grad_(False)
    ids = tokens()
    mask = (torch.arange(40) >= 3 * torch.arange(12).unsqueeze(1) % 17).long()
    with served_in_memory.open(AutoDistributedModelForCausalLM, folder) as opened:
        tuned = tuning(opened, r=4, lora_alpha=6)
        weights = copied(tuned)
        assert len(weights) == len(list(tuned.parameters())) >= 2 * NUM_BLOCKS
        loss = tuned(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        with inside(whole, weights, scaling=1.5):
            expected = whole(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        expected.backward()
        close(loss, expected)
        for got, wanted in zip(tuned.parameters(), weights.values(), strict=True):
            close(got.grad, wanted.grad)


def test_training_learns_what_plain_training_learns(
    model: DistributedModelForCausalLM, served_in_memory: ServedInMemory
) -> None:
    whole: Any = load_whole(served_in_memory.folder).requires_grad_(False)
    ids = tokens(6)
    tuned = LoraTuning(model, r=4, target_modules=["o_proj", "mlp.up_proj"], layers_to_transform=[1, 2, 5])
    assert len(list(tuned.parameters())) == 2 * 2 * 3
    weights = copied(tuned)
    losses: list[list[float]] = [[], []]
    mine = torch.optim.SGD(tuned.parameters(), lr=0.5)
    theirs = torch.optim.SGD(weights.values(), lr=0.5)
    for _ in range(5):
        loss = tuned(ids, labels=ids).loss
        with inside(whole, weights, tuned.scaling):
            expected = whole(ids, labels=ids, use_cache=False).loss
        for optimiser, term, seen in ((mine, loss, losses[0]), (theirs, expected, losses[1])):
            optimiser.zero_grad()
            term.backward()
            optimiser.step()
            seen.append(term.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < 0.99 * losses[0][0]


def test_lora_and_prompts_together(model: DistributedModelForCausalLM, served_in_memory: ServedInMemory) -> None:
    whole: Any = load_whole(served_in_memory.folder).requires_grad_(False)
    ids = tokens(3)
    tuned, prompts = tuning(model), PromptTuning(model, 4, deep=True)
    weights, plain = copied(tuned), PlainTuning(whole, prompts.prompt_embeddings, prompts.deep_prompts)
    with tuned.applied():
        prompts(ids, labels=ids).loss.backward()
    with inside(whole, weights, tuned.scaling):
        plain(ids, labels=ids).loss.backward()
    assert prompts.deep_prompts is not None and plain.deep_prompts is not None
    close(prompts.deep_prompts.grad, plain.deep_prompts.grad)
    for got, wanted in zip(tuned.parameters(), weights.values(), strict=True):
        close(got.grad, wanted.grad)


def test_what_was_learned_generates(model: DistributedModelForCausalLM, served_in_memory: ServedInMemory) -> None:
    whole: Any = load_whole(served_in_memory.folder)
    ids = tokens(2, 9)
    tuned = tuning(model)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    with inside(whole, copied(tuned), tuned.scaling), torch.no_grad():
        expected = whole.generate(ids, **options)
    assert torch.equal(tuned.generate(ids, use_cache=False, **options), expected)
    assert torch.equal(tuned.generate(ids, **options), expected)  # in a session, which the weights go into
    assert not torch.equal(model.generate(ids, **options), expected)  # the servers keep nothing of it
    with model.inference_session(max_length=32) as session, pytest.raises(BadInput, match="without session="):
        tuned.generate(ids, session=session, **options)


def test_blocks_at_a_time_are_changed_as_well(model: DistributedModelForCausalLM) -> None:
    hidden = torch.randn(2, 5, model.hidden_size, generator=torch.Generator().manual_seed(0))
    tuned = tuning(model, layers_to_transform=[3])
    with tuned.applied(), torch.no_grad():
        whole = model.remote_blocks(hidden)
        one_by_one = hidden
        for block in model.remote_blocks:
            one_by_one = block(one_by_one)
        unchanged = model.remote_blocks[:3](hidden)
    close(one_by_one, whole)
    assert torch.equal(unchanged, model.remote_blocks[:3](hidden))
    assert (whole - model.remote_blocks(hidden)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"r": 0}, "rank of 0"),
        ({"target_modules": ["attention"]}, "self_attn.q_proj"),
        ({"layers_to_transform": [6]}, "0 .. 5"),
        ({"layers_to_transform": []}, "0 .. 5"),
    ],
)
def test_what_cannot_be_changed_is_said(options: dict[str, Any], says: str, model: DistributedModelForCausalLM) -> None:
    with pytest.raises(BadInput, match=says):
        LoraTuning(model, **options)


def test_weights_that_are_no_numbers_are_refused(model: DistributedModelForCausalLM) -> None:
    tuned = LoraTuning(model)
    next(iter(tuned.parameters())).data.fill_(float("nan"))
    with pytest.raises(BadInput, match=r"self_attn.q_proj.lora_A hold NaN"):
        tuned(tokens(1))
    with pytest.raises(BadInput, match=r"self_attn.q_proj.lora_A hold NaN"):
        tuned.generate(tokens(1))
