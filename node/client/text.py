"""Text to tokens and back, as a model's tokenizer and chat template do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ModelError
from ..models import ModelFolder
from .dialogue import Turn


class Text:
    """Tokenizer and chat template of a model."""

    def __init__(self, folder: ModelFolder) -> None:
        from transformers import GenerationConfig

        self._tokenizer = load_tokenizer(folder)
        stops: set[int] = set()
        try:
            configured = GenerationConfig.from_pretrained(folder.path, local_files_only=True).eos_token_id
        except OSError:
            configured = folder.config.get("eos_token_id")
        for ids in (configured, self._tokenizer.eos_token_id):
            stops.update([ids] if isinstance(ids, int) else ids or [])
        self.stop_tokens = tuple(sorted(stops))

    def tokenize(self, turns: Sequence[Turn]) -> list[int]:
        """The prompt for the next answer. A model without a chat template gets the plain text."""
        if not self._tokenizer.chat_template:
            return list(self._tokenizer("\n".join(turn.content for turn in turns))["input_ids"])
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return list(
            self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def stream(self, write: Callable[[str], object]) -> Callable[[int], None]:
        """A function that takes tokens one by one and writes text as soon as it is whole characters."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)

        def on_token(token: int) -> None:
            piece = decoder.step(self._tokenizer.backend_tokenizer, token)
            if piece:
                write(piece)

        return on_token


def load_tokenizer(folder: ModelFolder) -> Any:
    """
    Raises:
        ModelError: the folder has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder.path} has no tokenizer that can be used ({error}); copy its files too") from None
