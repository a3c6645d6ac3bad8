from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import TopPLogitsWarper

from petalnode.node.client.generation.conversation import Sampler, Sampling
from petalnode.node.client.generation.sampling import PreparedConstraint, TopP
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
def test_large_vocabularys_top_p_is_transformers(spread: float, top_p: float) -> None:
    """In double precision, in which it makes no difference from which end the shares are added up."""
    scores = spread * torch.randn(1, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    scores[0, ::3] = float("-inf")  # as a grammar or top-k leaves them
    given = TopP(top_p)(torch.tensor([[1]]), scores)
    assert torch.equal(given, TopPLogitsWarper(top_p)(torch.tensor([[1]]), scores))
    assert torch.isfinite(given).any()


@pytest.mark.parametrize("top_p", [0.0, 5e-324, 1e-30])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 5000])
def test_least_top_p_leaves_likeliest_token(top_p: float, vocabulary: int) -> None:
    scores = torch.randn(vocabulary, generator=torch.Generator().manual_seed(7))
    sampler = Sampler(Sampling(temperature=1.0, top_p=top_p))
    assert {sampler.next([3], scores) for _ in range(20)} == {int(scores.argmax())}


def test_low_temperature_is_almost_greedy() -> None:
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
     {"top_p": -0.1}, {"top_p": 1.1}, {"top_p": float("nan")}, {"seed": 1 << 64}],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Sampling(**options)  # type: ignore[arg-type]


SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=3, logit_bias={4: 2.0}, frequency_penalty=0.5)


@pytest.mark.parametrize("size", [7, VOCABULARY, 3001])
def test_random_numbers_are_those_of_torch(size: int) -> None:
    """So that a seed gives the answer that it gave before they were drawn ahead."""
    generator, sampler = torch.Generator().manual_seed(5), Sampler(Sampling(temperature=1.0, seed=5))
    for number in range(20):
        row = 3 * torch.randn(size, generator=torch.Generator().manual_seed(number))
        expected = int(torch.multinomial(row.softmax(-1), 1, generator=generator))
        sampler.prepare(draw=bool(number % 2))
        assert sampler.next([1], row) == expected


def test_unaccepted_token_is_chosen_by_equal_random_numbers() -> None:
    plain, early = Sampler(SAMPLED), Sampler(SAMPLED)
    tokens = [1, 2]
    for number in range(20):
        early.prepare(draw=True)
        early.choose(tokens, logits(100 + number))  # an answer whose receipt is none
        guess = early.ahead().next(tokens, logits(number))
        token = early.choose(tokens, logits(number))
        early.accept(token)
        assert token == guess == plain.next(tokens, logits(number))
        tokens.append(token)


def test_logits_that_leave_nothing_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no token has a probability"):
        Sampler(Sampling(temperature=1.0)).next([1], torch.full((VOCABULARY,), float("-inf")))


class EvenPlaces:
    """A constraint: at every other place the one token 9. Never computed before it is asked for."""

    def __init__(self, quick: bool) -> None:
        self.is_quick = quick
        self.is_ready = False
        self.prepared = 0
        self._place = 0

    @property
    def only(self) -> int | None:
        return 9 if self.is_ready and self._place % 2 else None

    def prepare(self) -> None:
        self.prepared += not self.is_ready
        self.is_ready = True

    def apply(self, scores: torch.Tensor) -> None:
        self.prepare()
        if self._place % 2:
            scores[:9] = scores[10:] = float("-inf")

    def accept(self, token: int) -> None:
        assert token == 9 or not self._place % 2
        self._place, self.is_ready = self._place + 1, False


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_token_without_alternative_needs_no_logits(sampling: Sampling, quick: bool) -> None:
    beside: list[object] = []
    usual, constraint = Sampler(sampling, EvenPlaces(quick)), EvenPlaces(quick)
    assert isinstance(constraint, PreparedConstraint)
    nursery = cast(trio.Nursery, SimpleNamespace(start_soon=beside.append))
    sampler, tokens = Sampler(sampling, constraint, nursery), [1, 2]
    without = 0
    for number in range(20):
        expected = usual.next(list(tokens), logits(number))
        sampler.prepare(draw=True)
        assert sampler.is_ready == quick
        if not quick:
            constraint.prepare()
        if sampler.only is None:
            assert sampler.next(tokens, logits(number)) == expected
        else:
            assert sampler.only == expected == 9
            sampler.accept(9)
            without += 1
        tokens.append(expected)
    assert (without, constraint.prepared, len(beside)) == (10, 20, 0 if quick else 20)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-37, 1e-12])
def test_temperatures_next_to_zero_take_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([1.0, 20.0, -3.0])
    assert Sampler(Sampling(temperature=temperature, seed=1)).next([0], logits) == 1
