"""`petalnode service` and `logs`: a server that runs from log-in on, by the system's own means and without root.

systemd's user units on Linux, launchd on macOS, a scheduled task on Windows.
"""

from __future__ import annotations

import getpass
import os
import plistlib
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final
from xml.sax.saxutils import escape

import platformdirs
import typer
import typer.main

from .....crypto.identity import write_private
from ....errors import BadInput, ExitCode, MachineError
from ...output import Output

_NAME: Final = "petalnode"
_LABEL: Final = "org.petalnode.serve"
_NONE: Final = "no service is installed: `petalnode service install` does that"
_DRAIN: Final = 60  # seconds for sessions to move to other servers
_KEPT: Final = ("PETALNODE_", "HF_", "OMP_", "XDG_DATA_HOME", "XDG_CACHE_HOME")
"""How the variables begin that a service has of the shell in which it was installed."""

service = typer.Typer(help="A server that runs from log-in on: install, status, remove.", no_args_is_help=True)


@dataclass(frozen=True)
class Program:
    """What a service runs, where, and with which variables."""

    command: tuple[str, ...]
    folder: Path = Path()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """How this system runs a program from log-in on.

    Attributes:
        file: what describes the program there, and `text`, its content.
        log: the file that the program's output goes to; None where `logs` has a command.
    """

    file: Path
    text: bytes
    install: tuple[tuple[str, ...], ...]
    status: tuple[str, ...]
    remove: tuple[tuple[str, ...], ...]
    logs: tuple[str, ...] = ()
    log: Path | None = None


def system(platform: str, home: Path, log: Path, program: Program) -> System:
    """
    Raises:
        MachineError: there is none that is known here.
    """
    if platform.startswith("linux"):
        call = ("systemctl", "--user")
        return System(
            home / ".config" / "systemd" / "user" / f"{_NAME}.service",
            unit_text(program).encode(),
            ((*call, "daemon-reload"), (*call, "enable", "--now", _NAME)),
            (*call, "status", "--no-pager", _NAME),
            ((*call, "disable", "--now", _NAME),),
            ("journalctl", "--user", "--no-pager", "--unit", _NAME),
        )
    if platform == "darwin":
        agent = home / "Library" / "LaunchAgents" / f"{_LABEL}.plist"
        domain = f"gui/{os.getuid()}"
        return System(
            agent,
            agent_bytes(program, log),
            (("launchctl", "bootstrap", domain, str(agent)),),
            ("launchctl", "print", f"{domain}/{_LABEL}"),
            (("launchctl", "bootout", f"{domain}/{_LABEL}"),),
            log=log,
        )
    if platform == "win32":
        task, run = log.with_suffix(".xml"), "schtasks"
        user = "\\".join(filter(None, (os.environ.get("USERDOMAIN"), getpass.getuser())))
        return System(
            task,
            task_bytes(program, log, user),
            ((run, "/Create", "/F", "/TN", _NAME, "/XML", str(task)), (run, "/Run", "/TN", _NAME)),
            (run, "/Query", "/V", "/FO", "LIST", "/TN", _NAME),
            ((run, "/End", "/TN", _NAME), (run, "/Delete", "/F", "/TN", _NAME)),
            log=log,
        )
    raise MachineError(
        f"{platform}: no way to run services is known here; run `petalnode serve` at log-in by your own means"
    )


def unit_text(program: Program) -> str:
    """A unit of systemd for a user."""
    variables = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in program.variables.items())
    return f"""[Unit]
Description=petalnode: blocks of a language model for a swarm

[Service]
ExecStart={" ".join(_quoted(word).replace("$", "$$") for word in program.command)}
WorkingDirectory=-{str(program.folder).replace("%", "%%")}
{variables}TimeoutStopSec={_DRAIN}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={int(ExitCode.BAD_INPUT)}
Nice=10
LimitNOFILE=16384

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    for special, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        word = word.replace(special, instead)
    return f'"{word}"'


def agent_bytes(program: Program, log: Path) -> bytes:
    """An agent of launchd."""
    return plistlib.dumps(
        {
            "Label": _LABEL,
            "ProgramArguments": [*program.command],
            "WorkingDirectory": str(program.folder),
            "EnvironmentVariables": {**program.variables},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": _DRAIN,
            "ProcessType": "Background",
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
    )


def task_bytes(program: Program, log: Path, user: str) -> bytes:
    """A task of Windows' scheduler, which would else end it after three days, and on battery."""
    variables = "".join(f'set "{name}={value}"&& ' for name, value in program.variables.items())
    command = " ".join(map(_cmd_word, program.command))
    run = f'/d /c "{variables}{command} >> "{log}" 2>&1"'
    return f"""<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><UserId>{escape(user)}</UserId></LogonTrigger></Triggers>
  <Principals>
    <Principal id="Author"><UserId>{escape(user)}</UserId><LogonType>InteractiveToken</LogonType></Principal>
  </Principals>
  <Settings>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>255</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author"><Exec>
    <Command>cmd.exe</Command>
    <Arguments>{escape(run)}</Arguments>
    <WorkingDirectory>{escape(str(program.folder))}</WorkingDirectory>
  </Exec></Actions>
</Task>
""".encode("utf-16")


