"""`petalnode chat`: talk to the model that a swarm serves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import trio
import typer

from ..client.core import REFRESH_TIMEOUT, SwarmModel, identify_model, open_client
from ..client.dialogue import Dialogue, Turn, fit
from ..errors import BadInput, ExitCode, ModelError, PetalnodeError, SwarmError
from ..models import ModelFolder, resolve
from ..swarm.swarm import Swarm
from .join import JoinOptions, joined, joins_swarm
from .output import Output, ProgressBars

if TYPE_CHECKING:
    from ..client.generation import Conversation, Sampling

MAX_CONTEXT = 4096
"""Tokens that a chat reserves at every server, unless the model takes fewer."""
STOP_GRACE = 1.0
_HELP = "/new starts over, /route shows the servers, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."


@dataclass(frozen=True)
class ChatOptions:
    """What the options of the command say."""

    prompt: str | None = None
    system: str | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    show_route: bool = False
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


@joins_swarm
def chat(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file, hub id or alias. Default: what the swarm serves.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="One question, one answer. Also from a pipe.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=99, help="0 always takes the likeliest token; 0.7 is usual.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    show_route: Annotated[bool, typer.Option(help="Say which servers answered, and how fast.")] = False,
    allow: Annotated[list[str] | None, typer.Option(metavar="PEER", help="Use these servers only.")] = None,
    deny: Annotated[list[str] | None, typer.Option(metavar="PEER", help="Do not use this server.")] = None,
    *,
    join: JoinOptions,
) -> None:
    """Talk to the model that a swarm serves."""
    options = ChatOptions(
        prompt, system, max_new_tokens, temperature, top_p, seed, show_route, tuple(allow or ()), tuple(deny or ())
    )
    trio.run(_chat, model, options, join)


async def _chat(model: str | None, options: ChatOptions, join: JoinOptions) -> None:
    output = Output(join.json)
    if not join.peers:
        raise BadInput(
            "which swarm? Give --peer MULTIADDR (every server prints its own), or try `petalnode demo` for a local one"
        )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_in_thread, _import_generation)
        async with joined(join, output, role="chat", listens=False) as (swarm, _):
            if model is None:
                model = await _served_model(swarm)
            bars = ProgressBars(output.errors)
            folder = await trio.to_thread.run_sync(lambda: resolve(model, need="client", progress=bars))
            bars.stop()
            await chat_in(swarm, folder, options, output)


def _import_generation() -> None:
    from ..blocks.collector import collector_paused

    with collector_paused():
        from ..client import generation  # noqa: F401


async def _in_thread(function: Callable[[], object]) -> None:
    """Runs `function` in a worker thread, which is left behind if an error elsewhere cancels the wait."""
    await trio.to_thread.run_sync(function, abandon_on_cancel=True)


async def _served_model(swarm: Swarm) -> str:
    """The one model that the swarm serves.

    Raises:
        SwarmError: it serves none.
        BadInput: it serves several.
    """
    view = await swarm.refresh(timeout=REFRESH_TIMEOUT)
    names = sorted({name for name, _ in view.models(now=time.time()).values()})
    if not names:
        raise SwarmError("nobody in this swarm serves a model (yet): start one with `petalnode serve`")
    if len(names) > 1:
        raise BadInput(f"this swarm serves several models: name one of {', '.join(names)}")
    return names[0]


async def chat_in(swarm: Swarm, folder: ModelFolder, options: ChatOptions, output: Output) -> None:
    """Answers the prompt, or everything that a person types, over the servers of `swarm`.

    Raises:
        PetalnodeError: a one-shot answer cannot be had. In a chat the reason is printed and the chat goes on.
    """
    from ..blocks.client import load_client
    from ..client.generation import Conversation, Sampling

    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.seed)
    loaded: list[Any] = []

    def load() -> None:
        loaded.extend((load_client(folder.path), _Text(folder)))

    identified: list[SwarmModel] = []

    async def identify() -> None:
        with suppress(SwarmError):  # nobody answers just now; what was heard at joining has to do
            await swarm.refresh(timeout=REFRESH_TIMEOUT)
        identified.append(await identify_model(swarm, folder))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_in_thread, load)
        nursery.start_soon(identify)
    model, text = loaded
    context = min(MAX_CONTEXT, model.max_positions or MAX_CONTEXT)
    prompt = options.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = (await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)).strip()
        if not prompt:
            raise BadInput("nothing came through the pipe: there is no question")
    if prompt is not None:
        # One question needs no more of the servers' cache than its own length.
        tokens = len(text.tokenize(_opening(options).plus("user", prompt).turns))
        context = min(context, tokens + sampling.max_new_tokens)
    async with open_client(swarm, identified[0], allowed=options.allow, blocked=options.deny) as client:
        conversation = Conversation(client, model, max_length=context, stop_tokens=text.stop_tokens)
        async with aclosing(conversation):
            chatter = _Chatter(conversation, text, sampling, options, output)
            if prompt is not None:
                await chatter.answer(prompt)
            else:
                await chatter.loop(folder.name)


def _opening(options: ChatOptions) -> Dialogue:
    return Dialogue().plus("system", options.system) if options.system else Dialogue()


class _Text:
    """Tokenizer and chat template of a model."""

    def __init__(self, folder: ModelFolder) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder.path} has no tokenizer that can be used ({error}); copy its files too") from None
        stops: set[int] = set()
        try:
            configured = GenerationConfig.from_pretrained(folder.path, local_files_only=True).eos_token_id
        except OSError:
            configured = folder.config.get("eos_token_id")
        for ids in (configured, self._tokenizer.eos_token_id):
            stops.update([ids] if isinstance(ids, int) else ids or [])
        self.stop_tokens = tuple(sorted(stops))

    def tokenize(self, turns: Sequence[Turn]) -> list[int]:
        """The prompt for the next answer. A model without a chat template gets the plain text."""
        if not self._tokenizer.chat_template:
            return list(self._tokenizer("\n".join(turn.content for turn in turns))["input_ids"])
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return list(
            self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def stream(self, write: Callable[[str], object]) -> Callable[[int], None]:
        """A function that takes tokens one by one and writes text as soon as it is whole characters."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)

        def on_token(token: int) -> None:
            piece = decoder.step(self._tokenizer.backend_tokenizer, token)
            if piece:
                write(piece)

        return on_token


