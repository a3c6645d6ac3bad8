"""Where an index chooses the tokens for attention, it chooses the same ones however a prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from petalnode.node.blocks.caches.chosen_tokens import settle_choices
from petalnode.node.blocks.span import load_span
from petalnode.protocols.ids import Span
from tests.tiny_models import HIDDEN, load_whole, save_tiny

LENGTH = 90
CUTS = [(90,), (30, 60), (89, 1), (40, 1, 1, 48)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one head, half of all scores are 0."""
    torch.set_num_threads(1)
    return save_tiny("deepseek_v32", tmp_path_factory.mktemp("indexed") / "model", index_n_heads=1)


def chosen(whole: Any, cuts: tuple[int, ...]) -> list[torch.Tensor]:
    """For each token, which of those before it the first block chooses."""
    found: list[torch.Tensor] = []
    indexer = next(module for module in whole.modules() if hasattr(module, "index_topk"))
    hook = indexer.register_forward_hook(lambda _, args, output: found.extend(output[0].sort(dim=-1).values))
    cache, ids = DynamicCache(config=whole.config), torch.arange(3, 3 + LENGTH).unsqueeze(0)
    with torch.no_grad():
        for part in torch.split(ids, cuts, dim=1):
            whole(part, past_key_values=cache, use_cache=True)
    hook.remove()
    return [places[places <= number] for number, places in enumerate(found)]


def test_same_tokens_are_chosen_however_prompt_is_cut(folder: Path) -> None:
    """In transformers they are not, which the test notices when it changes. No other cause is left with the rule."""
    whole: Any = load_whole(folder)
    plain = [chosen(whole, cuts) for cuts in CUTS]
    differing = [sum(map(lambda a, b: not torch.equal(a, b), plain[0], other)) for other in plain[1:]]
    assert all(differing), "transformers chooses alike: the rule for ties is not needed any more"
    settle_choices(whole)
    first, *others = [chosen(whole, cuts) for cuts in CUTS]
    for other in others:
        assert all(map(torch.equal, first, other))


def test_blocks_answer_alike_however_prompt_is_cut(folder: Path) -> None:
    span = load_span(folder, Span(0, 6))
    hidden = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0))
    answers = []
    for cuts in CUTS:
        cache = span.make_cache(2, LENGTH, [0, 7])
        answers.append(torch.cat([span.forward(part, cache) for part in torch.split(hidden, cuts, dim=1)], dim=1))
    for answer in answers[1:]:
        assert (answer - answers[0])[:, 7:].abs().max() <= 1e-4 * answers[0].abs().max()
