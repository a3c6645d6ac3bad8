"""transformers' logits processors and stopping criteria as a sampler of the loop over tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from transformers.generation import LogitsProcessorList, logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from ...blocks.caches.own_states import PADDING_COUNTS
from ...blocks.remote_cache import RemoteCache
from ..generation.sampling import Token

_STATELESS: Final = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
)
"""Processors that may be asked about guesses as well: what they do depends on their arguments alone."""
_BY_ROW: Final = (
    *_STATELESS,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
"""Processors that do with a row what they would do with it alone, from several threads at once."""
_KEPT_NUMBERS: Final = 1 << 22
"""Random numbers that are kept for rows that come to the same step later; others are drawn once more."""


@dataclass(frozen=True)
class Prepared:
    """What transformers has prepared for its loop over `input_ids` [rows, tokens]: `arguments` are those of the model.

    Attributes:
        hidden: number of first tokens that are padding in all rows, and not computed. Processors see them.
    """

    model: Any
    input_ids: torch.Tensor
    processors: Any
    criteria: Any
    config: Any
    arguments: dict[str, Any]
    hidden: int = 0

    def part(self, rows: slice, cache: RemoteCache) -> Prepared:
        """The same for some of the rows, in a session of their own."""
        mask, positions = self.arguments.get("attention_mask"), self.arguments.get("position_ids")
        arguments, hidden = {**self.arguments, "past_key_values": cache}, 0
        if mask is not None:
            if self.model.config.model_type not in PADDING_COUNTS:
                hidden = int((mask[rows] != 0).any(0).long().argmax())
            arguments["attention_mask"] = mask[rows, hidden:]
        if positions is not None:
            arguments["position_ids"] = positions[rows if len(positions) > 1 else slice(None), hidden:]
        processors = LogitsProcessorList([_of_rows(one, rows) for one in self.processors])
        return replace(self, input_ids=self.input_ids[rows], processors=processors, arguments=arguments, hidden=hidden)

    @property
    def is_by_row(self) -> bool:
        """Whether each row becomes what it would become by itself, with the random numbers of its own."""
        kinds, config, mask = {type(one) for one in self.criteria}, self.config, self.arguments.get("attention_mask")
        ends = StopStringCriteria not in kinds or EosTokenCriteria in kinds  # else an ended row goes on with the others
        return (
            all(type(one) in _BY_ROW for one in self.processors)
            and kinds <= {EosTokenCriteria, MaxLengthCriteria, StopStringCriteria}
            and ends
            and not (config.output_scores or config.output_logits)
            and (self.input_ids.device.type == "cpu" or not config.do_sample)
            and (mask is None or mask.shape == self.input_ids.shape)
        )


def _of_rows(processor: Any, rows: slice) -> Any:
    """The processor for these rows alone, if what it knows of the prompts differs from row to row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor) or len(ignored) == 1:
        return processor
    return type(processor)(processor.penalty, ignored[rows])


class Answers:
    """What the rows of a batch have so far; a streamer sees a token of each row at a time, as in transformers' loop.
    Safe to use from several threads.

    Attributes:
        made: the tokens of each row, up to its end.
        padding: the token that stands behind it.
    """

    def __init__(self, rows: int, padding: int, streamer: Any) -> None:
        self.made: list[list[int]] = [[] for _ in range(rows)]
        self.padding = padding
        self.streamer = streamer
        self._ended = [False] * rows
        self._shown = 0
        self._lock = threading.Lock()

    def take(self, first: int, tokens: Sequence[int], ended: Sequence[bool]) -> None:
        """The next tokens of the rows from `first` on, as far as these have not ended; `ended`: which do so now."""
        with self._lock:
            for row, token in enumerate(tokens, first):
                if not self._ended[row]:
                    self.made[row].append(token)
            self._ended[first : first + len(ended)] = ended
            while self.streamer is not None and self._is_whole(self._shown):
                at, self._shown = self._shown, self._shown + 1
                step = [row[at] if at < len(row) else self.padding for row in self.made]
                self.streamer.put(torch.tensor(step))

    def _is_whole(self, step: int) -> bool:
        there = [step < len(row) for row in self.made]
        return any(there) and all(one or ended for one, ended in zip(there, self._ended, strict=True))

    def behind(self, prompts: torch.Tensor) -> torch.Tensor:
        """The whole sequences [rows, tokens], padded to the longest."""
        longest = max(map(len, self.made))
        rows = [row + [self.padding] * (longest - len(row)) for row in self.made]
        return torch.cat([prompts, prompts.new_tensor(rows)], dim=1)


