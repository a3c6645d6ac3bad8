"""Drafts that depend on no clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from petalnode.node.client.generation.drafting import Draft, DraftPlan


def draft_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of up to nine tokens whatever a step takes, in steps of three; some of them are wrong."""

    def choose(plan: object, drafts: Iterator[Draft], most: int) -> Draft:
        draft = next(drafts, Draft())
        tokens = list(draft.tokens[: min(most, 9)])
        if len(tokens) % 4 == 3:
            tokens[len(tokens) // 2] += 1
        return Draft(tuple(tokens), draft.match)

    monkeypatch.setattr(DraftPlan, "choose", choose)
    monkeypatch.setattr(DraftPlan, "step_tokens", lambda plan, tokens: min(tokens, 3))


class Few:
    """A processor with which a random model repeats itself."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 5:9] += 20
        return scores
