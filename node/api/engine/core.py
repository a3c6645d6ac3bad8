"""Answers, whatever endpoint asks: each choice in a session of its own, token by token, as events on a channel."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
import trio

from ....protocols.ids import Span
from ....protocols.prefix import BLOCK_TOKENS
from ....protocols.tensors import dtype_name
from ...blocks.client_part import ClientModel, SoftPrompt
from ...client.chat import Text
from ...client.chunks import from_chunks, to_chunks
from ...client.core import SwarmClient
from ...client.generation.conversation import Conversation
from ...client.generation.draft_model import DraftModel
from ...client.generation.picture_prompts import PicturePrompt, PicturePrompts
from ...client.session.stream import SessionSpec
from ...client.session_adapter import SessionAdapter, named
from ...errors import BadInput
from ...models.adapter import Adapter
from ...network.shares import Turns
from ...trust.receipt_file import AnswerReceipts
from ..errors import REQUEST_ID, ApiError, api_error
from ..fields import wrong
from .choice import AnswerParts, Choice
from .conversations import CacheScope, Conversations
from .generation import ApiLimits, ApiTallies, Event, Failed, GenerationRequest, ServedModel, SessionOptions
from .grammar import Grammars

log = logging.getLogger(__name__)

T = TypeVar("T")


class Core:
    """Answers with one model and its adapters. Raises BadInput for an adapter of another version of the model.

    Attributes:
        text: tokenizer and chat template.
        grammars: of the forms that answers can be bound to.
        models: by their ids; the first is the base model.
        receipts: of the last answers.
        tallies: of all answers.
        turns: of long bodies that are parsed.
        drafts: whether tokens are guessed from the text, and checked several at once.
        draft_model: guesses, too.
    """

    def __init__(
        self, client: SwarmClient, local: ClientModel, text: Text, models: Sequence[ServedModel], limits: ApiLimits
    ) -> None:
        for model in models:
            if isinstance(model.adapter, Adapter):
                model.adapter.check_model(client.model.version, client.model.name)
        self.client = client
        self.text = text
        self.hidden_size = local.hidden_size
        self.models = {model.name: model for model in models}
        self.limits = limits
        self.vocabulary = int(local.model.get_output_embeddings().weight.shape[0])
        self.grammars = Grammars(text.tokenizer, self.vocabulary, text.stop_tokens)
        self._local = local
        self._compiling = trio.CapacityLimiter(limits.grammars)
        self._answers = trio.CapacityLimiter(limits.answers)
        self._pictures = PicturePrompts(local, text.tokenizer, client.model.folder.path)
        self._seeing = trio.CapacityLimiter(1)
        self._adapters: dict[str, SessionAdapter | None] = {}
        self._secret = os.urandom(32)
        self.receipts = AnswerReceipts()
        self.tallies = ApiTallies()
        self.turns = Turns()
        self.drafts = False
        self.draft_model: DraftModel | None = None
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

    def is_covered(self) -> bool:
        """Whether the servers that are known hold every block together."""
        held = {block for server in self.client.servers() for block in range(server.span.start, server.span.end)}
        return len(held) >= self.client.model.num_blocks

    def context(self, model: ServedModel) -> int:
        """Tokens that a prompt and its answer may have together."""
        soft = model.adapter.soft_prompt if isinstance(model.adapter, Adapter) else None
        most = self._local.max_positions or self.limits.context
        return min(self.limits.context, most - (0 if soft is None else len(soft)))

    async def compiled(self, make: Callable[[T], str], wanted: T) -> str:
        """What `make`, of `grammars`, makes of a form. It runs in a thread that is left behind if it takes too long.

        A client can ask for a form that takes minutes, and then holds up other forms only.

        Raises:
            ApiError: the form cannot be enforced, or not be made ready in time.
        """
        with trio.move_on_after(self.limits.grammar_seconds):
            return await trio.to_thread.run_sync(make, wanted, limiter=self._compiling, abandon_on_cancel=True)
        text = f"this form was not ready after {self.limits.grammar_seconds:g} s: ask for a simpler one, or again later"
        raise wrong("response_format", text, "invalid_schema")

    @property
    def takes_pictures(self) -> bool:
        """Whether the model takes any."""
        return self._pictures.are_taken

    async def picture_prompt(self, messages: Sequence[dict[str, Any]], model: ServedModel) -> PicturePrompt:
        """As `PicturePrompts.prompt`, for one at a time, within the context of the model."""
        most = self.context(model)
        return await trio.to_thread.run_sync(self._pictures.prompt, messages, most, limiter=self._seeing)

    async def check(self, wanted: GenerationRequest) -> None:
        """What can be refused before anything is asked of the swarm.

        Raises:
            ApiError: tokens that the model does not know, or more than its context.
            NoChainError: no server holds the adapter.
        """
        context = self.context(wanted.model)
        for prompt in wanted.prompts:
            if not prompt:
                raise wrong(None, "the prompt is empty")
            if max(prompt) >= self.vocabulary:
                text = f"the model has no token {max(prompt)}: its ids end at {self.vocabulary - 1}"
                raise ApiError(400, text, param="prompt")
            least = 1 if wanted.max_tokens is None else max(1, wanted.max_tokens)
            if len(prompt) + least > context:
                text = f"the context has {context} tokens, but {len(prompt)} in the prompt and {least} in the answer"
                text += " are asked for: shorten the prompt, or ask for fewer"
                raise wrong(None, text, "context_length_exceeded")
        self._check_logprobs(wanted)
        await self.check_sessions(wanted.model, wanted.options)

    async def check_sessions(self, model: ServedModel, options: SessionOptions) -> None:
        """Whether sessions can be had as they are asked for. Raises ApiError, BadInput, or NoChainError."""
        self.client.narrowed(options.trusted, options.trusted_blocks)
        if options.adapter and model.adapter is not None:
            raise wrong("x_petalnode.adapter", f"the model {model.name} has an adapter already")
        await self._session_adapter(model)
        if options.adapter:
            await self.client.held_adapter(options.adapter)

    def _check_logprobs(self, wanted: GenerationRequest) -> None:
        if wanted.top_logprobs is None:
            return
        most = self.limits.answer_tokens if wanted.max_tokens is None else wanted.max_tokens
        tokens = sum((len(prompt) if wanted.echo else 0) + most for prompt in wanted.prompts)
        if tokens * (1 + wanted.top_logprobs) > self.limits.logprobs:
            text = f"these are more than {self.limits.logprobs:,} log-probabilities: ask for fewer tokens, answers or "
            raise wrong("logprobs", f"{text}alternatives at once")

    async def _session_adapter(self, model: ServedModel) -> SessionAdapter | None:
        """What changes the blocks of sessions of this model. Raises NoChainError."""
        if isinstance(model.adapter, Adapter):
            if model.name not in self._adapters:
                self._adapters[model.name] = SessionAdapter.of(model.adapter) if model.adapter.hash else None
        elif model.adapter is not None:
            self._adapters[model.name] = await self.client.held_adapter(model.adapter)
        return self._adapters.get(model.name)

    def client_for(self, options: SessionOptions) -> SwarmClient:
        """The client of sessions of which so much is asked. Raises BadInput."""
        trusted = self.client.narrowed(options.trusted, options.trusted_blocks)
        if trusted == self.client.trusted and options.compare_chains == 1:
            return self.client
        return self.client.variant(trusted=trusted, compare_chains=options.compare_chains)

    def _conversation(self, scope: CacheScope, length: int) -> Conversation:
        model, options = self.models[scope.model], scope.options
        adapter = self._adapters.get(scope.model)
        if options.adapter:
            adapter = named(options.adapter, self.client.servers()) or adapter
        conversation = Conversation(
            self.client_for(options),
            self._local,
            max_length=length,
            stop_tokens=self.text.stop_tokens,
            soft_prompt=model.adapter.soft_prompt if isinstance(model.adapter, Adapter) else None,
            adapter=adapter,
            drafts=options.drafts and (self.draft_model or self.drafts),
        )
        # Servers see one client.
        conversation.prefix_salt = hashlib.sha256(self._secret + scope.owner.encode()).digest()
        return conversation

    @asynccontextmanager
    async def answering(self, wanted: GenerationRequest) -> AsyncIterator[trio.MemoryReceiveChannel[Event]]:
        """Answers in the background of the block; the channel ends after every choice has, or the first has failed.

        Leaving the block ends what is left, and gives the servers their caches back.
        """
        await self.check(wanted)
        room = sum(len(prompt) for prompt in wanted.prompts) if wanted.echo else 0
        most = wanted.max_tokens if wanted.max_tokens is not None else self.limits.answer_tokens
        # Bounded by what the answers can have, so no choice waits for who reads; and a place for what is in progress.
        send, receive = trio.open_memory_channel[Event](room + len(wanted.prompts) * (most + 3) + 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer_all, wanted, send)
            yield receive
            nursery.cancel_scope.cancel()

    async def _answer_all(self, wanted: GenerationRequest, send: trio.MemorySendChannel[Event]) -> None:
        leaders = leaders_of(wanted.prompts)
        apart = wanted.options.compare_chains > 1 or wanted.echo  # none has use for what another's prompt has left
        with send:
            async with trio.open_nursery() as nursery:
                parts = AnswerParts(
                    self.text,
                    self.grammars,
                    self.conversations,
                    self.limits,
                    self.context(wanted.model),
                    self.is_covered,
                    self.tallies,
                )
                choices = [Choice(parts, wanted, index, send, nursery) for index in range(len(wanted.prompts))]
                for index, choice in enumerate(choices):
                    leader = None if apart or leaders[index] == index else choices[leaders[index]]
                    nursery.start_soon(self._answer_one, choice, leader, send, nursery)

    async def _answer_one(
        self, choice: Choice, leader: Choice | None, send: trio.MemorySendChannel[Event], nursery: trio.Nursery
    ) -> None:
        """Makes a choice, after the first token of `leader`; whose failure ends all."""
        if leader is not None:
            await leader.begun.wait()
        try:
            async with self._answers:
                await choice.run()
        except Exception as error:
            failed = api_error(error)
            if failed.code == "internal_error":
                log.exception("an answer to %s has failed in a way that nobody expected", REQUEST_ID.get())
            self.tallies.answers["failed"] += 1
            send.send_nowait(Failed(failed))
            nursery.cancel_scope.cancel()
        finally:
            choice.begun.set()

    async def block_outputs(
        self, model: ServedModel, prompt: Sequence[int], blocks: Sequence[int], options: SessionOptions
    ) -> dict[int, torch.Tensor]:
        """The output of each of `blocks` (ascending), [tokens, hidden size]."""
        adapter = await self._session_adapter(model)
        if options.adapter:
            adapter = await self.client.held_adapter(options.adapter)
        soft = model.adapter.soft_prompt if isinstance(model.adapter, Adapter) else None
        async with self._answers:
            return await block_outputs(self.client_for(options), self._local, prompt, blocks, adapter, soft)

    async def hidden_states(
        self, owner: str, model: ServedModel, prompt: Sequence[int], options: SessionOptions
    ) -> torch.Tensor:
        """What enters the head, float32 [tokens, hidden size]."""
        needed = len(prompt) + 1
        async with (
            self._answers,
            self.conversations.lent(CacheScope(owner, model.name, options), prompt, needed, needed) as conversation,
        ):
            async with aclosing(conversation.score(prompt, hidden=True)) as scored:
                found = [hidden.float().cpu() async for _, hidden in scored]
            await conversation.aclose()  # nothing goes on with it
        return torch.cat(found)


def leaders_of(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each prompt the first one that is the same. Its answer goes first, and the servers keep what they compute for
    the prompt. One that has no whole block to be kept is its own."""
    first: dict[tuple[int, ...], int] = {}
    return [
        first.setdefault(tuple(prompt), index) if len(prompt) > BLOCK_TOKENS else index
        for index, prompt in enumerate(prompts)
    ]


