"""One person's text in the swarm, from answer to answer, for programs that hold many in one process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

import torch
import trio

from ....protocols.ids import TEXT_NEEDS, Span
from ....protocols.tensors import dtype_name
from ...blocks.client_part import ClientModel, SoftPrompt
from ...blocks.images.encoder import ImagePrompt
from ...errors import BadInput
from ...swarm.routing import Hop
from ...trust.receipt_log import SessionLog
from ..chunks import from_chunks
from ..core import CODEC_OF, SwarmClient
from ..deadlines import Waits
from ..session.chain import HistoryLost, Interruption
from ..session.compared_session import Session
from ..session.prefixes import common_prefix
from ..session.session import ClientSession, SavedSession
from ..session.stream import HopTiming, SessionSpec
from ..session.trace import SessionTrace
from ..session_adapter import SessionAdapter
from .decoding import Decoding, Embedding
from .draft_model import DraftCache, DraftModel
from .drafting import DraftPlan, LookupDrafter
from .mtp_head import mtp_reader
from .sampling import Sampler, Sampling
from .speculation import Answering, Drafter

__all__ = ["KEEP_SECONDS", "Conversation", "Sampler", "Sampling"]

KEEP_SECONDS: Final = 60.0
"""How long servers keep the session of a kept conversation after its process is gone."""
_PIECE: Final = 64
"""Tokens whose logits are made at once: 12 MB for a vocabulary of 49,152."""


class Conversation:
    """One person's tokens in the swarm: keeps a session from answer to answer and sends only what is new.

    One call at a time. Servers that fail are replaced by the session.

    Args:
        max_length: tokens that the conversation may reach; servers reserve as many.
        stop_tokens: ids that end an answer.
        soft_prompt: [virtual tokens, embedding size], which stands before all of it and counts beyond max_length.
        adapter: changes the blocks; by default the client's.
        drafts: whether to ask about tokens that are guessed from the text, beside the next one, where that is quicker.
            The answer is the same. Where the text gives none, the model's MTP head guesses (`mtp_head`), or the given
            draft model, which has the same tokenizer.

    Attributes:
        prefix_salt: only with conversations of the same one it shares what servers keep of its beginning.
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
        drafts: DraftModel | bool = False,
    ) -> None:
        self.max_length = max_length
        self.drafting = DraftPlan()
        self._drafter: Drafter | None = None
        self._adapter = adapter
        self._embedding = Embedding(model, None if soft_prompt is None else SoftPrompt(soft_prompt))
        self._virtual = [] if soft_prompt is None else [model.any_token] * len(soft_prompt)
        self._drafts = drafts
        if drafts:
            reader = None if drafts is True else DraftCache(drafts, max_length)
            self._drafter = Drafter(self.drafting, LookupDrafter(), reader, len(self._virtual))
        self._client = client
        self.prefix_salt = b""
        self._model = model
        self._stop_tokens = frozenset(stop_tokens)
        self._stack = AsyncExitStack()
        self._decoding: Decoding | None = None
        self._kept: list[int] = []  # by the session of an earlier process
        self._saved: SavedSession | None = None
        self._keep = 0.0
        self._recovered = 0
        self._waited = Waits()
        self.reused = 0

    async def lengthen(self, max_length: int) -> None:
        """Lets the conversation reach `max_length` tokens. Its session is given up: the next answer opens one for as
        many. Servers that have kept its beginning need not compute that again."""
        self.max_length = max_length
        self._saved = None
        await self.aclose()

    def keep(self, tokens: Sequence[int], saved: SavedSession | None) -> None:
        """Makes the conversation outlive this process: servers keep its session for `KEEP_SECONDS` after it.

        `saved` is what an earlier process had, holding `tokens`: it is taken up if the servers still have it.
        """
        self._keep = KEEP_SECONDS
        self._kept = list(tokens) if saved is not None else []
        self._saved = saved

    @property
    def _session(self) -> Session | None:
        return None if self._decoding is None else self._decoding.session

    @property
    def _held(self) -> list[int]:
        """The tokens that the servers hold."""
        return self._kept if self._decoding is None else self._decoding.held

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
        """Of each server of the present chain: the time of its last step, and the tensor bytes sent to it and received
        from it so far."""
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
    def interruption(self) -> Interruption | None:
        """What the answer that is under way is held up by; None while all is well."""
        return self._session.interruption if isinstance(self._session, ClientSession) else None

    async def aclose(self) -> None:
        """Gives the servers their cache back, or leaves it there if the conversation is kept."""
        self._recovered = self.recoveries
        self._waited = self.waits
        self._decoding = None
        self._kept = []
        await self._stack.aclose()

    async def answer(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], object],
        stop: trio.Event | None = None,
        sampler: Sampler | None = None,
        pictures: ImagePrompt | None = None,
    ) -> list[int]:
        """Continues `prompt` (the whole conversation so far) and returns the new tokens, the stop token left out.

        `on_token` is called with each as it comes; `stop`, once set, ends the answer after the token that is being
        made. What the session holds of the prompt already is not sent again. `sampler` chooses in the place of the
        one that `sampling` says. `pictures` are in the prompt, whose tokens are then those of `PicturePrompts`; such an
        answer takes no drafts.

        Raises:
            BadInput: the prompt is empty or does not fit into max_length.
            SwarmError: no chain of servers can serve.
        """
        self._check(prompt)
        await self._see(pictures)
        tokens = [*self._virtual, *prompt]
        begin = len(tokens)
        limit = min(self.max_length + len(self._virtual), begin + sampling.max_new_tokens)
        stop = trio.Event() if stop is None else stop
        answer = Answering(tokens, limit, sampler or Sampler(sampling), on_token, stop, self._stop_tokens)
        await self._answer(begin, answer)
        return answer.tokens[begin:]

    async def _see(self, pictures: ImagePrompt | None) -> None:
        """What is sent from now on has these pictures in it, or none."""
        if pictures is not None and self._virtual:
            raise BadInput("pictures cannot be combined with a soft prompt: leave out one of them")
        if not self._virtual:
            self._embedding = Embedding(self._model, pictures)
        if self._decoding is not None:
            if pictures is not None and not self._decoding.session.spec.layout.cover(pictures.needs):
                await self.aclose()  # its servers need not know so much
                return
            self._decoding.embedding = self._embedding
            self._decoding.drafter = self._drafter if pictures is None else None

    async def _answer(self, begin: int, answer: Answering) -> None:
        limit = answer.limit
        while True:
            decoding = await self._open(answer.tokens)
            decoding.session.fit(begin)
            if len(answer.tokens) == begin:
                held = min(common_prefix(decoding.held, answer.tokens), decoding.session.position)
                self.reused = max(0, held - len(self._virtual))
            try:
                await decoding.run(answer, begin, limit)
                return
            except HistoryLost:
                await self._begin_anew()

    async def _begin_anew(self) -> None:
        """Taken up from an earlier process, whose inputs are gone: the tokens make them again."""
        await self.aclose()
        self._recovered += 1

    async def score(
        self, prompt: Sequence[int], *, hidden: bool = False
    ) -> AsyncGenerator[tuple[int, torch.Tensor], None]:
        """Runs all of `prompt` anew, and gives (first, logits) for pieces of it.

        `logits` [tokens, vocabulary] are those behind the tokens from `first` on, 0 being that of the prompt; with
        `hidden` it is what enters the head, [tokens, hidden size]. The session holds the prompt afterwards.

        Raises:
            BadInput: the prompt is empty or does not fit into max_length.
            SwarmError: no chain of servers can serve.
        """
        self._check(prompt)
        await self._see(None)
        tokens = [*self._virtual, *prompt]
        try:
            answered = await (await self._open(tokens[:1])).advance(tokens, len(tokens))
        except HistoryLost:
            await self._begin_anew()
            answered = await (await self._open(tokens[:1])).advance(tokens, len(tokens))
        out = from_chunks(answered)[:, len(self._virtual) :]
        for first in range(0, len(prompt), _PIECE):
            piece = out[:, first : first + _PIECE]
            yield first, await trio.to_thread.run_sync(self._scored, piece, hidden)

    def _scored(self, piece: torch.Tensor, hidden: bool) -> torch.Tensor:
        with self._model.last_hidden_state() as last:
            logits = self._model.head(piece)
        return last[0][0] if hidden else logits[0]

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise BadInput("there is nothing to answer: the prompt is empty")
        if len(prompt) + 1 > self.max_length:
            raise BadInput(f"the prompt has {len(prompt)} tokens, and {self.max_length} is the most with an answer")

    async def _open(self, tokens: list[int]) -> Decoding:
        """The session; a new one begins with what servers have kept of these tokens but the last."""
        if self._decoding is not None and not self._decoding.session.route:
            await self.aclose()  # all chains that were compared are lost
        if self._decoding is None:
            prompted = self._embedding.prompt
            pictures = prompted if isinstance(prompted, ImagePrompt) else None
            spec = SessionSpec(
                model_version=self._client.model.version,
                span=Span(0, self._client.model.num_blocks),
                batch=1,
                max_length=self.max_length + len(self._virtual),
                dtype=dtype_name(self._model.dtype),
                keep=self._keep,
                adapter=self._adapter,
                share=True,
                prefix_salt=self.prefix_salt,
                layout=TEXT_NEEDS if pictures is None else pictures.needs,
            )
            saved, self._saved = self._saved, None
            spec = replace(spec, codec=await self._client.chosen_codec(spec, saved))
            if self._drafter is not None and self._drafts is True:
                self._drafter.reader = await trio.to_thread.run_sync(mtp_reader, self._model, self.max_length)
            embed = self._embedding.chunks
            prompt = [] if saved is not None else await trio.to_thread.run_sync(embed, tokens, 0, spec)
            opened = self._client.session(spec, saved=saved, prompt=prompt)
            session = await self._stack.enter_async_context(opened)
            held = self._kept if saved is not None else tokens[: session.position]
            answering, virtual = self._client.state.answering, len(self._virtual)
            drafter = self._drafter if pictures is None else None
            self._decoding = Decoding(self._embedding, session, held, drafter, virtual, answering)
        return self._decoding
