"""A draft model guesses with the random numbers of the sampler, whose choice does not depend on the guess."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.span import load_span
from petalnode.node.client.generation.draft_model import PREFILL_TOKENS, DraftCache, DraftModel, ModelDrafter
from petalnode.node.client.generation.sampling import Sampler, Sampling
from petalnode.protocols.ids import Span
from tests.tiny_models import save_tiny

FEW = dict.fromkeys((5, 6, 7, 8), 20.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    folder = save_tiny("llama", tmp_path_factory.mktemp("draft"), max_position_embeddings=256)
    part = load_client(folder)
    return DraftModel(part, load_span(folder, Span(0, part.num_blocks)))


def logits_of(model: DraftModel, tokens: Sequence[int]) -> torch.Tensor:
    hidden = model.part.embed(torch.tensor([list(tokens)]))
    return model.part.head(model.blocks.forward(hidden, model.blocks.make_cache(1, 256)))[0, -1]


def guessed(drafter: ModelDrafter, line: Sequence[int], count: int) -> list[int]:
    ahead, told = drafter.ahead(len(line)), list(line)
    while len(told) < len(line) + count:
        if (token := drafter.guess(told, ahead)) is not None:
            told.append(token)
    return told[len(line) :]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=3, logit_bias=FEW)])
def test_it_guesses_the_samplers_choice_of_own_logits(model: DraftModel, sampling: Sampling) -> None:
    sampler, cache = Sampler(sampling), DraftCache(model, 256)
    tokens = [5 + index % 4 for index in range(PREFILL_TOKENS + 20)]
    tokens.append(sampler.next(tokens, logits_of(model, tokens)))
    drafter = ModelDrafter(cache, sampler)
    assert drafter.guess(tokens, drafter.ahead(len(tokens))) is None  # a part of it was read
    for _ in range(3):
        guesses = guessed(drafter, tokens, 4)
        for guess in guesses[:2]:  # the others are rolled back
            tokens.append(sampler.next(tokens, logits_of(model, tokens)))
            assert tokens[-1] == guess
        tokens.append(9)  # something else comes instead
        sampler.next(tokens, logits_of(model, tokens))


def test_differently_drafted_tokens_use_up_random_numbers(model: DraftModel) -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=8))
    tokens = [5, 6]
    tokens.append(sampler.next(tokens, logits_of(model, tokens)))
    drafter = ModelDrafter(DraftCache(model, 256), sampler)
    ahead, line = drafter.ahead(len(tokens)), [*tokens, 11, 12]
    guess = drafter.guess(line, ahead)
    for token in (11, 12):
        sampler.next(tokens, torch.zeros(128))
        tokens.append(token)
    assert guess == sampler.next(tokens, logits_of(model, tokens))


def test_a_soft_prompt_is_none_of_its_tokens(model: DraftModel) -> None:
    drafter = ModelDrafter(DraftCache(model, 64), Sampler(Sampling()), skipped=3)
    line = [0, 0, 0, 5, 6, 7]
    assert drafter.guess(line, drafter.ahead(6)) == int(logits_of(model, line[3:]).argmax())
    assert drafter.max_length == 67


VOCABULARY = 8
DRAWS = 4000


def distributions(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    chain = torch.randn(VOCABULARY, generator=generator)
    return chain, chain + (0.3, 1.0, 3.0)[number] * torch.randn(VOCABULARY, generator=generator)


@pytest.mark.parametrize("number", range(3))
def test_guesses_are_as_right_as_distributions_allow(number: int) -> None:
    """The distribution of what is chosen is that of the chain alone (chi-squared test, fixed seed)."""
    chain, draft = distributions(number)
    sampler = Sampler(Sampling(temperature=1.0, seed=number))
    sampler.next([0], chain)
    right, chosen = 0, Counter[int]()
    for _ in range(DRAWS):
        guess = sampler.ahead().next([0], draft)
        token = sampler.next([0], chain)
        right += guess == token
        chosen[token] += 1
    p, q = chain.softmax(-1), draft.softmax(-1)
    distance = float((p - q).abs().sum() / 2)
    noise = 3 * math.sqrt(0.25 / DRAWS)
    assert (1 - distance) / (1 + distance) - noise <= right / DRAWS <= 1 - distance + noise
    expected = (p * DRAWS).tolist()
    squared = sum((chosen[token] - due) ** 2 / due for token, due in enumerate(expected))
    assert squared < 24.3  # 99.9 % of the chi-squared distribution with 7 degrees of freedom
