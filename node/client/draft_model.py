"""A whole model on this machine that guesses tokens: a smaller one with the tokenizer of the model of the swarm."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from ...protocols.ids import Span
from ..blocks.client_part import ClientModel, load_client
from ..blocks.span import BlockSpan, load_span
from ..errors import BadInput
from ..models.folder import ModelFolder
from .chat import Text, same_tokens
from .sampling import AheadSampler, TokenSampler

PREFILL_TOKENS: Final = 64
"""Of a prompt that are read at once: whoever ends the answer waits for no more."""


class DraftModel:
    """Embeddings, blocks and head; several conversations take turns."""

    def __init__(self, part: ClientModel, blocks: BlockSpan) -> None:
        self.part = part
        self.blocks = blocks
        self.turn = threading.Lock()


class DraftReader(Protocol):
    """A draft model that has read some of one conversation. Its calls compute: they belong into a worker thread."""

    @property
    def max_length(self) -> int:
        """Tokens that the conversation may reach."""

    def read(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """The logits [vocabulary] after at most `max_length` tokens; None if it has to be called again to read more."""


class DraftCache:
    """What a draft model has read of one conversation. Its calls compute: they belong into a worker thread.

    Args:
        max_length: tokens that the conversation may reach.
    """

    def __init__(self, model: DraftModel, max_length: int) -> None:
        self._model = model
        self._max_length = min(max_length, model.blocks.max_positions)
        self._cache = model.blocks.make_cache(1, self._max_length)
        self._held: list[int] = []

    @property
    def max_length(self) -> int:
        return self._max_length

    def read(self, tokens: Sequence[int]) -> torch.Tensor | None:
        common = 0
        for held, wanted in zip(self._held, tokens[:-1], strict=False):
            if held != wanted:
                break
            common += 1
        some = list(tokens[common : common + PREFILL_TOKENS])
        with self._model.turn, torch.inference_mode():
            self._cache.rollback(common)
            self._held = list(tokens[:common])
            hidden = self._model.part.embed(torch.tensor([some]), common)
            blocks = self._model.blocks
            one = len(some) == 1
            out = blocks.decode([(hidden, self._cache)])[0] if one else blocks.forward(hidden, self._cache)
            self._held += some
            if len(self._held) < len(tokens):
                return None
            return self._model.part.head(out[:, -1:])[0, -1]


@dataclass
class Ahead:
    """Chooses guesses as the sampler of an answer will choose tokens: the next one stands behind `length` tokens."""

    sampler: AheadSampler
    length: int


class ModelDrafter:
    """Guesses the tokens of one answer, one after another, with a draft model.

    A token is drawn with the very random numbers that the chain's token will be drawn with, so that it is the same one
    as often as the two distributions allow without knowing of each other: with a probability of at least
    (1 - D) / (1 + D), D being their total variation distance ("drafter-invariant speculative decoding" by Gumbel
    sampling: Daliri, Musco and Suresh, arXiv 2408.07978). What the sampler chooses does not depend on the guess.

    Args:
        skipped: tokens at the beginning of a line that are none of the model's, such as those of a soft prompt.
    """

    def __init__(self, cache: DraftReader, sampler: TokenSampler, skipped: int = 0) -> None:
        self._cache = cache
        self._sampler = sampler
        self._skipped = skipped

    @property
    def max_length(self) -> int:
        """Tokens of the longest line."""
        return self._cache.max_length + self._skipped

    def ahead(self, length: int) -> Ahead:
        """For guesses behind so many tokens, all of which the sampler has chosen. Not while it chooses."""
        return Ahead(self._sampler.ahead(), length)

    def guess(self, line: Sequence[int], ahead: Ahead) -> int | None:
        """The token after `line`; None if there is more to read before. For worker threads, one call at a time."""
        logits = self._cache.read(line[self._skipped :])
        if logits is None:
            return None
        while ahead.length < len(line):  # tokens that were drafted otherwise
            ahead.sampler.skip(len(logits))
            ahead.length += 1
        ahead.length += 1
        return ahead.sampler.next(line, logits)


def load_draft_model(folder: ModelFolder, text: Text) -> DraftModel:
    """Loads all of the model in `folder`, its linear layers in eight bits. `text`: of the model that it drafts for.

    Raises:
        BadInput: its tokenizer is another one.
        ModelError: the folder is damaged or incomplete.
    """
    if not same_tokens(text, Text(folder)):
        raise BadInput(
            f"--draft {folder.asked or folder.name}: its tokenizer is not that of the model that the swarm serves, so "
            "its guesses would mean other words; give a smaller model of the same family, auto or none"
        )
    part = load_client(folder.path)
    return DraftModel(part, load_span(folder.path, Span(0, part.num_blocks), quantisation="int8", kernels="auto"))
