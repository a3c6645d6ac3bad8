"""`petalnode chat`: talk to the model that a swarm serves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import trio
import typer

from ...client.chat import SavedChat, Text, held_chat
from ...client.core import ClientOptions, open_client
from ...client.deadlines import DEADLINES
from ...client.swarm_model import SwarmModel, identify_model
from ...credits.wallet import Wallet
from ...errors import BadInput, ModelError, SwarmError
from ...models import ModelFolder, resolve
from ...network.addresses import parse_peer
from ...swarm.swarm import Swarm
from ...weights.remote_model import may_be_remote
from ..dialogue import Chatter, opening
from ..join import JoinOptions, joined, joins_swarm
from ..model_choice import (
    SwarmModelArgument,
    check_adapter,
    check_model,
    check_seed,
    folder_from_peers,
    linked_model,
    model_folder,
    served_model,
)
from ..output import Output
from ..process import start, text_given
from ..strangers import ServerChoice, StrangerNotice, told_file
from ..terminal import at_terminal

MAX_CONTEXT = 4096
"""Tokens that a chat reserves at every server, unless the model takes fewer."""
_LONGEST_QUESTION = 100 * MAX_CONTEXT
"""Characters. Longer ones never fit, and counting their tokens would take long."""


@dataclass(frozen=True)
class ChatOptions(ServerChoice):
    """The options of `petalnode chat`."""

    prompt: Annotated[
        str | None, typer.Option(help="Ask this one question, print the answer and exit. Also read from a pipe.")
    ] = None
    system: Annotated[str | None, typer.Option(help="System prompt: instructions before the conversation.")] = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512
    temperature: Annotated[
        float, typer.Option(min=0, max=99, help="Sampling temperature; 0 is greedy, 0.7 is usual.")
    ] = 0.0
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1, help="Sample from the most likely tokens of this total probability.")
    ] = 1.0
    seed: Annotated[int | None, typer.Option(help="Random seed, to make sampling repeatable.")] = None
    draft: Annotated[
        str,
        typer.Option(
            metavar="auto|none|MODEL",
            help="auto: guess tokens from the text so far, and have the servers check several at once where that is "
            "quicker; the answer is the same. MODEL: have this model, a smaller one with the same tokenizer that runs "
            "here, guess too. none: one token after the other.",
        ),
    ] = "auto"
    show_route: Annotated[bool, typer.Option(help="Print which servers answered, and the tokens per second.")] = False
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not say or ask that strangers' servers will see the text; for scripts.")
    ] = False
    session: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the conversation in this file; if the file exists, continue it."),
    ] = None
    adapter: Annotated[
        str | None,
        typer.Option(metavar="PATH|NAME", help="A folder with a peft adapter, or the name of one that servers hold."),
    ] = None
    share_receipts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MULTIADDR",
            help="Send receipts and hidden states to this auditor (a `petalnode validate`), which can infer the text "
            "from them, and publishes those of a wrong answer; repeatable.",
        ),
    ] = None
    require_pledge: Annotated[
        int | None,
        typer.Option(min=0, metavar="POINTS", help="Use only servers that pledge at least this many points."),
    ] = None
    credits: Annotated[
        str | None,
        typer.Option(
            metavar="MULTIADDR",
            help="Pay busy servers for priority with the points of --identity; MULTIADDR is the validator that "
            "issued them.",
        ),
    ] = None
    compare_chains: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Run every step on N chains that share no server, and compare their outputs."
        ),
    ] = None

    @property
    def draft_model(self) -> str | None:
        """The model that guesses tokens, if one is named."""
        return self.draft if self.draft not in ("auto", "none") else None


@joins_swarm
def chat(model: SwarmModelArgument = None, *, options: ChatOptions, join: JoinOptions) -> None:
    """Chat with the model that a swarm serves."""
    join.check()
    for address in (*(options.share_receipts or ()), *([options.credits] if options.credits else ())):
        parse_peer(address)
    options.chosen_servers()  # before anybody is asked
    check_seed(options.seed)
    model = linked_model(model, join.target)
    check_model(model)
    if options.draft_model is not None:
        check_model(options.draft_model)
        if options.compare_chains is not None:
            raise BadInput(
                "--draft MODEL needs steps under way side by side, and --compare-chains has none: give --draft auto"
            )
    if options.adapter is not None:
        check_adapter(options.adapter)
    options = replace(options, prompt=question(options.prompt))
    if options.credits and join.identity is None:
        raise BadInput("--credits spends the points of a key: give its file with --identity FILE")
    if options.session is None:
        trio.run(run_chat, model, options, join, None)
        return
    if join.identity is not None:
        raise BadInput("--session FILE contains a key of its own: leave --identity out")
    with held_chat(options.session) as saved:
        trio.run(run_chat, model, options, join, saved)


def question(prompt: str | None) -> str | None:
    """The one question to be answered: that of --prompt, else what comes through a pipe; None at a terminal.

    Raises:
        BadInput: it is empty, far too long or no text.
    """
    if prompt is None:
        if sys.stdin.isatty():
            return None
        try:
            prompt = sys.stdin.read(_LONGEST_QUESTION + 1)
        except UnicodeDecodeError as error:
            raise BadInput(f"what came through the pipe is not {error.encoding}: {error.reason}") from None
        if not prompt.strip():
            raise BadInput("nothing came through the pipe: there is no question")
    prompt = text_given(prompt).strip()
    if not prompt:
        raise BadInput("--prompt is empty: there is no question")
    if len(prompt) > _LONGEST_QUESTION:
        raise BadInput(
            f"the question has more than {_LONGEST_QUESTION:,} characters, and {MAX_CONTEXT} tokens are the most"
        )
    return prompt


async def run_chat(model: str | None, options: ChatOptions, join: JoinOptions, saved: SavedChat | None) -> None:
    """Chats as `options` say, in the swarm of `join`. Raises PetalnodeError."""
    output = Output(join.json)
    parts = ClientParts(options.adapter, options.draft_model)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(import_generation)
        if model is not None:  # what is named is loaded while others are still to answer
            nursery.start_soon(parts.find_and_load, model, output)
        identity = saved.identity if saved is not None else None
        start.stage("joining the swarm")
        async with joined(join, output, role="chat", listens=False, identity=identity) as (swarm, _):
            if join.identity is not None:
                output.note(f"the peer id of this client is {swarm.peer_id}")
            parts.join(swarm)
            start.stage("looking for the model")
            if model is None:
                nursery.start_soon(parts.find_and_load, await served_model(swarm, output), output)
            private = join.psk is not None
            await chat_in(swarm, await parts.folder(), options, output, saved, join.peers, parts, private=private)


class ClientParts:
    """What a client has of a model: its folder, embeddings and head, tokenizer and adapter, and another model that
    guesses tokens for it; loaded beside other things.

    Args:
        adapter: a folder with an adapter, or the name of one that servers hold.
        draft: the model that guesses.

    Attributes:
        draft_model: the same, as soon as all is loaded.
    """

    def __init__(self, adapter: str | None, draft: str | None = None) -> None:
        self.draft_model: Any = None
        self._adapter = adapter
        self._draft = draft
        self._draft_folder: ModelFolder | None = None
        self._folders: list[ModelFolder] = []
        self._loaded: list[Any] = []
        self._swarms: list[Swarm] = []
        self._found, self._done, self._joined = trio.Event(), trio.Event(), trio.Event()

    def join(self, swarm: Swarm) -> None:
        """What is not on this machine may come from peers of this swarm."""
        self._swarms.append(swarm)
        self._joined.set()

    async def _swarm_joined(self) -> Swarm:
        await self._joined.wait()
        return self._swarms[0]

    async def find_and_load(self, model: str, output: Output) -> None:
        """
        Raises:
            ModelError, MachineError, BadInput: the model or the adapter cannot be had or used.
        """
        try:
            folder = await model_folder(model, output, need="client")
        except ModelError as error:
            if not may_be_remote(model):
                raise
            folder = await folder_from_peers(await self._swarm_joined(), model, output, "client", error)
        if self._draft is not None:
            self._draft_folder = await model_folder(self._draft, output, need="all")
        await self.load(folder)

    async def load(self, folder: ModelFolder) -> None:
        """Loads what is in `folder`. Raises ModelError, BadInput."""
        self._folders.append(folder)
        self._found.set()
        await _in_thread(lambda: self._load(folder))
        self._done.set()

    def _load(self, folder: ModelFolder) -> None:
        from ...blocks import collector_paused

        with collector_paused():
            from ...blocks.client_part import load_client
            from ...client.session_adapter import choose_adapter, fit_adapter
            from ...models.adapter import Adapter

        adapter = choose_adapter(self._adapter) if self._adapter is not None else None
        client_part = load_client(folder.path)
        if isinstance(adapter, Adapter):
            fit_adapter(adapter, client_part)
        text = Text(folder)
        if self._draft is not None:
            from ...client.generation.draft_model import load_draft_model

            self.draft_model = load_draft_model(self._draft_folder or resolve(self._draft), text)
        self._loaded.extend((client_part, text, adapter))

    async def folder(self) -> ModelFolder:
        """As soon as it is found."""
        await self._found.wait()
        return self._folders[0]

    async def loaded(self) -> tuple[Any, Text, Any]:
        """(the client's part, tokenizer, adapter), as soon as they are loaded."""
        await self._done.wait()
        client_part, text, adapter = self._loaded
        return client_part, text, adapter


async def import_generation() -> None:
    """In a worker thread: torch and transformers, and what chooses tokens."""
    await _in_thread(_import_generation)


def _import_generation() -> None:
    from ...blocks import collector_paused

    with collector_paused():
        from ...client import generation  # noqa: F401


async def _in_thread(function: Callable[[], object]) -> None:
    """Runs `function` in a worker thread, which is left behind if an error elsewhere cancels the wait."""
    await trio.to_thread.run_sync(function, abandon_on_cancel=True)


async def _identify(swarm: Swarm, folder: ModelFolder, identified: list[SwarmModel]) -> None:
    with suppress(SwarmError):  # nobody answers just now; what was heard at joining has to do
        await swarm.refresh(sample=True, timeout=DEADLINES.refresh)
    identified.append(await identify_model(swarm, folder))


async def chat_in(
    swarm: Swarm,
    folder: ModelFolder,
    options: ChatOptions,
    output: Output,
    saved: SavedChat | None = None,
    peers: Sequence[str] = (),
    parts: ClientParts | None = None,
    *,
    private: bool = False,
) -> None:
    """Answers the prompt, or everything that a person types, over the servers of `swarm`.

    `parts` are being loaded already; without them they are loaded here. `private`: all of this swarm know each other.

    Raises:
        PetalnodeError: a one-shot answer cannot be had. In a chat the reason is printed and the chat goes on.
    """
    prompt = options.prompt
    start.stage(f"loading embeddings and head of {folder.name}, and asking the servers")

    identified: list[SwarmModel] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_identify, swarm, folder, identified)
        if parts is None:
            parts = ClientParts(options.adapter, options.draft_model)
            nursery.start_soon(parts.load, folder)
    model, text, adapter = await parts.loaded()
    # torch and transformers, which the thread has imported: not before others were asked.
    from ...client.generation.conversation import Conversation, Sampling
    from ...models.adapter import Adapter

    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    soft_prompt = adapter.soft_prompt if isinstance(adapter, Adapter) else None
    virtual = 0 if soft_prompt is None else len(soft_prompt)
    context = min(MAX_CONTEXT, (model.max_positions or MAX_CONTEXT) - virtual)
    if prompt is not None and saved is None:
        # One question needs no more of the servers' cache than its own length; a conversation will be longer.
        tokens = len(text.tokenize(opening(options.system).plus("user", prompt).turns))
        context = min(context, tokens + sampling.max_new_tokens)
    asked = ClientOptions(
        allowed=options.allow or (),
        blocked=options.deny or (),
        share_receipts=options.share_receipts or (),
        require_pledge=options.require_pledge,
        compare_chains=options.compare_chains or 1,
        trusted=options.chosen_servers(),
        adapter=adapter,
        codec=options.codec,
    )
    async with open_client(swarm, identified[0], asked) as client:
        if options.credits is not None:
            client.payments = Wallet(swarm, swarm.identity, options.credits)
        held = await client.adapter()
        conversation = Conversation(
            client,
            model,
            max_length=context,
            stop_tokens=text.stop_tokens,
            soft_prompt=soft_prompt,
            drafts=parts.draft_model or options.draft != "none",
        )
        async with aclosing(conversation):
            if saved is not None:
                identity = adapter.identity if isinstance(adapter, Adapter) else held.hash.hex() if held else ""
                saved = saved.check_model(client.model.version).with_adapter(identity)
                conversation.keep(saved.tokens, saved.session)
            serves = " --peer ".join((folder.name, *peers))
            notice = StrangerNotice(
                client,
                output,
                told_file(platformdirs.user_data_path("petalnode", appauthor=False)),
                named=(*(options.allow or ()), *(options.trusted or ())),
                private=private,
                yes=options.yes,
                asks=prompt is None and not output.as_json and at_terminal(),
            )
            chatter = Chatter(
                conversation,
                text,
                sampling,
                output,
                saved,
                client.disagreements,
                system=options.system,
                session_file=options.session,
                once=prompt is not None,
                show_route=options.show_route,
                serve_options=serves,
                is_there=lambda peer: swarm.is_connected(parse_peer(peer)[0]),
                notice=notice,
                is_closed=lambda hop: bool(
                    client.trusted.closed(range(hop.span.start, hop.span.end), folder.num_blocks)
                ),
            )
            start.done()
            if prompt is not None:
                await notice.permits()
                await chatter.answer(prompt)
            else:
                await chatter.loop(folder.name)
