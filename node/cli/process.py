"""The process of a command: its standard streams and log, the signals that end it, errors as a line and an exit code.

Imports the standard library and `errors` only, so that it is in place before anything slow is imported.
"""

from __future__ import annotations

import _thread
import codecs
import errno
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, TextIO, cast

from ..errors import BadInput, ExitCode, MachineError, PetalnodeError

_ENCODING_ERRORS: Final = "petalnode-plain"
_PLAIN: Final = {"…": "...", "→": "->", "█": "#", "·": ".", "─": "-", "│": "|", "━": "-"}
_RED: Final = ("\x1b[31m", "\x1b[0m")
_BROKEN: Final = (errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN)
_QUIET: Final = 0.5
_AGAIN: Final = 0.05
LOG_FORMATS: Final = ("text", "json")
SIGNALLED: Final = 128
"""An exit code above it is that of a signal, as shells have it."""

_UNSHOWN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u180e\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What a terminal obeys instead of showing it: control characters (C0, C1), what turns the direction of text (Unicode
Standard Annex 9), separators of lines, invisible letters, halves of pairs."""
_IN_A_LINE: Final = re.compile(f"{_UNSHOWN.pattern[:-1]}\t\n\u200b\u2060]")
"""In a line of its own also what ends the line, and what is of no width."""

_came: list[int] = []


def shown(text: str) -> str:
    """`text` for a terminal: what that would obey is escaped; line ends, tabs, letters, accents and emoji stay.

    It knows no state, so a text may come in pieces.
    """
    return _UNSHOWN.sub(_escaped, text)


def one_line(text: str) -> str:
    """As `shown`, but line ends and tabs are escaped, too: it cannot pass for several lines."""
    return _IN_A_LINE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class OutputClosed(Exception):
    """Nobody reads the output any more (`petalnode chat | head`): the end of a command, and no error."""


def prepare() -> None:
    """Makes the standard streams usable, and SIGTERM and SIGHUP end a command as Ctrl-C does."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if _encoding(stream) != "utf-8":
            _reconfigure(stream, errors=_ENCODING_ERRORS)
    if _encoding(sys.stdin) == "ascii":  # what a person types or pipes is hardly that
        _reconfigure(sys.stdin, encoding="utf-8", errors="strict")
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # `nohup` ignores SIGHUP, and then a closed terminal is no reason to end.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, interrupt)
    sys.unraisablehook = _again
    sys.excepthook = _traceback


def _traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Of a fault of the program; what a peer has said may stand in it."""
    with suppress(OSError, ValueError):
        sys.stderr.write(shown("".join(traceback.format_exception(kind, error, trace))))
        sys.stderr.flush()


def _again(ignored: sys.UnraisableHookArgs) -> None:
    """Sends a signal again whose exception came where none can be raised, such as while an object is freed."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    timer = threading.Timer(_AGAIN, _thread.interrupt_main, _came[:1])
    timer.daemon = True
    timer.start()


def _open_streams() -> None:
    """Opens descriptors 0, 1 and 2 on the null device where they are closed: a file or socket would take their numbers,
    and Python has no `sys.stdin` then."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _encoding(stream: Any) -> str:
    with suppress(LookupError, AttributeError):
        return codecs.lookup(stream.encoding).name
    return "utf-8"


def _reconfigure(stream: Any, **how: str) -> None:
    with suppress(AttributeError, ValueError, OSError):  # a test or a program has put another object there
        stream.reconfigure(**how)


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """Letters of a terminal that has not got our signs; others as \\uXXXX, so that nothing is left out."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, sign.encode("ascii", "backslashreplace").decode()) for sign in text), error.end


codecs.register_error(_ENCODING_ERRORS, _plain)


def interrupt(number: int, frame: object) -> None:
    """Handles SIGTERM and SIGHUP as Ctrl-C; the command then says which signal it was."""
    _came.append(number)
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # whoever has taken Ctrl-C (trio does) does what it does then


def forget_signals() -> None:
    """Those that came before are none of the command that begins now."""
    _came.clear()


def text_given(text: str) -> str:
    """An argument as text: bytes that the locale has no letters for are UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def say_error(text: str, prefix: str = "petalnode") -> None:
    """One line on standard error, in red on a terminal; nothing if nobody can read it.

    Scripts find the reason of an exit code by the `prefix`; what ends no command has another one.
    """
    before, after = _RED if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{before}{prefix}: {one_line(text)}{after}\n")
        sys.stderr.flush()


def interrupted(number: int | None = None) -> int:
    """Says that a signal has ended the command, by default the one that came; returns the exit code."""
    if number is None:
        number = _came[0] if _came else signal.SIGINT
    say_error("interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
    return SIGNALLED + number


class Start:
    """Says what a command does while it starts, from half a second on: a person is not to wait in the dark."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._current: str | None = None
        self._timer: threading.Timer | None = None

    def stage(self, text: str) -> None:
        """What is done now, such as "joining the swarm"; on standard error."""
        if self._current is None:
            self._quiet_until = time.monotonic() + _QUIET
        self._cancel()
        self._current = text
        left = self._quiet_until - time.monotonic()
        if left <= 0:
            self._say()
        else:
            self._timer = threading.Timer(left, self._say)
            self._timer.daemon = True
            self._timer.start()

    def done(self) -> None:
        """Nothing more is to be said."""
        self._cancel()
        self._current = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self) -> None:
        text = self._current
        with suppress(OSError, ValueError):
            if text is not None:
                sys.stderr.write(f"{one_line(text)} ...\n")
                sys.stderr.flush()


