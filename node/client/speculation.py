"""Drafts of one answer whose steps are under way side by side: sent before those before them are checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain as one_behind_the_other
from typing import Final

import torch
import trio

from .chunks import from_chunks
from .drafting import REALIGNED, Draft, DraftPlan, LookupDrafter
from .request import WireTensor
from .sampling import Sampler
from .session.flight import Flight

_LONG: Final = 4
"""From so many tokens on, a match says more than that the text went on as before behind a wrong token."""


@dataclass
class Answering:
    """An answer that grows.

    Attributes:
        tokens: all of the conversation, the answer's last.
        limit: how many they may become.
        stop_tokens: end the answer, and are no part of it.
    """

    tokens: list[int]
    limit: int
    sampler: Sampler
    on_token: Callable[[int], object]
    stop: trio.Event
    stop_tokens: frozenset[int]
    ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.ended or self.stop.is_set() or len(self.tokens) >= self.limit

    def take(self, token: int) -> None:
        """The token that was chosen comes next, unless the answer is over."""
        if self.is_over:
            return
        if token in self.stop_tokens:
            self.ended = True
            return
        self.tokens.append(token)
        self.on_token(token)

    def choose(self, logits: torch.Tensor, guesses: Sequence[int]) -> list[int]:
        """The next tokens, from logits [1 + guesses, vocabulary]: as many as were guessed right, and one more."""
        chosen: list[int] = []
        for row, guess in zip(logits, (*guesses, None), strict=True):
            chosen.append(self.sampler.next([*self.tokens, *chosen], row))
            if chosen[-1] != guess or chosen[-1] in self.stop_tokens:
                break
        return chosen


@dataclass(frozen=True)
class _Asked:
    """A step under way: `line[start:end]`; `alone`: nothing else was under way when it was sent, at `sent`."""

    start: int
    end: int
    sent: float
    alone: bool


@dataclass
class Speculation:
    """Checks drafts in steps that are under way side by side, as long as there are any.

    Attributes:
        line: the tokens of the answer and those that are drafted behind them, in order.
        held: the tokens that the session held after the last answer.
    """

    answer: Answering
    flight: Flight
    plan: DraftPlan
    lookup: LookupDrafter
    embed: Callable[[list[int], int], Awaitable[WireTensor]]
    head: Callable[[torch.Tensor], torch.Tensor]
    compute_seconds: Callable[[], Sequence[float]]
    most_step_tokens: int
    line: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    _sent: int = 0  # of `line`
    _asked: deque[_Asked] = field(default_factory=deque)
    _draft: Draft = field(default_factory=Draft)  # where what is drafted in `line` was found
    _checked: float = 0.0  # when

    async def run(self, draft: Draft) -> None:
        """Begins with this draft; returns when there is nothing to check, the answer is over, or nothing can be sent.

        Raises:
            SwarmError: servers failed, and no others hold their blocks.
        """
        tokens = self.answer.tokens
        self.held = tokens[:-1]
        self._draft = draft
        self.line, self._sent = [*tokens, *draft.tokens], len(tokens) - 1
        self._checked = trio.current_time()
        await self._send()
        while self._asked:
            hidden = await self.flight.answer()
            asked = self._asked.popleft()
            self.held = self.line[: asked.end]
            await self._check(asked, hidden)
            if self.answer.is_over:
                return
            self._draft_on()
            await self._send()

    async def _send(self) -> None:
        """Sends what was drafted and is not under way, as far as the servers take it now."""
        while self._sent < len(self.line) and self.flight.may_ask:
            size = min(self.plan.step_tokens(len(self.line) - self._sent), self.most_step_tokens)
            start, end = self._sent, self._sent + size
            if end - start == 1 and not self._asked and end == len(self.line):
                return  # no draft: a step like any other
            asked = _Asked(start, end, trio.current_time(), not self._asked)
            self._sent = end
            self._asked.append(asked)
            if not await self.flight.ask(await self.embed(self.line[start:end], start), start):
                self._asked.pop()
                return
            drafted = end - max(start, len(self.answer.tokens))
            if drafted > 0:
                self.plan.counts = self.plan.counts.plus(drafted=drafted, steps=1)

    async def _check(self, asked: _Asked, hidden: WireTensor) -> None:
        """Takes the tokens that follow from an answer; behind a wrong one, nothing that is under way is wanted."""
        answer, now = self.answer, trio.current_time()
        guesses = self.line[asked.start + 1 : asked.end]
        chosen = await trio.to_thread.run_sync(self._choose, hidden, guesses)
        made = len(answer.tokens)
        for token in chosen:
            answer.take(token)
        seconds = trio.current_time() - self._checked
        stages = self.compute_seconds()
        head = trio.current_time() - now
        speed = self.plan.speed
        if speed is not None and stages:
            speed.note_work(asked.end - asked.start, stages, head)
            if asked.alone:
                speed.note_alone(asked.end - asked.start, trio.current_time() - asked.sent)
            gained = (len(answer.tokens) - made) * speed.alone - seconds
            self.plan.counts = self.plan.counts.plus(gained=gained)
        self._checked = trio.current_time()
        guessed = self.line[made : asked.end + 1]
        right = sum(1 for token, guess in zip(chosen, guessed, strict=False) if token == guess)
        self._note(guessed, right)
        if right < len(chosen) and not answer.is_over:
            self.flight.drop()
            self._asked.clear()
            self.line, self._sent = list(answer.tokens), len(answer.tokens) - 1

    def _choose(self, hidden: WireTensor, guesses: Sequence[int]) -> list[int]:
        return self.answer.choose(self.head(from_chunks([hidden]))[0], guesses)

    def _note(self, guessed: Sequence[int], right: int) -> None:
        """So many of the drafted tokens were right; what was drafted goes on behind them, or behind the wrong one."""
        if not guessed:
            self._draft = Draft()
            return
        draft = self._draft
        self.plan.note_tokens(draft.match, len(guessed), right)
        match = draft.match + right if draft.match > REALIGNED else right
        place = draft.place + right
        if right < len(guessed):
            match, place = REALIGNED if match >= _LONG else 0, place + 1
        self._draft = Draft((), match, place)

    def _draft_on(self) -> None:
        """Drafts behind what is drafted already: what stands behind it there, else what is found anew."""
        tokens = self.answer.tokens
        under_way = len(self.line) - len(tokens)
        most = self.answer.limit - len(tokens) - 1
        if most <= under_way:
            return
        draft = self.plan.choose(self._drafts(bool(under_way)), most)
        self.line += draft.tokens[under_way:]
        if draft.tokens:
            self._draft = draft

    def _drafts(self, goes_on: bool) -> Iterator[Draft]:
        tokens, before = self.answer.tokens, self._draft
        known = before.match and 0 < before.place < len(tokens)
        if known and (goes_on or before.match > REALIGNED):
            yield self.lookup.follow(tokens, before.place, before.match)
        if goes_on:
            return
        found = list(self.lookup.matches(tokens))
        long = [draft for draft in found if draft.match >= _LONG]
        realigned = [self.lookup.follow(tokens, before.place, REALIGNED)] if known and before.match == REALIGNED else []
        yield from one_behind_the_other(long, realigned, found[len(long) :])
