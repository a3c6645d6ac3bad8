"""Shows an answer as it comes: to the letter in a pipe, at a terminal as Markdown that is wrapped at words."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Final

from ..output import Output
from ..process import shown, writing

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.markdown import Markdown

_INTERVAL: Final = 0.05  # seconds between two pictures of what is not finished
_FENCE: Final = re.compile(r" {0,3}(```+|~~~+)")
_ITEM: Final = re.compile(r"([-*+]|\d{1,9}[.)])\s")


def finished_blocks(text: str) -> tuple[str, str]:
    """(the blocks of a Markdown text that nothing which follows can change, the rest).

    A block ends with a blank line outside of fenced code, behind which another one begins; a list goes on in its items.
    """
    fence, blank, in_list, end, at = "", False, False, 0, 0
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if not line.strip():
            blank = not fence
        else:
            item = _ITEM.match(line) is not None
            if blank and not line[0].isspace() and line.endswith("\n") and not (in_list and item):
                end = at
            in_list = item or (in_list and (not blank or line[0].isspace()))
            blank = False
            if fence and found is not None and found[1].startswith(fence):
                fence = ""
            elif not fence and found is not None:
                fence = found[1]
        at += len(line)
    return text[:end], text[end:]


class PlainAnswer:
    """Writes pieces of an answer to standard output as they are; nothing with --json."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, piece: str) -> None:
        self._output.write(piece)

    def refresh(self) -> None:
        """Shows what has come, if that was put off."""

    def interrupt(self) -> None:
        """Something else is told now: the beginning of an answer stands in this line."""
        if not self._output.as_json and sys.stdout.isatty():
            self._output.write("\n")

    def finish(self) -> None:
        """The answer is over, or cut off."""
        self._output.write("\n")


class MarkdownAnswer(PlainAnswer):
    """Draws what is not finished yet anew with each piece, and leaves finished blocks on the screen."""

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._text = ""
        self._blocks = 0
        self._live: Live | None = None
        self._drawn = 0.0
        self._is_drawn = True

    def write(self, piece: str) -> None:
        self._text += shown(piece)
        finished, rest = finished_blocks(self._text)
        if finished:
            self._text = rest
            self._print(finished)
        self._is_drawn = False
        if time.monotonic() - self._drawn > _INTERVAL:
            self.refresh()

    def refresh(self) -> None:
        if self._is_drawn:
            return
        with writing():
            self._started().update(_Tail(markdown(self._text)), refresh=True)
        self._drawn, self._is_drawn = time.monotonic(), True

    def interrupt(self) -> None:
        self.refresh()

    def finish(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with writing():
                live.stop()
        self._print(self._text)
        self._text, self._is_drawn = "", True

    def _started(self) -> Live:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._output.console, auto_refresh=False, transient=True)
            self._live.start()
        return self._live

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._live is not None:
            self._live.update(_Tail(markdown(self._text)))
        if self._blocks:
            self._output.say("")
        self._blocks += 1
        self._output.table(markdown(text))


def markdown(text: str) -> Markdown:
    """What a model wrote. HTML is shown as it is, line ends stay, links are text and cannot be clicked on."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    found = Markdown("", code_theme="ansi_dark", justify="default", hyperlinks=False)
    parser = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_inline", "html_block"])
    found.parsed = parser.parse(text)
    for token in found.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return found


class _Tail:
    """The last lines of a Markdown text, as many as the screen has: a drawing that is longer cannot be drawn anew."""

    def __init__(self, text: Markdown) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self._text, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def _is_drawn(output: Output) -> bool:
    return not output.as_json and output.console.is_terminal and not output.console.is_dumb_terminal


def answer_on(output: Output) -> PlainAnswer:
    """What writes the next answer."""
    return MarkdownAnswer(output) if _is_drawn(output) else PlainAnswer(output)


def show_answer(output: Output, text: str) -> None:
    """A whole answer, as `answer_on` leaves it on the screen."""
    if _is_drawn(output):
        output.table(markdown(text))
    else:
        output.say(text)
