"""The Python API over real servers says what plain transformers says."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from petalnode import AutoDistributedModelForSequenceClassification
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.client.api.opening import DEFAULTS, ModelOptions
from petalnode.node.errors import BadInput, PetalnodeError, SwarmError
from tests.greedy import prompt
from tests.inspection import client_of
from tests.swarm.conftest import SharedSwarm
from tests.swarm.deep_drafts import LOOKUP
from tests.tiny_models import HIDDEN, NUM_BLOCKS, load_whole

pytestmark = pytest.mark.usefixtures("dials_awaited")
LOGITS = 1e-4
Model = DistributedModelForCausalLM


@pytest.fixture(scope="module")
def model(shared_swarm: SharedSwarm) -> Iterator[Model]:
    with AutoDistributedModelForCausalLM.from_pretrained(
        shared_swarm.folder, initial_peers=[shared_swarm.peer]
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(shared_swarm: SharedSwarm) -> Any:
    return load_whole(shared_swarm.folder)


def left_padded(*lengths: int) -> torch.Tensor:
    """An attention mask for rows of these lengths."""
    longest = max(lengths)
    return torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])


def generate(model: Any, ids: torch.Tensor, seed: int = 3, **options: Any) -> torch.Tensor:
    options.setdefault("attention_mask", torch.ones_like(ids))
    options.setdefault("do_sample", False)
    options.setdefault("max_new_tokens", 12)
    torch.manual_seed(seed)
    out: torch.Tensor = model.generate(ids, pad_token_id=0, **options)
    return out


MASKED = {"attention_mask": left_padded(9, 3, 6)}

SAME: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {"max_new_tokens": 40}),
    "greedy, a batch": (3, {}),
    "greedy, unequal prompts": (3, MASKED),
    "greedy, unequal ends": (3, {**MASKED, "eos_token_id": list(range(3, 20))}),
    "sampling": (1, {"do_sample": True}),
    "sampling, a batch": (3, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, **MASKED}),
    "several sequences": (2, {"do_sample": True, "num_return_sequences": 3}),
    "beam search": (1, {"num_beams": 5}),
    "beam search, unequal prompts": (3, {"num_beams": 5, "num_return_sequences": 2, **MASKED}),
    "repetition penalty": (1, {"repetition_penalty": 1.3}),
    "max_length": (1, {"max_new_tokens": None, "max_length": 20}),
    "one token": (2, {"max_new_tokens": 1}),
}


@pytest.fixture
def sampled(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of transformers' own loop, from now on."""
    entered: list[int] = []
    kind = type(model.transformers_model)
    loop = kind._sample

    def entering(asked: Any, ids: torch.Tensor, **given: Any) -> Any:
        entered.append(len(ids))
        return loop(asked, ids, **given)

    monkeypatch.setattr(kind, "_sample", entering)
    return entered


@pytest.mark.parametrize("case", SAME)
def test_generates_the_same_tokens(case: str, model: Model, whole: Any, sampled: list[int]) -> None:
    """Without transformers' loop, except that of beams."""
    rows, options = SAME[case]
    ids = prompt(rows, 9)
    generated = generate(model, ids, **options)
    assert not sampled
    assert torch.equal(generated, generate(whole, ids, **options))


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"eos_token_id": [7, 11, 19], "max_new_tokens": 60}])
def test_one_answer_is_same_with_and_without_streamer(options: dict[str, Any], model: Model, whole: Any) -> None:
    class Tokens(BaseStreamer):  # type: ignore[misc]  # transformers is untyped here
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    seen: list[int] = []
    ids = prompt(1, 9, seed=5)
    streamed = generate(model, ids, streamer=Tokens(), **options)
    alone = generate(model, ids, **options)
    assert torch.equal(alone, streamed)
    assert torch.equal(alone, generate(whole, ids, **options))
    assert alone[0].tolist() == seen


