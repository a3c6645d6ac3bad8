"""Blocks one by one give what a server of all of them gives, to the last bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.kernels import choice
from petalnode.node.blocks.passes import Batch, SpanPasses
from petalnode.node.blocks.span import load_span
from petalnode.node.errors import BadInput
from petalnode.node.verification.noise import Noise
from petalnode.node.verification.recomputation import (
    RECOMPUTATION,
    PassAnswer,
    Recomputation,
    RecordedStep,
    SessionAnswer,
    SessionQuestion,
)
from petalnode.protocols.ids import Span
from petalnode.protocols.training import LoraName
from tests.noted_calls import calls_of
from tests.tiny_models import HIDDEN, save_tiny

SPAN = Span(1, 5)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PETALNODE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


def hidden(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("group_bytes", [0, 1 << 30])
@pytest.mark.parametrize(("dtype", "quantisation"), [("float32", "none"), ("bfloat16", "none"), ("float32", "nf4")])
def test_a_session_with_rollback_and_reorder(folder: Path, dtype: str, quantisation: str, group_bytes: int) -> None:
    wire = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    steps = (
        RecordedStep(0, hidden(2, 9, seed=1, dtype=wire)),
        RecordedStep(9, hidden(2, 1, seed=2, dtype=wire)),
        RecordedStep(10, hidden(2, 1, seed=3, dtype=wire), (1, 1)),
        RecordedStep(7, hidden(2, 4, seed=4, dtype=wire)),
        RecordedStep(11, hidden(2, 1, seed=5, dtype=wire)),
    )
    blocks = load_span(folder, SPAN, dtype=dtype, quantisation=quantisation)
    cache = blocks.make_cache(2, 32, [3, 0])
    expected = []
    for step in steps:
        cache.rollback(step.position)
        cache.reorder(step.reorder or (0, 1))
        one = step.hidden.shape[1] == 1
        expected.append(blocks.decode([(step.hidden, cache)])[0] if one else blocks.forward(step.hidden, cache))
    truth = Recomputation(folder, dtype, quantisation, group_bytes=group_bytes)
    # A question of other blocks beside it: each goes through its own.
    answer, other = truth.answer([SessionQuestion(SPAN, steps, (3, 0)), SessionQuestion(Span(0, 2), steps[:1])])
    assert isinstance(answer, SessionAnswer) and isinstance(other, SessionAnswer)
    for mine, theirs in zip(answer.outputs, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(other.outputs[0], expected[0])
    assert truth.loads == SPAN.end  # blocks 0 .. 4, once each


@pytest.mark.parametrize("group_bytes", [0, 1 << 30])
def test_a_pass_and_its_gradients(folder: Path, group_bytes: int) -> None:
    prompts = hidden(len(SPAN), 1, 3, seed=1)
    path = "self_attn.q_proj"
    lora = {
        LoraName(2, path, "lora_A"): torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(5)),
        LoraName(2, path, "lora_B"): torch.randn(HIDDEN, 2, generator=torch.Generator().manual_seed(6)),
    }
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False
    batch = Batch(SPAN, hidden(2, 8), mask, None, prompts, lora)
    gradient = hidden(2, 8, seed=2)
    passes = SpanPasses(load_span(folder, SPAN), 1 << 40)

    def run(passing):  # type: ignore[no-untyped-def]
        while True:
            try:
                next(passing)
            except StopIteration as end:
                return end.value

    forward, backward = Recomputation(folder, "float32", "none", group_bytes=group_bytes).answer(
        [batch, replace(batch, gradient=gradient)]
    )
    assert isinstance(forward, PassAnswer) and isinstance(backward, PassAnswer)
    assert torch.equal(forward.output, run(passes.forward(batch)))
    expected = run(passes.backward(batch, gradient))
    assert torch.equal(backward.gradients.hidden, expected.hidden)
    assert torch.equal(backward.gradients.prompts, expected.prompts)
    assert expected.lora.keys() == backward.gradients.lora.keys() == lora.keys()
    for name, gradient in expected.lora.items():
        assert torch.equal(backward.gradients.lora[name], gradient)


def test_steps_with_a_hole_between_them_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="position 5"):
        Recomputation(folder, "float32", "none").answer(
            [SessionQuestion(SPAN, (RecordedStep(0, hidden(1, 3)), RecordedStep(5, hidden(1, 1))))]
        )


def test_no_more_weights_are_held_than_may_be(folder: Path) -> None:
    question = SessionQuestion(SPAN, (RecordedStep(0, hidden(1, 2)),))
    alone = Recomputation(folder, "float32", "none", group_bytes=0)
    alone.answer([question])
    pairs = Recomputation(folder, "float32", "none", group_bytes=2 * alone.largest)
    pairs.answer([question])
    assert pairs.largest == 2 * alone.largest and pairs.loads == len(SPAN)


@pytest.mark.usefixtures("kernels")
def test_blocks_of_a_kind_are_compared_once(tmp_path: Path) -> None:
    """With one by one, and as the compiled kernels compute them, which take longer than a block's question."""
    # Every other one of gemma3's blocks attends to a window.
    model = save_tiny("gemma3", tmp_path / "model")
    question = SessionQuestion(Span(0, 6), (RecordedStep(0, hidden(1, 9)), RecordedStep(9, hidden(1, 1))))
    with calls_of(choice._agrees, choice._difference) as compared:
        (alone,) = Recomputation(model, "float32", "none/exact-1", group_bytes=0).answer([question])
    assert Counter(call["part"] for call in compared) == {Span(0, 1): 2, Span(1, 2): 2}
    (together,) = Recomputation(model, "float32", "none/exact-1").answer([question])
    assert isinstance(alone, SessionAnswer) and isinstance(together, SessionAnswer)
    assert all(map(torch.equal, alone.outputs, together.outputs))


