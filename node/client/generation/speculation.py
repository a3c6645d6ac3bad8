"""Drafts of one answer whose steps are under way side by side: sent before those before them are checked."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
import trio

from ...errors import PetalnodeError, reason_of, unwrapped
from ...swarm.cost import CHUNK_TOKENS
from ..request import WireTensor
from ..session.compared_session import Session
from ..session.pipeline import Pipeline
from ..session.prefixes import common_prefix
from ..session.session import ClientSession
from ..session.step import UNWATCHED_BYTES
from .draft_model import Ahead, DraftReader, HiddenReader, ModelDrafter
from .drafting import BY_MODEL, DRAFTING, REALIGNED, Draft, DraftPlan, LookupDrafter, PipelineSpeed
from .sampling import Token, TokenSampler

_log = logging.getLogger(__name__)

_EIGHT_TOKENS: Final = (8, 3.7)
"""Times as long as one of one token that a step of eight is taken to be before any was seen, as by the kernels."""


@dataclass
class Answering:
    """An answer that grows.

    Attributes:
        tokens: all of the conversation, the answer's last.
        limit: how many they may become.
        stop_tokens: end the answer, and are no part of it.
    """

    tokens: list[Token]
    limit: int
    sampler: TokenSampler
    on_token: Callable[[Token], object] = lambda token: None
    stop: trio.Event = field(default_factory=trio.Event)
    stop_tokens: frozenset[int] = frozenset()
    ended: bool = False

    @property
    def is_over(self) -> bool:
        return self._is_closed or self.sampler.is_over

    @property
    def _is_closed(self) -> bool:
        """Whether no token is taken any more."""
        return self.ended or self.stop.is_set() or len(self.tokens) >= self.limit

    def take(self, token: Token) -> None:
        """The token that was chosen comes next, if there is to be one."""
        if self._is_closed:
            return
        if token in self.stop_tokens:
            self.ended = True
            return
        self.tokens.append(token)
        self.on_token(token)

    async def check(self, token: int, rows: torch.Tensor, guesses: Sequence[int]) -> list[int]:
        """The next tokens, this one first: as many as were guessed right, and one more. They are taken as they are
        chosen, which may end the answer."""
        chosen: list[int] = []
        for row, guess in zip((*rows, None), (*guesses, None), strict=True):
            chosen.append(token)
            self.take(token)
            if row is None or token != guess or self.is_over:
                break
            # Of several tokens: not in the trio thread, as `is_inline` has it.
            token = await trio.to_thread.run_sync(self.sampler.next, self.tokens, row)
        return chosen


@dataclass(frozen=True)
class _SentStep:
    """A step under way: `line[start:end]`; `alone`: nothing else was under way when it was sent, at `sent`."""

    start: int
    end: int
    sent: float
    alone: bool


class DraftedText(Protocol):
    """A text in a session whose drafts are checked: what is computed here while `steps` others are under way, and how
    long the servers took."""

    async def embed(self, tokens: list[int], position: int, steps: int = 0) -> list[WireTensor]:
        """Tokens that stand behind `position` others, as the session sends them."""

    async def first(
        self, answer: Answering, hidden: list[WireTensor], count: int, steps: int = 0
    ) -> tuple[float, int, torch.Tensor]:
        """Seconds for the logits of the last `count` tokens, the token that the first ones choose, and the others."""

    def compute_seconds(self) -> Sequence[float]:
        """Of the last step, of each server."""


@dataclass
class Speculation:
    """Checks drafts in steps that are under way side by side, as long as there are any.

    Attributes:
        line: the tokens of the answer and those that are drafted behind them, in order.
        model: guesses what follows; None once it has failed.
    """

    answer: Answering
    pipeline: Pipeline
    plan: DraftPlan
    lookup: LookupDrafter
    text: DraftedText
    most_step_tokens: int
    model: ModelDrafter | None = None
    line: list[int] = field(default_factory=list)
    _sent: int = 0  # of `line`
    _asked: deque[_SentStep] = field(default_factory=deque)
    _draft: Draft = field(default_factory=Draft)  # where what is drafted in `line` was found
    _found: Draft = field(default_factory=Draft)  # that nobody is asked about, as the draft model guesses
    _checked: float = 0.0  # when
    _by_model: bool = False  # what is drafted in `line` are guesses of the draft model, which may go on
    _ahead: Ahead | None = None  # chooses its guesses, until one is wrong
    _longest: int = 0  # how far it guesses now
    _changing: trio.Lock = field(default_factory=trio.Lock)  # `line` is sent, or given up
    _progress: trio.Event = field(default_factory=trio.Event)

    async def run(self, draft: Draft) -> None:
        """Begins with this draft; returns when there is nothing to check, the answer is over, or nothing can be sent.

        Raises:
            SwarmError: servers failed, and no others hold their blocks.
        """
        tokens = self.answer.tokens
        self._draft = draft
        self.line, self._sent = [*tokens, *draft.tokens], len(tokens) - 1
        self._checked = trio.current_time()
        if self.model is None:
            await self._run()
            return
        self._ahead = self.model.ahead(len(tokens))
        self.line = list(tokens)
        self._draft_on()
        with unwrapped(PetalnodeError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._guess_on, self.model)
                await self._run()
                nursery.cancel_scope.cancel()

    async def _run(self) -> None:
        await self._send()
        while self._asked:
            self.answer.sampler.prepare(draw=False)
            hidden = await self.pipeline.answer()
            asked = self._asked.popleft()
            await self._check(asked, hidden)
            if self.answer.is_over:
                return
            self._draft_on()
            await self._send()
            self._progress.set()

    async def _guess_on(self, model: ModelDrafter) -> None:
        """Has the draft model guess behind `line`, as far as that pays."""
        held: list[int] | None = None  # what it has read; None: nobody knows
        while True:
            line, ahead = list(self.line), self._ahead
            tokens = len(self.answer.tokens)
            depth = self.plan.model_depth(self.answer.limit - tokens - 1)
            self._longest = min(tokens + depth, model.max_length)
            if not self._by_model or ahead is None or len(line) >= self._longest:
                progress = self._progress = trio.Event()
                await self._send()  # what was gathered for a larger step
                await progress.wait()
                continue
            begun = trio.current_time()
            try:
                guess = await trio.to_thread.run_sync(model.guess, line, ahead)
            except Exception as error:  # as memory that is full; the answer comes all the same
                _log.warning("the draft model guesses no more in this conversation: %s", reason_of(error))
                self.model = self._ahead = None
                return
            unread = len(line) - min(common_prefix(held or (), line), len(line) - 1)
            if guess is not None and held is not None:
                self.plan.note_guess(trio.current_time() - begun, unread)
            held = line if guess is not None else None
            if guess is None or ahead is not self._ahead or len(line) != len(self.line):
                continue
            self.line.append(guess)
            await self._send()

    async def _send(self) -> None:
        """Sends what was drafted and is not under way, as far as the servers take it now."""
        async with self._changing:
            while self._sent < len(self.line) and self.pipeline.may_ask and await self._send_step():
                pass

    async def _send_step(self) -> bool:
        """Sends the next step; returns whether one was sent. Guesses of a draft model are gathered for a while."""
        speed, unsent = self.plan.speed, len(self.line) - self._sent
        if not self._by_model and not self._asked and unsent == 1:
            return False  # no draft: a step like any other
        gathers = self._by_model and self._asked and len(self.line) < self._longest
        if gathers and unsent < self.plan.model_step():
            return False
        if self._asked and speed is not None and speed.sharing > 1:
            # Each step takes the servers' time from other answers, too: not for one token that is right after another.
            under_way = len(self.line) - len(self.answer.tokens)
            least = min(speed.step_tokens(under_way), self.most_step_tokens) // 2
            if unsent < least:
                return False
        size = min(self.plan.step_tokens(unsent), self.most_step_tokens)
        start, end = self._sent, self._sent + size
        drafted = end - max(start, len(self.answer.tokens))  # some of it may be answered before it is sent
        asked = _SentStep(start, end, trio.current_time(), not self._asked)
        self._sent = end
        self._asked.append(asked)
        (chunk,) = await self.text.embed(self.line[start:end], start, len(self._asked) - 1)
        if not await self.pipeline.ask(chunk, start):
            self._asked.pop()
            return False
        if drafted > 0:
            self.plan.counts = self.plan.counts.plus(drafted=drafted, steps=1)
        return True

    async def _check(self, asked: _SentStep, hidden: WireTensor) -> None:
        """Takes the tokens that follow from an answer; behind a wrong one, nothing that is under way is wanted."""
        answer, now, made = self.answer, trio.current_time(), len(self.answer.tokens)
        guesses = self.line[asked.start + 1 : asked.end]
        head, token, rows = await self.text.first(answer, [hidden], asked.end - asked.start, len(self._asked))
        chosen = await answer.check(token, rows, guesses)
        if self.model is not None:
            self.model.note(self.line[: asked.end], [hidden])
        stages, speed = self.text.compute_seconds(), self.plan.speed
        if speed is not None and stages:
            speed.note_work(asked.end - asked.start, stages, head)
            if asked.alone:
                speed.note_alone(asked.end - asked.start, now - asked.sent + head)
            gained = (len(answer.tokens) - made) * speed.alone - (trio.current_time() - self._checked)
            self.plan.counts = self.plan.counts.plus(gained=gained)
            # What is beyond the work for the drafted tokens is of the network, or of somebody else's.
            most_lost = 2 * (speed.work.of(asked.end - asked.start) - speed.work.of(1))
            self.plan.settle(len(answer.tokens) - made, max(gained, -most_lost), by_model=self._by_model)
        self._checked = trio.current_time()
        guessed = self.line[made : asked.end + 1]
        right = sum(1 for token, guess in zip(chosen, guessed, strict=False) if token == guess)
        # A guess may be right before it is sent.
        self.plan.counts = self.plan.counts.plus(drafted=max(0, made + right - self._sent))
        self._note(guessed, right)
        self._note_found(chosen)
        if right < len(chosen) and not answer.is_over:
            async with self._changing:
                self.pipeline.drop()
                if speed is not None and self._asked:
                    sent = [(step.end - step.start, step.sent) for step in (asked, *self._asked)]
                    vain = speed.note_vain(sent, trio.current_time())
                    self.plan.settle(0, -vain, by_model=self._by_model)
                self._asked.clear()
                self.line, self._sent = list(answer.tokens), len(answer.tokens) - 1
                self._ahead = self.model.ahead(len(answer.tokens)) if self.model is not None else None

    def _note(self, guessed: Sequence[int], right: int) -> None:
        """`right` of the drafted tokens were right; what was drafted goes on behind them, or behind the wrong one."""
        if self._by_model and guessed:
            self.plan.note_tokens(BY_MODEL, len(guessed), right)
        if self._by_model or not guessed:
            self._draft = Draft()
            return
        draft = self._draft
        self.plan.note_tokens(draft.match, len(guessed), right)
        match = draft.match + right if draft.match > REALIGNED else right
        place = draft.place + right
        if right < len(guessed):
            match, place = REALIGNED if match >= DRAFTING.long_match else 0, place + 1
        self._draft = Draft((), match, place)

    def _note_found(self, chosen: Sequence[int]) -> None:
        """Learns how good what was looked up would have been where the draft model has guessed."""
        found, self._found = self._found, Draft()
        if found.tokens and chosen:
            right = common_prefix(found.tokens, chosen)
            self.plan.note_seen(found.match, min(right + 1, len(chosen)), right)

    def _draft_on(self) -> None:
        """Drafts behind what is drafted already: what stands behind it there, else what is found anew, or is guessed by
        the draft model from now on."""
        tokens = self.answer.tokens
        under_way = len(self.line) - len(tokens)
        most = self.answer.limit - len(tokens) - 1
        if most <= under_way:
            return
        guesses = self.model is not None and self.plan.model_depth(most) > 0
        draft = self.plan.choose(self._drafts(bool(under_way), guesses), most)
        self.line += draft.tokens[under_way:]
        if draft.tokens:
            self._draft = draft
        self._by_model = not draft.tokens and (self._by_model if under_way else guesses)
        self._found = next(self.lookup.matches(tokens), Draft()) if self._by_model else Draft()

    def _drafts(self, goes_on: bool, guesses: bool) -> Iterator[Draft]:
        """`goes_on`: behind some that are not checked. `guesses`: only those that are better than a draft model's."""
        tokens, before = self.answer.tokens, self._draft
        if goes_on and self._by_model:
            said = tuple(self.line[len(tokens) :])
            found = [draft for draft in self.lookup.matches(tokens) if draft.tokens[: len(said)] == said]
            yield from (draft for draft in found if draft.match > DRAFTING.long_match and self.plan.beats_model(draft))
            return
        known = before.match and 0 < before.place < len(tokens)
        if known and (goes_on or before.match > REALIGNED):
            yield self.lookup.follow(tokens, before.place, before.match)
        if goes_on:
            return
        found = list(self.lookup.matches(tokens))
        long = [draft for draft in found if draft.match >= DRAFTING.long_match]
        realigned = [self.lookup.follow(tokens, before.place, REALIGNED)] if known and before.match == REALIGNED else []
        for draft in (*long, *realigned, *found[len(long) :]):
            if not guesses or self.plan.beats_model(draft):
                yield draft


