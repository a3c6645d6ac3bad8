"""Rows of a batch that take drafts, each in a session of its own, say what they say in one batch without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.client.api.row_drafts import ROWS, lookup_gain
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm
from tests.inspection import draft_gain_of
from tests.swarm.deep_drafts import CONSTANT, LOOKUP
from tests.tiny_models import load_whole, save_tiny

Model = DistributedModelForCausalLM
pytestmark = pytest.mark.usefixtures("blocks_as_served")
SAID = [5, 6, 7, 8, 5]
PADDING = 0
PROMPTS = torch.tensor(
    [[5, 6, 7, 8, 9, 5, 6, 7], [PADDING] * 3 + [8, 7, 6, 5, 8], [PADDING, 7, 7, 7, 5, 6, 7, 7]], dtype=torch.long
)
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 3, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("batches"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def servers(swarm: MemorySwarm, folder: Path) -> dict[str, MemoryServer]:
    started = [swarm.start(folder, blocks) for blocks in ("0:3", "3:6")]
    return {server.ready["peer_id"]: server for server in started}


def generate(model: Any, prompt: torch.Tensor = PROMPTS, **options: Any) -> Any:
    torch.manual_seed(3)
    given = {"attention_mask": (prompt != PADDING).long(), "max_new_tokens": 32, "do_sample": False, **options}
    vocabulary = model.transformers_model.config.vocab_size
    # A random model repeats itself where it has few words.
    others = [token for token in range(vocabulary) if token not in SAID]
    return model.generate(prompt, pad_token_id=PADDING, suppress_tokens=others, **given)


class Seen:
    """A streamer."""

    def __init__(self) -> None:
        self.put_tokens: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "samples of each row": {**SAMPLED, "num_return_sequences": 2},
    "samples of one row": {**SAMPLED, "num_return_sequences": 3, "prompt": PROMPTS[:1]},
    "ends": {**SAMPLED, "eos_token_id": 6},
    "one token": {**SAMPLED, "max_new_tokens": 1},
    "max_length": {"max_new_tokens": None, "max_length": 30},
    "output object": {"return_dict_in_generate": True, "eos_token_id": 7, **SAMPLED},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_are_generated(model: Model, case: str) -> None:
    outputs, states, streamed = [], [], []
    for more in ({}, LOOKUP):
        streamer = Seen()
        made = generate(model, streamer=streamer, **CASES[case], **more)
        outputs.append(made.sequences if case == "output object" else made)
        states.append(torch.get_rng_state())
        streamed.append((streamer.put_tokens, streamer.ended))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(states[0], states[1]) and streamed[0] == streamed[1]
    rows = model.drafts["rows"]
    assert len(rows) == len(outputs[0])
    for name in ("drafted", "accepted", "steps"):
        assert model.drafts[name] == sum(row[name] for row in rows)
    if case in ("greedy", "max_length"):
        assert all(row["drafted"] >= row["accepted"] > 8 for row in rows)
        assert model.drafts["drafted"] > model.drafts["accepted"]
    if case == "ends":
        lengths = {int((row != PADDING).sum()) for row in outputs[0][:, PROMPTS.shape[1] :]}
        assert len(lengths) > 1, "all rows end at once: the case says nothing"


def test_an_assistant_changes_no_token_of_a_batch(model: Model, folder: Path) -> None:
    guessed = {**CONSTANT, "num_assistant_tokens": 6}
    for options in ({}, {"do_sample": True, "top_k": 3}):
        options = {"suppress_tokens": None, "max_new_tokens": 16, **options}
        torch.manual_seed(3)
        given = {"attention_mask": (PROMPTS != PADDING).long(), "pad_token_id": PADDING, **options}
        plain = model.generate(PROMPTS, **given)
        torch.manual_seed(3)
        assert torch.equal(model.generate(PROMPTS, assistant_model=load_whole(folder), **guessed, **given), plain)
        # It draws what the rows draw: only what is under way at the end is in vain.
        assert all(row["drafted"] - row["accepted"] <= 6 for row in model.drafts["rows"])


class Own:
    """A processor of which nothing is known."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[0, 5] += 1.0
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"logits_processor": [Own()]},
        {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
    ],
    ids=["scores", "a processor", "a criterion"],
)
def test_what_needs_batch_as_whole_takes_no_drafts(model: Model, options: dict[str, Any]) -> None:
    made = [generate(model, **options, **more) for more in ({}, LOOKUP)]
    if "return_dict_in_generate" in options:
        assert len(made[0].scores) == len(made[1].scores) == 32
        made = [one.sequences for one in made]
    assert torch.equal(made[0], made[1])
    assert model.drafts["drafted"] == 0 and "rows" not in model.drafts


def test_a_session_that_is_given_stays_one_batch(model: Model) -> None:
    plain = generate(model)
    with model.inference_session(max_length=100) as session:
        assert torch.equal(generate(model, session=session, **LOOKUP), plain)
        assert session.batch_size == len(PROMPTS) and "rows" not in model.drafts


def test_drafts_gain_is_known_for_the_next_batch(
    swarm: MemorySwarm, servers: dict[str, MemoryServer], folder: Path
) -> None:
    prompts, rows = PROMPTS.tolist(), len(PROMPTS)
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
        known, gains = draft_gain_of(model), [ROWS.first_gain]
        with model.inference_session(max_length=100) as session:
            made = generate(model, session=session, **LOOKUP)[:, PROMPTS.shape[1] :].tolist()
        assert model.drafts["accepted"] == 0
        gains.append((gains[0] + lookup_gain(list(zip(prompts, made, strict=True)))) / 2)
        assert known.value == gains[1]  # by what would have been right in one batch
        generate(model)
        assert known.value == gains[1]
        generate(model, **LOOKUP)
        accepted, tokens = model.drafts["accepted"], 32 * rows
        assert accepted
        assert known.value == pytest.approx((gains[1] + tokens / (tokens - accepted)) / 2)


class Acts(Seen):
    """A streamer that does something in the middle of the answer."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.put_tokens) == 12:
            self._act()


def test_error_of_one_row_ends_all_of_them(model: Model) -> None:
    def fail() -> None:
        raise ZeroDivisionError("by the streamer")

    with pytest.raises(ZeroDivisionError, match="by the streamer"):
        generate(model, streamer=Acts(fail), max_new_tokens=200, **LOOKUP)
    assert torch.equal(generate(model, **LOOKUP), generate(model))


def test_server_that_dies_is_replaced_in_every_row(
    swarm: MemorySwarm, servers: dict[str, MemoryServer], folder: Path, model: Model
) -> None:
    plain = generate(model)
    first = [server for server in servers.values() if server.span == (0, 3)]
    assert all(swarm.start(folder, blocks).ready for blocks in ("0:3", "3:6"))

    def kill() -> None:
        for server in first:
            server.kill()

    assert torch.equal(generate(model, streamer=Acts(kill), **LOOKUP), plain)
    assert len(model.drafts["rows"]) == len(PROMPTS)
