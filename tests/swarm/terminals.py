"""Commands at a pseudo-terminal, and the person before it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import Patience
from tests.swarm import warm_python
from tests.swarm.processes import START_TIMEOUT, STOP_TIMEOUT

# Makes the terminal on standard input its own, as a login shell does, so that Ctrl-C comes as a signal.
_ON_ITS_TERMINAL = """
import fcntl, os, runpy, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("petalnode", run_name="__main__", alter_sys=True)
"""
_MOST = 1 << 20
"""Characters after which what is waited for is not to be expected any more, however often a screen is drawn anew."""


class Terminal:
    """The person's side of a pseudo-terminal. What is shown is read at once, so that no command waits for it."""

    def __init__(self, descriptor: int, process: warm_python.Process) -> None:
        self.process = process
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._shown = ""
        self._read = 0
        self._ended = False
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    @property
    def shown(self) -> str:
        """All so far."""
        return self._shown

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def resize(self, columns: int, lines: int) -> None:
        """As a window that is made larger or smaller: the command gets SIGWINCH."""
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def modes(self) -> list[Any]:
        """How the terminal treats what is typed and shown; a command leaves them as they were."""
        return termios.tcgetattr(self._descriptor)

    def until(self, text: str) -> str:
        """What is shown up to and with `text`, from where the call before ended."""
        self._wait(lambda: text in self._shown[self._read :], f"never showed {text!r}")
        begin, self._read = self._read, self._shown.index(text, self._read) + len(text)
        return self._shown[begin : self._read]

    def wait_for_more(self) -> None:
        """Returns as soon as anything more is shown."""
        self._wait(lambda: len(self._shown) > self._read, "showed nothing more")

    def exit_code(self) -> int:
        """Reads what is left and waits for the end."""
        self._wait(lambda: self._ended, "did not end", STOP_TIMEOUT)
        code = self.process.wait(STOP_TIMEOUT)
        assert "Traceback" not in self._shown, self._shown
        return code

    def _wait(self, condition: Any, what: str, seconds: float = START_TIMEOUT) -> None:
        """Waits as long as the process makes progress."""
        patience = Patience(seconds, self.process.pid, lambda: len(self._shown))
        begun = len(self._shown)
        with self._changed:
            while not condition():
                hopeless = self._ended or len(self._shown) - begun > _MOST or patience.is_over
                assert not hopeless, f"{what}:\n{self._shown[-20_000:]}"
                self._changed.wait(1.0)

    def _follow(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:  # the other side is gone
                data = b""
            with self._changed:
                self._ended = not data
                self._shown += decoder.decode(data)
                self._changed.notify_all()
            if not data:
                return

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(STOP_TIMEOUT)
        os.close(self._descriptor)


@contextmanager
def terminal(
    *arguments: str, env: Mapping[str, str], cwd: Path, size: tuple[int, int] | None = None
) -> Iterator[Terminal]:
    """`petalnode ARGUMENTS` at a terminal of that number of columns and lines; None for a size that nobody has set."""
    ours, theirs = pty.openpty()
    if size is not None:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    command = [sys.executable, "-c", _ON_ITS_TERMINAL, *arguments]
    process = warm_python.start(command, {**env, "TERM": "xterm"}, cwd, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    opened = Terminal(ours, process)
    try:
        yield opened
    finally:
        opened.close()