@dataclass
class Drafter:
    """What guesses the tokens of a conversation.

    Attributes:
        plan: what drafts have brought so far, and whether they pay.
        reader: of a draft model.
        skipped: tokens at the beginning of the conversation that the draft model does not know.
    """

    plan: DraftPlan
    lookup: LookupDrafter
    reader: DraftReader | None = None
    skipped: int = 0

    def guess(self, tokens: list[int], most: int) -> Draft:
        """What may come next, up to `most` tokens; nothing where asking for it gains nothing."""
        return self.plan.choose(self.lookup.matches(tokens), most) if most > 0 else Draft()

    def model_guesses(self, answer: Answering) -> bool:
        """Whether the draft model is to guess on."""
        most = answer.limit - len(answer.tokens) - 1
        return self.reader is not None and self.plan.model_depth(most) > 0

    @property
    def reads(self) -> int:
        """Of how many last tokens of a prompt it is to be known what left the last block."""
        return self.reader.reads if isinstance(self.reader, HiddenReader) else 0

    def note_hidden(self, tokens: Sequence[Any], hidden: Sequence[WireTensor]) -> None:
        """The servers have answered for the last of `tokens`."""
        if isinstance(self.reader, HiddenReader):
            self.reader.note(tokens[self.skipped :], hidden)

    def note_speed(self, session: Session | None, tokens: int, head: float) -> None:
        """Learns how the servers' time grows with the tokens of a step; `head`: seconds of choosing a token of it."""
        plan = self.plan
        if not isinstance(session, ClientSession) or not session.spec.push:
            plan.speed = None
            return
        known = plan.speed is not None
        plan.speed = plan.speed or PipelineSpeed(sharing=plan.sharing)
        compute = [timing.compute for timing in session.timings]
        plan.speed.note_work(tokens, compute, head)
        if not known and tokens == 1:  # or each token of a first draft would seem to cost nothing
            more, times = _EIGHT_TOKENS
            plan.speed.note_work(more, [times * seconds for seconds in compute], times * head)

    def note_step(self, draft: Draft, accepted: int, seconds: float) -> None:
        """Learns from a step by itself."""
        self.plan.note(draft, accepted, seconds)
        if self.plan.speed is not None:
            self.plan.speed.note_alone(1 + len(draft.tokens), seconds)

    async def check(
        self,
        answer: Answering,
        draft: Draft,
        session: ClientSession,
        text: DraftedText,
    ) -> None:
        """Checks this draft and those that follow it, where possible in steps that are under way at once.

        The session, in which `text` is, may hold tokens behind the answer's then.

        Raises:
            SwarmError: servers failed, and no others hold their blocks.
        """
        session.position = len(answer.tokens) - 1
        (last,) = await text.embed(answer.tokens[-1:], session.position)
        async with session.pipeline() as pipeline:
            checking = Speculation(
                answer,
                pipeline,
                self.plan,
                self.lookup,
                text,
                # Which are never cut, and are sent without a look at whether the server reads.
                most_step_tokens=min(
                    session.max_step_tokens, CHUNK_TOKENS[0], max(1, UNWATCHED_BYTES // len(last.payload))
                ),
                model=ModelDrafter(self.reader, answer.sampler, self.skipped) if self.reader is not None else None,
            )
            await checking.run(draft)
            if checking.model is None:
                self.reader = None
