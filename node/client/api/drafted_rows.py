"""Drafts for a batch: each row in a session and a task of its own, so that it goes on as far as its drafts are right.

In one session all rows would have to wait for the one that was guessed worst, and be padded. What is returned is what
transformers' loop makes of the whole batch: a row's token of a step is chosen with the random numbers that are that
row's in that step, however far the others are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import torch
import trio
from transformers.generation import LogitsProcessorList, logits_process
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...blocks.client_part import ClientModel
from ...blocks.remote_cache import RemoteCache
from ..generation.drafting import DraftCounts, DraftPlan
from .generating import KNOWN, GenerateOptions, Prepared, Row
from .inference_session import InferenceSession
from .pace import Route
from .processors import STATELESS, ProcessorSampler

_BY_ROW: Final = (
    *STATELESS,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
"""Processors that do with a row what they would do with it alone, from several threads at once."""
_ENOUGH: Final = 12
"""Steps of all rows together, from which on they say something."""
_KEPT_NUMBERS: Final = 1 << 22
"""Random numbers that are kept for rows that come to the same step later; others are drawn once more."""


class RowDraws:
    """The random numbers that `torch.multinomial` would draw for all rows at once, step by step, for each row when it
    comes to the step. Safe to use from several threads.

    A token of a row is where its probabilities divided by exponential random numbers are largest, as `multinomial` has
    it. Begins where torch's generator of the CPU stands.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._generator = torch.Generator()
        self._states = [torch.get_rng_state()]  # before each step
        self._kept: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def choose(self, row: int, step: int, probabilities: torch.Tensor) -> int:
        """The token of a row in a step, of `probabilities` [vocabulary]."""
        return int((probabilities / self._drawn(step, len(probabilities))[row]).argmax())

    def finish(self, steps: int) -> None:
        """Leaves torch's generator as so many steps of the batch leave it, all of which some row has come to."""
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


class _Answers:
    """What the rows have so far; a streamer sees a token of each row at a time, as in transformers' loop."""

    def __init__(self, rows: int, padding: int, streamer: Any) -> None:
        self.made: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._times = [(0.0, 0.0)] * rows
        self._padding = padding
        self._streamer = streamer
        self._shown = 0
        self._lock = threading.Lock()

    @property
    def seconds(self) -> list[float]:
        """From the first token of each row to its last."""
        return [last - first for first, last in self._times]

    def take(self, row: int, token: int) -> None:
        now = time.perf_counter()
        with self._lock:
            self._times[row] = (self._times[row][0] if self.made[row] else now, now)
            self.made[row].append(token)
            self._show()

    def end(self, row: int) -> None:
        with self._lock:
            self._ended[row] = True
            self._show()

    def _show(self) -> None:
        while self._streamer is not None and self._is_whole(self._shown):
            at, self._shown = self._shown, self._shown + 1
            self._streamer.put(torch.tensor([row[at] if at < len(row) else self._padding for row in self.made]))

    def _is_whole(self, step: int) -> bool:
        there = [step < len(row) for row in self.made]
        return any(there) and all(one or ended for one, ended in zip(there, self._ended, strict=True))


