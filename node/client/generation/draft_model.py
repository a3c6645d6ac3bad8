"""What guesses tokens: a look into the text, or a smaller model on this machine with the tokenizer of the swarm's
model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch

from ....protocols.ids import Span
from ...blocks.caches.states import StatesLost
from ...blocks.client_part import ClientModel, load_client
from ...blocks.span import BlockSpan, load_span
from ...errors import BadInput
from ...models.folder import ModelFolder
from ..chat import Text
from ..request import WireTensor
from ..session.prefixes import common_prefix
from .sampling import AheadSampler, TokenSampler

MOST_DRAFTED: Final = 96
"""Tokens of one draft: more gains little where they are right, and costs the servers much where they are not."""
SHORTEST_MATCH: Final = 2
LONGEST_MATCH: Final = 48
"""Tokens that have to stand elsewhere, too, for a draft; more are not counted."""
_KEY: Final = 6
"""Tokens by which a place is found; longer matches are counted from there."""
PREFILL_TOKENS: Final = 64
"""Of a prompt that are read at once: whoever ends the answer waits for no more."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next; `match`: how many tokens before them stood elsewhere, before `place` in the text."""

    tokens: tuple[int, ...] = ()
    match: int = 0
    place: int = 0


@dataclass(frozen=True)
class FixedDrafts:
    """Drafts that are always as long, whether that pays or not: tokens that are looked up, and those that a draft model
    guesses. They are checked in three steps or more."""

    looked_up: int
    guessed: int

    @property
    def step_tokens(self) -> int:
        return max(1, max(self.looked_up, self.guessed) // 3)

    def cut(self, draft: Draft, most: int) -> Draft:
        """Its first tokens, `most` of them at the most."""
        return Draft(draft.tokens[: min(most, self.looked_up)], draft.match, draft.place)


class LookupDrafter:
    """Finds what followed the last tokens of a text where they stood before ("prompt lookup decoding", Saxena 2023;
    suffix matching as in REST, arXiv 2311.08252, section 3.2)."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known: list[int] = []

    def matches(self, tokens: Sequence[int]) -> Iterator[Draft]:
        """What may come after `tokens`, the longest match first, each up to `MOST_DRAFTED` tokens."""
        self._learn(tokens)
        for length in range(min(_KEY, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
            place = self._after.get(tuple(tokens[-length:]))
            if place is not None:
                yield self.follow(tokens, place, _whole_match(tokens, place) if length == _KEY else length)

    def follow(self, tokens: Sequence[int], place: int, match: int) -> Draft:
        """What comes after `tokens` if it is what stands there from `place` on."""
        return Draft(tuple(_repeated(tokens, place)), match, place)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Notes the newest place of every few tokens but the last ones, which nothing follows yet."""
        if list(tokens[: len(self._known)]) != self._known:
            self._after, self._known = {}, []
        for end in range(max(SHORTEST_MATCH, len(self._known)), len(tokens)):
            for length in range(SHORTEST_MATCH, min(_KEY, end) + 1):
                self._after[tuple(tokens[end - length : end])] = end
        self._known = list(tokens)


def _whole_match(tokens: Sequence[int], place: int) -> int:
    """How many of the last tokens stand before `place`, too."""
    length = _KEY
    while length < min(LONGEST_MATCH, place) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def _repeated(tokens: Sequence[int], place: int) -> list[int]:
    """What stands from `place` on; a text that ends there goes on as if it repeated itself."""
    period = len(tokens) - place
    return [tokens[place + index % period] for index in range(MOST_DRAFTED)]


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


@runtime_checkable
class HiddenReader(DraftReader, Protocol):
    """One that also reads what leaves the last block of the swarm's model, of a prompt for `reads` tokens."""

    reads: int

    def note(self, tokens: Sequence[int], hidden: Sequence[WireTensor] | torch.Tensor) -> None:
        """What left it for the last of `tokens`: [tokens, hidden size], or as it came. For any thread."""


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
        common = common_prefix(self._held, tokens[:-1])
        with self._model.turn, torch.inference_mode():
            try:
                self._cache.rollback(common)
            except StatesLost:
                common = 0
                self._cache.rollback(common)
            some = list(tokens[common : common + PREFILL_TOKENS])
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

    A token is drawn with the very random numbers that the chain's token will be drawn with. The two are therefore equal
    as often as their distributions allow without knowing of each other: with a probability of at least (1 - D) / (1 +
    D), D being their total variation distance ("drafter-invariant speculative decoding" by Gumbel sampling: Daliri,
    Musco and Suresh, arXiv 2408.07978). What the sampler chooses does not depend on the guess.

    Args:
        skipped: tokens at the beginning of a line that are none of the model's, as of a soft prompt.
    """

    def __init__(self, cache: DraftReader, sampler: TokenSampler, skipped: int = 0) -> None:
        self._cache = cache
        self._sampler = sampler
        self._skipped = skipped

    @property
    def max_length(self) -> int:
        """Tokens of the longest line."""
        return self._cache.max_length + self._skipped

    def note(self, line: Sequence[int], hidden: Sequence[WireTensor]) -> None:
        """The servers have answered for the last tokens of `line`."""
        if isinstance(self._cache, HiddenReader):
            self._cache.note(line[self._skipped :], hidden)

    def ahead(self, length: int) -> Ahead:
        """For guesses behind `length` tokens, all of which the sampler has chosen. Not while it chooses."""
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
    if text.tokenizer.get_vocab() != Text(folder).tokenizer.get_vocab():
        raise BadInput(
            f"--draft {folder.asked or folder.name}: its tokenizer is not that of the model that the swarm serves, so "
            "its guesses would mean other words; give a smaller model of the same family, auto or none"
        )
    part = load_client(folder.path)
    return DraftModel(part, load_span(folder.path, Span(0, part.num_blocks), quantisation="int8", kernels="auto"))
