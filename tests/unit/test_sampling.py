from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import TopPLogitsWarper

from petalnode.node.client.generation import Sampler, Sampling
from petalnode.node.client.sampling import TopP
from petalnode.node.errors import BadInput

VOCABULARY = 40


def logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**32 - 1))
def test_temperature_zero_takes_the_likeliest(seed: int) -> None:
    assert Sampler(Sampling()).next([1, 2], logits(seed)) == int(logits(seed).argmax())


def test_a_seed_makes_it_repeatable() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.next([], logits(index)) for index in range(30)]

    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None)


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_top_p_takes_from_the_likeliest_only(seed: int, top_p: float) -> None:
    probabilities, order = logits(seed).softmax(-1).sort(descending=True)
    allowed = set(order[: int((probabilities.cumsum(-1) < top_p).sum()) + 1].tolist())
    sampler = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=seed % 1000))
    assert {sampler.next([3], logits(seed)) for _ in range(20)} <= allowed


@pytest.mark.parametrize("spread", [4.0, 1.0, 0.01], ids=["peaked", "usual", "flat"])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_is_that_of_transformers(spread: float, top_p: float) -> None:
    """In double precision, in which it makes no difference from which end the shares are added up."""
    scores = spread * torch.randn(1, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    scores[0, ::3] = float("-inf")  # as a grammar or top-k leaves them
    given = TopP(top_p)(torch.tensor([[1]]), scores)
    assert torch.equal(given, TopPLogitsWarper(top_p)(torch.tensor([[1]]), scores))
    assert torch.isfinite(given).any()


def test_a_low_temperature_is_almost_greedy_and_a_high_one_is_not() -> None:
    cold, hot = (Sampler(Sampling(temperature=t, seed=0)) for t in (0.01, 50.0))
    peaked = torch.zeros(VOCABULARY)
    peaked[7] = 1.0
    assert {cold.next([], peaked) for _ in range(50)} == {7}
    assert len({hot.next([], peaked) for _ in range(50)}) > 10


def test_half_precision_logits() -> None:
    assert 0 <= Sampler(Sampling(temperature=1.0)).next([], logits(0).bfloat16()) < VOCABULARY


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": 100.0}, {"temperature": float("nan")},
     {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": float("nan")}],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Sampling(**options)  # type: ignore[arg-type]