start: Final = Start()


@contextmanager
def writing() -> Iterator[None]:
    """Turns standard output or error that cannot be written (a full disk behind it) into MachineError.

    Raises:
        MachineError: it cannot be written.
        OutputClosed: it is a pipe that nobody reads any more.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _BROKEN:
            raise OutputClosed from None
        raise MachineError(f"the output cannot be written: {error.strerror}") from None


def explain(error: BaseException) -> PetalnodeError | None:
    """The error as one sentence for a person; None if it is a fault of the program."""
    match error:
        case PetalnodeError():
            return error
        case FileNotFoundError() if error.filename is None and not _has_working_folder():
            return MachineError("the folder in which this command was given is gone: change to another one (cd)")
        case OSError() if error.strerror:
            names = [
                os.fsdecode(name)[:300] for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
            ]
            return MachineError(f"{error.strerror}{': ' if names else ''}{' and '.join(names)}")
        case UnicodeEncodeError():
            sign = text_given(error.object[error.start : error.start + 1])
            return BadInput(f"{sign!r} cannot be written in {error.encoding}: set LC_ALL to a locale of UTF-8")
        case UnicodeDecodeError():
            return BadInput(f"a text is not {error.encoding}: {error.reason} at byte {error.start}")
        case RuntimeError() if "home directory" in str(error):  # pathlib's
            return BadInput("a path begins with ~, and the home folder that it stands for is not known: write it out")
        case MemoryError():
            return MachineError("not enough memory: end other programs, or give fewer blocks or a smaller batch")
        case RuntimeError() if _is_of_memory(error):
            return MachineError(f"not enough memory: {str(error).splitlines()[0][:200]}")
    return None


def _has_working_folder() -> bool:
    with suppress(OSError):
        return bool(os.getcwd())
    return False


def _is_of_memory(error: RuntimeError) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or any(
        said in str(error) for said in ("can't allocate memory", "out of memory", "can't start new thread")
    )


def exit_code(error: BaseException) -> int | None:
    """Says an error of a command in one line; returns its exit code, None if it is a fault of the program."""
    start.done()
    errors = list(leaves(error))
    for found in errors:
        closed = isinstance(found, SystemExit) and isinstance(found.__context__, BrokenPipeError)  # rich's own
        if isinstance(found, OutputClosed | BrokenPipeError) or closed:
            return _close_output()
    for found in errors:
        if isinstance(found, SystemExit):
            return found.code if isinstance(found.code, int) else int(ExitCode.RESULT_SAYS_NO)
    for found in errors:
        if isinstance(found, KeyboardInterrupt):
            return interrupted()
    for kind in (PetalnodeError, Exception):
        for found in errors:
            if isinstance(found, kind) and (told := explain(found)) is not None:
                say_error(str(told))
                return int(told.exit_code)
    return None


def _close_output() -> int:
    """Lets nothing fail that is still to be written; returns the exit code."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(ExitCode.DONE)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group of groups; an error that is no group is itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error


# --- the log, on standard error; quiet unless asked for


class TextLines(logging.Formatter):
    """A line for a person. What a peer has said may stand in it, and cannot make lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return shown(super().formatException(ei))


class JsonLines(logging.Formatter):
    """A JSON object a line: time (UTC, RFC 3339), level, logger, message; the session that it is about, and the
    traceback of an error, where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        session = getattr(record, "session", None)
        if session is not None:
            fields["session"] = session
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error now: a panel at a terminal stands in its place for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """It has no other."""


def begin_logs() -> None:
    """Warnings and errors of all libraries go to standard error from now on."""
    handler = _StandardError()
    handler.setFormatter(TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def set_logs(level: str, form: str) -> None:
    """What `--log-level` and `--log-format` say.

    Raises:
        BadInput: there is no such level or format.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise BadInput(f"--log-level {level}: use debug, info, warning or error")
    if form not in LOG_FORMATS:
        raise BadInput(f"--log-format {form}: use {' or '.join(LOG_FORMATS)}")
    logging.getLogger("petalnode").setLevel(number)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StandardError):
            handler.setFormatter(JsonLines() if form == "json" else TextLines())
