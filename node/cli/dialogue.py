"""A conversation at one terminal, or of one question: what is typed, what is answered, what is kept."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
import typer

from ..client.chat import ChatMessage, Dialogue, SavedChat, Text, fit, read_dialogue
from ..client.deadlines import DEADLINES
from ..errors import BadInput, ExitCode, MachineError, PetalnodeError, unwrapped
from .conversation.answers import PlainAnswer, answer_on, show_answer
from .conversation.kept import asked_so_far, copy, save_dialogue
from .conversation.reader import read_question
from .conversation.settings import changed, described, repeats
from .output import Output
from .process import interrupted, text_given
from .terminal import LineReader, stopped_by_signal

if TYPE_CHECKING:
    from ..blocks.images.encoder import ImagePrompt
    from ..blocks.images.pictures import Picture
    from ..client.generation.conversation import Conversation, Sampling
    from ..client.generation.drafting import DraftCounts
    from ..client.generation.picture_prompts import PicturePrompts
    from ..client.session.chain import Interruption
    from ..client.session.comparing import Disagreement
    from ..swarm.routing import Hop
    from .strangers import StrangerNotice


@dataclass(frozen=True)
class DialogueLimits:
    """How long a line may be, and when a person is told what an answer waits for."""

    look: float = 0.25  # Seconds between two looks at what an answer waits for
    letters_per_token: int = 100  # Longer questions never fit, and to count their tokens takes long
    silence: float = 3.0  # Seconds without a word from the servers, after which a person is told


DIALOGUE: Final = DialogueLimits()
_HELP: Final = "/help lists what else can be typed, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."
_COMMANDS: Final = {
    "new": "starts over",
    "retry": "asks the last question again",
    "route": "shows the servers",
    "system": "TEXT: instructions before the conversation; none: without; alone: shows them",
    "set": "NAME VALUE: temperature, top_p, max_new_tokens, ...; alone: shows them",
    "model": "NAME: goes on with another model; alone: shows which are served",
    "save": "FILE: writes the conversation, as JSON or (.md, .txt) as text",
    "load": "FILE: goes on with a conversation that was written",
    "copy": "puts the last answer on the clipboard",
    "help": "shows this",
    "quit": "leaves (also /exit, Ctrl-D, or Ctrl-C twice)",
}
_COMMAND: Final = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_TYPING: Final = (
    'Alt-Enter begins a line; lines between """ and """ are one question, and so is what is pasted. Arrow keys bring '
    "earlier questions back."
)


def _hop(hop: Hop) -> dict[str, Any]:
    return {"peer_id": hop.peer_id, "blocks": [hop.span.start, hop.span.end]}


def opening(system: str | None) -> Dialogue:
    """What stands before the first question: the system turn, if there is one."""
    return Dialogue().plus("system", text_given(system)) if system else Dialogue()


@dataclass
class Chatter:
    """One person at one terminal, or a program with one question.

    Args:
        saved: the conversation so far, which is kept in `session_file`.
        disagreements: of compared chains; grows with the answers.
        system: the system prompt of a new conversation.
        once: there is one question only, and what goes wrong is raised.
        serve_options: those of `petalnode serve` for another server of the same swarm: model, and peers to join by.
        keeps_caches: whether `session_file` also has what a later process needs to go on with the servers' caches.
        stops_repetition: whether an answer ends that has come to repeat itself.
        notice: asked before each prompt whether it may go to the servers that there are.
        is_there: whether a peer to join by, given by its address, is connected now.
        is_closed: whether only servers that the person trusts may take the place of a lost one.
        link_without: `petalnode join` and a link into this swarm through others than a peer, "" if there are none.
        served: the models that the swarm serves, by name.
        longest: how many tokens a conversation may reach with the model and the servers that there are now.
        reader: where a person types.
        pictures: for the first question.
        see: makes prompts of turns that have pictures.
    """

    conversation: Conversation
    text: Text
    sampling: Sampling
    output: Output
    saved: SavedChat | None
    disagreements: Sequence[Disagreement]
    system: str | None = None
    session_file: Path | None = None
    keeps_caches: bool = True
    stops_repetition: bool = False
    once: bool = False
    show_route: bool = False
    serve_options: str = ""
    notice: StrangerNotice | None = None
    is_closed: Callable[[Hop], bool] = lambda _: False
    is_there: Callable[[str], bool] = lambda _: True
    link_without: Callable[[str], str] = lambda _: ""
    served: Callable[[], Sequence[str]] = tuple
    longest: Callable[[], int] = int
    reader: LineReader | None = None
    pictures: tuple[Picture, ...] = ()
    see: PicturePrompts | None = None

    def __post_init__(self) -> None:
        self._reader: LineReader | None = None
        self._answer: PlainAnswer = PlainAnswer(self.output)
        self._wanted: str | None = None
        self.settings: list[list[str]] = []  # what was typed behind /set
        self.dialogue = opening(self.system)
        self.unfinished = False  # whether the answer to the newest question was cut off, or never came
        if self.saved is not None and self.saved.dialogue.turns:
            self.dialogue, self.unfinished = self.saved.dialogue, self.saved.unfinished
            self.system = self.system or self.dialogue.system

    def show_past(self) -> None:
        """What was said in an earlier run, as it looked there."""
        for turn in self.dialogue.turns:
            if turn.role == "assistant":
                show_answer(self.output, turn.content)
            else:
                self.output.say(f"\n> {turn.content}" if turn.role == "user" else f"(system prompt: {turn.content})")
        if self.dialogue.questions:
            self.output.say("")

    async def loop(self, model_name: str) -> str | None:
        """Answers what is typed, until the end; or to the model that is to go on, which this returns."""
        self.output.say(f"Talking to {model_name}. {_HELP}", style="dim")
        if self.dialogue.questions:
            self.output.say(f"(going on after {asked_so_far(self.dialogue)}; /new starts over)", style="dim")
        if self.unfinished:
            self.output.say("(the last question was not answered to the end; /retry asks it again)")
        self._reader = reader = self.reader or LineReader()
        with reader:
            if self.notice is not None and not await self.notice.permits(reader):
                raise typer.Exit(ExitCode.RESULT_SAYS_NO)
            while self._wanted is None:
                try:
                    typed = await read_question(reader, "\n> ")
                    if typed is None or typed in ("/quit", "/exit"):
                        return None
                    await self.obey(typed)
                except PetalnodeError as error:
                    self.output.error(str(error))
        return self._wanted

    async def obey(self, line: str) -> None:
        """Does what one line says."""
        found = _COMMAND.fullmatch(line)
        if found is not None:
            await self._command(found[1], (found[2] or "").strip())
        elif line:
            await self._answer_or_say_why(line)

    async def _command(self, name: str, rest: str) -> None:
        match name:
            case "new":
                self.dialogue, self.unfinished = opening(self.system), False
                self.output.say("(starting over)", style="dim")
            case "route":
                self._say_route()
            case "retry" if self.dialogue.questions:
                self.dialogue, question, _ = self.dialogue.without_newest()
                self.unfinished = False
                await self._answer_or_say_why(question)
            case "set":
                if rest:
                    self.sampling = changed(self.sampling, rest.split())
                    self.settings.append(rest.split())
                self.output.say(f"({described(self.sampling)})", style="dim")
            case "save" | "load" | "copy":
                self._file_away(name, rest)
            case "system" | "model":
                self._replace(name, rest)
            case _:
                unknown = "" if name == "help" else f"there is no /{name}\n"
                lines = [f"  /{command:7} {does}" for command, does in _COMMANDS.items()]
                self.output.say("\n".join([f"{unknown}{_TYPING}", *lines]), style="dim")

    def _replace(self, name: str, rest: str) -> None:
        if name == "model":
            self._wanted = rest or None
            if not rest:
                self.output.say(f"served in this swarm: {', '.join(self.served()) or 'nothing'}", style="dim")
            return
        turns = tuple(turn for turn in self.dialogue.turns if turn.role != "system")
        if rest:
            self.system = None if rest == "none" else rest
            self.dialogue = replace(self.dialogue, turns=(*opening(self.system).turns, *turns))
        self.output.say(f"(system prompt: {self.system or 'none'})", style="dim")

    def _file_away(self, name: str, rest: str) -> None:
        """/save, /load and /copy. Raises BadInput, MachineError."""
        if name == "copy":
            answers = [turn.content for turn in self.dialogue.turns if turn.role == "assistant"]
            self.output.say(f"({copy(answers[-1])})" if answers else "(there is no answer yet)", style="dim")
            return
        if not rest:
            raise BadInput(f"/{name} takes the name of a file")
        try:
            path = Path(rest).expanduser()
        except RuntimeError as error:
            raise BadInput(f"{rest}: {error}") from None
        if name == "save":
            save_dialogue(path, self.dialogue)
            self.output.say(f"(written to {path})", style="dim")
            return
        self.dialogue = read_dialogue(path)
        self.system = self.dialogue.system
        self.unfinished = any(turn.role == "user" for turn in self.dialogue.turns[-1:])  # /retry asks it
        self.output.say(f"({asked_so_far(self.dialogue)}; /retry asks the last one again)", style="dim")

    async def _answer_or_say_why(self, question: str) -> None:
        try:
            # Strangers may have come since the last question.
            if self.notice is None or await self.notice.permits(self._reader):
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
        most = max(self.conversation.max_length, self.longest())
        if len(question) > DIALOGUE.letters_per_token * most:
            raise BadInput(f"the question has {len(question):,} characters, and does not fit into the context")
        asked, self.pictures = self._heard().plus("user", question, self.pictures), ()
        await self._lengthen(asked.turns, most)
        room = min(self.sampling.max_new_tokens, self.conversation.max_length // 4)
        most = self.conversation.max_length - room
        fitted, tokens, dropped = await trio.to_thread.run_sync(fit, asked, self._tokens, most)
        if dropped:
            self.output.say(f"(the context is full: the oldest {dropped} turns were dropped)", style="dim")
        recoveries = self.conversation.recoveries
        before = self.conversation.drafting.counts
        disagreed = len(self.disagreements)
        begun = time.perf_counter()
        said: list[int] = []
        self._keep(fitted, finished=False)
        self._answer = answer_on(self.output)
        try:
            seen = self.see.of_turns(fitted.turns) if self.see is not None else None
            stopped = await stopped_by_signal(partial(self._ask, tokens, said, seen.seen if seen else None))
        except BaseException:
            if said:
                self._keep(fitted.plus("assistant", self.text.decode(said)), finished=False)
                self._answer.finish()
            raise
        seconds = time.perf_counter() - begun
        text = self.text.decode(said)
        recoveries = self.conversation.recoveries - recoveries
        try:
            drafts = self.conversation.drafting.counts - before
            why = "stopped" if stopped is not None else ""
            if not why and self.stops_repetition and repeats(said):
                why = "stopped, because it only repeated itself; /retry asks again"
            elif not why and not self.once and len(said) >= self.sampling.max_new_tokens:
                why = f"cut after {len(said)} tokens; /set max_new_tokens {2 * len(said)} lets answers be longer"
            self._tell(text, len(said), seconds, recoveries, disagreed, drafts, why)
        finally:
            self._keep(fitted.plus("assistant", text), finished=True)
        if stopped is not None and (stopped != signal.SIGINT or self.once):
            raise typer.Exit(interrupted(stopped))

    def _tokens(self, turns: Sequence[ChatMessage]) -> list[int]:
        seen = self.see.of_turns(turns) if self.see is not None else None
        return self.text.tokenize(turns) if seen is None else list(seen.tokens)

    async def _lengthen(self, turns: Sequence[ChatMessage], most: int) -> None:
        """Makes room for these turns and an answer, by at least doubling, where that can be had."""
        now = self.conversation.max_length
        if most <= now:
            return
        wanted = len(await trio.to_thread.run_sync(self._tokens, turns)) + self.sampling.max_new_tokens
        if wanted > now:
            await self.conversation.lengthen(min(most, max(wanted, 2 * now)))

    async def _ask(self, tokens: list[int], said: list[int], seen: ImagePrompt | None, stop: trio.Event) -> None:
        """Writes the answer as it comes, and appends its tokens to `said`."""
        text = self.text.stream()

        def on_token(token: int) -> None:
            said.append(token)
            if written := text.add(token):
                self._answer.write(written)
            if self.stops_repetition and repeats(said):
                stop.set()

        with unwrapped(PetalnodeError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_what_is_waited_for)
                await self.conversation.answer(tokens, self.sampling, on_token, stop, pictures=seen)
                nursery.cancel_scope.cancel()

    def _tell(
        self, text: str, tokens: int, seconds: float, recoveries: int, disagreed: int, drafts: DraftCounts, stopped: str
    ) -> None:
        compared = self.conversation.compared_routes
        if self.output.as_json:
            self.output.emit(
                text=text,
                tokens=tokens,
                seconds=round(seconds, 3),
                route=list(map(_hop, self.conversation.route)),
                recoveries=recoveries,
                reused=self.conversation.reused,
                codec=self.conversation.codec,
                drafts=drafts.fields(),
                waits=self.conversation.waits.fields(),
                **({"compared": [list(map(_hop, route)) for route in compared]} if compared else {}),
                disagreements=[disagreement.fields() for disagreement in self.disagreements[disagreed:]],
            )
        else:
            self._answer.finish()
            if stopped:
                self.output.say(f"({stopped})", style="dim")
            if self.show_route:
                rate = tokens / seconds if seconds else 0.0
                self.output.say(f"\n{tokens} tokens in {seconds:.1f} s, {rate:.1f} tokens/s{drafts}", style="dim")
                self._say_route()

    async def _say_what_is_waited_for(self) -> None:
        """Says which server was lost or is silent, how long the answer waits for others, and what would help."""
        told: Interruption | None = None
        opening = trio.current_time() + DIALOGUE.silence
        while True:
            await trio.sleep(DIALOGUE.look)
            self._answer.refresh()
            interruption, now = self.conversation.interruption, trio.current_time()
            if told is not None and told.lost and interruption is None:
                seconds = round(now - told.since, 1)
                fields = {"event": "server-replaced", **_hop(told.hop), "seconds": seconds}
                self._tell_progress(f"going on after {seconds} s", **fields)
                told = None
            if (
                interruption is not None
                and interruption != told
                and (interruption.lost or now - interruption.since > DIALOGUE.silence)
            ):
                told = interruption
                self._tell_interruption(interruption)
            if not self.conversation.is_open and now > opening:
                opening = math.inf
                self._answer.interrupt()
                self.output.note(f"no server has taken the conversation yet: asking for up to {DEADLINES.reopen:.0f} s")

    def _tell_interruption(self, interruption: Interruption) -> None:
        hop = interruption.hop
        if not interruption.lost:
            self._answer.interrupt()
            self.output.note(f"server …{hop.peer_id[-8:]} (blocks {hop.span}) is silent; others are looked for")
            return
        advice = self._advice(hop)
        another = "another one that you trust" if self.is_closed(hop) else "another one"
        reason = interruption.reason.replace(hop.peer_id, f"…{hop.peer_id[-8:]}")
        self._tell_progress(
            f"lost a server: {reason}\nThe answer waits up to {interruption.waits:.0f} s until it is back, or "
            f"{another} serves blocks {hop.span}. What would help: {advice}",
            event="server-lost",
            **_hop(hop),
            reason=interruption.reason,
            waits_seconds=interruption.waits,
            advice=advice,
        )

    def _advice(self, lost: Hop) -> str:
        """How to have the blocks of a lost server served again."""
        model, *peers = self.serve_options.split(" --peer ")
        others = [peer for peer in peers if lost.peer_id not in peer and self.is_there(peer)]
        options = " --peer ".join((model, *others[:1]))
        # Who joined by the lost server cannot say by whom to join; and a trusted server is one by its key.
        if self.is_closed(lost) or (peers and not others):
            return f"start this server again, on its machine: petalnode serve {options} --blocks {lost.span}"
        link = self.link_without(lost.peer_id)
        also = f"; or send somebody: {link}" if link else ""
        return f"start another server of them: petalnode serve {options} --blocks {lost.span}{also}"

    def _tell_progress(self, text: str, **fields: Any) -> None:
        self._answer.interrupt()
        self.output.note(text)
        self.output.emit(**fields)

    def _keep(self, dialogue: Dialogue, *, finished: bool) -> None:
        """Notes what was said by now, and saves it if there is a file for it.

        A file that cannot be written ends no conversation: what is said is on the screen.
        """
        self.dialogue, self.unfinished = dialogue, not finished
        if self.saved is None or self.session_file is None:
            return
        state = self.conversation.state() if finished and self.keeps_caches else ([], None)
        self.saved = self.saved.after(dialogue, *state) if finished else self.saved.asking(dialogue)
        try:
            self.saved.save(self.session_file)
        except MachineError as error:
            if finished and self.once:
                raise
            self.output.warn(str(error))

    def _say_route(self) -> None:
        hops = [f"{hop.span} at …{hop.peer_id[-8:]}" for hop in self.conversation.route]
        text = f"route: you → {' → '.join(hops)} → you" if hops else "no route yet: ask something"
        text += f", in {self.conversation.codec}" if self.conversation.codec != "none" else ""
        self.output.say(text, style="dim")
