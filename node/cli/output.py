"""What a command says, and where: people's text or one JSON object per line."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from .process import say_error, shown, writing

_ENDLESS: Final = 10_000
"""Columns of a pipe, unless the person gives it some."""
_FIGURE: Final = re.compile(r"\S*\d\S*")
_MOST_FIGURE: Final = 24
"""Characters of a figure; what is longer is a name or a hash, and may be folded."""


def whole_figures(table: Table) -> Table:
    """Makes columns wide enough for their figures. rich would fold them: of 131072 it shows 13107, and 2 below."""
    for column in table.columns:
        cells = [cell.plain if isinstance(cell, Text) else str(cell) for cell in column.cells]
        figures = [len(figure) for cell in cells for figure in _FIGURE.findall(cell)]
        column.min_width = max([column.min_width or 0, *(length for length in figures if length <= _MOST_FIGURE)])
    return table


class _Console(Console):
    """Prints what it is given: `:name:` and `[red]` are text, escape sequences are shown. A closed pipe is left
    to the caller."""

    def __init__(self, *, stderr: bool) -> None:
        # Soft wrapping: a line that a person copies (a command, an address) must not be broken by the terminal's width.
        super().__init__(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)

        if not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _ENDLESS

    def render_str(self, text: str, **options: Any) -> Text:
        """Texts of cells are measured as they are shown."""
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The only way to the terminal: what rich itself tells that is no text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise


class Output:
    """With `as_json`, standard output carries one JSON object a line and nothing else; text goes to standard error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _Console(stderr=as_json)
        self.errors = _Console(stderr=True)

    def say(self, text: str, *, style: str | None = None) -> None:
        """A line for a person."""
        with writing():
            self.console.print(text, style=style)

    def table(self, table: RenderableType) -> None:
        """A table, or several parts of which some are. No figure is cut: where they need it, lines are longer."""
        for part in table.renderables if isinstance(table, Group) else (table,):
            if isinstance(part, Table):
                whole_figures(part)
            with writing():
                self.console.print(part, crop=False, soft_wrap=False)

    def write(self, text: str) -> None:
        """A piece of an answer, as it comes; nothing with --json. A pipe or a file gets it to the letter."""
        if not self.as_json:
            with writing():
                sys.stdout.write(shown(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()

    def emit(self, **fields: Any) -> None:
        """A JSON line for a program; nothing without --json."""
        if self.as_json:
            with writing():
                sys.stdout.write(json.dumps(fields) + "\n")
                sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line for a person beside the answer: on standard error, with or without --json."""
        with suppress(OSError):
            self.errors.print(text, style="dim")

    def warn(self, text: str) -> None:
        """A line for a person about something that went wrong, and does not end the command."""
        say_error(text, "warning")

    def error(self, text: str) -> None:
        say_error(text)


class _Known(ProgressColumn):
    """Another column, where it is known how much there is to do: else rich says "0/? bytes" and "?"."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return Text() if task.total is None else self._column.render(task)


class ProgressBars:
    """Renders `models.Progress` calls as bars on standard error; silent where that is no terminal.

    At the end of a `with` block the terminal is as it was. What a thread tells that was left behind is not shown.
    """

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Known(DownloadColumn()),
            _Known(TransferSpeedColumn()),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._console = console
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if self._over:
            return
        if what not in self._tasks:
            if not self._console.is_terminal:
                self._console.print(f"{what} ...")
            if not self._bars.live.is_started:
                self._bars.start()
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)
        if total is not None and done >= total:
            self._bars.remove_task(self._tasks.pop(what))
            if not self._tasks:
                self._bars.stop()

    def stop(self) -> None:
        self._bars.stop()
