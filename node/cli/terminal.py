"""Signals and typed lines, handled while the node keeps running."""

from __future__ import annotations

import atexit
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, TextIO, cast

import trio
import typer

from ...protocols.announcement import Announcement
from ..errors import BadInput, ExitCode, PetalnodeError, unwrapped
from ..models.sources.alias import ALIASES
from ..swarm.routing import describe_blocks
from ..swarm.versions import VERSIONS, SeveralVersions
from ..swarm.view import coverage_of, is_online
from .output import Output
from .process import interrupted, say_error, shown, start

STOP_GRACE = 1.0


ENDING: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals by which a person, a service manager or a closed terminal ends a command."""


async def stopped_by_signal(function: Callable[[trio.Event], Awaitable[object]]) -> int | None:
    """Awaits `function(stop)` until it is done; a signal of `ENDING` sets `stop`. The signal, if one came.

    Signals come to the main thread: in another one nothing sets `stop`.
    """
    stop = trio.Event()
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        await function(stop)
        return None
    with unwrapped(PetalnodeError), trio.open_signal_receiver(*_heeded()) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_signals, signals, came, stop, nursery.cancel_scope)
            await function(stop)
            nursery.cancel_scope.cancel()
    return next((number for number in came if number != signal.SIGINT), came[0] if came else None)


async def _watch_signals(
    signals: AsyncIterator[int], came: list[int], stop: trio.Event, scope: trio.CancelScope
) -> None:
    async for number in signals:
        came.append(number)
        stop.set()
        # A token is on its way; a long prompt or a silent server is not waited for.
        await trio.sleep(STOP_GRACE)
        scope.cancel()


def _heeded() -> list[signal.Signals]:
    """Those of `ENDING` that end this process: `nohup` has SIGHUP ignored."""
    return [number for number in ENDING if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN]


def at_terminal() -> bool:
    """Whether a person reads what is asked and can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class LineReader:
    """Reads lines in a thread, so that the node stays alive meanwhile, and leaves the terminal as it was."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> None:
        try:
            import readline  # noqa: F401  (line editing and history for input())
            import termios

            self._saved = termios.tcgetattr(sys.stdin.fileno())
        except (ImportError, OSError):
            pass  # Windows, or no terminal to restore

    def __exit__(self, *exc_info: object) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    async def read(self, prompt: str) -> str | None:
        """A line, or None at the end.

        Raises:
            BadInput: it is not text.
        """
        try:
            return await trio.to_thread.run_sync(input, shown(prompt), abandon_on_cancel=True)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise BadInput(f"what was typed is not {error.encoding}: {error.reason}") from None


async def choose_model(
    models: Mapping[bytes, tuple[str, int]], servers: Sequence[Announcement], output: Output, here: Collection[str] = ()
) -> bytes:
    """The version of one of these models: the only one, or that which a person at a terminal chooses by its number.

    `here` are those whose names come first.

    Raises:
        BadInput: they are several, and nobody is there to be asked, or chose one.
    """
    order = sorted(models.items(), key=lambda item: (item[1][0] not in here, *aliases_first(item[1][0]), item[0]))
    if len(order) == 1:
        return order[0][0]
    if output.as_json or not at_terminal():
        named = list(dict.fromkeys(name for _, (name, _) in order))
        if len(named) == 1:
            named = [f"{name}@{version.hex()[: VERSIONS.digits]}" for version, (name, _) in order]
        more = f" and {len(named) - VERSIONS.named} more" if len(named) > VERSIONS.named else ""
        raise BadInput(f"this swarm serves several models: name one of {', '.join(named[: VERSIONS.named])}{more}")
    start.done()
    order = order[: VERSIONS.named]
    what = "several models" if len({name for name, _ in models.values()}) > 1 else "several versions of this model"
    output.say(f"this swarm serves {what}:")
    for number, (version, (name, num_blocks)) in enumerate(order, 1):
        online = [server for server in servers if server.model_version == version and is_online(server, num_blocks)]
        lacking = [block for block, servers_of in enumerate(coverage_of(online, num_blocks)) if not servers_of]
        names = [server.public_name or f"…{server.peer_id[-8:]}" for server in online[: VERSIONS.named]]
        missing = f"; {describe_blocks(lacking)} missing" if lacking else ""
        typed, who = f"{name}@{version.hex()[: VERSIONS.digits]}", ", ".join(names) or "nobody"
        output.say(f"  {number}  {typed}, {num_blocks} blocks, served by {who}{missing}")
    if len(models) > len(order):
        output.say(f"and {len(models) - len(order)} more, which MODEL@VERSION can name")
    reader = LineReader()
    with reader:
        line = (await reader.read(f"which one? [1-{len(order)}] ") or "").strip()
    if not line.isdecimal() or not 1 <= int(line) <= len(order):
        raise BadInput("no model was chosen: give a number of the list, or name MODEL")
    return order[int(line) - 1][0]


def ask_version(several: SeveralVersions, output: Output) -> str:
    """NAME@VERSION, which a person at a terminal chooses by its number.

    Raises:
        SeveralVersions: nobody is there to be asked.
        BadInput: none was chosen.
    """
    if output.as_json or not at_terminal():
        raise several
    written()
    models = {server.model_version: (several.name, server.num_blocks) for server in several.servers}
    version = trio.run(choose_model, models, several.servers, output)
    return f"{several.name}@{version.hex()[: VERSIONS.digits]}"


def aliases_first(name: str) -> tuple[bool, str]:
    return name not in ALIASES, name


class _Unhurried:
    """A stream to a terminal, written to by a thread. What the terminal does not take stays in a queue, and is left out
    where that is full."""

    def __init__(self, stream: TextIO, waiting: queue.Queue[tuple[int, bytes]]) -> None:
        self._stream, self.waiting = stream, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        data = text.encode(self._stream.encoding, self._stream.errors or "strict")
        with suppress(queue.Full):
            self.waiting.put_nowait((self._stream.fileno(), data))
        return len(text)

    def flush(self) -> None:
        """The thread does."""


def unhurried() -> None:
    """From now on a terminal that takes nothing (Ctrl-S, a hanging connection) does not stop this node, for which
    others wait."""
    if isinstance(sys.stdout, _Unhurried) or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return
    waiting = queue.Queue[tuple[int, bytes]](256)
    threading.Thread(target=_carry, args=(waiting,), daemon=True).start()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        setattr(sys, name, cast(TextIO, _Unhurried(stream, waiting)))
    atexit.register(written)


def _carry(waiting: queue.Queue[tuple[int, bytes]]) -> None:
    while True:
        descriptor, data = waiting.get()
        with suppress(OSError):  # the terminal is gone, which is no reason to stop serving
            while data:
                data = data[os.write(descriptor, data) :]
        waiting.task_done()


def written() -> None:
    """Returns when all is written that was said, or a terminal has taken nothing for a second."""
    deadline = time.monotonic() + STOP_GRACE
    for stream in (sys.stdout, sys.stderr):
        while isinstance(stream, _Unhurried) and stream.waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        with suppress(OSError, ValueError):
            stream.flush()


class StopSignal:
    """`event` is set by the first signal; the second one ends the process at once."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.number: int | None = None

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        unhurried()
        with trio.open_signal_receiver(*_heeded()) as signals:
            task_status.started()
            async for number in signals:
                if self.event.is_set():
                    say_error("ended at once")
                    written()
                    os._exit(ExitCode.INTERRUPTED)
                self.number = number
                self.event.set()

    def leave(self) -> NoReturn:
        """Says what has stopped the command, and ends it.

        Raises:
            typer.Exit: with the exit code.
        """
        if self.number is not None:
            interrupted(self.number)
        raise typer.Exit(self.exit_code)

    @property
    def interrupted(self) -> bool:
        return self.number == signal.SIGINT

    async def watch_stdin(self) -> None:
        """Sets `event` when standard input ends, as it does when the parent process is gone."""
        await trio.to_thread.run_sync(_read_to_end, sys.stdin.fileno(), abandon_on_cancel=True)
        self.event.set()

    @property
    def exit_code(self) -> ExitCode:
        """Ctrl-C is an interruption; SIGTERM is how a service is told to stop, and no error."""
        return ExitCode.INTERRUPTED if self.interrupted else ExitCode.DONE


def _read_to_end(descriptor: int) -> None:
    # Not through Python's buffer: a thread that is left behind in there aborts the interpreter when it ends.
    while os.read(descriptor, 1 << 16):
        pass