class RowDraws:
    """The random numbers that `torch.multinomial` would draw for all rows at once, step by step. Each row gets its own
    when it comes to the step. Safe to use from several threads.

    A row's token is where its probabilities divided by exponential random numbers are largest, as `multinomial` has it.
    Begins where torch's generator of the CPU stands.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._generator = torch.Generator()
        self._states = [torch.get_rng_state()]  # before each step
        self._kept: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def choose(self, first: int, step: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The tokens in a step of the rows from `first` on, of `probabilities` [rows, vocabulary]."""
        count, vocabulary = probabilities.shape
        return (probabilities / self._drawn(step, vocabulary)[first : first + count]).argmax(-1)

    def finish(self, steps: int) -> None:
        """Leaves torch's generator as `steps` steps of the batch leave it, all of which some row has come to."""
        torch.set_rng_state(self._states[steps])

    def _drawn(self, step: int, vocabulary: int) -> torch.Tensor:
        """Of a step, [rows, vocabulary]."""
        with self._lock:
            if step in self._kept:
                return self._kept[step]
            for drawn in range(min(step, len(self._states) - 1), step + 1):  # those between are not known yet
                self._generator.set_state(self._states[drawn])
                numbers = torch.empty(self._rows, vocabulary).exponential_(1, generator=self._generator)
                if drawn + 1 == len(self._states):
                    self._states.append(self._generator.get_state())
            self._kept[step] = numbers
            while len(self._kept) > max(1, _KEPT_NUMBERS // numbers.numel()):
                del self._kept[next(iter(self._kept))]
            return numbers


class ProcessorSampler:
    """Chooses tokens as transformers' loop does: with its processors, criteria and the same random numbers.

    Of several rows a token is the tuple of theirs, and logits are [rows, vocabulary].

    Args:
        first: the first of these rows in `answers` and `draws`.
        draws: the random numbers of a batch whose other rows are elsewhere; None: those of torch's generator.

    Attributes:
        is_over: criteria have ended all rows.
        only: nothing is known before the logits are.
        scores, logits: of each token, [rows, vocabulary], where they are wanted.
    """

    only: Final = None

    def __init__(self, prepared: Prepared, answers: Answers, first: int = 0, draws: RowDraws | None = None) -> None:
        config, ids = prepared.config, prepared.input_ids
        keeps = bool(config.return_dict_in_generate)
        self.is_over = False
        self.scores: tuple[torch.Tensor, ...] | None = () if keeps and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keeps and config.output_logits else None
        self._processors = prepared.processors
        self._criteria = prepared.criteria
        self._samples = bool(config.do_sample)
        self._answers = answers
        self._first = first
        self._draws = draws
        self._ids = ids  # the text as processors and criteria see it, where they do
        self._prompt = self._length = ids.shape[1]
        self._hidden = ids[0, : prepared.hidden].tolist()
        self._ended = [False] * len(ids)
        # Behind its end a row has padding, if there is a token that ends it.
        self._pads = any(hasattr(one, "eos_token_id") for one in prepared.criteria)
        self._before_draw: torch.Tensor | None = None  # of torch's generator, for the token that is not accepted yet
        self._chosen: tuple[torch.Tensor, torch.Tensor] | None = None  # raw logits and scores
        # Kept until the next token, or malloc gives a thread's memory back at every one: 10 % of the time of 16 rows.
        self._last: object = None
        self._ends = _ends(prepared.criteria)
        self._is_plain = not (
            prepared.processors or self._samples or self.scores is not None or self.logits is not None
        )

    @property
    def is_ready(self) -> bool:
        """Whether only processors and criteria of transformers are asked, and those that are quick."""
        known = all(type(one) in _STATELESS for one in self._processors) and self._ends is not None
        quick = self._answers.streamer is None and (self._draws is None or not self._samples)
        return known and quick and self._ids.device.type == "cpu"

    def prepare(self, *, draw: bool) -> None:
        """Nothing is known before the logits are."""

    def next(self, tokens: Sequence[Token], logits: torch.Tensor) -> Token:
        """The token after `tokens`; shows it to the criteria and to the streamer."""
        token = self.choose(tokens, logits)
        self.accept(token)
        return token

    @torch.no_grad()
    def choose(self, tokens: Sequence[Token], logits: torch.Tensor) -> Token:
        """As `TokenSampler.choose`."""
        if self._is_plain:
            chosen = logits.argmax(-1)
        else:
            raw = logits.to(copy=True, dtype=torch.float32, device=self._ids.device).view(len(self._ended), -1)
            scores = self._processors(self._ids, raw)
            self._chosen = raw, scores
            shares = scores.softmax(-1) if self._samples else None
            chosen = scores.argmax(-1) if shares is None else self._draw(shares)
            self._last = raw, scores, shares
        if len(self._ended) == 1:
            return int(chosen)
        filled, padding = [self._pads and ended for ended in self._ended], self._answers.padding
        return tuple(padding if fill else one for one, fill in zip(chosen.tolist(), filled, strict=True))

    @torch.no_grad()
    def accept(self, token: Token) -> None:
        """The next token is the one that was chosen: criteria and streamer see it."""
        tokens = (token,) if isinstance(token, int) else token
        self._before_draw = None
        if self._chosen is not None:
            raw, scores = self._chosen
            self.scores = None if self.scores is None else (*self.scores, scores)
            self.logits = None if self.logits is None else (*self.logits, raw)
            self._chosen = None
        self._length += 1
        if self._ends is None or not self._is_plain:
            self._ids = torch.cat([self._ids, self._ids.new_tensor(tokens).unsqueeze(1)], dim=1)
        if self._ends is not None:
            ends, longest = self._ends
            met = [one in ends or self._length >= longest for one in tokens]
        else:
            met = self._criteria(self._ids, self.scores).tolist()
        self._ended = [before or now for before, now in zip(self._ended, met, strict=True)]
        self.is_over = all(self._ended)
        self._answers.take(self._first, tokens, self._ended if self._pads else [self.is_over] * len(tokens))

    def _draw(self, probabilities: torch.Tensor) -> torch.Tensor:
        """The next tokens [rows], of `probabilities` [rows, vocabulary]."""
        if self._draws is not None:
            return self._draws.choose(self._first, self._length - self._prompt, probabilities)
        if self._before_draw is not None:
            torch.set_rng_state(self._before_draw)
        self._before_draw = torch.get_rng_state()
        return torch.multinomial(probabilities, 1).squeeze(1)

    def ahead(self) -> ProcessorAhead:
        """Draws the same random numbers, where those are the CPU's; knows no processor that keeps a state."""
        return ProcessorAhead(self)


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


class ProcessorAhead:
    """Chooses as the sampler of one row will, which is shown nothing."""

    def __init__(self, sampler: ProcessorSampler) -> None:
        self._processors = [one for one in sampler._processors if type(one) in _STATELESS]
        self._samples = sampler._samples
        self._hidden = sampler._hidden
        self._prompt = sampler._prompt
        self._row = sampler._first
        self._draws = sampler._draws
        self._generator = torch.Generator()
        if sampler._ids.device.type == "cpu":
            self._generator.set_state(torch.get_rng_state())

    @torch.no_grad()
    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """As `AheadSampler.next`."""
        scores, ids = logits.float().cpu().unsqueeze(0), torch.tensor([[*self._hidden, *tokens]])
        for processor in self._processors:
            scores = processor(ids, scores)
        if not self._samples:
            return int(scores.argmax())
        if self._draws is not None:
            return int(self._draws.choose(self._row, ids.shape[1] - self._prompt, scores.softmax(-1)))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def skip(self, vocabulary: int) -> None:
        """As `AheadSampler.skip`. Those of `RowDraws` follow from a token's place, whatever was drawn before."""
        if self._samples and self._draws is None:
            torch.multinomial(torch.ones(1, vocabulary), 1, generator=self._generator)
