"""What a model of the swarm is called with is used as plain transformers uses it, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.errors import BadInput
from petalnode.node.testing.memory_servers import memory_swarm
from tests.greedy import prompt
from tests.tiny_models import save_tiny

Model = DistributedModelForCausalLM
LOGITS = 1e-4
RESTARTING = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("called"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with memory_swarm() as swarm:
        for server in [swarm.start(folder, blocks) for blocks in ("0:3", "3:6")]:
            server.ready  # noqa: B018  (waits)
        with swarm.open_model(AutoDistributedModelForCausalLM, folder) as opened:
            yield opened


@pytest.mark.parametrize("use_cache", [None, False])
@pytest.mark.parametrize("mask", [None, torch.ones(2, 10), torch.tensor([[0] * 3 + [1] * 7, [1] * 10])])
@torch.no_grad()
def test_positions_beginning_anew_are_as_in_transformers(
    mask: torch.Tensor | None, use_cache: bool | None, model: Model, whole: Any
) -> None:
    """Without a mask and a cache they are several texts in one row; with one of the two, they are one text."""
    ids = prompt(2, 10)
    found = model(ids, position_ids=RESTARTING, attention_mask=mask, use_cache=use_cache).logits
    expected = whole(ids, position_ids=RESTARTING, attention_mask=mask, use_cache=use_cache).logits
    seen = torch.ones(2, 10, dtype=torch.bool) if mask is None else mask.bool()
    assert (found - expected)[seen].abs().max() <= LOGITS


@pytest.mark.parametrize("name", ["pixel_values", "input_id", "encoder_hidden_states"])
def test_an_unknown_keyword_of_a_call_is_refused(name: str, model: Model) -> None:
    with pytest.raises(TypeError, match=f"'{name}'"):
        model(prompt(1, 5), **{name: torch.ones(1, 5)})


@pytest.mark.parametrize(
    ("name", "value"),
    [("output_attentions", True), ("is_causal", False), ("cu_seq_lens_q", torch.tensor([0, 5])), ("seq_idx", 1)],
)
def test_what_does_not_reach_the_blocks_is_refused(name: str, value: Any, model: Model) -> None:
    with pytest.raises(BadInput, match=name):
        model(prompt(1, 5), **{name: value})


def test_double_or_extra_argument_is_refused(model: Model) -> None:
    ids = prompt(1, 5)
    with pytest.raises(TypeError, match="input_ids"):
        model(ids, input_ids=ids)
    with pytest.raises(TypeError, match="positional"):
        model(ids, *[None] * 20)


@torch.no_grad()
def test_arguments_that_change_nothing_pass(model: Model, whole: Any) -> None:
    ids = prompt(2, 7)
    options: dict[str, Any] = {
        "pixel_values": None, "output_attentions": False, "is_causal": True, "return_dict": True,
        "num_items_in_batch": torch.tensor(12), "labels": ids, "logits_to_keep": 0,
    }  # fmt: skip
    found = model(ids, None, **options)
    expected = whole(ids, None, **{name: value for name, value in options.items() if name != "pixel_values"})
    assert (found.logits - expected.logits).abs().max() <= LOGITS
    assert abs(float(found.loss - expected.loss)) <= LOGITS


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.5},
        {"output_attentions": True},
        {"generation_config": GenerationConfig(output_hidden_states=True, return_dict_in_generate=True)},
        {"inputs_embeds": torch.zeros(1, 5, 64)},
        {"past_key_values": object()},
        {"cache_implementation": "static"},
        {"cu_seq_lens_q": torch.tensor([0, 5])},
        {"is_causal": False},
        {"assistant_early_exit": 2},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generate_refuses_by_name_what_it_would_ignore(options: dict[str, Any], model: Model) -> None:
    name = next(iter(options))
    with pytest.raises(BadInput, match="output_hidden_states" if name == "generation_config" else name):
        model.generate(prompt(1, 5), max_new_tokens=2, do_sample=False, pad_token_id=0, **options)


def test_generate_refuses_an_unknown_keyword(model: Model) -> None:
    with pytest.raises(ValueError, match="pixel_values"):
        model.generate(prompt(1, 5), max_new_tokens=2, pixel_values=torch.ones(1))


@pytest.mark.parametrize(
    "options",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4]])},
        {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [6]]},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3, 40))},
        {"min_new_tokens": 6, "eos_token_id": list(range(3, 60))},
        {"sequence_bias": {(7,): 5.0}},
        {"guidance_scale": 1.0},
        {"prefill_chunk_size": 2},
        {"forced_eos_token_id": 2},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 9},
        {"encoder_repetition_penalty": 1.4},
        {"renormalize_logits": True, "repetition_penalty": 1.2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generate_honours_what_transformers_honours(options: dict[str, Any], model: Model, whole: Any) -> None:
    ids = prompt(1, 5)
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **given, **options), whole.generate(ids, **given, **options))


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({"max_new_tokens": 30}, {"generation_config": GenerationConfig(do_sample=False)}),
        ({"max_new_tokens": 30}, {"max_length": 12}),
        ({"max_length": 40}, {"generation_config": GenerationConfig(do_sample=False)}),
        ({"cache_implementation": "hybrid"}, {"max_new_tokens": 6}),  # of Gemma 2
    ],
)
def test_model_s_own_generation_config_is_merged(
    own: dict[str, Any], options: dict[str, Any], model: Model, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in own.items():
        monkeypatch.setattr(model.transformers_model.generation_config, name, value)
        monkeypatch.setattr(whole.generation_config, name, value)
    ids = prompt(1, 5)
    given = {"pad_token_id": 0, "attention_mask": torch.ones_like(ids), **options}
    assert torch.equal(model.generate(ids, **given), whole.generate(ids, **given))


def test_answer_without_length_ends_with_the_model(model: Model, whole: Any) -> None:
    ids = prompt(1, whole.config.max_position_embeddings - 5)
    given = {"pad_token_id": 0, "attention_mask": torch.ones_like(ids), "do_sample": False}
    assert torch.equal(model.generate(ids, **given), whole.generate(ids, **given))
