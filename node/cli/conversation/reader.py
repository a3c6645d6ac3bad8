"""Reads questions at a terminal with prompt_toolkit: editing, history, and pastes of several lines as one question."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import trio

from ..process import shown, text_given
from ..terminal import LineReader

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import Application
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_QUOTES: Final = '"""'
_PASTES, _NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"
"""A terminal marks the beginning and the end of what is pasted, or not (bracketed paste of xterm)."""
_LEAVING: Final = 1.0  # seconds
_AGAIN: Final = "Ctrl-C again or Ctrl-D leaves"


def is_open_block(text: str) -> bool:
    '''Whether a block that begins with """ goes on in the next line.'''
    begun = text.lstrip()
    return begun.startswith(_QUOTES) and _QUOTES not in begun[len(_QUOTES) :]


def question_of(text: str) -> str:
    '''What was typed, without the """ around a block.'''
    stripped = text.strip()
    if stripped.startswith(_QUOTES):
        return stripped.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return stripped


class QuestionReader(LineReader):
    """Reads at a terminal that can move its cursor. What is typed while nobody reads is not shown: the next line begins
    with it.

    Args:
        history: earlier questions, oldest first.
    """

    def __init__(self, history: Iterable[str] = ()) -> None:
        super().__init__()
        self._history = list(history)
        self._session: PromptSession[str] | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._warned = False

    def __enter__(self) -> None:
        super().__enter__()
        if self._saved is not None:
            import termios

            modes = [*self._saved]
            modes[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, modes)
            self._tell(_PASTES)

    def __exit__(self, *exc_info: object) -> None:
        self._idle.wait(_LEAVING)  # prompt_toolkit, if it was interrupted, leaves the terminal as it found it
        if self._saved is not None:
            self._tell(_NO_PASTES)
        super().__exit__(*exc_info)

    def _tell(self, sequence: str) -> None:
        with suppress(OSError):
            sys.stdout.write(sequence)
            sys.stdout.flush()

    async def read(self, prompt: str) -> str | None:
        """What was typed or pasted, perhaps of several lines, or None at the end.

        Raises:
            KeyboardInterrupt: a second Ctrl-C.
        """
        self._idle.clear()
        try:
            return await trio.to_thread.run_sync(self._ask, shown(prompt), abandon_on_cancel=True)
        except EOFError:
            return None
        except BaseException:
            self._leave()
            raise

    def _ask(self, prompt: str) -> str:
        try:
            if self._session is None:
                self._session = self._begin()
            above, _, last = prompt.rpartition("\n")
            if above or prompt.startswith("\n"):
                self._tell(above + "\n")
            return self._session.prompt(last, handle_sigint=False)
        finally:
            if self._saved is not None:
                self._tell(_PASTES)
            self._idle.set()

    def _leave(self) -> None:
        app = None if self._session is None else self._session.app
        if app is not None and app.loop is not None and not self._idle.is_set():
            with suppress(RuntimeError):  # the loop has ended
                app.loop.call_soon_threadsafe(_exit, app)

    def _begin(self) -> PromptSession[str]:
        # 0.2 s, in the thread that waits for a person.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.output.defaults import create_output

        output: Any = create_output(sys.stdout)
        output.enable_cpr = False  # the terminal's answer would be read as typed
        session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(self._history),
            multiline=Condition(lambda: is_open_block(session.default_buffer.text)),
            key_bindings=self._bindings(),
            placeholder=lambda: [("fg:ansibrightblack", _AGAIN if self._warned else "")],
            output=output,
        )
        session.default_buffer.on_text_changed += lambda buffer: self._forget(buffer.text)
        return session

    def _forget(self, text: str) -> None:
        self._warned = self._warned and not text

    def _bindings(self) -> KeyBindings:
        from prompt_toolkit.key_binding import KeyBindings

        bindings = KeyBindings()

        @bindings.add("c-c")
        def _clear_or_leave(event: KeyPressEvent) -> None:
            if self._warned:
                event.app.exit(exception=KeyboardInterrupt())
            else:
                event.current_buffer.reset()
                self._warned = True

        @bindings.add("escape", "enter")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return bindings


def _exit(app: Application[Any]) -> None:
    with suppress(Exception):  # it has come to its end meanwhile
        app.exit(result="")


async def read_question(reader: LineReader, prompt: str) -> str | None:
    '''A line, or the lines of a block between """; None at the end.'''
    text = await reader.read(prompt)
    while text is not None and is_open_block(text):
        more = await reader.read("... ")
        if more is None:
            break
        text += f"\n{more}"
    return None if text is None else question_of(text_given(text))
