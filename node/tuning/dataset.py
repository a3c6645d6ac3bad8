"""What a model learns from: the lines of a JSONL file as examples, rows of tokens and padded batches."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import BadInput

if TYPE_CHECKING:
    import torch

_FORMS = '{"text": ..}, {"prompt": .., "completion": ..} or {"text": .., "label": ..}'
_NUMBER: Final = re.compile(r"0|-?[1-9][0-9]{0,99}")  # far below what Python refuses to convert
PIECE: Final = 1 << 16
"""Characters that a tokenizer gets at once."""
_CHARACTERS_PER_TOKEN: Final = 128
"""More than any token has in a text, on average."""
IGNORED: Final = -100
"""The label of a token that is not to be learned, in transformers."""


@dataclass(frozen=True)
class Example:
    """`text` is learned, as the completion of `prompt` if there is one; or it belongs to the class `label`."""

    text: str
    prompt: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Dataset:
    """The examples of a file; all have a label, or none has.

    Attributes:
        name: the file's name, without its folder.
        hash: SHA-256 of its bytes, in hexadecimal digits.
    """

    name: str
    hash: str
    examples: tuple[Example, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, in order; empty if the examples have none."""
        found = {example.label for example in self.examples if example.label is not None}
        return tuple(sorted(found, key=lambda label: (0, int(label), "") if _is_number(label) else (1, 0, label)))


def read_dataset(path: Path) -> Dataset:
    """
    Raises:
        BadInput: the file cannot be read, a line is no example (its number is said), or there is none.
    """
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8").split("\n")
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder: give a JSONL file") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        bad = data[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}, line {bad}: this is not UTF-8; save the file as UTF-8") from None
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(parse_example(line))
            except ValueError as error:
                raise BadInput(f"{path}, line {number}: {error}") from None
            if (examples[0].label is None) != (examples[-1].label is None):
                raise BadInput(f'{path}, line {number}: either all lines have a "label" or none')
    if not examples:
        raise BadInput(f"{path} holds no examples: it takes one on each line, {_FORMS}")
    return Dataset(path.name, hashlib.sha256(data).hexdigest(), tuple(examples))


def parse_example(line: str) -> Example:
    """
    Raises:
        ValueError: saying what is wrong and what is wanted.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON ({error}); a line takes {_FORMS}") from None
    if not isinstance(found, dict):
        raise ValueError(f"a line takes an object, {_FORMS}")  # noqa: TRY004
    if "prompt" in found or "completion" in found:
        return Example(_text(found, "completion"), _text(found, "prompt", may_be_empty=True))
    if "label" in found:
        label = found["label"]
        if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
            raise ValueError(f'"label" takes a text or a whole number, not {json.dumps(label)}')
        return Example(_text(found, "text"), label=str(label))
    return Example(_text(found, "text"))


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """(training, evaluation) examples: a random `share` is for evaluation; at least one example for each."""
    if share <= 0:
        return tuple(examples), ()
    ranked = sorted(range(len(examples)), key=lambda i: hashlib.sha256(f"{seed}/{i}".encode()).digest())
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    held_out = set(ranked[:count])
    return (
        tuple(example for number, example in enumerate(examples) if number not in held_out),
        tuple(example for number, example in enumerate(examples) if number in held_out),
    )


def _text(found: dict[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    if name not in found:
        raise ValueError(f'"{name}" is missing; a line takes {_FORMS}')
    text = found[name]
    if not isinstance(text, str) or not (text or may_be_empty):
        raise ValueError(f'"{name}" takes a text that is not empty, not {json.dumps(text)[:80]}')
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape one half of a surrogate pair; no tokenizer takes it
        raise ValueError(f'"{name}" holds half of a surrogate pair, which is no character') from None
    return text


def _is_number(label: str) -> bool:
    return _NUMBER.fullmatch(label) is not None


@dataclass(frozen=True)
class TokenRow:
    """The tokens of one example. The first `given` tokens are not learned; `label` is the index of its class."""

    tokens: tuple[int, ...]
    given: int = 0
    label: int | None = None


@dataclass(frozen=True)
class TrainingBatch:
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
        """The number of values in the mean loss. Without virtual tokens (`prefix`) the first token is not predicted."""
        if self.labels.dim() == 1:
            return len(self.labels)
        return int((self.labels[:, 0 if prefix else 1 :] != IGNORED).sum())


def rows_of(
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    max_length: int,
    chat: bool,
    labels: Sequence[str] = (),
    progress: Callable[[int], object] = lambda characters: None,
) -> list[TokenRow]:
    """Rows of 2 to `max_length` tokens.

    Longer texts are split into several rows; a prompt and completion that are too long are truncated; rows without a
    token to learn are left out. The tokenizer gets a piece of bounded length at a time, so that a signal is not held up
    for long.

    Args:
        chat: prompts and completions are turns of the tokenizer's chat template.
        labels: the classes, by their numbers.
        progress: is called with the number of characters whenever some are done.
    """
    rows: list[TokenRow] = []
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    most = max_length * _CHARACTERS_PER_TOKEN  # beyond these, all would be truncated
    for example in examples:
        if example.prompt is not None:
            given, learned = _turns(example.prompt[:most], example.text[:most], tokenizer, chat=chat)
            rows.append(TokenRow(tuple([*given, *learned, *end][:max_length]), len(given)))
            progress(len(example.prompt) + len(example.text))
            continue
        if example.label is not None:
            tokens = list(tokenizer(example.text[:most])["input_ids"])
            rows.append(TokenRow(tuple(tokens[:max_length]), label=labels.index(example.label)))
            progress(len(example.text))
            continue
        tokens = []
        for piece in pieces_of(example.text):
            if end and tokens[-1:] == end:  # the tokenizer sets it behind each piece
                tokens.pop()
            tokens += tokenizer(piece, add_special_tokens=not tokens)["input_ids"]
            progress(len(piece))
        tokens += [] if tokens[-1:] == end else end
        rows += [TokenRow(tuple(tokens[start : start + max_length])) for start in range(0, len(tokens), max_length)]
    return [row for row in rows if _teaches(row)]


def pieces_of(text: str) -> Iterator[str]:
    """The text in pieces of at most `PIECE` characters, each but the last cut before white space if it has any."""
    start = 0
    while len(text) - start > PIECE:
        cut = max(text.rfind(space, start + 1, start + PIECE) for space in (" ", "\n"))
        cut = cut if cut > start else start + PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]


def _teaches(row: TokenRow) -> bool:
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


def batch_of(rows: Sequence[TokenRow], padding: int) -> TrainingBatch:
    """Rows padded with the token id `padding`."""
    import torch  # `petalnode tune --help` does without

    length = max(len(row.tokens) for row in rows)
    ids = torch.full((len(rows), length), padding)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for index, row in enumerate(rows):
        tokens = torch.tensor(row.tokens)
        ids[index, : len(tokens)] = tokens
        mask[index, : len(tokens)] = 1
        labels[index, row.given : len(tokens)] = tokens[row.given :]
    classes = [row.label for row in rows if row.label is not None]
    if classes:
        labels = torch.tensor(classes)
    return TrainingBatch(ids, mask, labels, int(mask.sum()))
