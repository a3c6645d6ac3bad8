"""What a command says, and where: people's text or one JSON object per line."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn


class Output:
    """With `as_json`, standard output carries one JSON object a line and nothing else; text goes to standard error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        # Soft wrapping: a line that a person copies (a command, an address) must not be broken by the terminal's width.
        self.console = Console(stderr=as_json, soft_wrap=True, highlight=False)
        self.errors = Console(stderr=True, soft_wrap=True, highlight=False)

    def say(self, text: str, *, style: str | None = None) -> None:
        """A line for a person."""
        self.console.print(text, style=style, markup=False)

    def emit(self, **fields: Any) -> None:
        """A JSON line for a program; nothing without --json."""
        if self.as_json:
            sys.stdout.write(json.dumps(fields) + "\n")
            sys.stdout.flush()

    def warn(self, text: str) -> None:
        """A line for a person that is not an answer: on standard error, with or without --json."""
        self.errors.print(f"petalnode: {text}", style="yellow", markup=False, emoji=False)

    def error(self, text: str) -> None:
        self.errors.print(f"petalnode: {text}", style="red", markup=False)


class ProgressBars:
    """Renders `models.Progress` calls as bars on standard error; silent where that is no terminal."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._console = console

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self._tasks:
            if not self._console.is_terminal:
                self._console.print(f"{what} ...", markup=False)
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
