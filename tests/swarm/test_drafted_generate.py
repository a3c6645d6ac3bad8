"""`model.generate` with drafts says what it says without them: tokens, scores, what criteria and streamers see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.client.api.generating import Assistant
from petalnode.node.client.api.tuning import LoraTuning, PromptTuning
from petalnode.node.errors import BadInput
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm
from tests.swarm.deep_drafts import CONSTANT, LOOKUP, Few
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import load_whole, save_tiny

Model = DistributedModelForCausalLM
pytestmark = pytest.mark.usefixtures("blocks_as_served")
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
GUESSED = {**CONSTANT, "num_assistant_tokens": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("generated"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def servers(swarm: MemorySwarm, folder: Path) -> dict[str, MemoryServer]:
    return {server.ready["peer_id"]: server for server in [swarm.start(folder, blocks) for blocks in ("0:3", "3:6")]}


class Seen:
    """A criterion that is never met, and a streamer; what they were shown."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.put_tokens: list[int] = []
        self.ended = 0

    def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.ids.append(ids[0].tolist())
        return torch.tensor([False])

    def put(self, value: torch.Tensor) -> None:
        self.put_tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def generate(model: Any, prompt: torch.Tensor | None = None, **options: Any) -> Any:
    ids = torch.tensor([PROMPT]) if prompt is None else prompt
    torch.manual_seed(3)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 32, "do_sample": False, **options}
    return model.generate(ids, pad_token_id=0, logits_processor=[Few()], **options)


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "left padding": {"prompt": torch.tensor([[0, 0, 0, *PROMPT]]), "attention_mask": torch.tensor([[0] * 3 + [1] * 8])},
    "one token": {"max_new_tokens": 1},
    "max_length": {"max_new_tokens": None, "max_length": 30},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_are_generated(model: Model, case: str) -> None:
    plain = generate(model, **CASES[case])
    after, none = torch.get_rng_state(), model.drafts
    drafted = generate(model, **CASES[case], **LOOKUP)
    assert torch.equal(drafted, plain)
    assert torch.equal(torch.get_rng_state(), after)
    assert none["drafted"] == 0
    if case in ("greedy", "left padding"):
        assert model.drafts["accepted"] > 8 and model.drafts["drafted"] > model.drafts["accepted"]


def test_criteria_streamers_and_scores_are_those_without_drafts(model: Model) -> None:
    outputs, seen = [], []
    for options in ({}, LOOKUP):
        one = Seen()
        outputs.append(
            generate(
                model,
                stopping_criteria=[one],
                streamer=one,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                **SAMPLED,
                **options,
            )
        )
        seen.append(one)
    assert seen[0].ids == seen[1].ids and seen[0].put_tokens == seen[1].put_tokens and seen[1].ended == 1
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for left, right in ((outputs[0].scores, outputs[1].scores), (outputs[0].logits, outputs[1].logits)):
        assert len(left) == len(right) == 32
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(left, right, strict=True))


def test_an_answer_ends_where_it_ends_without_drafts(model: Model, tmp_path: Path) -> None:
    tokens = generate(model)[0].tolist()
    for end in set(tokens[len(PROMPT) :]):
        ended = generate(model, eos_token_id=end, **LOOKUP)
        assert ended[0].tolist() == tokens[: tokens.index(end, len(PROMPT)) + 1]
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.decode(tokens[-3:])
    options = {"stop_strings": [text], "tokenizer": tokenizer}
    assert torch.equal(generate(model, **options, **LOOKUP), generate(model, **options))


def test_session_goes_on_behind_answer_with_drafts(model: Model) -> None:
    with model.inference_session(max_length=200) as plain, model.inference_session(max_length=200) as session:
        first = generate(model, session=plain)
        second = generate(model, torch.cat([first, torch.tensor([[5, 6]])], dim=1), session=plain)
        assert torch.equal(generate(model, session=session, **LOOKUP), first)
        assert session.position == plain.position - len(second[0]) + len(first[0])
        assert session.tokens == first[:, :-1].tolist()
        counts = model.drafts
        again = generate(model, torch.cat([first, torch.tensor([[5, 6]])], dim=1), session=session, **LOOKUP)
        assert torch.equal(again, second) and session.tokens == second[:, :-1].tolist()
        assert session.drafts["drafted"] == counts["drafted"] + model.drafts["drafted"]


def test_too_short_a_session_says_so_with_drafts(model: Model) -> None:
    errors = []
    for options in ({}, LOOKUP):
        with model.inference_session(max_length=20) as session, pytest.raises(BadInput) as error:
            generate(model, session=session, **options)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_batch_takes_no_drafts(model: Model) -> None:
    prompt = torch.tensor([PROMPT, PROMPT[::-1]])
    assert torch.equal(generate(model, prompt, **LOOKUP), generate(model, prompt))
    assert model.drafts["drafted"] == 0
    copies = {**SAMPLED, "num_return_sequences": 3}
    assert torch.equal(generate(model, **copies, **LOOKUP), generate(model, **copies))


