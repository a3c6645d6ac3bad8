"""The `petalnode` command: its sub-commands, and how errors become sentences and exit codes."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

import typer

from ..errors import ExitCode, PetalnodeError

# typer brings a copy of click of its own in some versions, so its errors are reached through typer.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="petalnode",
    help="Run language models over a swarm of ordinary machines, peer to peer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(value: bool) -> None:
    if value:
        from ..version import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


_COMMANDS = (
    *("demo", "serve", "chat", "status", "bootstrap", "doctor", "swarm-key"),
    *("plan", "tune", "adapters", "validate", "verify-evidence", "bans", "credits"),
)
"""In the order of the help."""
_MODULES = {"swarm-key": "bootstrap", "verify-evidence": "validate"}
"""The module in `commands`, where it is not named after the command."""


def _register(arguments: list[str]) -> None:
    """Adds the command that is called, or all of them for the help: importing a command takes time and memory."""
    called = [name for name in arguments[:1] if name in _COMMANDS]
    for name in called or _COMMANDS:
        module = importlib.import_module(f".commands.{_MODULES.get(name, name)}", __package__)
        found = getattr(module, name.replace("-", "_"))
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)


def main() -> NoReturn:
    """Runs the command line and exits with the codes of `ExitCode`."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _register(sys.argv[1:])
    # Output that nobody reads any more (`petalnode chat | head`) is no error of ours.
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = int(ExitCode.DONE)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process as `sys.exit` does, but for freeing every object: after torch, that alone takes a second."""
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        sys.exit(code)  # the interpreter has to wait for it
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line; returns its exit code. A person's mistake is one line on standard error."""
    try:
        result = app(arguments, prog_name="petalnode", standalone_mode=False)
        return result if isinstance(result, int) else int(ExitCode.DONE)
    except BaseException as raised:
        errors = list(_leaves(raised))
        for error in errors:
            if isinstance(error, (typer.Exit, SystemExit)):
                return _exit_code(error)
        for error in errors:
            if isinstance(error, (typer.Abort, KeyboardInterrupt)):
                return int(ExitCode.INTERRUPTED)
        for error in errors:
            if isinstance(error, PetalnodeError):
                from .output import Output

                Output(False).error(str(error))
                return int(error.exit_code)
            if isinstance(error, _UsageError):
                error.show()  # type: ignore[attr-defined]
                return int(ExitCode.BAD_INPUT)
        for error in errors:
            if isinstance(error, BrokenPipeError):
                raise error from None
        raise


def _exit_code(error: BaseException) -> int:
    code = error.exit_code if isinstance(error, typer.Exit) else getattr(error, "code", 0)
    return code if isinstance(code, int) else int(ExitCode.RESULT_SAYS_NO)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