def test_too_long_an_answer_is_refused_like_transformers(model: Model) -> None:
    ids = prompt(1, 9)
    with model.inference_session(14) as session:
        with pytest.raises(BadInput, match="max_length of 14"):
            generate(model, ids, session=session, max_new_tokens=12)
        assert session.position == 14


def test_end_within_session_is_kept_by_it(model: Model, whole: Any) -> None:
    ids = prompt(1, 9, seed=5)
    unended = generate(whole, ids, max_new_tokens=20)
    end = int(unended[0, 14])
    with model.inference_session(60) as session:
        ended = generate(model, ids, session=session, eos_token_id=end, max_new_tokens=20)
        assert torch.equal(ended, generate(whole, ids, eos_token_id=end, max_new_tokens=20))
        assert session.position == ended.shape[1] - 1
        assert torch.equal(generate(model, ended, session=session), generate(whole, ended))


@pytest.mark.parametrize(
    "case",
    [
        "greedy, a batch",
        "greedy, unequal prompts",
        "greedy, unequal ends",
        "sampling, a batch",
        "several sequences",
        "one token",
    ],
)
def test_rows_in_several_sessions_are_the_same(case: str, model: Model, whole: Any) -> None:
    opened = client_of(model).state.totals.opened
    rows, options = SAME[case]
    ids = prompt(rows, 9)
    expected = generate(whole, ids, **options)
    after = torch.get_rng_state()
    assert torch.equal(generate(model, ids, **LOOKUP, **options), expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert client_of(model).state.totals.opened - opened == len(expected)


class Seen(BaseStreamer):  # type: ignore[misc]  # transformers is untyped here
    """A streamer, a processor and a criterion of somebody's own, by which rows depend on each other."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")

    def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.seen.append(ids.tolist())
        return ids[:, -1] % 9 == ids.shape[1] % 9

    def processed(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(ids.tolist())
        return scores + scores.flip(0)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("end", [None, list(range(3, 12))], ids=["no end", "an end"])
def test_batch_shows_others_what_that_of_transformers_shows(
    sampling: dict[str, Any], end: Any, model: Model, whole: Any
) -> None:
    """Tokens, scores, logits, and what a streamer, a processor and a criterion are shown, with rows that end apart."""
    shown, made, states = [], [], []
    for one in (model, whole):
        others = Seen()
        output: Any = generate(
            one, prompt(3, 9), **MASKED, **sampling, eos_token_id=end, return_dict_in_generate=True, max_new_tokens=20,
            output_scores=True, output_logits=True, streamer=others, stopping_criteria=[others],
            logits_processor=[others.processed],
        )  # fmt: skip
        made.append(output)
        shown.append(others.seen)
        states.append(torch.get_rng_state())
    assert shown[0] == shown[1] and shown[0][-1] == "end" and torch.equal(*states)
    assert torch.equal(made[0].sequences, made[1].sequences)
    assert len(made[0].scores) == len(made[0].logits) == len(made[1].scores) > 1
    for name in ("scores", "logits"):
        for found, expected in zip(made[0][name], made[1][name], strict=True):
            assert found.shape == expected.shape and torch.allclose(found, expected, atol=LOGITS)


def test_a_loop_of_somebody_s_own_is_called(model: Model, whole: Any, sampled: list[int]) -> None:
    def own(asked: Any, ids: torch.Tensor, **given: Any) -> Any:
        return type(asked)._sample(asked, ids, **given)

    generated = generate(model, prompt(2, 9), custom_generate=own)
    assert sampled == [2]
    assert torch.equal(generated, generate(whole, prompt(2, 9)))


def test_rows_of_one_session_share_one_message_step(model: Model) -> None:
    with model.inference_session(max_length=40) as session:
        generate(model, prompt(3, 9), session=session, min_new_tokens=12, max_new_tokens=12)
        assert session.batch_size == 3 and session.position == 9 + 11
        assert session.waits["step"]["count"] == 12


def test_what_depends_on_other_rows_stays_together(model: Model) -> None:
    apart: list[dict[str, Any]] = [
        SAME["beam search, unequal prompts"][1],
        {"logits_processor": [lambda ids, scores: scores]},
        {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
        {"return_dict_in_generate": True, "output_scores": True},
        {"sequence_bias": {(7,): 5.0}},
    ]
    opened = client_of(model).state.totals.opened
    for options in apart:
        generate(model, prompt(3, 9), **options | {"max_new_tokens": 2}, **({} if "num_beams" in options else LOOKUP))
    assert client_of(model).state.totals.opened - opened == len(apart)


def test_a_row_that_fails_ends_the_others(model: Model) -> None:
    with pytest.raises(BadInput, match="hides all of its tokens"):
        generate(model, prompt(2, 9), attention_mask=left_padded(9, 0), max_new_tokens=200, **LOOKUP)


def test_logits_are_the_same(model: Model, whole: Any) -> None:
    ids, mask = prompt(3, 11), left_padded(11, 4, 7)
    with torch.no_grad():
        assert (model(ids).logits - whole(ids).logits).abs().max() <= LOGITS
        got, expected = model(ids, attention_mask=mask).logits, whole(ids, attention_mask=mask).logits
    assert (got - expected)[mask == 1].abs().max() <= LOGITS


def test_a_long_prompt_goes_through_in_chunks(model: Model, whole: Any) -> None:
    ids = prompt(2, 700)
    with torch.no_grad():
        assert (model(ids).logits - whole(ids).logits).abs().max() <= LOGITS
    assert torch.equal(generate(model, ids, max_new_tokens=4), generate(whole, ids, max_new_tokens=4))


def test_calls_in_one_session_send_only_news(model: Model, whole: Any) -> None:
    with model.inference_session(max_length=100) as session:
        first = generate(model, prompt(1, 9), session=session)
        assert torch.equal(first, generate(whole, prompt(1, 9)))
        assert session.position == first.shape[1] - 1
        longer = torch.cat([first, prompt(1, 4, seed=1)], dim=1)
        second = generate(model, longer)  # the open session is used by itself
        assert session.position == second.shape[1] - 1
        assert torch.equal(second, generate(whole, longer))
        assert [blocks for _, blocks in session.route] == [(0, 2), (2, 4), (4, 6)]


def test_a_changed_token_rolls_back(model: Model, whole: Any) -> None:
    with model.inference_session(max_length=100) as session:
        ids = generate(model, prompt(1, 9), session=session)
        ids[0, 5] = ids[0, 5] % 100 + 1
        assert torch.equal(generate(model, ids, session=session), generate(whole, ids))
        shorter = ids[:, :4]
        assert torch.equal(generate(model, shorter, session=session), generate(whole, shorter))


def test_a_session_goes_on_after_beam_search(model: Model, whole: Any) -> None:
    with model.inference_session(max_length=60) as session:
        beams = generate(model, prompt(1, 6), session=session, num_beams=4)
        assert torch.equal(beams, generate(whole, prompt(1, 6), num_beams=4))
        again = generate(model, prompt(4, 5), session=session)
        assert torch.equal(again, generate(whole, prompt(4, 5)))
    config = GenerationConfig(num_beams=3, num_return_sequences=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with model.inference_session(max_length=60) as session:
        several = model.generate(prompt(1, 9), session=session, generation_config=config)
        assert torch.equal(generate(model, several, session=session), generate(whole, several))


@pytest.mark.parametrize("lengths", [(9, 6), (9, 9)])
def test_a_session_refuses_other_padding(lengths: tuple[int, ...], model: Model) -> None:
    ids, other = prompt(2, 9), {(9, 6): (9, 9), (9, 9): (6, 9)}[lengths]
    with model.inference_session(max_length=60) as session:
        made = generate(model, ids, session=session, attention_mask=left_padded(*lengths))
        with pytest.raises(BadInput, match="padding"):
            generate(model, made, session=session, attention_mask=left_padded(*(12 + length for length in other)))
        again = generate(model, made, session=session, attention_mask=left_padded(*(12 + one for one in lengths)))
        assert torch.equal(again[:, : made.shape[1]], made)


def test_mixed_steps_equal_one_pass(model: Model) -> None:
    hidden = torch.randn(2, 21, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = model.remote_blocks(hidden)
    with model.inference_session(max_length=21) as session:
        parts = [session.step(part) for part in hidden.split([1, 7, 1, 1, 11], dim=1)]
        assert session.position == 21
    assert (torch.cat(parts, dim=1) - expected).abs().max() <= LOGITS


def test_rollback_is_exact(model: Model) -> None:
    hidden = torch.randn(1, 8, HIDDEN, generator=torch.Generator().manual_seed(0))
    other = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    with model.inference_session(max_length=12) as session:
        session.step(hidden[:, :2])
        session.step(hidden[:, 2:])
        session.position = 2
        got = session.step(other)
        assert session.position == 7
    expected = model.remote_blocks(torch.cat([hidden[:, :2], other], dim=1))[:, 2:]
    assert (got - expected).abs().max() <= LOGITS
    with model.inference_session(max_length=12) as session:
        session.step(hidden[:, :2])
        assert torch.equal(session.step(other), got)


def test_a_position_that_is_not_held_is_refused(model: Model) -> None:
    with model.inference_session(max_length=12) as session:
        with pytest.raises(BadInput, match="no tokens"):
            session.position = 1
        session.step(torch.randn(1, 3, HIDDEN))
        for position in (4, -1):
            with pytest.raises(BadInput, match="3 tokens"):
                session.position = position
        assert session.position == 3


def test_too_many_tokens_leave_the_session_usable(model: Model) -> None:
    with model.inference_session(max_length=8) as session:
        session.step(torch.randn(1, 6, HIDDEN))
        with pytest.raises(BadInput, match="max_length of 8"):
            session.step(torch.randn(1, 3, HIDDEN))
        assert session.position == 6
        session.step(torch.randn(1, 2, HIDDEN))
        assert session.position == 8


def test_more_than_the_model_takes_is_refused(model: Model) -> None:
    with pytest.raises(PetalnodeError, match="4096"):
        generate(model, prompt(1, 4), max_new_tokens=100_000)


def test_slices_of_the_blocks_make_the_whole(model: Model) -> None:
    blocks = model.remote_blocks
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert len(blocks) == NUM_BLOCKS and len(blocks[1:5]) == 4 and len(blocks[-2:]) == 2
    expected = blocks(hidden)
    assert (blocks[3:](blocks[:3](hidden)) - expected).abs().max() <= LOGITS
    one_by_one = hidden
    for index in range(NUM_BLOCKS):
        one_by_one = blocks[index](one_by_one)
    assert (one_by_one - expected).abs().max() <= LOGITS
    with pytest.raises(IndexError):
        blocks[NUM_BLOCKS]
    with pytest.raises(IndexError):
        blocks[3:3]


def test_session_of_slice_runs_through_these_blocks_only(model: Model) -> None:
    hidden = torch.randn(1, 4, HIDDEN)
    with model.remote_blocks[1:5].inference_session(max_length=4) as session:
        out = session.step(hidden)
        assert [blocks for _, blocks in session.route] == [(1, 2), (2, 4), (4, 5)]
    assert (out - model.remote_blocks[1:5](hidden)).abs().max() <= LOGITS


def test_a_session_refuses_gradients_clearly(model: Model) -> None:
    hidden = torch.randn(1, 4, HIDDEN, requires_grad=True)
    with model.inference_session(max_length=4) as session:
        with pytest.raises(PetalnodeError, match="gradient"):
            session.step(hidden)
        with torch.no_grad():
            assert session.step(hidden).shape == hidden.shape


@pytest.mark.parametrize(
    "hidden",
    [
        torch.zeros(4, HIDDEN),
        torch.zeros(1, 0, HIDDEN),
        torch.zeros(1, 4, HIDDEN, dtype=torch.float64),
        torch.zeros(1, 4, HIDDEN, dtype=torch.int64),
    ],
    ids=["two dimensions", "no tokens", "float64", "integers"],
)
def test_what_is_no_hidden_state_is_refused(hidden: torch.Tensor, model: Model) -> None:
    with model.inference_session(max_length=8) as session, pytest.raises(BadInput):
        session.step(hidden)


def test_another_hidden_size_is_refused(model: Model) -> None:
    with pytest.raises(PetalnodeError, match="65"):
        model.remote_blocks(torch.zeros(1, 4, HIDDEN + 1))


def test_another_number_of_rows_is_refused(model: Model) -> None:
    with model.inference_session(max_length=8) as session:
        session.step(torch.randn(2, 3, HIDDEN))
        with pytest.raises(BadInput, match="2 rows"):
            session.step(torch.randn(1, 1, HIDDEN))


def test_nan_is_refused_and_the_servers_live_on(model: Model, whole: Any) -> None:
    with model.inference_session(max_length=8) as session, pytest.raises(SwarmError, match="NaN"):
        session.step(torch.full((1, 2, HIDDEN), float("nan")))
    assert torch.equal(generate(model, prompt(1, 5)), generate(whole, prompt(1, 5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_may_travel_in_half(dtype: torch.dtype, model: Model) -> None:
    hidden = torch.randn(1, 6, HIDDEN, generator=torch.Generator().manual_seed(0))
    out = model.remote_blocks(hidden.to(dtype))
    assert out.dtype == dtype
    assert (out.float() - model.remote_blocks(hidden)).abs().max() < 1.0


@pytest.mark.parametrize("ids", [torch.zeros(1, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long), None])
def test_generate_needs_tokens(ids: torch.Tensor | None, model: Model) -> None:
    with pytest.raises(BadInput, match="input_ids"):
        model.generate(ids)


def test_closing_a_session_twice_and_using_it_after(model: Model) -> None:
    session = model.inference_session(max_length=4)
    session.step(torch.randn(1, 1, HIDDEN))
    session.close()
    session.close()
    with pytest.raises(PetalnodeError, match="closed"):
        session.step(torch.randn(1, 1, HIDDEN))
    assert model.active_session is None


def test_closing_a_model_twice_and_using_it_after(shared_swarm: SharedSwarm) -> None:
    opened = AutoDistributedModelForCausalLM.from_pretrained(shared_swarm.folder, initial_peers=[shared_swarm.peer])
    session = opened.inference_session(max_length=4)
    session.step(torch.randn(1, 1, HIDDEN))
    opened.close()
    opened.close()
    with pytest.raises(PetalnodeError, match="closed"):
        opened.generate(prompt(1, 3))
    session.close()  # the model took its servers along; that is no error


def test_two_threads_generate_at_once(model: Model, shared_swarm: SharedSwarm, whole: Any) -> None:
    outputs: dict[str, torch.Tensor] = {}
    failures: list[BaseException] = []

    def run(name: str, opened: Model, ids: torch.Tensor) -> None:
        try:
            with opened.inference_session(max_length=60) as session:
                outputs[name] = opened.generate(
                    ids, session=session, attention_mask=torch.ones_like(ids), pad_token_id=0,
                    do_sample=False, max_new_tokens=30,
                )  # fmt: skip
        except BaseException as error:
            failures.append(error)

    with AutoDistributedModelForCausalLM.from_pretrained(
        shared_swarm.folder, initial_peers=[shared_swarm.peer]
    ) as second:
        work = {"first": (model, prompt(1, 9)), "again": (model, prompt(2, 5)), "second": (second, prompt(2, 7))}
        threads = [threading.Thread(target=run, args=(name, *what)) for name, what in work.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    assert not failures
    for name, (_, ids) in work.items():
        assert torch.equal(outputs[name], generate(whole, ids, max_new_tokens=30)), name


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3"])
def test_other_architectures(name: str, shared_swarm: SharedSwarm) -> None:
    folder = shared_swarm.models / name
    reference = load_whole(folder)
    with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[shared_swarm.peer]) as opened:
        ids = prompt(3, 9)
        for options in ({}, MASKED, {"num_beams": 3, **MASKED}):
            got = generate(opened, ids, max_new_tokens=15, eos_token_id=None, **options)
            assert torch.equal(got, generate(reference, ids, max_new_tokens=15, eos_token_id=None, **options))
        with torch.no_grad():
            assert (opened(ids).logits - reference(ids).logits).abs().max() <= LOGITS


def test_only_allowed_servers_are_used(shared_swarm: SharedSwarm) -> None:
    first = shared_swarm.llama[0].peer_id
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            shared_swarm.folder, initial_peers=[shared_swarm.peer], blocked_servers=[first]
        ) as opened,
        pytest.raises(SwarmError, match="0:2"),
    ):
        opened.generate(prompt(1, 3))


@pytest.mark.parametrize(
    ("peers", "error"),
    [
        ([], BadInput),
        ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV", BadInput),
        (["/ip4/127.0.0.1/tcp/1"], BadInput),
        (["/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV"], SwarmError),
    ],
    ids=["none", "one string", "no peer id", "nobody there"],
)
def test_peers_that_cannot_be(peers: Any, error: type[Exception], models: Path) -> None:
    with pytest.raises(error):
        AutoDistributedModelForCausalLM.from_pretrained(models / "tiny-llama", initial_peers=peers)


def test_a_model_that_nobody_serves(shared_swarm: SharedSwarm) -> None:
    other = shared_swarm.models / "other-llama"
    with (
        AutoDistributedModelForCausalLM.from_pretrained(other, initial_peers=[shared_swarm.peer]) as opened,
        pytest.raises(SwarmError, match="serves tiny-gemma3, tiny-gpt2, tiny-llama"),
    ):
        opened.generate(prompt(1, 3))


OPENERS = (AutoDistributedModelForCausalLM, AutoDistributedModelForSequenceClassification)
opener_cases = pytest.mark.parametrize("opener", OPENERS, ids=lambda opener: opener.__name__)


@opener_cases
def test_every_kind_of_model_has_all_options(opener: Any) -> None:
    """In the signature that `help` shows, with its default, and in the docstring."""
    parameters = inspect.signature(opener.from_pretrained).parameters
    documented = inspect.getdoc(opener.from_pretrained)
    assert DEFAULTS.keys() == ModelOptions.__annotations__.keys()
    for name, default in DEFAULTS.items():
        assert parameters[name].default == default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"    {name}: " in documented
    assert "options" not in parameters


@opener_cases
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"compare_chains": 0}, BadInput, "compare_chains"),
        ({"share_receipts": ["/ip4/127.0.0.1/tcp/1"]}, BadInput, "p2p"),
        ({"swarm_key": "nothing.key"}, BadInput, "nothing.key"),
        ({"adaptor": "x"}, TypeError, "adaptor"),
    ],
    ids=["no chain", "an auditor without an id", "no key", "a typo"],
)
def test_options_that_cannot_be(
    opener: Any, options: dict[str, Any], error: type[Exception], says: str, shared_swarm: SharedSwarm
) -> None:
    with pytest.raises(error, match=says):
        opener.from_pretrained(shared_swarm.folder, initial_peers=[shared_swarm.peer], **options)


@opener_cases
def test_only_servers_that_pledge_are_used(opener: Any, shared_swarm: SharedSwarm) -> None:
    with (
        opener.from_pretrained(shared_swarm.folder, initial_peers=[shared_swarm.peer], require_pledge=1) as opened,
        pytest.raises(SwarmError, match="0:6"),
    ):
        opened(prompt(1, 3))
