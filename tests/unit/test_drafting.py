"""Drafts: what is found in a text, how deep it pays to draft, and that it is left where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.client.generation.draft_model import (
    LONGEST_MATCH,
    MOST_DRAFTED,
    SHORTEST_MATCH,
    Draft,
    LookupDrafter,
)
from petalnode.node.client.generation.drafting import DraftCounts, DraftPlan, expected_tokens
from petalnode.node.swarm.cost import LineEstimate


def drafted(tokens: list[int]) -> list[Draft]:
    return list(LookupDrafter().matches(tokens))


def test_longest_matchs_continuation_is_drafted_first() -> None:
    found = drafted([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 1, 2, 3, 4])
    assert [(draft.match, draft.tokens[:2]) for draft in found] == [(4, (5, 9)), (3, (7, 1)), (2, (7, 1))]
    assert all(len(draft.tokens) == MOST_DRAFTED for draft in found)
    assert drafted([1, 2, 3]) == drafted([1]) == drafted([]) == []


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    best = drafted([5, 6, 7, 5, 6, 7, 5, 6])[0]
    assert best.tokens[:7] == (7, 5, 6, 7, 5, 6, 7)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60))
def test_growing_text_gives_what_a_new_look_gives(tokens: list[int], cut: int) -> None:
    drafter = LookupDrafter()
    for end in range(len(tokens) + 1):
        found = list(drafter.matches(tokens[:end]))
    assert found == drafted(tokens)
    other = [*tokens[:cut], 9, 8, 9, 8, 9]
    assert list(drafter.matches(other)) == drafted(other)
    for draft in found:
        assert SHORTEST_MATCH <= draft.match <= LONGEST_MATCH
        end = tokens[-draft.match :]
        places = [at for at in range(len(tokens) - draft.match) if tokens[at : at + draft.match] == end]
        assert tokens[places[-1] + draft.match] == draft.tokens[0]


@pytest.mark.parametrize(("share", "depth", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 2, 1.75)])
def test_how_many_tokens_a_step_brings(share: float, depth: int, tokens: float) -> None:
    assert expected_tokens(share, depth) == pytest.approx(tokens)


def test_the_cost_of_a_step_is_learnt() -> None:
    cost = LineEstimate()
    cost.note(1, 0.1)
    assert cost.of(9) == pytest.approx(0.1)  # nothing is known of other steps
    for tokens in (1, 5, 9, 1, 17):
        cost.note(tokens, 0.1 + 0.01 * (tokens - 1))
    assert cost.of(1) == pytest.approx(0.1) and cost.of(33) == pytest.approx(0.42)
    cost.note(1, 100.0)  # a server was replaced
    assert cost.of(1) < 0.2


def simulated(
    text: Callable[[random.Random, list[int]], int], fixed: float, each: float, seed: int, steps: int = 300
) -> tuple[float, DraftCounts]:
    """Tokens a second with drafts, as a multiple of those without, where a step of m tokens takes fixed + m x each."""
    rng, plan, drafter = random.Random(seed), DraftPlan(), LookupDrafter()
    tokens, seconds = [0], 0.0
    for _ in range(steps):
        draft = plan.choose(drafter.matches(tokens), MOST_DRAFTED)
        accepted = 0
        for guess in (*draft.tokens, None):
            tokens.append(text(rng, tokens))
            if tokens[-1] != guess:
                break
            accepted += 1
        took = fixed + each * (1 + len(draft.tokens))
        seconds += took
        plan.note(draft, accepted, took * rng.uniform(0.9, 1.1))
    return (len(tokens) - 1) * (fixed + each) / seconds, plan.counts


def repeats(rng: random.Random, tokens: list[int]) -> int:
    return len(tokens) % 97


def is_random(rng: random.Random, tokens: list[int]) -> int:
    return rng.randrange(6)  # so few that there are matches, which mean nothing


def often_repeats(rng: random.Random, tokens: list[int]) -> int:
    return len(tokens) % 97 if rng.random() < 0.8 else rng.randrange(1000)


@pytest.mark.parametrize("seed", range(3))
def test_repetition_is_many_times_quicker_over_wide_areas(seed: int) -> None:
    assert simulated(repeats, 0.2, 0.001, seed)[0] > 10
    assert simulated(often_repeats, 0.2, 0.001, seed)[0] > 1.2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fixed", "each"), [(0.2, 0.001), (0.01, 0.01), (0.0, 0.02), (0.02, 0.002)])
def test_it_is_never_much_slower(fixed: float, each: float, seed: int) -> None:
    for text in (is_random, repeats, often_repeats):
        assert simulated(text, fixed, each, seed, 600)[0] > 0.97, text


def test_nothing_is_drafted_long_where_tokens_cost_alike() -> None:
    _, counts = simulated(is_random, 0.0, 0.02, 1, 600)
    assert counts.drafted < 20


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 48), st.integers(0, 48), st.floats(0.001, 10)), max_size=40), st.integers(0, 60)
)
def test_a_draft_is_never_longer_than_asked_for(steps: list[tuple[int, int, float]], most: int) -> None:
    plan = DraftPlan()
    assert plan.choose(iter([Draft((1,) * 48, 3)]), most) == Draft()  # before the first step
    for depth, accepted, seconds in steps:
        plan.note(Draft((1,) * depth, 3), min(accepted, depth), seconds)
        assert len(plan.choose(iter([Draft((1,) * 48, 3)]), most).tokens) <= most
        assert plan.counts.accepted <= plan.counts.drafted
