"""`petalnode.json` beside an adapter: the model, task and method that it was trained for. peft ignores the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ...crypto.bounded_json import JsonLimits, parse_json_object
from ..errors import BadInput

NOTE: Final = "petalnode.json"
FORMAT: Final = 1
MAX_NOTE_BYTES: Final = 1 << 20
_LIMITS: Final = JsonLimits(MAX_NOTE_BYTES, values=50_000, depth=16)

Method = Literal["prompt", "deep-prompt", "lora"]
METHODS: Final[tuple[Method, ...]] = ("prompt", "deep-prompt", "lora")
Task = Literal["language", "classification"]


@dataclass(frozen=True)
class AdapterNote:
    """
    Attributes:
        method: how it was trained.
        model, model_version: the name of the model, and its version: 64 hexadecimal digits.
        task: language model or classifier.
        labels: of a classifier, in the order of its logits.
        tags: for searches on a hub.
        results: figures of its training, for people.
    """

    method: Method
    model: str
    model_version: str
    task: Task = "language"
    labels: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    results: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, ensure_ascii=False)
        return f"{text}\n".encode(errors="replace")

    def write(self, folder: Path) -> None:
        (folder / NOTE).write_bytes(self.to_bytes())


def read_note(folder: Path) -> AdapterNote | None:
    """What the adapter in `folder` was made for; None if nothing is noted.

    Raises:
        BadInput: the note is damaged, or of a newer format.
    """
    file = folder / NOTE
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_NOTE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}") from None
    return parse_note(data, str(file))


def parse_note(data: bytes, what: str) -> AdapterNote:
    """
    Raises:
        BadInput: this is no note; `what` says where it comes from.
    """
    try:
        found = parse_json_object(data, _LIMITS)
        if found["format"] != FORMAT:
            raise BadInput(f"{what} has format {found['format']}: a newer petalnode is needed to read it")
        if found["method"] not in METHODS or found["task"] not in ("language", "classification"):
            raise ValueError("unknown method or task")
        version = str(found["model_version"])
        if len(bytes.fromhex(version)) != 32:
            raise ValueError("the model version has 64 hexadecimal digits")
        return AdapterNote(
            method=found["method"],
            model=str(found["model"]),
            model_version=version,
            task=found["task"],
            labels=tuple(map(str, found["labels"])),
            tags=tuple(map(str, found["tags"])),
            results=dict(found["results"]),
        )
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{what} does not say what the adapter is for ({error}): save or download it again") from None
