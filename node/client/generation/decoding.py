"""The loop over tokens of one answer: chat, the HTTP APIs, `generate` and probes have this one.

Rows of a batch that share a session go on together. A token is a tuple of theirs, and one message a step carries all. A
sampler chooses each token (`TokenSampler`); transformers' processors and criteria are one implementation of it. Which
thread embeds and chooses the tokens, `is_inline` decides: for prompts, single steps, rows and drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import trio

from ...blocks.client_part import ClientModel, SoftPrompt
from ...blocks.images.encoder import ImagePrompt
from ...blocks.images.layout import TEXT
from ..chunks import PIPELINE_TOKENS, from_chunks, to_chunks
from ..request import WireTensor
from ..session.compared_session import Session
from ..session.pipeline import Pipeline
from ..session.prefixes import common_prefix
from ..session.session import ClientSession
from ..session.stream import SessionSpec
from .drafting import Draft
from .sampling import Token, TokenSampler
from .speculation import Answering, Drafter

T = TypeVar("T")


def is_inline(tokens: int, *, short: bool, beside: int) -> bool:
    """Whether the trio thread computes the client's part of a step itself, without the two wakings of a worker thread.

    Args:
        tokens: how many are embedded or chosen, in all rows together.
        short: for one token, a worker thread would not be quicker.
        beside: other answers and other steps that are under way. The trio thread has to send and receive for them.
    """
    return short and tokens == 1 and beside == 0


async def computed(inline: bool, function: Callable[..., T], *args: Any) -> T:
    """What `function` returns, called here where `inline`, else in a worker thread."""
    return function(*args) if inline else await trio.to_thread.run_sync(function, *args)


@dataclass(frozen=True)
class Embedding:
    """How the tokens of one text, or of rows beside each other, enter the first block.

    Attributes:
        prompt: in the place of the first tokens.
        mask: [rows, tokens], 0 at those of the first tokens that are padding.
    """

    model: ClientModel
    prompt: SoftPrompt | ImagePrompt | None = None
    mask: torch.Tensor | None = None
    rows: int = 1

    @cached_property
    def padding(self) -> int:
        """Tokens at the beginning of each row that nobody sees."""
        return 0 if self.mask is None else int((self.mask == 0).sum(-1).min())

    @property
    def is_short(self) -> bool:
        """Whether one token takes so little that a worker thread would not be quicker."""
        return self.model.is_short and not isinstance(self.prompt, SoftPrompt)

    def chunks(self, tokens: list[Token], position: int, session: Session | SessionSpec) -> list[WireTensor]:
        """The hidden states of `tokens`, which stand behind `position` others, as the session sends them."""
        mask = self.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones((self.rows, position + len(tokens) - mask.shape[1]))], dim=1)
        # Tokens of pictures are below zero, and have their embeddings from the prompt.
        ids = torch.tensor(tokens).view(len(tokens), self.rows).T.contiguous().clamp(min=0)
        prompt = self.prompt
        with nullcontext() if prompt is None or position >= prompt.tokens else self.model.prompted(prompt):
            hidden = self.model.embed(ids, position, mask)
        layout = TEXT if prompt is None else prompt.layout(position, self.rows, len(tokens))
        if isinstance(session, SessionSpec):
            return to_chunks(hidden, session.codec, PIPELINE_TOKENS, layout)
        size = session.chunk_tokens(len(tokens), hidden.shape[2] * (1 + layout.blocks))
        return to_chunks(hidden, session.spec.codec, size, layout)


@dataclass(frozen=True)
class _Embedded:
    """A token that was just chosen, ready to be sent at this position."""

    position: int
    token: Token
    chunks: list[WireTensor]


@dataclass(frozen=True)
class _Early:
    """A token that was chosen before the receipt of the answer was checked that it `follows` from, in `seconds`."""

    follows: WireTensor
    token: Token
    seconds: float


@dataclass(eq=False)
class Decoding:
    """One text, or rows that go on together, in one session. One call at a time.

    Attributes:
        held: the tokens that the session holds.
        least: number of first tokens that are sent together or not at all, such as those of a soft prompt.
        answering: all answers that this trio thread makes now.
    """

    embedding: Embedding
    session: Session
    held: list[Token]
    drafter: Drafter | None = None
    least: int = 0
    answering: set[object] = field(default_factory=set)
    _embedded: _Embedded | None = None

    async def run(self, answer: Answering, begin: int, limit: int) -> None:
        """Extends `answer` until it is over, up to `limit` tokens; the first `begin` of them are the prompt.

        Raises:
            SwarmError: no chain of servers can serve.
            BadInput: the session was opened for fewer tokens.
        """
        self.answering.add(self)
        try:
            while self._goes_on(answer, limit):
                await self._extend(answer, begin)
        finally:
            self.answering.discard(self)

    def _goes_on(self, answer: Answering, limit: int) -> bool:
        """Whether there is a next token, before which the session gives up what it holds where transformers does."""
        tokens, session, model = len(answer.tokens), self.session, self.embedding.model
        limit = model.draft_limit(tokens, limit, self.embedding.padding)
        # No draft is longer than the session has room for, which says so at the token for which it has none.
        answer.limit = min(limit, max(session.spec.max_length, tokens) + 1)
        if answer.is_over:
            return False
        if model.refills(session.position, tokens):
            session.fit(tokens)
        return True

    async def _extend(self, answer: Answering, begin: int) -> None:
        """Takes the next token, or several by drafts. The first step, with the prompt, has none."""
        tokens, sampler, drafter = answer.tokens, answer.sampler, self.drafter
        made, draft = len(tokens), Draft()
        if drafter is not None:
            if made > begin:
                draft = drafter.guess(tokens, answer.limit - made - 1)
            if await self._check_side_by_side(drafter, answer, draft):
                return
        begun, sent = trio.current_time(), [*tokens, *draft.tokens]
        quick = self._is_inline(1 + len(draft.tokens))
        chunks = await self._unsent(sent, 1 + len(draft.tokens))
        early: _Early | None = None
        if isinstance(self.session, ClientSession) and len(chunks) == 1:
            async with self.session.under_way(chunks[0]) as pipeline:
                sampler.prepare(draw=quick)
                early = await self._choose_early(pipeline, answer) if quick else None
                hidden = [await pipeline.answer()]
            self.held = sent
        else:
            sampler.prepare(draw=False)
            reads = min(drafter.reads, sum(chunk.tokens for chunk in chunks)) if drafter is not None else 0
            hidden = await self._step(sent, chunks, max(1 + len(draft.tokens), reads))
        answered = trio.current_time()
        if drafter is not None:
            drafter.note_hidden(sent, hidden)
        if early is not None and early.follows.payload is hidden[-1].payload:
            answered -= early.seconds
            sampler.accept(early.token)
            answer.take(early.token)
        elif draft.tokens:
            _, token, rows = await self.first(answer, hidden, 1 + len(draft.tokens))
            await answer.check(token, rows, draft.tokens)
        else:
            token, self._embedded = await computed(self._is_inline(1, sampler), self._choose, answer, hidden)
            answer.take(token)
        if drafter is not None and not answer.is_over:
            now = trio.current_time()
            drafter.note_speed(self.session, hidden[-1].tokens, now - answered)
            if made > begin:
                drafter.note_step(draft, len(tokens) - made - 1, now - begun)

    async def _check_side_by_side(self, drafter: Drafter, answer: Answering, draft: Draft) -> bool:
        """Checks this draft and those that follow it, or a draft model's, in steps that are under way at once; false if
        there are none, or that cannot be."""
        session, tokens = self.session, answer.tokens
        if not draft.tokens and not drafter.model_guesses(answer):
            return False
        held = min(common_prefix(self.held, tokens), session.position)
        if drafter.plan.speed is None or not isinstance(session, ClientSession) or held < len(tokens) - 1:
            return False
        made = len(tokens)
        try:
            await drafter.check(answer, draft, session, self)
        finally:
            self.held = tokens[: min(session.position, len(tokens) - 1)]  # behind the last one, drafts may be held
        return len(tokens) > made

    def _is_inline(self, tokens: int, sampler: TokenSampler | None = None, steps: int = 0) -> bool:
        """As `is_inline`, for `tokens` of each row that `sampler` chooses, if any; `steps`: of this text, under way."""
        short = self.embedding.is_short and (sampler is None or sampler.is_ready)
        return is_inline(tokens * self.embedding.rows, short=short, beside=len(self.answering - {self}) + steps)

    async def advance(self, tokens: list[Token], outputs: int) -> list[WireTensor]:
        """Brings the session to hold all of `tokens`; returns chunks that end in the outputs of the last `outputs`."""
        return await self._step(tokens, await self._unsent(tokens, outputs), outputs)

    async def _unsent(self, tokens: list[Token], outputs: int) -> list[WireTensor]:
        """The hidden states of those of `tokens` that the session does not hold, and of the last `outputs` anyhow."""
        session = self.session
        # What is to be answered is sent, whether the servers hold it or not.
        start = min(common_prefix(self.held, tokens), len(tokens) - outputs, session.position)
        start = start if start >= self.least else 0
        session.position = start
        del self.held[start:]
        return await self.embed(tokens[start:], start)

    async def _step(self, tokens: list[Token], chunks: list[WireTensor], outputs: int) -> list[WireTensor]:
        """Sends what makes the session hold `tokens`."""
        session = self.session
        if isinstance(session, ClientSession):
            out = await session.step(chunks, outputs=outputs)
        else:
            out = await session.step(chunks)
        self.held = list(tokens)
        first, answered = len(out), 0
        while answered < outputs:
            first -= 1
            answered += out[first].tokens
        return out[first:]

    async def _choose_early(self, pipeline: Pipeline, answer: Answering) -> _Early | None:
        """The next token, chosen while the receipt of the answer that it follows from is checked; nothing is settled.
        None where no token could be chosen."""
        arrived, sampler, model = await pipeline.arrive(), answer.sampler, self.embedding.model
        if arrived is None or (hidden := arrived.chunk) is None or not sampler.is_ready:
            return None
        begun, token = trio.current_time(), sampler.only
        try:
            if token is None:
                normed = model.normed(from_chunks([hidden])[:, -1:])
                arrived.start_check()
                token = sampler.choose(answer.tokens, model.logits_of(normed)[0, 0])
        except Exception:  # who reads the answer for good meets it again and says what is wrong with it
            return None
        return _Early(hidden, token, trio.current_time() - begun)

    async def embed(self, tokens: list[Token], position: int, steps: int = 0) -> list[WireTensor]:
        """As `DraftedText.embed`."""
        ready, self._embedded = self._embedded, None
        if ready is not None and (ready.position, [ready.token]) == (position, tokens):
            return ready.chunks
        inline = self._is_inline(len(tokens), steps=steps)
        return await computed(inline, self.embedding.chunks, tokens, position, self.session)

    async def first(
        self, answer: Answering, hidden: list[WireTensor], count: int, steps: int = 0
    ) -> tuple[float, int, torch.Tensor]:
        """As `DraftedText.first`."""
        return await computed(self._is_inline(count, answer.sampler, steps), self._first, answer, hidden, count)

    def _first(self, answer: Answering, hidden: list[WireTensor], count: int) -> tuple[float, int, torch.Tensor]:
        begun = time.perf_counter()
        logits = self.embedding.model.head(from_chunks(hidden)[:, -count:])[0]
        return time.perf_counter() - begun, answer.sampler.next(answer.tokens, logits[0]), logits[1:]

    def compute_seconds(self) -> Sequence[float]:
        """As `DraftedText.compute_seconds`."""
        return [timing.compute for timing in self.session.timings] if isinstance(self.session, ClientSession) else []

    def _choose(self, answer: Answering, hidden: list[WireTensor]) -> tuple[Token, _Embedded | None]:
        """The next token, made ready to be sent as well, which saves another way to a worker thread and back."""
        logits = self.embedding.model.head(from_chunks(hidden)[:, -1:])[:, 0]
        token = answer.sampler.next(answer.tokens, logits.squeeze(0))
        if token in answer.stop_tokens or answer.is_over or len(answer.tokens) + 1 >= answer.limit:
            return token, None
        position = len(answer.tokens)
        return token, _Embedded(position, token, self.embedding.chunks([token], position, self.session))