class _Chatter:
    """One person at one terminal."""

    def __init__(
        self, conversation: Conversation, text: _Text, sampling: Sampling, options: ChatOptions, output: Output
    ) -> None:
        self._conversation = conversation
        self._text = text
        self._sampling = sampling
        self._options = options
        self._output = output
        self._dialogue = _opening(options)

    async def loop(self, model_name: str) -> None:
        self._output.say(f"Talking to {model_name}. {_HELP}", style="dim")
        reader = _LineReader()
        with reader:
            while True:
                line = await reader.read("\n> ")
                if line is None or line.strip() in ("/quit", "/exit"):
                    return
                question = line.strip()
                if question == "/new":
                    self._dialogue = _opening(self._options)
                    self._output.say("(starting over)", style="dim")
                elif question == "/route":
                    self._say_route()
                elif question.startswith("/"):
                    self._output.say(_HELP, style="dim")
                elif question:
                    try:
                        await self.answer(question)
                    except PetalnodeError as error:
                        self._output.error(str(error))

    async def answer(self, question: str) -> None:
        """Streams one answer. Ctrl-C stops it; what was said until then counts."""
        asked = self._dialogue.plus("user", question)
        room = min(self._sampling.max_new_tokens, self._conversation.max_length // 4)
        fitted, tokens, dropped = fit(asked, self._text.tokenize, self._conversation.max_length - room)
        if dropped:
            self._output.say(f"(the context is full: the oldest {dropped} turns were dropped)", style="dim")
        recoveries = self._conversation.recoveries
        begun = time.perf_counter()
        said: list[int] = []
        write = self._text.stream(self._write)

        def on_token(token: int) -> None:
            said.append(token)
            write(token)

        stopped = await _stopped_by_ctrl_c(
            lambda stop: self._conversation.answer(tokens, self._sampling, on_token, stop)
        )
        seconds = time.perf_counter() - begun
        text = self._text.decode(said)
        self._dialogue = fitted.plus("assistant", text)
        recoveries = self._conversation.recoveries - recoveries
        if self._output.as_json:
            self._output.emit(
                text=text,
                tokens=len(said),
                seconds=round(seconds, 3),
                route=[
                    {"peer_id": hop.peer_id, "blocks": [hop.span.start, hop.span.end]}
                    for hop in self._conversation.route
                ],
                recoveries=recoveries,
            )
        else:
            self._write("\n")
            if stopped:
                self._output.say("(stopped)", style="dim")
            if self._options.show_route:
                rate = len(said) / seconds if seconds else 0.0
                self._output.say(f"\n{len(said)} tokens in {seconds:.1f} s, {rate:.1f} tokens/s", style="dim")
                self._say_route()
        if stopped and self._options.prompt is not None:
            raise typer.Exit(ExitCode.INTERRUPTED)

    def _write(self, text: str) -> None:
        if not self._output.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _say_route(self) -> None:
        hops = [f"{hop.span} at …{hop.peer_id[-8:]}" for hop in self._conversation.route]
        text = f"route: you → {' → '.join(hops)} → you" if hops else "no route yet: ask something"
        self._output.say(text, style="dim")


async def _stopped_by_ctrl_c(function: Callable[[trio.Event], Awaitable[object]]) -> bool:
    """Awaits `function(stop)` until it is done; Ctrl-C sets `stop`. True if that happened."""
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGINT) as signals:

            async def watch() -> None:
                async for _ in signals:
                    stop.set()
                    # A token is on its way; a long prompt or a silent server is not waited for.
                    await trio.sleep(STOP_GRACE)
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await function(stop)
            nursery.cancel_scope.cancel()
    return stop.is_set()


class _LineReader:
    """Reads lines in a thread, so that the node stays alive meanwhile, and leaves the terminal as it was."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> None:
        try:
            import readline  # noqa: F401  (line editing and history for input())
            import termios

            self._saved = termios.tcgetattr(sys.stdin.fileno())
        except (ImportError, OSError):
            pass  # Windows, or no terminal to restore

    def __exit__(self, *exc_info: object) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    async def read(self, prompt: str) -> str | None:
        """A line, or None at the end."""
        try:
            return await trio.to_thread.run_sync(input, prompt, abandon_on_cancel=True)
        except EOFError:
            return None