def _cmd_word(word: str) -> str:
    """As cmd.exe takes it: what means something to that is quoted, too."""
    quoted = subprocess.list2cmdline([word])
    if quoted.startswith('"') or not set(word) & set("&|<>^()"):
        return quoted
    return f'"{quoted}' + "\\" * (len(word) - len(word.rstrip("\\"))) + '"'


def program_of(arguments: Sequence[str], variables: Mapping[str, str]) -> Program:
    """`petalnode serve` with these arguments, as it can be started again when its links have ended. It needs no shell
    that sets `variables`: peers and swarm key are those of the links.

    Raises:
        BadInput, typer.BadParameter: `serve` would not take the arguments, or a link cannot be used.
    """
    # A second, for `install` alone.
    from ...app import with_values
    from ...join import PEERS_VARIABLE, SWARM_KEY_VARIABLE, JoinOptions
    from ...model_choice import linked_model
    from ..serve import serve

    only = typer.Typer()
    only.command()(serve)
    parsed = typer.main.get_command(only).make_context("petalnode serve", with_values(["serve", *arguments])[1:]).params
    key = parsed["swarm_key"]
    join = JoinOptions(
        peer=[*(parsed["peer"] or ())], new_swarm=parsed["new_swarm"], swarm_key=None if key is None else Path(key)
    )
    target = join.target
    model = linked_model(parsed["model"], target)
    kept = {name: value for name, value in variables.items() if name.startswith(_KEPT) and value.isprintable()}
    kept.pop(PEERS_VARIABLE, None)
    if target.peers:
        kept[PEERS_VARIABLE] = ",".join(target.peers)
    if target.psk is not None and key is None:
        kept[SWARM_KEY_VARIABLE] = target.psk
    words = [] if model is None or model == parsed["model"] else [model]
    rest = iter(arguments)
    for word in rest:
        if word in ("--peer", "-p"):
            next(rest)
        elif not word.startswith(("--peer=", "-p")):
            words.append(word)
    return Program((sys.executable, "-m", "petalnode", "serve", *words), Path.cwd(), kept)


def _here(program: Program | None = None) -> System:
    log = platformdirs.user_log_path(_NAME, appauthor=False) / "serve.log"
    return system(sys.platform, Path.home(), log, program or Program(()))


def _run(command: Sequence[str]) -> int:
    """
    Raises:
        MachineError: there is no such program here.
    """
    try:
        return subprocess.run(command).returncode
    except OSError as error:
        raise MachineError(f"{command[0]} cannot be run ({error.strerror}): services are not to be had here") from None


@service.command(context_settings={"ignore_unknown_options": True})
def install(
    serve: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] [OPTIONS OF SERVE]", help="What follows `petalnode serve`.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print what would be installed.")] = False,
) -> None:
    """Run `petalnode serve` from log-in on, and now. What follows is for `serve`, such as a link: --peer LINK."""
    arguments = serve or []
    if bad := next((word for word in arguments if not word.isprintable()), None):
        raise BadInput(f"{bad!r}: arguments of a service cannot have such characters")
    found, output = _here(program_of(arguments, os.environ)), Output(False)
    if show:
        output.say(found.text.decode("utf-16" if found.file.suffix == ".xml" else "utf-8"))
        return
    if found.file.exists():  # one that runs would go on with what it was given before
        for command in found.remove:
            _run(command)
    for file in filter(None, (found.file, found.log)):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_private(found.file, found.text)
    try:
        for command in found.install:
            if code := _run(command):
                raise MachineError(f"`{' '.join(command)}` ended with {code}: the service is not installed")
    except MachineError:
        found.file.unlink(missing_ok=True)
        raise
    output.say("the server runs from log-in on: `petalnode logs` shows what it says, `service remove` ends it")


@service.command()
def status() -> None:
    """Say whether the service runs."""
    found = _here()
    if not found.file.exists():
        Output(False).say(_NONE)
        raise typer.Exit(ExitCode.RESULT_SAYS_NO)
    raise typer.Exit(ExitCode.RESULT_SAYS_NO if _run(found.status) else ExitCode.DONE)


@service.command()
def remove() -> None:
    """Stop the service, and let it not run again. Models and keys stay."""
    found = _installed()
    codes = [_run(command) for command in found.remove]
    found.file.unlink()
    Output(False).say("removed: the server does not run any more" if not codes[-1] else "removed; it did not run")


def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines, from the end.")] = 100,
) -> None:
    """Print what the installed service has said."""
    found = _installed()
    if found.logs:
        if code := _run((*found.logs, "--lines", str(lines))):
            raise MachineError(f"{found.logs[0]} ended with {code}")
        return
    try:
        assert found.log is not None
        with found.log.open(encoding="utf-8", errors="replace") as stream:
            for line in deque(stream, lines):
                print(line, end="")
    except FileNotFoundError:
        raise BadInput(_NONE) from None


def _installed() -> System:
    """Raises BadInput if no service is."""
    found = _here()
    if not found.file.exists():
        raise BadInput(_NONE)
    return found
