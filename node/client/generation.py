"""Token by token through the swarm, for programs that hold many conversations in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
import trio
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from ...protocols.ids import Span
from ...protocols.tensors import dtype_name
from ..blocks.client_part import ClientModel
from ..errors import BadInput
from ..swarm.routing import Hop
from .chunks import from_chunks, to_chunks
from .core import SwarmClient
from .deadlines import Waits
from .request import WireTensor
from .session.chain import HistoryLost, Trouble
from .session.compared_session import Session
from .session.session import ClientSession, SavedSession
from .session.stream import SessionSpec

KEEP_SECONDS: Final = 60.0
"""How long servers keep the session of a kept conversation after its process is gone."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; `seed` makes sampling repeatable."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadInput(f"{self.max_new_tokens} new tokens are none: ask for 1 or more")
        if not 0 <= self.temperature < 100:
            raise BadInput(f"a temperature of {self.temperature} is out of range: 0 is greedy, 0.7 is usual")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"a top-p of {self.top_p} is out of range: above 0, at most 1")


class Sampler:
    """Chooses tokens from logits with transformers' own processors."""

    def __init__(self, sampling: Sampling) -> None:
        self._greedy = sampling.temperature == 0
        self._processors = LogitsProcessorList()
        if not self._greedy:
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
        self._generator = torch.Generator()
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        else:
            self._generator.seed()

    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """The token after `tokens`, from logits [vocabulary]."""
        if self._greedy:
            return int(logits.argmax())
        scores = self._processors(torch.tensor([tokens]), logits.float().cpu().unsqueeze(0))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


class Conversation:
    """One person's tokens in the swarm: keeps a session from answer to answer and sends only what is new.

    One call at a time. Servers that fail are replaced by the session.

    Args:
        max_length: tokens that the conversation may reach; servers reserve as many.
        stop_tokens: ids that end an answer.
        soft_prompt: [virtual tokens, embedding size], which stands before all of it and counts beyond max_length.

    Attributes:
        reused: tokens of the last prompt that the servers held already.
    """

    def __init__(
        self,
        client: SwarmClient,
        model: ClientModel,
        *,
        max_length: int,
        stop_tokens: Sequence[int],
        soft_prompt: torch.Tensor | None = None,
    ) -> None:
        self.max_length = max_length
        self._soft_prompt = soft_prompt
        self._virtual = [] if soft_prompt is None else [model.any_token] * len(soft_prompt)
        self._client = client
        self._model = model
        self._stop_tokens = frozenset(stop_tokens)
        self._stack = AsyncExitStack()
        self._session: Session | None = None
        self._held: list[int] = []
        self._saved: SavedSession | None = None
        self._keep = 0.0
        self._recovered = 0
        self._waited = Waits()
        self.reused = 0

    def keep(self, tokens: Sequence[int], saved: SavedSession | None) -> None:
        """Makes the conversation outlive this process: servers keep its session for `KEEP_SECONDS` after it.

        `saved` is what an earlier process had, holding `tokens`: it is taken up if the servers still have it.
        """
        self._keep = KEEP_SECONDS
        self._held = list(tokens) if saved is not None else []
        self._saved = saved

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
    def compared_routes(self) -> tuple[tuple[Hop, ...], ...]:
        """The chains whose outputs are compared; empty if there is only one."""
        return () if self._session is None or isinstance(self._session, ClientSession) else self._session.routes

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
    ) -> list[int]:
        """Continues `prompt` (the whole conversation so far) and returns the new tokens, the stop token left out.

        `on_token` is called with each as it comes; `stop`, once set, ends the answer after the token that is being
        made. What the session holds of the prompt already is not sent again.

        Raises:
            BadInput: the prompt is empty or does not fit into max_length.
            SwarmError: no chain of servers can serve.
        """
        if not prompt:
            raise BadInput("there is nothing to answer: the prompt is empty")
        if len(prompt) + 1 > self.max_length:
            raise BadInput(f"the prompt has {len(prompt)} tokens, and {self.max_length} is the most with an answer")
        sampler = Sampler(sampling)
        tokens = [*self._virtual, *prompt]
        begin = len(tokens)
        session = await self._open()
        self.reused = max(0, min(_common_prefix(self._held, tokens), session.position) - len(self._virtual))
        limit = min(self.max_length + len(self._virtual), begin + sampling.max_new_tokens)
        while len(tokens) < limit and not (stop is not None and stop.is_set()):
            hidden = await self._advance(tokens)
            token = await trio.to_thread.run_sync(self._choose, sampler, tokens, hidden)
            if token in self._stop_tokens:
                break
            tokens.append(token)
            on_token(token)
        return tokens[begin:]

    async def _advance(self, tokens: list[int]) -> list[WireTensor]:
        """Brings the session to hold all of `tokens`; returns the last output."""
        try:
            return await self._send(tokens)
        except HistoryLost:
            # Taken up from an earlier process, whose inputs are gone: the tokens make them again.
            await self.aclose()
            self._recovered += 1
            return await self._send(tokens)

    async def _send(self, tokens: list[int]) -> list[WireTensor]:
        session = await self._open()
        # At least one token is sent, because its output is what the next one is chosen from.
        start = min(_common_prefix(self._held, tokens), len(tokens) - 1, session.position)
        start = start if start >= len(self._virtual) else 0
        session.position = start
        del self._held[start:]
        chunks = await trio.to_thread.run_sync(self._embed, tokens[start:], start, session)
        out = await session.step(chunks)
        self._held = list(tokens)
        return out[-1:]

    async def _open(self) -> Session:
        if self._session is None:
            spec = SessionSpec(
                model_version=self._client.model.version,
                span=Span(0, self._client.model.num_blocks),
                batch=1,
                max_length=self.max_length + len(self._virtual),
                dtype=dtype_name(self._model.dtype),
                keep=self._keep,
            )
            saved, self._saved = self._saved, None
            opened = self._client.session(spec, saved=saved)
            self._session = await self._stack.enter_async_context(opened)
        return self._session

    def _embed(self, tokens: list[int], position: int, session: Session) -> list[WireTensor]:
        prompted = nullcontext() if self._soft_prompt is None else self._model.prompted(self._soft_prompt)
        with prompted:
            hidden = self._model.embed(torch.tensor([tokens]), position)
        return to_chunks(hidden, session.spec.codec, session.max_step_tokens)

    def _choose(self, sampler: Sampler, tokens: list[int], hidden: list[WireTensor]) -> int:
        last = from_chunks(hidden)[:, -1:]
        return sampler.next(tokens, self._model.head(last)[0, -1])


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
