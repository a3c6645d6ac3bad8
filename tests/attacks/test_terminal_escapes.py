"""Texts of strangers that a terminal would obey: a model's answer, a server's error, names that are announced."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from petalnode.node.cli.conversation.answers import MarkdownAnswer, answer_on
from petalnode.node.cli.output import Output, ProgressBars
from petalnode.node.cli.process import JsonLines, TextLines, one_line, say_error, shown
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import Refusal

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
HOSTILE = {
    "clipboard": CLIPBOARD,
    "title": "\x1b]0;root@host\x1b\\",
    "link": "\x1b]8;;http://192.0.2.1/\x1b\\bank\x1b]8;;\x1b\\",
    "cursor": "\x1b[2J\x1b[1;1Hall is well",
    "colour": "\x1b[8mhidden\x1b[0m",
    "C1": "\x9d52;c;YQ==\x9c\x9b2J",
    "bell, back, return": "ok\x07\x08\x08\rno\x7f\x0e",
    "direction": "exe.\u202egpj \u2066x\u2069",
    "lines": "a\u2028b\u2029c\x85d\x0b\x0ce",
    "tags": "\U000e0041\U000e0042",
    "half of a pair": "\ud83d",
}
READABLE = (
    "naïve Ünïcödé e\u0301 ñ", "日本語\u3000中文", "עברית\u200f عربي", "नमस्ते क्\u200dष",
    "👨\u200d👩\u200d👧 ❤\ufe0f 🏳\ufe0f\u200d🌈 👍🏽",
    "tab\there\nand a line", "no\u00a0break", "\ue0b0", "\U0001fae8",
)  # fmt: skip
MARKUP = "[red]x[/red] [link=http://192.0.2.1]y[/link] [/] [bold :smile:"


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def obeyed(text: str) -> list[str]:
    """What a terminal would not show as a letter: line ends and tabs, and letters without width in words, left out."""
    allowed = "\n\t\u00ad\u061c\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064"
    return [
        char for char in text if (char not in allowed and unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp"))
        or char in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff"
    ]  # fmt: skip


@contextmanager
def at_terminal(kind: str = "dumb") -> Iterator[Terminal]:
    """Standard output and error are one."""
    opened = Terminal()
    environment = {"TERM": kind, "NO_COLOR": "1", "COLUMNS": "200"}
    with patch.dict(os.environ, environment), redirect_stdout(opened), redirect_stderr(opened):
        yield opened


@given(st.text())
def test_any_text(text: str) -> None:
    for made in (shown(text), one_line(text)):
        assert not obeyed(made)
        assert shown(made) == made
    assert len(one_line(text).splitlines()) <= 1
    assert "".join(map(shown, text)) == shown(text)  # a sequence that is split over tokens
    assert shown(text).count("\n") == text.count("\n")


@pytest.mark.parametrize("text", READABLE)
def test_what_people_read_stays(text: str) -> None:
    assert shown(text) == text


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_reaches_the_terminal(name: str) -> None:
    text = f"a{HOSTILE[name]}b"
    assert obeyed(text) or name == "tags"
    with at_terminal() as terminal:
        output = Output(False)
        output.say(text, style="dim")
        output.note(text)
        output.warn(text)
        output.error(text)
        for token in text:
            output.write(token)
        table = Table(title=text)
        table.add_column(text)
        table.add_row(text)
        table.add_row(Text(text))
        output.table(table)
        output.table(Panel(Text(text), title=Text(text)))
        bars = ProgressBars(output.errors)
        bars(text, 1, 2)
        bars.stop()
    assert not obeyed(terminal.getvalue())
    assert terminal.getvalue().count("\\") >= 11


def as_markdown(text: str) -> str:
    """What a terminal gets of an answer, without rich's own sequences."""
    with at_terminal("xterm") as terminal:
        answer = answer_on(Output(False))
        assert isinstance(answer, MarkdownAnswer)
        for piece in re.findall("&#[0-9]+;|.", text, re.DOTALL):
            answer.write(piece)
            answer.refresh()
        answer.finish()
    return _OWN.sub("", terminal.getvalue())


