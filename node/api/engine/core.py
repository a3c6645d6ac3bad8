"""Answers, whatever endpoint asks: each choice in a session of its own, token by token, as events on a channel."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import trio

from ...blocks.client_part import ClientModel
from ...client.chat import Text
from ...client.core import SwarmClient
from ...client.generation import Conversation
from ...client.sampling import Sampler, Sampling
from ...client.session_adapter import SessionAdapter, named
from ...errors import BadInput, NoChainError
from ...models.adapter import Adapter
from ...trust.receipt_file import AnswerReceipts, SignedReply
from ...trust.receipt_log import SessionLog
from ..errors import ApiError, api_error
from .conversations import CacheScope, Conversations
from .generation import (
    ApiLimits,
    ChosenToken,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    HopReport,
    Piece,
    ServedModel,
)
from .grammar import AnyConstraint, Grammars
from .stops import StopStrings

log = logging.getLogger(__name__)

_BEFORE: Final = 6
"""Tokens of a prompt by which the first word of a completion is spaced."""


class Core:
    """Answers with one model and its adapters. Raises BadInput for an adapter of another version of the model.

    Attributes:
        text: tokenizer and chat template.
        grammars: of the forms that answers can be bound to.
        models: by their ids; the first is the base model.
        receipts: of the last answers.
    """

    def __init__(
        self, client: SwarmClient, local: ClientModel, text: Text, models: Sequence[ServedModel], limits: ApiLimits
    ) -> None:
        for model in models:
            if isinstance(model.adapter, Adapter):
                model.adapter.check_model(client.model.version, client.model.name)
        self.client = client
        self.text = text
        self.models = {model.name: model for model in models}
        self.limits = limits
        self.vocabulary = int(local.model.get_output_embeddings().weight.shape[0])
        self.grammars = Grammars(text.tokenizer, self.vocabulary, text.stop_tokens)
        self._local = local
        self._answers = trio.CapacityLimiter(limits.answers)
        self._adapters: dict[str, SessionAdapter | None] = {}
        self.receipts = AnswerReceipts()
        self.conversations = Conversations(self._conversation, limits.kept, limits.kept_seconds)

    @property
    def base(self) -> ServedModel:
        return next(iter(self.models.values()))

    def model(self, name: str) -> ServedModel:
        """The model of this id; the base model for an empty one. Raises ApiError."""
        found = self.models.get(name) if name else self.base
        if found is None:
            known = ", ".join(self.models)
            raise ApiError(
                404, f"there is no model {name[:200]!r} here; there are: {known}", param="model", code="model_not_found"
            )
        return found

    @property
    def is_covered(self) -> bool:
        """Whether the servers that are known hold every block together."""
        held = {block for server in self.client.servers() for block in range(server.span.start, server.span.end)}
        return len(held) >= self.client.model.num_blocks

    def context(self, model: ServedModel) -> int:
        """Tokens that a prompt and its answer may have together."""
        soft = model.adapter.soft_prompt if isinstance(model.adapter, Adapter) else None
        most = self._local.max_positions or self.limits.context
        return min(self.limits.context, most - (0 if soft is None else len(soft)))

    async def check(self, wanted: GenerationRequest) -> None:
        """What can be refused before anything is asked of the swarm.

        Raises:
            ApiError: tokens that the model does not know, or more than its context.
            NoChainError: no server holds the adapter.
        """
        context = self.context(wanted.model)
        for prompt in wanted.prompts:
            if not prompt:
                raise ApiError(400, "the prompt is empty", code="invalid_value")
            if max(prompt) >= self.vocabulary:
                raise ApiError(
                    400, f"the model has no token {max(prompt)}: its ids end at {self.vocabulary - 1}", param="prompt"
                )
            least = 1 if wanted.max_tokens is None else max(1, wanted.max_tokens)
            if len(prompt) + least > context:
                raise ApiError(
                    400,
                    f"the context has {context} tokens, but {len(prompt)} in the prompt and {least} in the answer are "
                    "asked for: shorten the prompt, or ask for fewer",
                    code="context_length_exceeded",
                )
        self._check_logprobs(wanted)
        await self._session_adapter(wanted.model)

    def _check_logprobs(self, wanted: GenerationRequest) -> None:
        if wanted.top_logprobs is None:
            return
        most = self.limits.answer_tokens if wanted.max_tokens is None else wanted.max_tokens
        tokens = sum((len(prompt) if wanted.echo else 0) + most for prompt in wanted.prompts)
        if tokens * (1 + wanted.top_logprobs) > self.limits.logprobs:
            raise ApiError(
                400,
                f"these are more than {self.limits.logprobs:,} log-probabilities: ask for fewer tokens, answers or "
                "alternatives at once",
                param="logprobs",
                code="invalid_value",
            )

    async def _session_adapter(self, model: ServedModel) -> SessionAdapter | None:
        """What changes the blocks of sessions of this model. Raises NoChainError."""
        if isinstance(model.adapter, Adapter):
            if model.name not in self._adapters:
                self._adapters[model.name] = SessionAdapter.of(model.adapter) if model.adapter.hash else None
        elif model.adapter is not None:
            found = named(model.adapter, self.client.servers())
            if found is None:
                await self.client.refresh()
                found = named(model.adapter, self.client.servers())
            if found is None:
                raise NoChainError(
                    f"no server holds the adapter {model.adapter}", tuple(range(self.client.model.num_blocks))
                )
            self._adapters[model.name] = found
        return self._adapters.get(model.name)

    def _conversation(self, name: str, length: int) -> Conversation:
        model = self.models[name]
        return Conversation(
            self.client,
            self._local,
            max_length=length,
            stop_tokens=self.text.stop_tokens,
            soft_prompt=model.adapter.soft_prompt if isinstance(model.adapter, Adapter) else None,
            adapter=self._adapters.get(name),
        )

    @asynccontextmanager
    async def answering(self, wanted: GenerationRequest) -> AsyncIterator[trio.MemoryReceiveChannel[Event]]:
        """Answers in the background of the block; the channel ends after every choice has, or the first has failed.

        Leaving the block ends what is left, and gives the servers their caches back.
        """
        await self.check(wanted)
        room = sum(len(prompt) for prompt in wanted.prompts) if wanted.echo else 0
        most = wanted.max_tokens if wanted.max_tokens is not None else self.limits.answer_tokens
        # Bounded by what the answers can have, so no choice waits for who reads.
        send, receive = trio.open_memory_channel[Event](room + len(wanted.prompts) * (most + 3))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer_all, wanted, send)
            yield receive
            nursery.cancel_scope.cancel()

    async def _answer_all(self, wanted: GenerationRequest, send: trio.MemorySendChannel[Event]) -> None:
        async def answer(index: int) -> None:
            try:
                async with self._answers:
                    await _Choice(self, wanted, index, send).run()
            except Exception as error:
                failed = api_error(error)
                if failed.code == "internal_error":
                    log.exception("an answer has failed in a way that nobody expected")
                send.send_nowait(Failed(failed))
                nursery.cancel_scope.cancel()

        with send:
            async with trio.open_nursery() as nursery:
                for index in range(len(wanted.prompts)):
                    nursery.start_soon(answer, index)

    async def hidden_states(self, owner: str, model: ServedModel, prompt: Sequence[int]) -> torch.Tensor:
        """What enters the head, float32 [tokens, hidden size]."""
        found: list[torch.Tensor] = []
        needed = len(prompt) + 1
        async with (
            self._answers,
            self.conversations.lent(CacheScope(owner, model.name), prompt, needed, needed) as conversation,
        ):
            await conversation.score(prompt, lambda _, hidden: found.append(hidden.float().cpu()), hidden=True)
            await conversation.aclose()  # nothing goes on with it
        return torch.cat(found)


class _Recorder(Sampler):
    """A sampler that notes how likely the model found what was chosen, before anything changed its logits."""

    def __init__(self, sampling: Sampling, constraint: AnyConstraint | None, top: int | None) -> None:
        super().__init__(sampling, constraint)
        self._top = top
        self.last: ChosenToken | None = None

    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        token = super().next(tokens, logits)
        self.last = ChosenToken(token, None) if self._top is None else _likelihoods(logits[None], [token], self._top)[0]
        return token


def _likelihoods(logits: torch.Tensor, chosen: Sequence[int], top: int) -> list[ChosenToken]:
    """For each row of logits [tokens, vocabulary], how likely the chosen token is, and the likeliest ones."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(-1, torch.tensor(chosen, device=scores.device)[:, None])[:, 0].tolist()
    if not top:
        return [ChosenToken(token, value) for token, value in zip(chosen, own, strict=True)]
    best = scores.topk(min(top, scores.shape[-1]), dim=-1)
    rows = zip(chosen, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [ChosenToken(token, value, tuple(zip(ids, values, strict=True))) for token, value, ids, values in rows]


class _Choice:
    """One choice of a request."""

    def __init__(self, core: Core, wanted: GenerationRequest, index: int, send: trio.MemorySendChannel[Event]) -> None:
        self._core = core
        self._wanted = wanted
        self._index = index
        self._prompt = wanted.prompts[index]
        self._send = send
        self._stop = trio.Event()
        self._stops = StopStrings(wanted.stop)
        self._made = 0
        self._logs: list[tuple[SessionLog, int]] = []

    async def run(self) -> None:
        wanted, core = self._wanted, self._core
        context = core.context(wanted.model)
        asked = wanted.max_tokens if wanted.max_tokens is not None else core.limits.answer_tokens
        needed = min(context, len(self._prompt) + max(1, asked))
        scope = CacheScope(wanted.owner, wanted.model.name)
        async with core.conversations.lent(scope, self._prompt, needed, context) as conversation:
            try:
                await self._answer(conversation, asked)
            except NoChainError:
                reserve = core.conversations.idle or conversation.max_length > needed
                if self._made or not reserve or not core.is_covered:
                    raise
                # Servers may have too little room: ours that nobody uses goes first, then what is only in reserve.
                await core.conversations.drop_idle()
                await conversation.aclose()
                conversation.max_length = needed
                await self._answer(conversation, asked)
            if wanted.echo:
                await conversation.aclose()  # its prompt was scored, and is hardly scored again

    async def _answer(self, conversation: Conversation, asked: int) -> None:
        wanted, prompt = self._wanted, self._prompt
        before = conversation.recoveries
        traffic = {timing.peer_id: (sent, received) for timing, sent, received in conversation.hops}
        self._logs = [(log, _newest(log)) for log in conversation.logs]
        if wanted.echo:
            await self._echo(conversation)
        length = 0
        cached = 0
        if asked:
            seed = wanted.sampling.seed
            sampling = replace(
                wanted.sampling,
                max_new_tokens=min(asked, conversation.max_length - len(prompt)),
                seed=None if seed is None else seed + self._index,
            )
            constraint = await trio.to_thread.run_sync(self._constraint)
            recorder = _Recorder(sampling, constraint, wanted.top_logprobs)
            taking = self._taking(conversation, recorder, constraint)
            length = len(await conversation.answer(prompt, sampling, taking, self._stop, recorder))
            cached = 0 if wanted.echo else min(conversation.reused, len(prompt) - 1)  # one is always sent
            if held_back := self._stops.end():
                self._send.send_nowait(Piece(self._index, held_back))
            full = length >= sampling.max_new_tokens
        reason = "length" if not asked or (full and not self._stop.is_set()) else "stop"
        self._send.send_nowait(
            Finished(
                self._index,
                reason,
                len(prompt),
                length,
                cached,
                conversation.recoveries - before,
                _hops(conversation, traffic),
                self._receipts(conversation),
                self._stops.found,
            )
        )

    def _note_servers(self, conversation: Conversation) -> None:
        """Those that came into the chain, while they are in it."""
        for log in conversation.logs:
            if not any(log is known for known, _ in self._logs):
                self._logs.append((log, 0))

    def _receipts(self, conversation: Conversation) -> tuple[SignedReply, ...]:
        self._note_servers(conversation)
        return tuple(
            SignedReply(log.peer_id, entry.receipt)
            for log, before in self._logs
            for entry in log.entries
            if entry.receipt.sequence > before
        )

    def _constraint(self) -> AnyConstraint | None:
        grammars, grammar, mark = self._core.grammars, self._wanted.grammar, self._wanted.bound_after
        if grammar is None:
            return None
        return grammars.constraint_after(mark, grammar) if mark else grammars.constraint(grammar)

    def _taking(
        self,
        conversation: Conversation,
        recorder: _Recorder,
        constraint: AnyConstraint | None,
    ) -> Any:
        pieces: list[str] = []
        before = self._prompt[-_BEFORE:] if self._wanted.continues else ()
        decode = self._core.text.stream(pieces.append, before, special=self._wanted.shows_special)

        def take(token: int) -> None:
            self._made += 1
            self._note_servers(conversation)
            decode(token)
            text = self._stops.feed("".join(pieces))
            pieces.clear()
            assert recorder.last is not None
            self._send.send_nowait(Piece(self._index, text, (recorder.last,)))
            if self._stops.found is not None or (constraint is not None and constraint.done):
                self._stop.set()

        return take

    async def _echo(self, conversation: Conversation) -> None:
        """Sends the prompt, with log-probabilities if they are asked for."""
        prompt, top = self._prompt, self._wanted.top_logprobs
        chosen = [ChosenToken(prompt[0], None)]

        def note(first: int, logits: torch.Tensor) -> None:
            following = prompt[first + 1 : first + 1 + len(logits)]
            chosen.extend(_likelihoods(logits[: len(following)], following, top or 0))

        if top is not None:
            await conversation.score(prompt, note)
        else:
            chosen = [ChosenToken(token, None) for token in prompt]
        self._made += 1
        text = await trio.to_thread.run_sync(self._core.text.decode, prompt)
        self._send.send_nowait(Piece(self._index, text, tuple(chosen)))


def _newest(log: SessionLog) -> int:
    """The sequence number of its last receipt; 0 if there is none."""
    return log.entries[-1].receipt.sequence if log.entries else 0


def _hops(conversation: Conversation, before: dict[str, tuple[int, int]]) -> tuple[HopReport, ...]:
    reports = []
    for hop, (timing, sent, received) in zip(conversation.route, conversation.hops, strict=False):
        old_sent, old_received = before.get(timing.peer_id, (0, 0))
        reports.append(
            HopReport(
                hop.peer_id,
                (hop.span.start, hop.span.end),
                round(timing.total * 1000, 3),
                max(0, sent - old_sent),
                max(0, received - old_received),
            )
        )
    return tuple(reports)


def check_adapters(models: Sequence[ServedModel]) -> None:
    """
    Raises:
        BadInput: two models of one name.
    """
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise BadInput(f"two models of the API would have one name: {', '.join(names)}")
