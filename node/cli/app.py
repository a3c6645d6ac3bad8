"""The `petalnode` command: its sub-commands, and how errors become sentences and exit codes."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

import typer
import typer.main

from ..errors import ExitCode
from .process import begin_logs, exit_code, forget_signals, interrupted, leaves, say_error, start

# typer brings a copy of click of its own in some versions, so its errors are reached through typer.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _version(value: bool) -> None:
    if value:
        from ..version import __version__

        print(__version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


COMMANDS: Final = {
    "demo": "Start a swarm of the default model on this machine, separate from all others, and chat with it.",
    "serve": "Host blocks of a model for the swarm.",
    "chat": "Chat with the model that a swarm serves.",
    "api": "Serve an OpenAI-compatible HTTP API and a chat page, which answer over the servers of a swarm.",
    "invite": "Print a link with which somebody else joins this swarm: `petalnode join LINK`.",
    "join": "Join a swarm by a link: check it, say what will be fetched and served, ask, and serve (or chat).",
    "pause": "Pause servers on this machine: they take no new sessions, and leave the swarm when theirs have moved or "
    "ended.",
    "resume": "Let paused servers on this machine serve again.",
    "stop": "Stop servers on this machine, once their sessions have moved or ended.",
    "service": "A server that runs from log-in on: install, status, remove.",
    "logs": "Print what the installed service has said.",
    "status": "Show the models of a swarm, its servers and the blocks that they hold, and its relays.",
    "bootstrap": "Run a DHT node and relay without a model: other nodes join and reach each other through it.",
    "doctor": "Check this machine and its connection to the swarm: versions, device, memory, disk, port, clock, "
    "reachability.",
    "self-test": "Test this machine: speed of the devices, exactness against plain transformers, a swarm on loopback, "
    "reachability.",
    "swarm-key": "Create the key of a private swarm, which only nodes with a copy of this file can join.",
    "manifest": "Write the manifest of a model, for its repository to say which version it is to whoever has a part of "
    "it.",
    "models": "The models on this disk: list, verify, remove; and what one needs, here and of a swarm.",
    "fit": "Say which models fit, on this machine, those of --machines, or with --peer those of a swarm, and how fast.",
    "plan": "Plan which machine should serve which blocks: for the lowest latency, and for the highest throughput.",
    "tune": "Fine-tune a model over the swarm that serves it.",
    "adapters": "Search, fetch and share adapters (in folders, git repositories or on the hub).",
    "validate": "Check servers: send requests like those of a client, and recompute the answers block by block.",
    "verify-evidence": "Check evidence of a server's fault: exit code 0 if it is proved, 1 if it is not, 2 if it "
    "cannot be checked.",
    "verify-receipts": "Check the receipts of an answer of `petalnode api`: exit code 0 if all are as they should be, "
    "1 if not.",
    "bans": "List the servers that your nodes do not use because of a fault, with the reason and for how long.",
    "credits": "Show and transfer points, which validators issue for verified work.",
    "update": "Say whether a newer version is there, and the command that installs it.",
    "completion": "Print a script that completes commands and options in a shell.",
    "man": "Print the manual page.",
}
"""In the order of the help, which has their first sentences without importing them."""
_MODULES = {
    "self-test": "self_test",
    "invite": "links.invite",
    "join": "links.join",
    "fit": "planning.fit",
    "plan": "planning.plan",
    "pause": "serve",
    "resume": "serve",
    "stop": "serve",
    "service": "machine.service",
    "logs": "machine.service",
    "manifest": "models",
    "update": "machine.update",
    "completion": "machine.manual",
    "man": "machine.manual",
    "swarm-key": "bootstrap",
    "verify-evidence": "validate",
    "verify-receipts": "validate",
}
"""The module in `commands`, where it is not named after the command."""
_OPTIONAL_VALUES: Final = {
    ("status", "--watch"): "2",
    ("chat", "--resume"): "0",
    ("serve", "--pause-when-busy"): "50%",
    ("serve", "--when-away"): "10",
}
"""Options whose value may be left out, which typer has not got; with the value that is taken then."""


def command_line(arguments: list[str]) -> typer.Typer:
    """The command that is called, and only the names of the others: importing a command takes time and memory.

    Without arguments, all of them.
    """
    app = typer.Typer(
        name="petalnode",
        help="Run language models over a swarm of ordinary machines, peer to peer.",
        callback=_root,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for name, about in COMMANDS.items():
        if arguments and arguments[0] != name:
            app.command(name, help=about)(_another)
            continue
        module = importlib.import_module(f".commands.{_MODULES.get(name, name)}", __package__)
        found: typer.Typer | Callable[..., None] = getattr(module, name.replace("-", "_"))
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def every_command() -> Any:
    """The command line with all commands imported."""
    return typer.main.get_command(command_line([]))


def with_values(arguments: list[str]) -> list[str]:
    """The arguments, with a value for options whose value may be left out, and is: no number follows."""
    found: list[str] = []
    for index, argument in enumerate(arguments):
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        usual = _OPTIONAL_VALUES.get((arguments[0], argument))
        has_value = usual is None or following.rstrip("%").replace(".", "", 1).isdecimal()
        found.append(argument if has_value else f"{argument}={usual}")
    return found


def _another() -> None:
    """Stands for a command that was not called."""


def main() -> NoReturn:
    """Runs the command line and exits with the codes of `ExitCode`."""
    begin_logs()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Which of the options are explained is settled when a command is imported (`join.ALL_IN_HELP`).
    arguments = ["--help" if argument == "--help-all" else argument for argument in sys.argv[1:]]
    try:
        if arguments[:1] in (["chat"], ["tune"], ["api"]) and "--help" not in arguments:
            start.stage("starting")
        arguments = with_values(arguments)
        app = command_line(arguments or ["--help"])
        gc.freeze()
        gc.enable()  # `petalnode.__main__` has disabled it
        code = run(arguments, app)
        sys.stdout.flush()
    except BaseException as error:
        found = exit_code(error)
        if found is None:
            raise
        code = found
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process as `sys.exit` does, but for freeing every object: after torch, that alone takes a second."""
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        sys.exit(code)  # the interpreter has to wait for it
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _told(error: Any, arguments: list[str]) -> int:
    """Says in one line what is wrong with the command line; returns the exit code."""
    message = str(error.format_message()).strip()
    if not message:  # no command was named: the help
        error.show()
        return int(ExitCode.BAD_INPUT)
    named = f"petalnode {arguments[0]}" if arguments[:1] and arguments[0] in COMMANDS else "petalnode"
    path = named if error.ctx is None else error.ctx.command_path
    message = message if message.endswith("?") else f"{message.rstrip('.')}:"
    say_error(f"{message} `{path} --help` says what it takes")
    return int(ExitCode.BAD_INPUT)


def run(arguments: list[str], app: typer.Typer | None = None) -> int:
    """Runs one command line; returns its exit code. A person's mistake is one line on standard error."""
    forget_signals()
    try:
        # Not `app(arguments)`, which makes a silent exit code of Ctrl-C.
        command = typer.main.get_command(app or command_line(arguments or ["--help"]))
        with command.make_context("petalnode", list(arguments)) as context:
            result = command.invoke(context)
        return result if isinstance(result, int) else int(ExitCode.DONE)
    except BaseException as raised:
        for error in leaves(raised):
            if isinstance(error, typer.Exit):
                return error.exit_code
            if isinstance(error, typer.Abort | EOFError):
                return interrupted()
            if isinstance(error, _UsageError):
                return _told(error, arguments)
        code = exit_code(raised)
        if code is None:
            raise
        return code
