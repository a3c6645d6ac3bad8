"""What a model learns from: the lines of a JSONL file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadInput

_FORMS = '{"text": ..}, {"prompt": .., "completion": ..} or {"text": .., "label": ..}'


@dataclass(frozen=True)
class Example:
    """`text` is to be learned as the answer to `prompt` if there is one, or belongs to the class `label`."""

    text: str
    prompt: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Dataset:
    """The examples of a file, which are all of one kind: to be classified, or not.

    Attributes:
        name: the file's name, without its folder.
        hash: SHA-256 of its bytes, in hexadecimal digits.
    """

    name: str
    hash: str
    examples: tuple[Example, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, in order; none if this is no classification."""
        found = {each.label for each in self.examples if each.label is not None}
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
    """(to train on, to evaluate on): `share` of the examples, by chance, at least one of each if there is a share."""
    if share <= 0:
        return tuple(examples), ()
    ranked = sorted(range(len(examples)), key=lambda i: hashlib.sha256(f"{seed}/{i}".encode()).digest())
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    held_out = set(ranked[:count])
    return (
        tuple(each for number, each in enumerate(examples) if number not in held_out),
        tuple(each for number, each in enumerate(examples) if number in held_out),
    )


def _text(found: dict[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    if name not in found:
        raise ValueError(f'"{name}" is missing; a line takes {_FORMS}')
    text = found[name]
    if not isinstance(text, str) or not (text or may_be_empty):
        raise ValueError(f'"{name}" takes a text that is not empty, not {json.dumps(text)[:80]}')
    return text


def _is_number(label: str) -> bool:
    return label.lstrip("-").isdecimal() and str(int(label)) == label
