"""What a model learns from: the lines of a JSONL file as examples."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import BadInput

_FORMS = '{"text": ..}, {"prompt": .., "completion": ..}, {"messages": [..]} or {"text": .., "label": ..}'
_ROLES: Final = ("system", "user", "assistant")
_CSV: Final = "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin, delimiter={})]"
_FRAME: Final = (
    "pip install pandas {1} && python -c 'import pandas, sys; "
    'pandas.read_{0}(sys.argv[1]).to_json(sys.argv[2], orient="records", lines=True)\' {{0}} {{1}}'
)
_TABLES: Final = {
    ".csv": ("a CSV file", f"python -c '{_CSV.format('chr(44)')}' < {{0}} > {{1}}"),
    ".tsv": ("a TSV file", f"python -c '{_CSV.format('chr(9)')}' < {{0}} > {{1}}"),
    ".parquet": ("a parquet file", _FRAME.format("parquet", "pyarrow")),
    ".xlsx": ("an Excel file", _FRAME.format("excel", "openpyxl")),
}
"""Kinds of files that are no JSONL, by their endings: what they are called, and how FILE (0) becomes JSONL (1)."""
_NUMBER: Final = re.compile(r"0|-?[1-9][0-9]{0,99}")  # far below what Python refuses to convert


@dataclass(frozen=True)
class Message:
    """A turn of a chat. An assistant's is learned if its `weight` is 1."""

    role: str
    content: str
    weight: int = 1

    @property
    def is_learned(self) -> bool:
        return self.role == "assistant" and self.weight > 0


@dataclass(frozen=True)
class Example:
    """`text` is learned, as the completion of `prompt` if there is one; or it belongs to the class `label`. Or of
    `messages` the answers are learned, those of `weight` 0 excepted."""

    text: str = ""
    prompt: str | None = None
    label: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def characters(self) -> int:
        return len(self.text) + len(self.prompt or "") + sum(len(message.content) for message in self.messages)


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
    if table := _TABLES.get(path.suffix.lower()):
        raise BadInput(_how_to_convert(path, *table))
    try:
        data = path.read_bytes()
        if data[:4] == b"PAR1":
            raise BadInput(_how_to_convert(path, *_TABLES[".parquet"]))
        lines = data.decode("utf-8").removeprefix("\ufeff").split("\n")  # some editors mark UTF-8 so
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


def _how_to_convert(path: Path, kind: str, command: str) -> str:
    wanted = path.with_suffix(".jsonl")
    if wanted == path:
        wanted = path.with_name(f"{path.stem}-converted.jsonl")
    given, made = shlex.quote(str(path)), shlex.quote(str(wanted))
    return (
        f"{path} is {kind}, and --data takes JSONL: on each line {_FORMS}. Call its columns so (prompt and "
        f"completion, or text and label), and convert it with: {command.format(given, made)}"
    )


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
    if "messages" in found:
        return Example(messages=_messages(found["messages"]))
    if "prompt" in found or "completion" in found:
        return Example(_text(found, "completion"), _text(found, "prompt", may_be_empty=True))
    if "label" in found:
        label = found["label"]
        if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
            raise ValueError(f'"label" takes a text or a whole number, not {json.dumps(label)}')
        return Example(_text(found, "text"), label=str(label))
    return Example(_text(found, "text"))


def _messages(given: object) -> tuple[Message, ...]:
    """OpenAI's chat format. Raises ValueError."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError('"messages" takes a list of objects {"role": .., "content": ..}')
    found = []
    for message in given:
        role, weight = message.get("role"), message.get("weight", 1)
        if role not in _ROLES:
            raise ValueError(f'a message has a "role" of {", ".join(_ROLES)}, not {json.dumps(role)[:80]}')
        if message.get("tool_calls") or message.get("function_call"):
            raise ValueError("calls of tools cannot be learned: leave these messages out")
        if weight not in (0, 1):
            raise ValueError(f'the "weight" of a message is 0 or 1, not {json.dumps(weight)[:80]}')
        found.append(Message(role, _text(message, "content", may_be_empty=role != "assistant"), int(weight)))
    if not any(message.is_learned for message in found) or found[0].role == "assistant":
        raise ValueError('"messages" takes a question and behind it an answer to learn, of the role "assistant"')
    return tuple(found)


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
