"""A person at a terminal: questions, Ctrl-C, /commands."""

from __future__ import annotations

import os
import pty
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.patience import Patience
from tests.swarm import warm_python
from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import START_TIMEOUT, STOP_TIMEOUT, Nodes

# Makes the terminal on standard input its own, as a login shell does, so that Ctrl-C comes as a signal.
_ON_ITS_TERMINAL = """
import fcntl, os, runpy, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("petalnode", run_name="__main__", alter_sys=True)
"""


class Terminal:
    """The person's side of a pseudo-terminal."""

    def __init__(self, descriptor: int, process: warm_python.Process) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = ""
        self._all = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, text: str) -> str:
        """What is shown up to and with `text`."""
        while text not in self._unread:
            if not self._shows_more(START_TIMEOUT):
                raise AssertionError(f"never showed {text!r}:\n{self._all}")
            try:
                data = os.read(self._descriptor, 4096).decode(errors="replace")
            except OSError:  # the other side is gone
                data = ""
            if not data:
                raise AssertionError(f"ended before it showed {text!r}:\n{self._all}")
            self._unread += data
            self._all += data
        shown, _, self._unread = self._unread.partition(text)
        return shown + text

    def wait_for_more(self) -> None:
        """Returns as soon as anything more is shown."""
        if not self._unread:
            assert self._shows_more(START_TIMEOUT), self._all

    def _shows_more(self, seconds: float) -> bool:
        """Waits for that as long as the process makes progress; false if it has made none for so many seconds."""
        patience = Patience(seconds, self.process.pid)
        while not select.select([self._descriptor], [], [], 1.0)[0]:
            if patience.is_over:
                return False
        return True

    def exit_code(self) -> int:
        """Reads what is left and waits for the end."""
        while True:
            try:
                if not self._shows_more(STOP_TIMEOUT):
                    raise AssertionError(f"did not end:\n{self._all}")
                data = os.read(self._descriptor, 4096)
            except OSError:
                break
            if not data:
                break
            self._all += data.decode(errors="replace")
        code = self.process.wait(STOP_TIMEOUT)
        assert "Traceback" not in self._all, self._all
        return code


@contextmanager
def terminal(*arguments: str, env: dict[str, str], cwd: Path) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _ON_ITS_TERMINAL, *arguments]
    process = warm_python.start(command, env | {"TERM": "xterm"}, cwd, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture(scope="module")
def terminals(node_starter: Nodes, shared_swarm: SharedSwarm) -> Iterator[list[Terminal]]:
    """One for each test, started side by side."""
    arguments = ("chat", "tiny-llama", "--peer", shared_swarm.peer, "--max-new-tokens", "3500")
    with ExitStack() as stack:
        yield [
            stack.enter_context(terminal(*arguments, env=node_starter.env, cwd=shared_swarm.models)) for _ in range(3)
        ]


@pytest.fixture
def chat(terminals: list[Terminal]) -> Terminal:
    opened = terminals.pop()
    opened.until("> ")
    return opened


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat: Terminal, shared_swarm: SharedSwarm) -> None:
    chat.type("/route\n")
    chat.until("no route yet")
    chat.until("> ")
    chat.type("hello\n")
    chat.until("hello\r\n")
    chat.wait_for_more()
    chat.type("\x03")
    chat.until("(stopped)")
    chat.until("> ")
    chat.type("/route\n")
    shown = chat.until("→ you")
    for node in shared_swarm.llama:
        assert node.peer_id[-8:] in shown
    chat.until("> ")
    chat.type("/new\n")
    chat.until("starting over")
    chat.until("> ")
    chat.type("and again\n")
    chat.until("and again\r\n")
    chat.wait_for_more()
    chat.type("\x03")
    chat.until("(stopped)")
    chat.until("> ")
    chat.type("/quit\n")
    assert chat.exit_code() == 0


def test_end_of_input_leaves(chat: Terminal) -> None:
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_ctrl_c_at_the_prompt_leaves(chat: Terminal) -> None:
    chat.type("\x03")
    assert chat.exit_code() == 130
