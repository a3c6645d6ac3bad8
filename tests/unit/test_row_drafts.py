"""Whether the rows of a batch take drafts, each in a session of its own."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from petalnode.node.client.api.processors import Prepared
from petalnode.node.client.api.row_drafts import ROWS, draft_apart, lookup_gain


def by_row(processors: Sequence[Any] = (), criteria: Sequence[Any] = (), **more: Any) -> bool:
    config = {"output_scores": False, "output_logits": False, "do_sample": True}
    ids, arguments = torch.ones(3, 5, dtype=torch.long), {"attention_mask": more.pop("mask", None)}
    found = SimpleNamespace(**(config | more))
    return Prepared(None, ids, processors, [MaxLengthCriteria(9), *criteria], found, arguments).is_by_row


def test_rows_that_depend_on_each_other_stay_together() -> None:
    """What is asked is not how the arguments are called: it is what transformers has made of them."""
    ends, strings = EosTokenCriteria(2), object.__new__(StopStringCriteria)
    own = type("Own", (logits_process.TopKLogitsWarper,), {})(5)
    assert by_row([logits_process.TopKLogitsWarper(5)], [ends])
    assert by_row(criteria=[strings, ends]) and not by_row(criteria=[strings])
    assert by_row(mask=torch.ones(3, 5)) and not by_row(mask=torch.ones(3, 7))
    for processors in ([own], [lambda ids, scores: scores], [logits_process.NoBadWordsLogitsProcessor([[5]])]):
        assert not by_row(processors)
    for criteria in ([lambda ids, scores: False], [MaxTimeCriteria(9.0)]):
        assert not by_row(criteria=criteria)
    assert not by_row(output_scores=True) and not by_row(output_logits=True)


@pytest.mark.parametrize("kind", ["llama", "recurrent_gemma"])
def test_part_of_the_rows_loses_common_padding(kind: str) -> None:
    """Unless the model computes with the padding."""
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    ids, places = torch.arange(16).view(4, 4), (mask.cumsum(-1) - 1).clamp(min=0)
    penalty = logits_process.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([1, 2, 3, 4]))
    arguments = {"attention_mask": mask, "position_ids": places}
    whole = Prepared(model, ids, [penalty], [], SimpleNamespace(), arguments)
    cache: Any = object()
    for rows, common in ((slice(0, 2), 2), (slice(0, 1), 3), (slice(1, 3), 0), (slice(3, 4), 0)):
        part, hidden = whole.part(rows, cache), common if kind == "llama" else 0
        assert part.hidden == hidden and torch.equal(part.input_ids, ids[rows])
        assert torch.equal(part.arguments["attention_mask"], mask[rows, hidden:])
        assert torch.equal(part.arguments["position_ids"], places[rows, hidden:])
        assert part.arguments["past_key_values"] is cache
        assert part.processors[0].prompt_ignore_length.tolist() == list(range(1, 5))[rows]


@pytest.mark.parametrize(
    ("rows", "step_seconds", "trip_seconds", "gain", "expected"),
    [
        (4, [0.02, 0.02, 0.02], 0.2, ROWS.first_gain, True),  # far away
        (4, [0.02, 0.02, 0.02], 0.2, 1.05, False),  # where drafts bring nothing
        (4, [0.005], 0.0001, ROWS.first_gain, False),  # a server at hand has its batches
        (4, [0.001, 0.001], 0.0001, 8.0, False),  # the client has the most to do
        (4, [0.2], 0.02, 8.0, False),  # each row takes nearly as long as all
        (4, [0.02], 0.2, ROWS.first_gain, True),
        (1, [0.02], 0.2, 8.0, False),
        (17, [0.001], 0.5, 8.0, False),  # as many threads and sessions
        (4, [], 0.2, 8.0, False),  # no chain
    ],
)
def test_whether_rows_take_drafts(
    rows: int, step_seconds: list[float], trip_seconds: float, gain: float, expected: bool
) -> None:
    assert draft_apart(rows, step_seconds, trip_seconds, gain) == expected


def test_hypothetical_drafts_are_counted_in_the_text() -> None:
    said = list(range(40))
    assert lookup_gain([([*said, *said[:2]], said[2:32])]) == 30 / 2  # steps of 16 tokens
    assert lookup_gain([(said, list(range(100, 140)))]) == 1.0
    assert lookup_gain([([*said, *said[:2]], said[2:32]), (said, list(range(100, 130)))]) == 60 / 32
    assert lookup_gain([]) == lookup_gain([(said, [])]) == 1.0
