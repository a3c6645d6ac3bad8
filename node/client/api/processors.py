"""transformers' logits processors and stopping criteria as a sampler of the loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..generation.sampling import AheadSampler

STATELESS: Final = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
    )
)
"""Processors that may be asked about guesses as well: what they do depends on their arguments alone."""


class ProcessorSampler:
    """Chooses tokens as transformers' loop does: with its processors, criteria and the same random numbers.

    Attributes:
        is_over: a criterion has ended the answer.
        only: nothing is known before the logits are.
        scores, logits: of each token, [1, vocabulary], where they are wanted.
    """

    only: Final = None

    def __init__(self, processors: Any, criteria: Any, config: Any, streamer: Any, device: torch.device) -> None:
        self.is_over = False
        keeps = bool(config.return_dict_in_generate)
        self.scores: tuple[torch.Tensor, ...] | None = () if keeps and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keeps and config.output_logits else None
        self._processors = processors
        self._criteria = criteria
        self._samples = bool(config.do_sample)
        self._streamer = streamer
        self._device = device
        self._before_draw: torch.Tensor | None = None  # of torch's generator, for the token that is not accepted yet
        self._chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # text, raw logits and scores
        self._ends = _ends(criteria)
        self._is_plain = not (processors or self._samples or self.scores is not None or self.logits is not None)
        self._length = 0

    @property
    def is_ready(self) -> bool:
        """Whether only processors and criteria of transformers are asked, and those that are quick."""
        known = all(type(one) in STATELESS for one in self._processors)
        return known and self._ends is not None and self._streamer is None and self._device.type == "cpu"

    def prepare(self, *, draw: bool) -> None:
        """Nothing is known before the logits are."""

    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """The token after `tokens`, from logits [vocabulary]; shows it to the criteria and to the streamer."""
        token = self.choose(tokens, logits)
        self.accept(token)
        return token

    @torch.no_grad()
    def choose(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """As `TokenSampler.choose`."""
        self._length = len(tokens) + 1
        if self._is_plain and self._ends is not None:
            return int(logits.argmax())
        ids = self._ids(tokens)
        raw = logits.to(copy=True, dtype=torch.float32, device=self._device).unsqueeze(0)
        scores = self._processors(ids, raw)
        self._chosen = ids, raw, scores
        return int(self._draw(tokens, scores.softmax(-1)) if self._samples else scores.argmax(-1))

    @torch.no_grad()
    def accept(self, token: int) -> None:
        """The next token is the one that was chosen: criteria and streamer see it."""
        self._before_draw = None
        if self._chosen is not None:
            _, raw, scores = self._chosen
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (raw,)
        if self._ends is not None:
            ends, longest = self._ends
            self.is_over = token in ends or self._length >= longest
        elif self._chosen is not None:
            ids = torch.cat([self._chosen[0], torch.tensor([[token]], device=self._device)], dim=1)
            self.is_over = bool(self._criteria(ids, self.scores).all())
        self._chosen = None
        self._show(token)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """The text as processors and criteria see it, [1, tokens]."""
        return torch.tensor([tokens], device=self._device)

    def _draw(self, tokens: Sequence[int], probabilities: torch.Tensor) -> torch.Tensor:
        """The token after `tokens`, [1], of `probabilities` [1, vocabulary]."""
        if self._before_draw is not None:
            torch.set_rng_state(self._before_draw)
        self._before_draw = torch.get_rng_state()
        return torch.multinomial(probabilities, 1)[0]

    def _show(self, token: int) -> None:
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))

    def ahead(self) -> AheadSampler:
        """Draws the same random numbers, where those are the CPU's; knows no processor that keeps a state."""
        return _Ahead([one for one in self._processors if type(one) in STATELESS], self._samples, self._device)


def _ends(criteria: Any) -> tuple[frozenset[int], int] | None:
    """The tokens that end an answer, and its longest length; None where other criteria have to be asked."""
    tokens: set[int] = set()
    longest: list[int] = []
    for one in criteria:
        if type(one) is EosTokenCriteria:
            tokens |= set(one.eos_token_id.flatten().tolist())
        elif type(one) is MaxLengthCriteria:
            longest.append(one.max_length)
        else:
            return None
    return (frozenset(tokens), min(longest)) if longest else None


class _Ahead:
    def __init__(self, processors: Sequence[Any], samples: bool, device: torch.device) -> None:
        self._processors = processors
        self._samples = samples
        self._generator = torch.Generator()
        if device.type == "cpu":
            self._generator.set_state(torch.get_rng_state())

    @torch.no_grad()
    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        scores, ids = logits.float().cpu().unsqueeze(0), torch.tensor([tokens])
        for processor in self._processors:
            scores = processor(ids, scores)
        if not self._samples:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def skip(self, vocabulary: int) -> None:
        if self._samples:
            torch.multinomial(torch.ones(1, vocabulary), 1, generator=self._generator)
