"""`petalnode chat`: talk to the model that a swarm serves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import trio
import typer

from ...client.chat import Dialogue, SavedChat, Text, fit, held_chat
from ...client.core import open_client
from ...client.deadlines import REFRESH_TIMEOUT
from ...client.session_adapter import is_adapter_name
from ...client.swarm_model import SwarmModel, identify_model
from ...credits.wallet import Wallet
from ...errors import BadInput, MachineError, PetalnodeError, SwarmError
from ...models import ModelFolder
from ...models.adapter import check_adapter_files
from ...network.addresses import parse_peer
from ...swarm.swarm import Swarm
from ..join import JoinOptions, check_peer_id, joined, joins_swarm
from ..model_choice import SwarmModelArgument, check_model, model_folder, served_model
from ..output import Output
from ..process import text_given
from ..terminal import LineReader, stopped_by_signal

if TYPE_CHECKING:
    from ...client.generation import Conversation, Sampling
    from ...client.session.comparing import Disagreement

MAX_CONTEXT = 4096
"""Tokens that a chat reserves at every server, unless the model takes fewer."""
_LONGEST_QUESTION = 100 * MAX_CONTEXT
"""Characters. Longer ones never fit, and counting their tokens would take long."""
_HELP = (
    "/new starts over, /retry asks the last question again, /route shows the servers, /quit (or Ctrl-D) leaves; "
    "Ctrl-C stops an answer."
)


@dataclass(frozen=True)
class ChatOptions:
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
    show_route: Annotated[bool, typer.Option(help="Print which servers answered, and the tokens per second.")] = False
    allow: Annotated[
        list[str] | None, typer.Option(metavar="PEER", help="Use only this server (a peer id); repeatable.")
    ] = None
    deny: Annotated[
        list[str] | None, typer.Option(metavar="PEER", help="Never use this server (a peer id); repeatable.")
    ] = None
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
            "from them; repeatable.",
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


@joins_swarm
def chat(model: SwarmModelArgument = None, *, options: ChatOptions, join: JoinOptions) -> None:
    """Chat with the model that a swarm serves."""
    join.check()
    for address in (*(options.share_receipts or ()), *([options.credits] if options.credits else ())):
        parse_peer(address)
    for name, peers in (("allow", options.allow), ("deny", options.deny)):
        for peer in peers or ():
            check_peer_id(peer, f"--{name}")
    check_model(model)
    if options.adapter is not None and not is_adapter_name(options.adapter):
        check_adapter_files(Path(options.adapter))
    options = replace(options, prompt=question(options.prompt))
    if options.credits and join.identity is None:
        raise BadInput("--credits spends the points of a key: give its file with --identity FILE")
    if options.session is None:
        trio.run(_chat, model, options, join, None)
        return
    if join.identity is not None:
        raise BadInput("--session FILE contains a key of its own: leave --identity out")
    with held_chat(options.session) as saved:
        trio.run(_chat, model, options, join, saved)


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


async def _chat(model: str | None, options: ChatOptions, join: JoinOptions, saved: SavedChat | None) -> None:
    output = Output(join.json)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_in_thread, _import_generation)
        identity = saved.identity if saved is not None else None
        async with joined(join, output, role="chat", listens=False, identity=identity) as (swarm, _):
            if join.identity is not None:
                output.note(f"the peer id of this client is {swarm.peer_id}")
            folder = await model_folder(model or await served_model(swarm), output, need="client")
            await chat_in(swarm, folder, options, output, saved)


def _import_generation() -> None:
    from ...blocks import collector_paused

    with collector_paused():
        from ...client import generation  # noqa: F401


async def _in_thread(function: Callable[[], object]) -> None:
    """Runs `function` in a worker thread, which is left behind if an error elsewhere cancels the wait."""
    await trio.to_thread.run_sync(function, abandon_on_cancel=True)


async def chat_in(
    swarm: Swarm, folder: ModelFolder, options: ChatOptions, output: Output, saved: SavedChat | None = None
) -> None:
    """Answers the prompt, or everything that a person types, over the servers of `swarm`.

    Raises:
        PetalnodeError: a one-shot answer cannot be had. In a chat the reason is printed and the chat goes on.
    """
    from ...blocks.client_part import load_client
    from ...client.generation import Conversation, Sampling
    from ...client.session_adapter import choose_adapter, fit_adapter
    from ...models.adapter import Adapter

    prompt = options.prompt
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    loaded: list[Any] = []

    def load() -> None:
        adapter = choose_adapter(options.adapter) if options.adapter is not None else None
        client_part = load_client(folder.path)
        if isinstance(adapter, Adapter):
            fit_adapter(adapter, client_part)
        loaded.extend((client_part, Text(folder), adapter))

    identified: list[SwarmModel] = []

    async def identify() -> None:
        with suppress(SwarmError):  # nobody answers just now; what was heard at joining has to do
            await swarm.refresh(timeout=REFRESH_TIMEOUT)
        identified.append(await identify_model(swarm, folder))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_in_thread, load)
        nursery.start_soon(identify)
    model, text, adapter = loaded
    soft_prompt = adapter.soft_prompt if isinstance(adapter, Adapter) else None
    virtual = 0 if soft_prompt is None else len(soft_prompt)
    context = min(MAX_CONTEXT, (model.max_positions or MAX_CONTEXT) - virtual)
    if prompt is not None and saved is None:
        # One question needs no more of the servers' cache than its own length; a conversation will be longer.
        tokens = len(text.tokenize(_opening(options).plus("user", prompt).turns))
        context = min(context, tokens + sampling.max_new_tokens)
    async with open_client(
        swarm,
        identified[0],
        allowed=options.allow or (),
        blocked=options.deny or (),
        share_receipts=options.share_receipts or (),
        require_pledge=options.require_pledge,
        compare_chains=options.compare_chains or 1,
        adapter=adapter,
    ) as client:
        if options.credits is not None:
            client.payments = Wallet(swarm, swarm.identity, options.credits)
        held = await client.adapter()
        conversation = Conversation(
            client, model, max_length=context, stop_tokens=text.stop_tokens, soft_prompt=soft_prompt
        )
        async with aclosing(conversation):
            if saved is not None:
                identity = adapter.identity if isinstance(adapter, Adapter) else held.hash.hex() if held else ""
                saved = saved.check_model(client.model.version).with_adapter(identity)
                conversation.keep(saved.tokens, saved.session)
            chatter = _Chatter(conversation, text, sampling, options, output, saved, client.disagreements)
            if prompt is not None:
                await chatter.answer(prompt)
            else:
                await chatter.loop(folder.name)


def _opening(options: ChatOptions) -> Dialogue:
    return Dialogue().plus("system", text_given(options.system)) if options.system else Dialogue()


@dataclass
class _Chatter:
    """One person at one terminal."""

    conversation: Conversation
    text: Text
    sampling: Sampling
    options: ChatOptions
    output: Output
    saved: SavedChat | None
    disagreements: Sequence[Disagreement]

    def __post_init__(self) -> None:
        self.dialogue = _opening(self.options)
        self.unfinished = False  # whether the answer to the newest question was cut off, or never came
        if self.saved is not None and self.saved.dialogue.turns:
            self.dialogue, self.unfinished = self.saved.dialogue, self.saved.unfinished

    async def loop(self, model_name: str) -> None:
        self.output.say(f"Talking to {model_name}. {_HELP}", style="dim")
        if count := self.dialogue.questions:
            asked = "1 question" if count == 1 else f"{count} questions"
            self.output.say(f"(going on after {asked}; /new starts over)", style="dim")
        if self.unfinished:
            _, question, answer = self.dialogue.without_newest()
            self.output.say(f"(the last question was not answered to the end; /retry asks it again)\n> {question}")
            self.output.say(answer)
        reader = LineReader()
        with reader:
            while True:
                try:
                    line = await reader.read("\n> ")
                    if line is None or line.strip() in ("/quit", "/exit"):
                        return
                    await self._obey(text_given(line).strip())
                except PetalnodeError as error:
                    self.output.error(str(error))

    async def _obey(self, line: str) -> None:
        """Does what one line says."""
        if line == "/new":
            self.dialogue, self.unfinished = _opening(self.options), False
            self.output.say("(starting over)", style="dim")
        elif line == "/route":
            self._say_route()
        elif line == "/retry" and self.dialogue.questions:
            self.dialogue, line, _ = self.dialogue.without_newest()
            self.unfinished = False
            await self._answer_or_say_why(line)
        elif line.startswith("/"):
            self.output.say(_HELP, style="dim")
        elif line:
            await self._answer_or_say_why(line)

    async def _answer_or_say_why(self, question: str) -> None:
        try:
            await self.answer(question)
        except PetalnodeError as error:
            self.output.error(str(error))
            if self.unfinished:
                self.output.say("(/retry asks the question again)", style="dim")

    def _heard(self) -> Dialogue:
        """What was said so far, without a question that nobody has answered: templates want the turns to alternate."""
        if self.unfinished:
            before, _, answer = self.dialogue.without_newest()
            return self.dialogue if answer else before
        return self.dialogue

    async def answer(self, question: str) -> None:
        """Streams one answer. Ctrl-C stops it; what was said until then counts, and is kept if it fails."""
        asked = self._heard().plus("user", question)
        room = min(self.sampling.max_new_tokens, self.conversation.max_length // 4)
        fitted, tokens, dropped = fit(asked, self.text.tokenize, self.conversation.max_length - room)
        if dropped:
            self.output.say(f"(the context is full: the oldest {dropped} turns were dropped)", style="dim")
        recoveries = self.conversation.recoveries
        disagreed = len(self.disagreements)
        begun = time.perf_counter()
        said: list[int] = []
        write = self.text.stream(self.output.write)

        def on_token(token: int) -> None:
            said.append(token)
            write(token)

        self._keep(fitted, finished=False)
        try:
            stopped = await stopped_by_signal(
                lambda stop: self.conversation.answer(tokens, self.sampling, on_token, stop)
            )
        except BaseException:
            if said:
                self._keep(fitted.plus("assistant", self.text.decode(said)), finished=False)
                self.output.write("\n")
            raise
        seconds = time.perf_counter() - begun
        text = self.text.decode(said)
        recoveries = self.conversation.recoveries - recoveries
        try:
            self._tell(text, len(said), seconds, recoveries, disagreed, stopped=stopped is not None)
        finally:
            self._keep(fitted.plus("assistant", text), finished=True)
        if stopped is not None and (stopped != signal.SIGINT or self.options.prompt is not None):
            raise typer.Exit(128 + stopped)

    def _tell(self, text: str, tokens: int, seconds: float, recoveries: int, disagreed: int, *, stopped: bool) -> None:
        if self.output.as_json:
            self.output.emit(
                text=text,
                tokens=tokens,
                seconds=round(seconds, 3),
                route=[
                    {"peer_id": hop.peer_id, "blocks": [hop.span.start, hop.span.end]}
                    for hop in self.conversation.route
                ],
                recoveries=recoveries,
                reused=self.conversation.reused,
                waits=self.conversation.waits.fields(),
                disagreements=[disagreement.fields() for disagreement in self.disagreements[disagreed:]],
            )
        else:
            self.output.write("\n")
            if stopped:
                self.output.say("(stopped)", style="dim")
            if self.options.show_route:
                rate = tokens / seconds if seconds else 0.0
                self.output.say(f"\n{tokens} tokens in {seconds:.1f} s, {rate:.1f} tokens/s", style="dim")
                self._say_route()

    def _keep(self, dialogue: Dialogue, *, finished: bool) -> None:
        """Notes what was said by now, and saves it if there is a file for it.

        A file that cannot be written ends no conversation: what is said is on the screen.
        """
        self.dialogue, self.unfinished = dialogue, not finished
        if self.saved is None or self.options.session is None:
            return
        self.saved = self.saved.after(dialogue, *self.conversation.state()) if finished else self.saved.asking(dialogue)
        try:
            self.saved.save(self.options.session)
        except MachineError as error:
            if finished and self.options.prompt is not None:
                raise
            self.output.warn(str(error))

    def _say_route(self) -> None:
        hops = [f"{hop.span} at …{hop.peer_id[-8:]}" for hop in self.conversation.route]
        text = f"route: you → {' → '.join(hops)} → you" if hops else "no route yet: ask something"
        self.output.say(text, style="dim")