class _RowSampler(ProcessorSampler):
    """Of one row: knows its padding, which processors see, and its random numbers."""

    def __init__(
        self, answers: _Answers, row: int, padding: Sequence[int], prompt: int, draws: RowDraws, given: Sequence[Any]
    ) -> None:
        processors, criteria, config, device = given
        super().__init__(processors, criteria, config, None, device)
        self._answers = answers
        self._row = row
        self._padding = list(padding)
        self._prompt = prompt
        self._draws = draws

    @property
    def is_ready(self) -> bool:
        """The random numbers of all rows may be to draw."""
        return False

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[*self._padding, *tokens]], device=self._device)

    def _draw(self, tokens: Sequence[int], probabilities: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self._draws.choose(self._row, len(tokens) - self._prompt, probabilities[0])])

    def _show(self, token: int) -> None:
        self._answers.take(self._row, token)

    @torch.no_grad()
    def guess(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """What `next` would choose, shown to nobody, without processors that may only be asked once for a token."""
        scores, ids = logits.float().cpu().unsqueeze(0), self._ids(tokens).cpu()
        for processor in self._processors:
            if type(processor) in STATELESS:
                scores = processor(ids, scores)
        return int(self._draw(tokens, scores.softmax(-1)) if self._samples else scores.argmax(-1))

    def ahead(self) -> _RowAhead:
        return _RowAhead(self)


class _RowAhead:
    """Guesses with the random numbers that the row's sampler will draw with."""

    def __init__(self, sampler: _RowSampler) -> None:
        self._sampler = sampler

    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        return self._sampler.guess(tokens, logits)

    def skip(self, vocabulary: int) -> None:
        """Which random numbers are a token's follows from its place, not from those that were drawn before."""


class DraftedRows:
    """The loop over tokens of a batch, for the argument `custom_generate` of transformers' `generate`.

    Where an argument makes rows depend on each other, on their order, or wants what only a batch as a whole has, the
    batch goes as one, without drafts.

    Attributes:
        counts: what drafts have brought in each row; empty if the batch went as one.
        route: the chain of all rows, for which `step_seconds` counts.
        step_seconds: from one step of a row to the next; None if there were few, or rows had different chains.
    """

    def __init__(
        self, local: ClientModel, open_row: Callable[[int], InferenceSession], plan: DraftPlan, options: GenerateOptions
    ) -> None:
        self.counts: list[DraftCounts] = []
        self.route: Route = ()
        self.step_seconds: float | None = None
        self._local = local
        self._open_row = open_row
        self._plan = plan
        self._options = options

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers' own loop returns, for `input_ids` [rows, tokens]."""
        prepared = Prepared(model, logits_processor, stopping_criteria, generation_config, model_kwargs)
        padding = _left_padding(input_ids, model_kwargs)
        if padding is None or not _by_row(logits_processor, stopping_criteria, generation_config, input_ids):
            return prepared.by_transformers(input_ids, self._options.streamer)
        filler = generation_config._pad_token_tensor
        answers = _Answers(len(input_ids), 0 if filler is None else int(filler), self._options.streamer)
        draws = RowDraws(len(input_ids))
        self._run(prepared, input_ids, padding, answers, draws)
        longest = max(map(len, answers.made))
        if generation_config.do_sample:
            draws.finish(longest)
        if self._options.streamer is not None:
            self._options.streamer.end()
        made = [row + [answers._padding] * (longest - len(row)) for row in answers.made]
        sequences = torch.cat([input_ids, input_ids.new_tensor(made)], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=model_kwargs["past_key_values"])

    def _run(
        self, prepared: Prepared, input_ids: torch.Tensor, padding: Sequence[int], answers: _Answers, draws: RowDraws
    ) -> None:
        """Raises the first error of a row, after all have ended."""
        length, routes = int(prepared.config.max_length), set[Route]()
        options = replace(self._options, streamer=None)
        failures: list[Exception] = []
        with ExitStack() as stack:
            sessions = [stack.enter_context(self._open_row(max(1, length - hidden))) for hidden in padding]
            for session, plan in zip(sessions, self._plan.of_rows(len(padding)), strict=True):
                session.drafting = plan

            async def run(row: int, nursery: trio.Nursery) -> None:
                ids = input_ids[row : row + 1, padding[row] :]
                hidden = input_ids[row, : padding[row]].tolist()
                processors = LogitsProcessorList([_of_row(one, row) for one in prepared.processors])
                given = processors, prepared.criteria, prepared.config, input_ids.device
                sampler = _RowSampler(answers, row, hidden, ids.shape[1], draws, given)
                own = Row(self._local, sessions[row], options, sampler)
                arguments = {
                    **prepared.arguments,
                    "attention_mask": torch.ones_like(ids),
                    "position_ids": torch.arange(ids.shape[1], device=ids.device).unsqueeze(0),
                    "past_key_values": RemoteCache(sessions[row]),
                }
                try:
                    await trio.to_thread.run_sync(own.begin, replace(prepared, arguments=arguments), ids)
                    await own.extend(length - padding[row])
                    routes.add(tuple((peer, start, end) for peer, (start, end) in sessions[row].route))
                    answers.end(row)
                    await trio.to_thread.run_sync(sessions[row].close)  # the others do not need its cache
                except Exception as error:
                    failures.append(error)
                    nursery.cancel_scope.cancel()

            async def run_all() -> None:
                async with trio.open_nursery() as nursery:
                    for row in range(len(padding)):
                        nursery.start_soon(run, row, nursery)

            sessions[0].runtime.call(run_all)
        if failures:
            raise failures[0]
        self.counts = [session.drafting.counts for session in sessions]
        self._plan.counts = sum_of(self.counts)
        steps = [len(row) - 1 - counts.accepted for row, counts in zip(answers.made, self.counts, strict=True)]
        if len(routes) == 1 and sum(steps) >= _ENOUGH:
            self.route = routes.pop()
            self.step_seconds = max(span / max(1, count) for span, count in zip(answers.seconds, steps, strict=True))


def _of_row(processor: Any, row: int) -> Any:
    """The processor for this row alone, if what it knows of the prompts differs from row to row."""
    hidden = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(hidden, torch.Tensor) or len(hidden) == 1:
        return processor
    return type(processor)(processor.penalty, hidden[row : row + 1])


def sum_of(rows: Sequence[DraftCounts]) -> DraftCounts:
    """Of rows that were made at the same time: their tokens together, and the seconds of the one that gained least."""
    total = DraftCounts()
    for one in rows:
        total = total.plus(drafted=one.drafted, accepted=one.accepted, steps=one.steps)
    return total.plus(gained=min((one.gained for one in rows), default=0.0))


def _left_padding(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int] | None:
    """Of each row, how many of its first tokens are hidden; None if others are, or it is not known how to cut rows."""
    if not {name for name, value in model_kwargs.items() if value is not None} <= KNOWN:
        return None
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        return [0] * len(input_ids)
    if mask.shape != input_ids.shape:
        return None
    padding = (mask == 0).sum(-1)
    expected = torch.arange(mask.shape[1], device=mask.device) >= padding.unsqueeze(1)
    if not torch.equal(mask != 0, expected) or int(padding.max()) >= mask.shape[1]:
        return None
    rows, positions = [int(hidden) for hidden in padding], model_kwargs.get("position_ids")
    if positions is not None:
        for row, hidden in enumerate(rows):
            own = positions[row if len(positions) > 1 else 0, hidden:]
            if own.tolist() != list(range(mask.shape[1] - hidden)):
                return None
    return rows


def _by_row(processors: Any, criteria: Any, config: Any, input_ids: torch.Tensor) -> bool:
    """Whether each row becomes what it would become by itself, with the random numbers of its own."""
    kinds = {type(one) for one in criteria}
    ends = StopStringCriteria not in kinds or EosTokenCriteria in kinds  # else an ended row goes on beside the others
    return (
        all(type(one) in _BY_ROW for one in processors)
        and kinds <= {EosTokenCriteria, MaxLengthCriteria, StopStringCriteria}
        and ends
        and not (config.output_scores or config.output_logits or config.output_attentions)
        and (input_ids.device.type == "cpu" or not config.do_sample)
    )
