"""Examples as tokens, and rows of tokens as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from .example import Example

IGNORED: Final = -100
"""The label of a token that is not to be learned, in transformers."""


@dataclass(frozen=True)
class Row:
    """The tokens of one example. The first `given` of them are not learned; `label` is the number of its class."""

    tokens: tuple[int, ...]
    given: int = 0
    label: int | None = None


@dataclass(frozen=True)
class Batch:
    """Rows padded at the right.

    Attributes:
        ids, mask: int64 [rows, tokens].
        labels: int64 [rows, tokens], IGNORED where nothing is learned; of classes [rows].
        tokens: that are not padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    tokens: int

    def counted(self, prefix: int) -> int:
        """Of how many values its loss is the mean: the first token of a row has nothing before it but a prefix."""
        if self.labels.dim() == 1:
            return len(self.labels)
        return int((self.labels[:, 0 if prefix else 1 :] != IGNORED).sum())


def rows_of(
    examples: Sequence[Example], tokenizer: Any, *, max_length: int, chat: bool, labels: Sequence[str] = ()
) -> list[Row]:
    """Rows of 2 to `max_length` tokens.

    Longer texts are cut into several rows; of a prompt and a completion that are too long, the end is cut off; what
    then holds nothing to learn is left out.

    Args:
        chat: prompts and completions are turns of the tokenizer's chat template.
        labels: the classes, by their numbers.
    """
    rows: list[Row] = []
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for example in examples:
        if example.prompt is not None:
            given, learned = _turns(example.prompt, example.text, tokenizer, chat=chat)
            rows.append(Row(tuple([*given, *learned, *end][:max_length]), len(given)))
            continue
        tokens = list(tokenizer(example.text)["input_ids"])
        if example.label is not None:
            rows.append(Row(tuple(tokens[:max_length]), label=labels.index(example.label)))
            continue
        tokens += [] if tokens[-1:] == end else end
        rows += [Row(tuple(tokens[start : start + max_length])) for start in range(0, len(tokens), max_length)]
    return [each for each in rows if _teaches(each)]


def _teaches(row: Row) -> bool:
    if row.label is not None:
        return bool(row.tokens)
    return len(row.tokens) > max(row.given, 1)


def _turns(prompt: str, completion: str, tokenizer: Any, *, chat: bool) -> tuple[list[int], list[int]]:
    if chat:
        turns = [{"role": "user", "content": prompt}]
        given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        given = tokenizer(prompt)["input_ids"] if prompt else []
    return list(given), list(tokenizer(completion, add_special_tokens=False)["input_ids"])


def batch_of(rows: Sequence[Row], padding: int) -> Batch:
    """
    Args:
        padding: a token id.
    """
    length = max(len(each.tokens) for each in rows)
    ids = torch.full((len(rows), length), padding)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for index, row in enumerate(rows):
        tokens = torch.tensor(row.tokens)
        ids[index, : len(tokens)] = tokens
        mask[index, : len(tokens)] = 1
        labels[index, row.given : len(tokens)] = tokens[row.given :]
    classes = [each.label for each in rows if each.label is not None]
    if classes:
        labels = torch.tensor(classes)
    return Batch(ids, mask, labels, int(mask.sum()))