def reading(folder: Path) -> tuple[Any, list[int]]:
    """An assistant, and the length of what it had read after each of its calls."""
    assistant, lengths = load_whole(folder), list[int]()
    assistant.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["past_key_values"].get_seq_length() + given["input_ids"].shape[1]),
        with_kwargs=True,
    )
    return assistant, lengths


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 24}, {**SAMPLED, "max_new_tokens": 24}], ids=["greedy", "sampled"]
)
def test_an_assistant_changes_no_token(model: Model, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = generate(model, **options)
    after = torch.get_rng_state()
    other, read = reading(save_tiny("llama", tmp_path, seed=1, max_position_embeddings=512))
    assert torch.equal(generate(model, assistant_model=other, **options, **GUESSED), plain)
    assert torch.equal(torch.get_rng_state(), after) and read


def test_an_assistant_that_is_the_model_guesses_right(model: Model, folder: Path) -> None:
    torch.manual_seed(3)
    ids = torch.tensor([[0, 0, *PROMPT]])
    options = {"attention_mask": torch.tensor([[0] * 2 + [1] * 8]), "max_new_tokens": 24, "pad_token_id": 0}
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        torch.manual_seed(3)
        plain = model.generate(ids, **options, **sampling)
        torch.manual_seed(3)
        assistant, read = reading(folder)
        drafted = model.generate(ids, assistant_model=assistant, **options, **sampling, **GUESSED)
        assert torch.equal(drafted, plain)
        # Only what is under way at the end of the answer is in vain.
        assert model.drafts["drafted"] - model.drafts["accepted"] <= 6
        # It does not see the padding.
        assert read and min(read) >= len(PROMPT) and max(read) <= len(PROMPT) + 24


def test_assistant_reads_on_behind_what_it_has_read(folder: Path) -> None:
    whole, assistant = load_whole(folder), Assistant(load_whole(folder))
    long = [*PROMPT] * 12
    assert assistant.read(long) is None  # more than is read at once
    for tokens in (long, [*long, 9], [*long[:-2], 3, 4], long[:5]):
        read = assistant.read(tokens)
        assert read is not None
        torch.testing.assert_close(read, whole(torch.tensor([tokens])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_a_soft_prompt_takes_drafts(model: Model) -> None:
    tuned = PromptTuning(model, 4)
    plain = generate(tuned)
    assert torch.equal(generate(tuned, **LOOKUP), plain) and model.drafts["accepted"]


def test_lora_weights_that_are_uploaded_take_drafts(model: Model) -> None:
    tuned = LoraTuning(model, r=2)
    with torch.no_grad():
        for weight in tuned.weights.values():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    plain = generate(tuned)
    assert not torch.equal(plain, generate(model))
    assert torch.equal(generate(tuned, **LOOKUP), plain) and model.drafts["accepted"]


def test_compared_chains_and_server_that_dies_take_drafts(
    swarm: MemorySwarm, servers: dict[str, MemoryServer], folder: Path, model: Model
) -> None:
    plain = generate(model)
    for server in [swarm.start(folder, blocks) for blocks in ("0:3", "3:6")]:
        servers[server.ready["peer_id"]] = server
    with swarm.open_model(AutoDistributedModelForCausalLM, folder, compare_chains=2) as compared:
        assert torch.equal(generate(compared, **LOOKUP), plain) and compared.drafts["accepted"]

    class Kills(Seen):
        """Ends the first server of the chain in the middle of the answer."""

        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.put_tokens) == len(PROMPT) + 16:
                servers[session.route[0][0]].kill()

    with model.inference_session(max_length=100) as session:
        assert torch.equal(generate(model, streamer=Kills(), session=session, **LOOKUP), plain)
        assert session.recoveries and session.tokens == plain[:, :-1].tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**LOOKUP, "num_beams": 3}, "beam search takes no drafts"),
        ({**LOOKUP, "use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0"),
        ({**LOOKUP, "num_assistant_tokens": 0}, "num_assistant_tokens is 0"),
        ({**LOOKUP, "custom_generate": print}, "custom_generate"),
        ({"assistant_model": "smollm2"}, "assistant_model is a causal language model"),
    ],
    ids=["beams", "no cache", "none", "no tokens", "custom", "a name"],
)
def test_impossible_combinations_are_refused_in_one_line(model: Model, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said) as error:
        generate(model, **options)
    assert "\n" not in str(error.value)


def test_an_assistant_with_another_vocabulary_is_refused(model: Model, tmp_path: Path) -> None:
    other = load_whole(save_tiny("llama", tmp_path, vocab_size=100))
    with pytest.raises(BadInput, match="a vocabulary of 100 tokens"):
        generate(model, assistant_model=other)


def test_the_generation_config_may_ask_for_drafts(model: Model) -> None:
    plain = generate(model)
    config = model.transformers_model.generation_config
    config.prompt_lookup_num_tokens = 10
    try:
        assert torch.equal(generate(model), plain) and model.drafts["accepted"]
        assert config.prompt_lookup_num_tokens == 10
    finally:
        config.prompt_lookup_num_tokens = None
