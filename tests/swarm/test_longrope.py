"""Texts that pass the length from which on longrope takes other factors, through two servers in memory: the tokens are
those of plain transformers, which computes a text with the factors of its whole length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.testing.memory_servers import memory_swarm
from tests.greedy import prompt
from tests.swarm.deep_drafts import LOOKUP
from tests.swarm.longrope_models import BORDER, FIELDS, SIZES, given, padded
from tests.swarm.memory_pool import started
from tests.tiny_models import load_whole, save_tiny

Model = DistributedModelForCausalLM
once_of_each_kind = pytest.mark.parametrize("served", ["phi3", "llama"], indirect=True)
"""Of phimoe the cache is filled anew as phi3's is."""


@dataclass(frozen=True)
class Served:
    model: Model
    whole: Any

    def same(self, ids: torch.Tensor, new: int, *, drafts: bool = False, **options: Any) -> None:
        """Asserts that the swarm says what the whole model says without drafts: with them that is not exact."""
        expected = self.whole.generate(ids, **given(ids, new), **options)
        found = self.model.generate(ids, **given(ids, new), **options, **(LOOKUP if drafts else {}))
        assert found.tolist() == expected.tolist()


@pytest.fixture(scope="module", params=FIELDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name = request.param
    folder = save_tiny(name, tmp_path_factory.mktemp(name), **SIZES, **FIELDS[name])
    with memory_swarm() as swarm:
        started(swarm, folder, "0:1", "1:3")
        with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
            yield Served(model, load_whole(folder))


@pytest.mark.parametrize(("length", "new"), [(12, 36), (BORDER - 1, 4), (BORDER, 4), (BORDER + 1, 4), (700, 6)])
def test_text_becomes_long_or_is_long_from_start(length: int, new: int, served: Served) -> None:
    """700 tokens travel in two chunks and are computed in three parts."""
    served.same(prompt(1, length), new)


@pytest.mark.parametrize("lengths", [(30, 12, 25), (BORDER + 8, 3), (BORDER, BORDER - 5)])
def test_rows_of_different_lengths(lengths: tuple[int, ...], served: Served) -> None:
    served.same(padded(*lengths), 25)


def test_many_rows_become_long_after_their_first_chunk(served: Served) -> None:
    served.same(prompt(16, BORDER + 10), 3)


@once_of_each_kind
def test_rows_that_are_all_padded(served: Served) -> None:
    """transformers looks at the width of the batch before it fills its cache anew, and at positions for the factors."""
    served.same(padded(20, 14, width=30), 30)
    served.same(padded(20, width=30), 25)


@once_of_each_kind
def test_beams_change_places_where_the_text_becomes_long(served: Served) -> None:
    served.same(padded(BORDER - 6, 20), 14, num_beams=3, num_return_sequences=2)


@once_of_each_kind
def test_other_loops_than_that_of_one_greedy_answer(served: Served) -> None:
    """Those of transformers: for logits that are looked at, and without a cache."""
    served.same(prompt(1, 30), 20, repetition_penalty=1.2)
    served.same(prompt(1, 30), 14, use_cache=False)
    served.same(prompt(1, 30), 14, prefill_chunk_size=9)


@once_of_each_kind
def test_session_rolled_back_becomes_long_again(served: Served) -> None:
    with served.model.inference_session(max_length=200) as session:
        long = prompt(1, BORDER + 20)
        served.same(long, 5)
        assert session.position == BORDER + 24
        for ids, new in ((long[:, : BORDER - 8], 4), (long[:, : BORDER - 8], 20), (long[:, : BORDER + 3], 3)):
            served.same(ids, new)
        served.same(long[:, :10], 3)


@once_of_each_kind
@pytest.mark.parametrize(("length", "new"), [(20, 34), (BORDER - 2, 28), (BORDER + 9, 28)])
def test_drafts(length: int, new: int, served: Served) -> None:
    repeating = prompt(1, 5).repeat(1, 1 + length // 5)[:, :length]
    few = {"sequence_bias": {(token,): 25.0 for token in range(5, 8)}}  # so that the answer repeats itself
    texts = [repeating, torch.cat([torch.zeros(1, 6, dtype=torch.long), repeating], dim=1)]
    for ids, options in zip(texts[:: -1 if length == 20 else 1], ({}, few), strict=True):
        served.same(ids, new, drafts=True, **options)
    assert served.model.drafts["accepted"] > 5


@once_of_each_kind
def test_several_texts_share_what_has_equal_factors(served: Served) -> None:
    text = prompt(1, 100, seed=9)
    for length, new in ((100, 3), (36, 3), (38, 12), (99, 3), (36, 2)):
        served.same(text[:, :length], new)


@torch.no_grad()
def test_a_forward_pass(served: Served) -> None:
    for length in (BORDER, BORDER + 1, 300):
        ids = prompt(2, length)
        assert (served.model(ids).logits - served.whole(ids).logits).abs().max() <= 1e-3
