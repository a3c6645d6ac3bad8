"""A conversation at one terminal, or of one question: what is typed, what is answered, what is kept."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
import typer

from ..client.chat import Dialogue, SavedChat, Text, fit
from ..client.deadlines import DEADLINES
from ..errors import BadInput, ExitCode, MachineError, PetalnodeError, unwrapped
from .output import Output
from .process import interrupted, text_given
from .terminal import LineReader, stopped_by_signal

if TYPE_CHECKING:
    from ..client.generation.conversation import Conversation, Sampling
    from ..client.generation.drafting import DraftCounts
    from ..client.session.chain import Trouble
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
_HELP: Final = (
    "/new starts over, /retry asks the last question again, /route shows the servers, /quit (or Ctrl-D) leaves; "
    "Ctrl-C stops an answer."
)


def _fields(trouble: Trouble) -> dict[str, Any]:
    """What the events of a lost server have in common."""
    return _hop(trouble.hop)


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
        notice: asked before each prompt whether it may go to the servers that there are.
        is_there: whether a peer to join by, given by its address, is connected now.
        is_closed: whether only servers that the person trusts may take the place of a lost one.
    """

    conversation: Conversation
    text: Text
    sampling: Sampling
    output: Output
    saved: SavedChat | None
    disagreements: Sequence[Disagreement]
    system: str | None = None
    session_file: Path | None = None
    once: bool = False
    show_route: bool = False
    serve_options: str = ""
    notice: StrangerNotice | None = None
    is_closed: Callable[[Hop], bool] = lambda _: False
    is_there: Callable[[str], bool] = lambda _: True

    def __post_init__(self) -> None:
        self._reader: LineReader | None = None
        self.dialogue = opening(self.system)
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
        self._reader = reader = LineReader()
        with reader:
            if self.notice is not None and not await self.notice.permits(reader):
                raise typer.Exit(ExitCode.RESULT_SAYS_NO)
            while True:
                try:
                    line = await reader.read("\n> ")
                    if line is None or line.strip() in ("/quit", "/exit"):
                        return
                    await self.obey(text_given(line).strip())
                except PetalnodeError as error:
                    self.output.error(str(error))

    async def obey(self, line: str) -> None:
        """Does what one line says."""
        if line == "/new":
            self.dialogue, self.unfinished = opening(self.system), False
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
        if len(question) > DIALOGUE.letters_per_token * self.conversation.max_length:
            raise BadInput(f"the question has {len(question):,} characters, and does not fit into the context")
        asked = self._heard().plus("user", question)
        room = min(self.sampling.max_new_tokens, self.conversation.max_length // 4)
        fitted, tokens, dropped = fit(asked, self.text.tokenize, self.conversation.max_length - room)
        if dropped:
            self.output.say(f"(the context is full: the oldest {dropped} turns were dropped)", style="dim")
        recoveries = self.conversation.recoveries
        before = self.conversation.drafting.counts
        disagreed = len(self.disagreements)
        begun = time.perf_counter()
        said: list[int] = []
        self._keep(fitted, finished=False)
        try:
            stopped = await stopped_by_signal(partial(self._ask, tokens, said))
        except BaseException:
            if said:
                self._keep(fitted.plus("assistant", self.text.decode(said)), finished=False)
                self.output.write("\n")
            raise
        seconds = time.perf_counter() - begun
        text = self.text.decode(said)
        recoveries = self.conversation.recoveries - recoveries
        try:
            drafts = self.conversation.drafting.counts - before
            self._tell(text, len(said), seconds, recoveries, disagreed, drafts, stopped=stopped is not None)
        finally:
            self._keep(fitted.plus("assistant", text), finished=True)
        if stopped is not None and (stopped != signal.SIGINT or self.once):
            raise typer.Exit(interrupted(stopped))

    async def _ask(self, tokens: list[int], said: list[int], stop: trio.Event) -> None:
        """Writes the answer as it comes, and appends its tokens to `said`."""
        write = self.text.stream(self.output.write)
        with unwrapped(PetalnodeError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_what_is_waited_for)
                await self.conversation.answer(tokens, self.sampling, partial(_write_token, write, said), stop)
                nursery.cancel_scope.cancel()

    def _tell(
        self,
        text: str,
        tokens: int,
        seconds: float,
        recoveries: int,
        disagreed: int,
        drafts: DraftCounts,
        *,
        stopped: bool,
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
            self.output.write("\n")
            if stopped:
                self.output.say("(stopped)", style="dim")
            if self.show_route:
                rate = tokens / seconds if seconds else 0.0
                self.output.say(f"\n{tokens} tokens in {seconds:.1f} s, {rate:.1f} tokens/s{drafts}", style="dim")
                self._say_route()

    async def _say_what_is_waited_for(self) -> None:
        """Says which server was lost or is silent, how long the answer waits for others, and what would help."""
        told: Trouble | None = None
        opening = trio.current_time() + DIALOGUE.silence
        while True:
            await trio.sleep(DIALOGUE.look)
            trouble, now = self.conversation.trouble, trio.current_time()
            if told is not None and told.lost and trouble is None:
                seconds = round(now - told.since, 1)
                fields = {"event": "server-replaced", **_fields(told), "seconds": seconds}
                self._tell_progress(f"going on after {seconds} s", **fields)
                told = None
            if trouble is not None and trouble != told and (trouble.lost or now - trouble.since > DIALOGUE.silence):
                told = trouble
                self._tell_trouble(trouble)
            if not self.conversation.is_open and now > opening:
                opening = math.inf
                self.output.note(f"no server has taken the conversation yet: asking for up to {DEADLINES.reopen:.0f} s")

    def _tell_trouble(self, trouble: Trouble) -> None:
        hop = trouble.hop
        if not trouble.lost:
            self.output.note(f"server …{hop.peer_id[-8:]} (blocks {hop.span}) is silent; others are looked for")
            return
        advice = self._advice(hop)
        another = "another one that you trust" if self.is_closed(hop) else "another one"
        self._tell_progress(
            f"lost a server: {trouble.reason}\nThe answer waits up to {trouble.waits:.0f} s until it is back, or "
            f"{another} serves blocks {hop.span}. What would help: {advice}",
            event="server-lost",
            **_fields(trouble),
            reason=trouble.reason,
            waits_seconds=trouble.waits,
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
        return f"start another server of them: petalnode serve {options} --blocks {lost.span}"

    def _tell_progress(self, text: str, **fields: Any) -> None:
        if not self.output.as_json and sys.stdout.isatty():
            self.output.write("\n")  # the beginning of an answer stands in this line
        self.output.note(text)
        self.output.emit(**fields)

    def _keep(self, dialogue: Dialogue, *, finished: bool) -> None:
        """Notes what was said by now, and saves it if there is a file for it.

        A file that cannot be written ends no conversation: what is said is on the screen.
        """
        self.dialogue, self.unfinished = dialogue, not finished
        if self.saved is None or self.session_file is None:
            return
        self.saved = self.saved.after(dialogue, *self.conversation.state()) if finished else self.saved.asking(dialogue)
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


def _write_token(write: Callable[[int], object], said: list[int], token: int) -> None:
    said.append(token)
    write(token)