def test_blocks_that_nobody_asks_for_are_not_loaded(folder: Path) -> None:
    truth = Recomputation(folder, "float32", "none")
    steps = (RecordedStep(0, hidden(1, 2)),)
    first, last, both = truth.answer([SessionQuestion(span, steps) for span in (Span(0, 1), Span(3, 4), Span(0, 1))])
    assert truth.loads == 2
    assert isinstance(first, SessionAnswer) and isinstance(last, SessionAnswer) and isinstance(both, SessionAnswer)
    assert torch.equal(first.outputs[0], both.outputs[0]) and not torch.equal(first.outputs[0], last.outputs[0])
    assert truth.answer([]) == [] and truth.loads == 2


def test_a_dtype_that_is_none_is_an_error(folder: Path) -> None:
    with pytest.raises(BadInput, match="nothing is computed in 'float8' here"):
        Recomputation(folder, "float8", "none").answer([SessionQuestion(SPAN, (RecordedStep(0, hidden(1, 2)),))])


@pytest.mark.parametrize("scores", [[1e-4, 0.9, 0.0], [1e-4, 1.0, 9e-5]])
def test_noise_of_probability_is_relative_to_it(scores: list[float]) -> None:
    """Whatever a mixture of experts has made unlikely stays so: its own size bounds what roundings do to it."""
    for pair in range(3):
        for sign in (1, -1):
            with Noise(1e-3, 4, 5 + pair, pair, sign):
                chosen = torch.topk(torch.tensor([scores]), 2, dim=-1).indices
            assert chosen.tolist() == [[1, 0]]


def test_noise_enters_every_block_and_leaves_last_one(folder: Path) -> None:
    for group_bytes in (0, 1 << 30):
        truth = Recomputation(folder, "float32", "none", group_bytes=group_bytes)
        for question in (SessionQuestion(SPAN, (RecordedStep(0, hidden(1, 2)),)), Batch(SPAN, hidden(1, 2))):
            with calls_of(Noise.added) as changed:
                (noisy,) = truth.perturbed([question], 1e-3)
            assert len(noisy) == 2 * RECOMPUTATION.pairs
            times = Counter(id(call["self"]) for call in changed)
            assert list(times.values()) == [len(SPAN) + 1] * (2 * RECOMPUTATION.pairs)


def test_noise_has_the_size_that_it_is_given() -> None:
    exact = torch.ones(1, 1, 4096)
    for sign in (1, -1):
        noisy = Noise(1e-3, 4, 5, 0, sign).added(exact)
        assert float((noisy - exact).std()) == pytest.approx(1e-3, rel=0.1)
    one, other = (Noise(1e-3, 4, 5, 0, sign).added(exact) for sign in (1, -1))
    assert torch.allclose(one - exact, exact - other, atol=1e-6)
    small = torch.zeros(1, 1, 4)
    small[..., 0] = 4.0  # of a token with one large value, the others get what it has on average
    changed = torch.stack([Noise(1e-3, 4, seed, 0, 1).added(small) for seed in range(400)])
    assert float(changed[..., 1].std()) == pytest.approx(1e-3, rel=0.2)
    assert float(changed[..., 0].std()) == pytest.approx(4e-3, rel=0.2)
