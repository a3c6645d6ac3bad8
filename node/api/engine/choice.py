"""One choice of a request: a conversation that is lent, its tokens as they come, what it waits for, what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import trio

from ...client.chat import Text, TextStream
from ...client.generation.conversation import Conversation
from ...client.generation.sampling import Sampler, Sampling
from ...errors import NoChainError
from ...trust.receipt_file import AnswerTokens, SignedReply
from ...trust.receipt_log import SessionLog
from .conversations import CacheScope, Conversations
from .generation import (
    AnswerProgress,
    ApiLimits,
    ApiTallies,
    ChosenToken,
    Event,
    Finished,
    GenerationRequest,
    HopReport,
    TextPiece,
    WaitingFor,
)
from .grammar import AnyConstraint, Grammars


@dataclass(frozen=True)
class ProgressTimes:
    """How often a client that waits is told what its answer waits for."""

    look_seconds: float = 0.1
    every_seconds: float = 0.5
    silence: float = 1.5
    """Seconds without a word from a server, after which that is told."""


PROGRESS: Final = ProgressTimes()


def waiting_of(conversation: Conversation, now: float) -> WaitingFor | None:
    """What the step is held up by, if that is worth telling at `now` (seconds of trio's clock)."""
    interruption = conversation.interruption
    if interruption is None or not (interruption.lost or now - interruption.since > PROGRESS.silence):
        return None
    blocks = (interruption.hop.span.start, interruption.hop.span.end)
    return WaitingFor(interruption.hop.peer_id, blocks, interruption.lost, interruption.reason, interruption.waits)


def is_news(told: AnswerProgress | None, now: AnswerProgress, since: float) -> bool:
    """Whether `now` is to be told, `since` seconds after `told`: at once that a server is missed or was replaced, the
    milliseconds of hops every now and then."""
    if not now.hops and now.waiting is None:
        return False
    if told is None or (told.waiting, told.recoveries) != (now.waiting, now.recoveries) or route(told) != route(now):
        return True
    return since >= PROGRESS.every_seconds and told.tokens != now.tokens


def route(progress: AnswerProgress) -> list[tuple[str, tuple[int, int]]]:
    return [(hop.peer_id, hop.blocks) for hop in progress.hops]


def traffic_of(conversation: Conversation) -> dict[str, tuple[int, int]]:
    """Tensor bytes to and from each server so far."""
    return {timing.peer_id: (sent, received) for timing, sent, received in conversation.hops}


def hops_of(conversation: Conversation, before: Mapping[str, tuple[int, int]]) -> tuple[HopReport, ...]:
    """The servers of its chain; bytes beyond those `before`."""
    reports = []
    for hop, (timing, sent, received) in zip(conversation.route, conversation.hops, strict=False):
        old_sent, old_received = before.get(timing.peer_id, (0, 0))
        traffic = max(0, sent - old_sent), max(0, received - old_received)
        blocks = hop.span.start, hop.span.end
        reports.append(HopReport(hop.peer_id, blocks, round(timing.total * 1000, 3), *traffic))
    return tuple(reports)


def progress_fields(progress: AnswerProgress) -> dict[str, Any]:
    """`x_petalnode` of a chunk in the middle of an answer."""
    return {
        "progress": {
            "index": progress.choice,
            "tokens": progress.tokens,
            "recoveries": progress.recoveries,
            "waiting": None if progress.waiting is None else asdict(progress.waiting),
            "hops": [hop.fields() for hop in progress.hops],
        }
    }


class StopStrings:
    """Lets text through up to the first of some strings. The beginning of what may be one is held back.

    Attributes:
        found: the string that was met; None so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What of the text so far can be shown, and was not shown before."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places, key=lambda found: found[0])
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back, when no more comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, but is not."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


_BEFORE: Final = 6
"""Tokens of a prompt by which the first word of a completion is spaced."""


class _LikelihoodSampler(Sampler):
    """A sampler that notes how likely the model found what was chosen, before anything changed its logits."""

    def __init__(
        self, sampling: Sampling, constraint: AnyConstraint | None, top: int | None, nursery: trio.Nursery
    ) -> None:
        super().__init__(sampling, constraint, nursery)
        self._top = top
        self._chosen: ChosenToken | None = None
        self.last: ChosenToken | None = None

    @property
    def only(self) -> int | None:
        """Where likelihoods are asked for, the logits have to come by here."""
        return super().only if self._top is None else None

    def choose(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        token = super().choose(tokens, logits)
        if self._top is not None:
            self._chosen = _likelihoods(logits[None], [token], self._top)[0]
        return token

    def accept(self, token: int) -> None:
        super().accept(token)
        self.last = self._chosen


def _likelihoods(logits: torch.Tensor, chosen: Sequence[int], top: int) -> list[ChosenToken]:
    """For each row of logits [tokens, vocabulary], how likely the chosen token is, and the likeliest ones."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(-1, torch.tensor(chosen, device=scores.device)[:, None])[:, 0].tolist()
    if not top:
        return [ChosenToken(token, value) for token, value in zip(chosen, own, strict=True)]
    best = scores.topk(min(top, scores.shape[-1]), dim=-1)
    rows = zip(chosen, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [ChosenToken(token, value, tuple(zip(ids, values, strict=True))) for token, value, ids, values in rows]


@dataclass(frozen=True)
class AnswerParts:
    """What answers of one model share.

    Attributes:
        context: tokens of a prompt and its answer.
        tallies: where answers are counted.
        is_covered: whether the servers that are known hold every block together.
    """

    text: Text
    grammars: Grammars
    conversations: Conversations
    limits: ApiLimits
    context: int
    is_covered: Callable[[], bool]
    tallies: ApiTallies


class Choice:
    """One choice of a request.

    Attributes:
        begun: set with its first token: servers have its prompt then.
    """

    def __init__(
        self,
        parts: AnswerParts,
        wanted: GenerationRequest,
        index: int,
        send: trio.MemorySendChannel[Event],
        nursery: trio.Nursery,
    ) -> None:
        self._parts = parts
        self._nursery = nursery
        self._wanted = wanted
        self._index = index
        self._prompt = wanted.prompts[index]
        self._send = send
        self._stop = trio.Event()
        self.begun = trio.Event()
        self._stops = StopStrings(wanted.stop)
        self._made = 0
        self._begun = trio.current_time()
        self._logs: list[tuple[SessionLog, int]] = []
        self._decoder: TextStream | None = None

    async def run(self) -> None:
        self._begun = trio.current_time()
        wanted, parts = self._wanted, self._parts
        asked = wanted.max_tokens if wanted.max_tokens is not None else parts.limits.answer_tokens
        needed = min(parts.context, len(self._prompt) + max(1, asked))
        scope = CacheScope(wanted.owner, wanted.model.name, wanted.options)
        async with parts.conversations.lent(scope, self._prompt, needed, parts.context) as conversation:
            with self._telling(conversation):
                try:
                    await self._answer(conversation, asked)
                except NoChainError as error:
                    reserve = parts.conversations.idle or conversation.max_length > needed
                    if self._made or error.gone or not reserve or not parts.is_covered():
                        raise
                    # Servers may have too little room: ours that nobody uses goes first, then what is only in reserve.
                    await parts.conversations.drop_idle()
                    await conversation.aclose()
                    conversation.max_length = needed
                    await self._answer(conversation, asked)
            if wanted.echo:
                await conversation.aclose()  # its prompt was scored, and is hardly scored again

    async def _answer(self, conversation: Conversation, asked: int) -> None:
        wanted, prompt = self._wanted, self._prompt
        before = conversation.recoveries
        traffic, drafts = traffic_of(conversation), conversation.drafting.counts
        self._logs = [(log, _newest(log)) for log in conversation.logs]
        if wanted.echo:
            await self._echo(conversation)
        tokens = list(prompt)
        cached = 0
        if asked:
            seed = wanted.sampling.seed
            sampling = replace(
                wanted.sampling,
                max_new_tokens=min(asked, conversation.max_length - len(prompt)),
                seed=None if seed is None else seed + self._index,
            )
            constraint = await trio.to_thread.run_sync(self._constraint)
            recorder = _LikelihoodSampler(sampling, constraint, wanted.top_logprobs, self._nursery)
            taking = partial(self._take, conversation, recorder, constraint)
            before_answer = prompt[-_BEFORE:] if wanted.continues else ()
            self._decoder = self._parts.text.stream(before_answer, special=wanted.shows_special)
            tokens += await conversation.answer(prompt, sampling, taking, self._stop, recorder, wanted.pictures)
            cached = 0 if wanted.echo else min(conversation.reused, len(prompt) - 1)  # one is always sent
            if held_back := self._stops.end():
                self._send.send_nowait(TextPiece(self._index, held_back))
            full = len(tokens) - len(prompt) >= sampling.max_new_tokens
        reason = "length" if not asked or (full and not self._stop.is_set()) else "stop"
        length, tallies = len(tokens) - len(prompt), self._parts.tallies
        tallies.answers[reason] += 1
        tallies.tokens.update(prompt=len(prompt) - cached, cached=cached, completion=length)
        end = Finished(
            self._index,
            reason,
            len(prompt),
            length,
            cached,
            conversation.recoveries - before,
            hops_of(conversation, traffic),
            self._receipts(conversation, tokens),
            self._stops.found,
            conversation.compared_routes,
            conversation.drafting.counts - drafts,
        )
        if tallies.on_answer is not None:
            tallies.on_answer(wanted.model.name, end, conversation.trace)
        self._send.send_nowait(end)

    @contextmanager
    def _telling(self, conversation: Conversation) -> Iterator[None]:
        """Tells of the choice's progress for the length of the block, if that is wanted."""
        if not self._wanted.progress:
            yield
            return
        scope = trio.CancelScope()
        self._nursery.start_soon(self._tell, conversation, scope)
        try:
            yield
        finally:
            scope.cancel()

    async def _tell(self, conversation: Conversation, scope: trio.CancelScope) -> None:
        """Sends what is news until `scope` is cancelled. Of a reader that is behind, no more than one stands in the
        channel."""
        recoveries, traffic = conversation.recoveries, traffic_of(conversation)
        told, since = None, 0.0
        with scope:
            while True:
                await trio.sleep(PROGRESS.look_seconds)
                since += PROGRESS.look_seconds
                now = self._progress(conversation, recoveries, traffic)
                if is_news(told, now, since) and not self._send.statistics().current_buffer_used:
                    self._send.send_nowait(now)
                    told, since = now, 0.0

    def _progress(self, conversation: Conversation, before: int, traffic: dict[str, tuple[int, int]]) -> AnswerProgress:
        """How far it is; `before` and `traffic` were the recoveries and bytes when it began."""
        waiting = waiting_of(conversation, trio.current_time())
        recoveries = conversation.recoveries - before
        return AnswerProgress(self._index, self._made, recoveries, hops_of(conversation, traffic), waiting)

    def _note_servers(self, conversation: Conversation) -> None:
        """Those that came into the chain, while they are in it."""
        for log in conversation.logs:
            if not any(log is known for known, _ in self._logs):
                self._logs.append((log, 0))

    def _receipts(self, conversation: Conversation, tokens: Sequence[int]) -> tuple[SignedReply, ...]:
        """Those of the answer whose tokens these are, with the prompt's."""
        self._note_servers(conversation)
        wanted = self._wanted
        plain = wanted.pictures is None and wanted.model.adapter is None  # else more than tokens enters the blocks
        answer = AnswerTokens(tuple(tokens), len(self._prompt)) if plain else None
        return tuple(
            SignedReply(log.peer_id, entry.receipt, entry.step, entry.asked, answer)
            for log, before in self._logs
            for entry in log.entries
            if entry.receipt.sequence > before
        )

    def _constraint(self) -> AnyConstraint | None:
        grammars, grammar, mark = self._parts.grammars, self._wanted.grammar, self._wanted.bound_after
        if grammar is None:
            return None
        return grammars.constraint_after(mark, grammar) if mark else grammars.constraint(grammar)

    def _take(
        self, conversation: Conversation, recorder: _LikelihoodSampler, constraint: AnyConstraint | None, token: int
    ) -> None:
        if not self._made:
            self._parts.tallies.first_token.add(trio.current_time() - self._begun)
            self.begun.set()
        self._made += 1
        self._note_servers(conversation)
        assert self._decoder is not None
        text = self._stops.feed(self._decoder.add(token))
        self._send.send_nowait(TextPiece(self._index, text, (recorder.last or ChosenToken(token, None),)))
        if self._stops.found is not None or (constraint is not None and constraint.done):
            self._stop.set()

    async def _echo(self, conversation: Conversation) -> None:
        """Sends the prompt, with log-probabilities if they are asked for."""
        prompt, top = self._prompt, self._wanted.top_logprobs
        chosen = [ChosenToken(prompt[0], None)]

        if top is not None:
            async with aclosing(conversation.score(prompt)) as scored:
                async for first, logits in scored:
                    await trio.to_thread.run_sync(_note_likelihoods, chosen, prompt, top, first, logits)
        else:
            chosen = [ChosenToken(token, None) for token in prompt]
        self._made += 1
        text = await trio.to_thread.run_sync(self._parts.text.decode, prompt)
        self._send.send_nowait(TextPiece(self._index, text, tuple(chosen)))


def _note_likelihoods(
    chosen: list[ChosenToken], prompt: Sequence[int], top: int, first: int, logits: torch.Tensor
) -> None:
    """Appends to `chosen` how likely the tokens behind `first` were."""
    following = prompt[first + 1 : first + 1 + len(logits)]
    chosen.extend(_likelihoods(logits[: len(following)], following, top))


def _newest(log: SessionLog) -> int:
    """The sequence number of its last receipt; 0 if there is none."""
    return log.entries[-1].receipt.sequence if log.entries else 0
