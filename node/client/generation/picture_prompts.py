"""Prompts of conversations with pictures: tokens by the model's own processor, and what its encoder makes of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...blocks.client_part import ClientModel
from ...blocks.images.encoder import ImagePrompt
from ...blocks.images.pictures import Picture, PictureReader
from ...errors import BadInput
from ..chat import ChatMessage


@dataclass(frozen=True)
class PicturePrompt:
    """`tokens`: those of pictures are below zero, and equal ones are of equal pictures, so that tokens tell texts
    apart. `seen`: what enters the first block."""

    tokens: tuple[int, ...]
    seen: ImagePrompt


class PicturePrompts:
    """Of the model in `folder`, whose processor and encoder are loaded with the first picture. For any thread."""

    def __init__(self, model: ClientModel, tokenizer: Any, folder: Path) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._folder = folder
        self._reader: PictureReader | None = None
        self._lock = threading.Lock()
        self._newest: tuple[tuple[ChatMessage, ...], PicturePrompt] | None = None

    @cached_property
    def are_taken(self) -> bool:
        """Whether the model takes any: by its configuration alone."""
        return self._model.encoder.is_there

    def prompt(self, messages: Sequence[dict[str, Any]], most: int | None = None) -> PicturePrompt:
        """The prompt for the next answer to messages, some contents of which are lists of texts and pictures.

        What has more than `most` tokens is refused before the encoder sees it, which may take long.

        Raises:
            BadInput: the model's processor does not take them; there are too many tokens.
            ModelError: the model takes no pictures.
        """
        with self._lock:
            if self._reader is None:
                self._model.encoder.load()
                self._reader = PictureReader(self._folder, self._tokenizer)
            read = self._reader.read(messages)
        if most is not None and len(read.ids) > most:
            raise BadInput(
                f"the prompt has {len(read.ids):,} tokens, those of pictures included: {most:,} are the most"
            )
        seen = self._model.encoder.encode(torch.tensor([read.ids]), None, read.values)
        return PicturePrompt(tuple(read.named(seen)), seen)

    def of_turns(self, turns: Sequence[ChatMessage]) -> PicturePrompt | None:
        """The same of turns of a chat; None where they have no pictures. The newest one is kept."""
        if not any(turn.pictures for turn in turns):
            return None
        if self._newest is None or self._newest[0] != tuple(turns):
            contents = [{"role": turn.role, "content": with_pictures(turn.content, turn.pictures)} for turn in turns]
            self._newest = tuple(turns), self.prompt(contents)
        return self._newest[1]


def has_pictures(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether any message has one."""
    return any(isinstance(message.get("content"), list) for message in messages)


def with_pictures(text: str, pictures: Sequence[Picture]) -> str | list[dict[str, Any]]:
    """The content of a message that shows pictures, before its text."""
    if not pictures:
        return text
    return [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": text}]
