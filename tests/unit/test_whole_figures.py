"""A figure in a table is never cut: half of one reads as another. Bars leave the terminal as it was."""

from __future__ import annotations

import io
import re
from contextlib import suppress

import pytest
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from petalnode.node.cli.output import Output, ProgressBars

FIGURES = ["100:131", "131072", "98765.4", "1000000", "12:13"]


def table() -> Table:
    made = Table(title="servers")
    for name, justify in (("blocks", "right"), ("machine of a long name", "left"), ("cache", "right")):
        made.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name in ("computes, ms", "tokens", "on the route"):
        made.add_column(name)
    made.add_row("100:131", "a" * 30, "131072", Text("98765.4"), "1000000", "goes to 12:13 soon, as far as it knows")
    return made


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_terminal_is_too_narrow_for_a_figure(width: int) -> None:
    output, written = Output(False), io.StringIO()
    output.console = Console(file=written, force_terminal=True, width=width, color_system=None, soft_wrap=True)
    output.table(Group(table(), Text("below")))
    words = re.split(r"[\s│┃,]+", written.getvalue())
    assert [figure for figure in FIGURES if figure not in words] == []
    assert "below" in words and ("a" * 30 in words) == (width == 200)


def test_lines_in_pipe_are_as_long_as_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    Output(False).table(table())
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "131072" in line]
    assert "a" * 30 in row and "goes to 12:13 soon, as far as it knows" in row and len(row) < 200
    monkeypatch.setenv("COLUMNS", "60")
    Output(False).table(table())
    assert "a" * 30 not in capsys.readouterr().out


def test_bars_leave_the_cursor_whatever_happens() -> None:
    written = io.StringIO()
    with suppress(KeyboardInterrupt), ProgressBars(Console(file=written, force_terminal=True)) as bars:
        bars("reading", 1, 2)
        assert "\x1b[?25l" in written.getvalue()
        raise KeyboardInterrupt
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")
    shown = written.getvalue()
    bars("a thread that was left behind", 1, 2)
    assert written.getvalue() == shown