_OWN = re.compile("\x1b\\[(\\?25[lh]|[0-9]*A|2K|[0-9;]*m)|\r")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "form", ["a{}b", "# {}", "- {}", "```{}\n{}\n```", "[{}](http://192.0.2.1/{})", "![{}](x)", "|{}|\n|-|\n|{}|"]
)
def test_an_answer_that_is_drawn_as_markdown(name: str, form: str) -> None:
    """Also by entities, which Markdown makes letters of, and by links, which terminals would follow."""
    entities = "".join(f"&#{ord(letter)};" for letter in HOSTILE[name])
    for text in (HOSTILE[name], entities):
        shown_text = as_markdown(form.replace("{}", text))
        assert not obeyed(shown_text), shown_text


def test_markdown_hides_nothing_that_the_model_wrote() -> None:
    shown_text = as_markdown("one\ntwo <script>x</script>\n\n<div>\nthree\n\n[four](http://192.0.2.1/five)\n")
    lines = [line.rstrip() for line in shown_text.splitlines()]
    assert "two <script>x</script>" in lines and "<div>" in lines  # in lines of their own
    assert "http://192.0.2.1/five" in shown_text


def test_begun_answer_is_seen_before_its_end() -> None:
    with at_terminal("xterm") as terminal:
        answer = answer_on(Output(False))
        answer.write("one ")
        answer.refresh()
        assert "one" in terminal.getvalue()
        answer.finish()


def test_a_panel_that_is_drawn_again() -> None:
    """rich's own control sequences pass, those of a text do not."""
    with at_terminal("xterm") as terminal, Live(console=Output(False).console, auto_refresh=False) as live:
        live.update(Panel(Text(CLIPBOARD)), refresh=True)
        live.update(Panel(Text(CLIPBOARD)), refresh=True)
    said = terminal.getvalue()
    assert "\x1b[" in said and "\\x1b]52" in said
    assert "\x1b]" not in said and "\x07" not in said


def test_markup_is_text() -> None:
    with at_terminal() as terminal:
        output = Output(False)
        output.say(MARKUP)
        output.note(MARKUP)
        table = Table()
        table.add_column("name")
        table.add_row(MARKUP)
        output.table(table)
        bars = ProgressBars(output.errors)
        bars(MARKUP, 1, 2)
        bars.stop()
    assert terminal.getvalue().count("[red]x[/red] [link=http://192.0.2.1]y[/link]") >= 3
    assert "\x1b]8" not in terminal.getvalue()


def test_logs() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = logging.Logger("test")
    log.addHandler(handler)
    for form in (TextLines(), JsonLines()):
        handler.setFormatter(form)
        for text in HOSTILE.values():
            try:
                raise ValueError(f"{text}\u2028")
            except ValueError:
                log.exception("server %s said\n2026 ERROR: no", text)
    assert not obeyed(stream.getvalue())
    assert "\n2026 ERROR" not in stream.getvalue()


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say_error(f"server x refused: no\npetalnode: all is well{CLIPBOARD}")
    assert capsys.readouterr().err.splitlines() == [
        "petalnode: server x refused: no\\npetalnode: all is well\\x1b]52;c;cm0gLXJmIH4=\\x07"
    ]
    refusal = Refusal.from_wire(wire.Error(message="no\n  blocks\u2028left\x85here"))
    assert refusal.message == "no blocks left here"


def test_programs_get_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets an answer to the letter, --json has it escaped as JSON does."""
    Output(False).write(CLIPBOARD)
    assert capsys.readouterr().out == CLIPBOARD
    for text in HOSTILE.values():
        Output(True).emit(text=text)
        out = capsys.readouterr().out
        assert not obeyed(out) and json.loads(out) == {"text": text}