def check_adapters(models: Sequence[ServedModel]) -> None:
    """
    Raises:
        BadInput: two models of one name.
    """
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise BadInput(f"two models of the API would have one name: {', '.join(names)}")


async def block_outputs(
    client: SwarmClient,
    local: ClientModel,
    prompt: Sequence[int],
    blocks: Sequence[int],
    adapter: SessionAdapter | None = None,
    soft_prompt: torch.Tensor | None = None,
) -> dict[int, torch.Tensor]:
    """The output of each of `blocks` (ascending), [tokens, hidden size] in the client's dtype.

    The blocks up to each of them run in a session of their own. So its output comes back to the client, and none runs
    twice. A soft prompt stands before the tokens; its own positions are left out.

    Raises:
        SwarmError: no chain of servers can serve.
    """
    virtual = 0 if soft_prompt is None else len(soft_prompt)
    tokens = [local.any_token] * virtual + list(prompt)

    hidden = await trio.to_thread.run_sync(_embedded, local, tokens, soft_prompt)
    found = {}
    for start, end in pairwise([0, *(block + 1 for block in blocks)]):
        spec = SessionSpec(
            model_version=client.model.version,
            span=Span(start, end),
            batch=1,
            max_length=len(tokens),
            dtype=dtype_name(local.dtype),
            adapter=adapter,
        )
        async with client.session(spec) as session:
            size = session.chunk_tokens(*hidden.shape[1:])
            chunks = await trio.to_thread.run_sync(to_chunks, hidden, session.spec.codec, size)
            hidden = await trio.to_thread.run_sync(from_chunks, await session.step(chunks))
        found[end - 1] = hidden[0, virtual:]
    return found


def _embedded(local: ClientModel, tokens: Sequence[int], soft_prompt: torch.Tensor | None) -> torch.Tensor:
    with nullcontext() if soft_prompt is None else local.prompted(SoftPrompt(soft_prompt)):
        return local.embed(torch.tensor([tokens]), 0)
