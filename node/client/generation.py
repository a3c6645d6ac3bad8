"""Token by token through the swarm, for programs that hold many conversations in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
import trio

from ...protocols.ids import Span
from ...protocols.tensors import dtype_name
from ..blocks.client_part import ClientModel
from ..errors import BadInput
from ..swarm.routing import Hop
from ..trust.receipt_log import SessionLog
from .chunks import PIPELINE_TOKENS, from_chunks, to_chunks
from .core import CODEC_OF, SwarmClient
from .deadlines import Waits
from .draft_model import DraftCache, DraftModel
from .drafting import Draft, DraftPlan, LookupDrafter
from .request import WireTensor
from .sampling import EarlyToken, Sampler, Sampling
from .session.chain import HistoryLost, Trouble
from .session.compared_session import Session
from .session.prefixes import common_prefix
from .session.session import ClientSession, SavedSession
from .session.stream import HopTiming, SessionSpec
from .session.trace import SessionTrace
from .session_adapter import SessionAdapter
from .speculation import Answering, Drafter

__all__ = ["KEEP_SECONDS", "Conversation", "Sampler", "Sampling"]

KEEP_SECONDS: Final = 60.0
"""How long servers keep the session of a kept conversation after its process is gone."""
_PIECE: Final = 64
"""Tokens whose logits are made at once: 12 MB for a vocabulary of 49,152."""


@dataclass(frozen=True)
class _Embedded:
    """A token that was just chosen, ready to be sent at this position of a session."""

    session: Session
    position: int
    token: int
    chunks: list[WireTensor]


class Conversation:
    """One person's tokens in the swarm: keeps a session from answer to answer and sends only what is new.

    One call at a time. Servers that fail are replaced by the session.

    Args:
        max_length: tokens that the conversation may reach; servers reserve as many.
        stop_tokens: ids that end an answer.
        soft_prompt: [virtual tokens, embedding size], which stands before all of it and counts beyond max_length.
        adapter: changes the blocks; by default the client's.
        drafts: whether to ask the servers about tokens that are guessed from the text, beside the next one, where that
            is quicker. The answer is the same.
        draft_model: guesses tokens, too, where the text does not; it has the tokenizer of the model.
        prefix_salt: only with conversations of the same one it shares what servers keep of its beginning.

    Attributes:
        reused: tokens of the last prompt that the servers held already.
        drafting: what drafts have brought so far.
    """

    def __init__(
        self,
        client: SwarmClient,
        model: ClientModel,
        *,
        max_length: int,
        stop_tokens: Sequence[int],
        soft_prompt: torch.Tensor | None = None,
        adapter: SessionAdapter | None = None,
        drafts: bool = False,
        draft_model: DraftModel | None = None,
        prefix_salt: bytes = b"",
    ) -> None:
        self.max_length = max_length
        self.drafting = DraftPlan()
        self._drafter: Drafter | None = None
        self._adapter = adapter
        self._soft_prompt = soft_prompt
        self._virtual = [] if soft_prompt is None else [model.any_token] * len(soft_prompt)
        if drafts or draft_model is not None:
            reader = DraftCache(draft_model, max_length) if draft_model is not None else None
            self._drafter = Drafter(self.drafting, LookupDrafter(), reader, len(self._virtual))
        self._client = client
        self._salt = prefix_salt
        self._model = model
        self._stop_tokens = frozenset(stop_tokens)
        self._stack = AsyncExitStack()
        self._session: Session | None = None
        self._held: list[int] = []
        self._saved: SavedSession | None = None
        self._keep = 0.0
        self._recovered = 0
        self._waited = Waits()
        self._embedded: _Embedded | None = None
        self.reused = 0

    def keep(self, tokens: Sequence[int], saved: SavedSession | None) -> None:
        """Makes the conversation outlive this process: servers keep its session for `KEEP_SECONDS` after it.

        `saved` is what an earlier process had, holding `tokens`: it is taken up if the servers still have it.
        """
        self._keep = KEEP_SECONDS
        self._held = list(tokens) if saved is not None else []
        self._saved = saved

    def take_over(self, session: Session, tokens: Sequence[int]) -> None:
        """Makes the answers in `session`, which somebody else has opened and will close; it holds `tokens`."""
        self._session, self._held = session, list(tokens)

    def state(self) -> tuple[list[int], SavedSession | None]:
        """What `keep` takes in the next process."""
        saved = None if self._session is None else self._session.saved()
        return (self._held, saved) if saved is not None else ([], None)

    @property
    def route(self) -> tuple[Hop, ...]:
        """The chain of the open session; empty before the first token."""
        return () if self._session is None else self._session.route

    @property
    def recoveries(self) -> int:
        """Servers that were replaced so far."""
        return self._recovered + (0 if self._session is None else self._session.recoveries)

    @property
    def waits(self) -> Waits:
        """What was waited for so far."""
        return Waits.of(self._waited, *([] if self._session is None else [self._session.waits]))

    @property
    def hops(self) -> tuple[tuple[HopTiming, int, int], ...]:
        """Of each server of the present chain: the time of its last step, and the tensor bytes that this client has
        sent to it and received from it so far."""
        if not isinstance(self._session, ClientSession):
            return ()
        pairs = zip(self._session.timings, self._session.traffic, strict=True)
        return tuple((timing, sent, received) for timing, (sent, received) in pairs)

    @property
    def logs(self) -> tuple[SessionLog, ...]:
        """The receipts of the servers of the present chain, in its order."""
        if not isinstance(self._session, ClientSession):
            return ()
        return tuple(log for link in self._session.links if (log := link.server.log) is not None)

    def shared_with(self, prompt: Sequence[int]) -> tuple[int, int]:
        """How many tokens the servers hold, and how many of them `prompt` begins with."""
        held = self._held[len(self._virtual) :]
        return len(held), common_prefix(held, prompt)

    @property
    def compared_routes(self) -> tuple[tuple[Hop, ...], ...]:
        """The chains whose outputs are compared; empty if there is only one."""
        return () if self._session is None or isinstance(self._session, ClientSession) else self._session.routes

    @property
    def trace(self) -> SessionTrace | None:
        """Of the open session, if the client makes traces."""
        return None if self._session is None else self._session.spec.trace

    @property
    def codec(self) -> str:
        """How the hidden states of the open session travel, by the name that a person gives it."""
        wire_name = "none" if self._session is None else self._session.spec.codec
        return next(name for name, codec in CODEC_OF.items() if codec == wire_name)

    @property
    def is_open(self) -> bool:
        """Whether servers hold a session of it."""
        return self._session is not None

    @property
    def trouble(self) -> Trouble | None:
        """What the answer that is under way is held up by; None while all is well."""
        return self._session.trouble if isinstance(self._session, ClientSession) else None

    async def aclose(self) -> None:
        """Gives the servers their cache back, or leaves it there if the conversation is kept."""
        self._recovered = self.recoveries
        self._waited = self.waits
        self._session = None
        self._held = []
        await self._stack.aclose()

    async def answer(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], object],
        stop: trio.Event | None = None,
        sampler: Sampler | None = None,
    ) -> list[int]:
        """Continues `prompt` (the whole conversation so far) and returns the new tokens, the stop token left out.

        `on_token` is called with each as it comes; `stop`, once set, ends the answer after the token that is being
        made. What the session holds of the prompt already is not sent again. `sampler` chooses in the place of the
        one that `sampling` says.

        Raises:
            BadInput: the prompt is empty or does not fit into max_length.
            SwarmError: no chain of servers can serve.
        """
        self._check(prompt)
        self._client.answering.add(self)
        try:
            return await self._answer(
                prompt, sampling, on_token, trio.Event() if stop is None else stop, sampler or Sampler(sampling)
            )
        finally:
            self._client.answering.discard(self)

    async def _answer(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], object],
        stop: trio.Event,
        sampler: Sampler,
    ) -> list[int]:
        tokens = [*self._virtual, *prompt]
        begin = len(tokens)
        session = await self._open(tokens)
        session.fit(begin)
        self.reused = max(0, min(common_prefix(self._held, tokens), session.position) - len(self._virtual))
        limit = min(self.max_length + len(self._virtual), begin + sampling.max_new_tokens)
        answer, drafter = Answering(tokens, limit, sampler, on_token, stop, self._stop_tokens), self._drafter
        while self._goes_on(answer, limit):
            draft = Draft()
            if drafter is not None and len(tokens) > begin:
                draft = drafter.guess(tokens, answer.limit - len(tokens) - 1)
            guesses = drafter is not None and (bool(draft.tokens) or drafter.model_guesses(answer))
            if drafter is not None and guesses and await self._check_side_by_side(drafter, answer, draft):
                continue
            begun, made = trio.current_time(), len(tokens)
            early = EarlyToken(self._model, sampler, tokens) if not draft.tokens and self._is_quick else None
            waiting = partial(sampler.prepare, draw=early is not None)
            asked = [*tokens, *draft.tokens]
            hidden = await self._advance(asked, outputs=1 + len(draft.tokens), waiting=waiting, early=early)
            answered = trio.current_time()
            if early is not None and early.answer is hidden[-1]:
                answered -= early.seconds
                answer.take(early.accept())
            elif draft.tokens:
                await answer.check(partial(self._logits, hidden, 1 + len(draft.tokens)), draft.tokens)
            else:
                token, self._embedded = await trio.to_thread.run_sync(self._choose, answer, hidden)
                answer.take(token)
            if drafter is not None and not answer.is_over:
                now = trio.current_time()
                drafter.note_speed(self._session, hidden[-1].tokens, now - answered)
                if made > begin:
                    drafter.note_step(draft, len(tokens) - made - 1, now - begun)
        return tokens[begin:]

    def _goes_on(self, answer: Answering, limit: int) -> bool:
        """Whether there is a next token, before which the session gives up what it holds where transformers does."""
        tokens, session = len(answer.tokens), self._session
        answer.limit = self._model.draft_limit(tokens, limit)
        if answer.is_over:
            return False
        if session is not None and self._model.refills(session.position, tokens):
            session.fit(tokens)
        return True

    async def _check_side_by_side(self, drafter: Drafter, answer: Answering, draft: Draft) -> bool:
        """Checks this draft and those that follow it in steps that are under way at once; false if that cannot be."""
        session, tokens = self._session, answer.tokens
        held = min(common_prefix(self._held, tokens), 0 if session is None else session.position)
        if drafter.plan.speed is None or not isinstance(session, ClientSession) or held < len(tokens) - 1:
            return False
        made = len(tokens)
        embed = partial(self._embed, session=session)
        try:
            await drafter.check(answer, draft, session, embed, self._model.head)
        finally:
            self._held = tokens[: min(session.position, len(tokens) - 1)]  # behind the last one, drafts may be held
        return len(tokens) > made

    @property
    def _is_quick(self) -> bool:
        """Whether one token is embedded and chosen on the trio thread: that takes less than waking another one twice,
        and nobody else's answer waits for it."""
        return self._model.is_short and self._soft_prompt is None and len(self._client.answering) == 1

    async def score(
        self, prompt: Sequence[int], on_logits: Callable[[int, torch.Tensor], object], *, hidden: bool = False
    ) -> None:
        """Runs all of `prompt` anew, and calls `on_logits(first, logits)` for pieces of it, in a worker thread.

        `logits` [tokens, vocabulary] are those behind the tokens from `first` on, 0 being that of the prompt; with
        `hidden` it is what enters the head, [tokens, hidden size]. The session holds the prompt afterwards.

        Raises:
            BadInput: the prompt is empty or does not fit into max_length.
            SwarmError: no chain of servers can serve.
        """
        self._check(prompt)
        tokens = [*self._virtual, *prompt]
        out = from_chunks(await self._advance(tokens, outputs=len(tokens)))[:, len(self._virtual) :]
        for first in range(0, len(prompt), _PIECE):
            piece = out[:, first : first + _PIECE]
            await trio.to_thread.run_sync(self._hand_on, first, piece, on_logits, hidden)

    def _hand_on(
        self, first: int, piece: torch.Tensor, on_logits: Callable[[int, torch.Tensor], object], hidden: bool
    ) -> None:
        with self._model.last_hidden_state() as last:
            logits = self._model.head(piece)
        on_logits(first, last[0][0] if hidden else logits[0])

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise BadInput("there is nothing to answer: the prompt is empty")
        if len(prompt) + 1 > self.max_length:
            raise BadInput(f"the prompt has {len(prompt)} tokens, and {self.max_length} is the most with an answer")

    async def _advance(
        self,
        tokens: list[int],
        *,
        outputs: int,
        waiting: Callable[[], None] = lambda: None,
        early: EarlyToken | None = None,
    ) -> list[WireTensor]:
        """Brings the session to hold all of `tokens`; returns chunks that end in the outputs of the last `outputs`.

        `waiting` is called before the answer is waited for, and computes something short meanwhile.
        """
        try:
            return await self._send(tokens, outputs, waiting, early)
        except HistoryLost:
            # Taken up from an earlier process, whose inputs are gone: the tokens make them again.
            await self.aclose()
            self._recovered += 1
            return await self._send(tokens, outputs, waiting, early)

    async def _send(
        self, tokens: list[int], outputs: int, waiting: Callable[[], None], early: EarlyToken | None
    ) -> list[WireTensor]:
        session = await self._open(tokens[: len(tokens) - outputs + 1])
        # What is to be answered is sent, whether the servers hold it or not.
        start = min(common_prefix(self._held, tokens), len(tokens) - outputs, session.position)
        start = start if start >= len(self._virtual) else 0
        session.position = start
        del self._held[start:]
        ready, self._embedded = self._embedded, None
        if ready is not None and (ready.session, ready.position, [ready.token]) == (session, start, tokens[start:]):
            chunks = ready.chunks
        elif len(tokens) == start + 1 and self._is_quick:
            chunks = self._embed(tokens[start:], start, session)
        else:
            chunks = await trio.to_thread.run_sync(self._embed, tokens[start:], start, session)
        if isinstance(session, ClientSession) and len(chunks) == 1:
            out = await session.step(chunks, waiting=waiting, early=early)
        elif isinstance(session, ClientSession):
            waiting()
            out = await session.step(chunks, outputs=outputs)
        else:
            waiting()
            out = await session.step(chunks)
        self._held = list(tokens)
        first, answered = len(out), 0
        while answered < outputs:
            first -= 1
            answered += out[first].tokens
        return out[first:]

    async def _open(self, tokens: list[int]) -> Session:
        """The session; a new one begins with what servers have kept of these tokens but the last."""
        if self._session is None:
            spec = SessionSpec(
                model_version=self._client.model.version,
                span=Span(0, self._client.model.num_blocks),
                batch=1,
                max_length=self.max_length + len(self._virtual),
                dtype=dtype_name(self._model.dtype),
                keep=self._keep,
                adapter=self._adapter,
                share=True,
                prefix_salt=self._salt,
            )
            saved, self._saved = self._saved, None
            spec = replace(spec, codec=await self._client.chosen_codec(spec, saved))
            prompt = [] if saved is not None else await trio.to_thread.run_sync(self._embed, tokens, 0, spec)
            opened = self._client.session(spec, saved=saved, prompt=prompt)
            self._session = await self._stack.enter_async_context(opened)
            self._held = self._held if saved is not None else tokens[: self._session.position]
        return self._session

    def _embed(self, tokens: list[int], position: int, session: Session | SessionSpec) -> list[WireTensor]:
        prompted = nullcontext() if self._soft_prompt is None else self._model.prompted(self._soft_prompt)
        with prompted:
            hidden = self._model.embed(torch.tensor([tokens]), position)
        if isinstance(session, SessionSpec):
            return to_chunks(hidden, session.codec, PIPELINE_TOKENS)
        return to_chunks(hidden, session.spec.codec, session.chunk_tokens(*hidden.shape[1:]))

    def _logits(self, hidden: list[WireTensor], count: int) -> torch.Tensor:
        """Those of the last `count` tokens, [count, vocabulary]."""
        return self._model.head(from_chunks(hidden)[:, -count:])[0]

    def _choose(self, answer: Answering, hidden: list[WireTensor]) -> tuple[int, _Embedded | None]:
        """The next token, made ready to be sent as well, which saves another way to a worker thread and back."""
        token = answer.sampler.next(answer.tokens, self._logits(hidden, 1)[0])
        session, position = self._session, len(answer.tokens)
        if session is None or token in self._stop_tokens:
            return token, None
        return token, _Embedded(session, position, token, self._embed([token], position, session))
