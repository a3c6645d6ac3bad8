"""`petalnode service` and `logs`: a server that runs from log-in on, by the system's own means and without root.

systemd's user units on Linux, launchd on macOS, a scheduled task on Windows.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import platformdirs
import typer

from .....crypto.identity import write_private
from ....errors import BadInput, ExitCode, MachineError
from ...output import Output

_NAME: Final = "petalnode"
_LABEL: Final = "org.petalnode.serve"
_NONE: Final = "no service is installed: `petalnode service install` does that"
_DRAIN: Final = 60  # seconds for sessions to move to other servers

service = typer.Typer(help="A server that runs from log-in on: install, status, remove.", no_args_is_help=True)


@dataclass(frozen=True)
class System:
    """How this system runs a program from log-in on.

    Attributes:
        file: what describes the program there, and `text`, its content; None where a command does.
        log: the file that the program's output goes to; None where `logs` has a command.
    """

    file: Path | None
    text: bytes
    install: tuple[tuple[str, ...], ...]
    status: tuple[str, ...]
    remove: tuple[tuple[str, ...], ...]
    logs: tuple[str, ...] = ()
    log: Path | None = None

    @property
    def is_described(self) -> bool:
        """Whether the file is there that describes the program; a system without one has to be asked."""
        return self.file is None or self.file.exists()


def system(platform: str, home: Path, log: Path, serve: Sequence[str]) -> System:
    """
    Raises:
        MachineError: there is none that is known here.
    """
    if platform.startswith("linux"):
        unit = home / ".config" / "systemd" / "user" / f"{_NAME}.service"
        call = ("systemctl", "--user")
        return System(
            unit,
            unit_text(serve).encode(),
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
            agent_bytes(serve, log),
            (("launchctl", "bootstrap", domain, str(agent)),),
            ("launchctl", "print", f"{domain}/{_LABEL}"),
            (("launchctl", "bootout", f"{domain}/{_LABEL}"),),
            log=log,
        )
    if platform == "win32":
        run = f'cmd /c "{subprocess.list2cmdline(serve)} >> "{log}" 2>&1"'
        return System(
            None,
            b"",
            (
                ("schtasks", "/Create", "/F", "/TN", _NAME, "/SC", "ONLOGON", "/TR", run),
                ("schtasks", "/Run", "/TN", _NAME),
            ),
            ("schtasks", "/Query", "/V", "/FO", "LIST", "/TN", _NAME),
            (("schtasks", "/End", "/TN", _NAME), ("schtasks", "/Delete", "/F", "/TN", _NAME)),
            log=log,
        )
    raise MachineError(
        f"{platform}: no way to run services is known here; run `petalnode serve` at log-in by your own means"
    )


def unit_text(serve: Sequence[str]) -> str:
    """A unit of systemd for a user."""
    words = " ".join(_quoted(word) for word in serve)
    return f"""[Unit]
Description=petalnode: blocks of a language model for a swarm

[Service]
ExecStart={words}
TimeoutStopSec={_DRAIN}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={int(ExitCode.BAD_INPUT)}
Nice=10
LimitNOFILE=16384

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    for special, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, instead)
    return f'"{word}"'


def agent_bytes(serve: Sequence[str], log: Path) -> bytes:
    """An agent of launchd."""
    return plistlib.dumps(
        {
            "Label": _LABEL,
            "ProgramArguments": [*serve],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": _DRAIN,
            "ProcessType": "Background",
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
    )


def _here(serve: Sequence[str] = ()) -> System:
    log = platformdirs.user_log_path(_NAME, appauthor=False) / "serve.log"
    return system(sys.platform, Path.home(), log, (sys.executable, "-m", "petalnode", "serve", *serve))


def _run(command: Sequence[str], *, quiet: bool = False) -> int:
    """
    Raises:
        MachineError: there is no such program here.
    """
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL if quiet else None).returncode
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
    found, output = _here(arguments), Output(False)
    if show:
        output.say(found.text.decode() or subprocess.list2cmdline(found.install[0]))
        return
    for folder in (found.file, found.log):
        if folder is not None:
            folder.parent.mkdir(parents=True, exist_ok=True)
    if found.file is not None:
        write_private(found.file, found.text)
    try:
        for command in found.install:
            if code := _run(command):
                raise MachineError(f"`{' '.join(command)}` ended with {code}: the service is not installed")
    except MachineError:
        if found.file is not None:
            found.file.unlink(missing_ok=True)
        raise
    output.say("the server runs from log-in on: `petalnode logs` shows what it says, `service remove` ends it")


@service.command()
def status() -> None:
    """Say whether the service runs."""
    found = _here()
    if not found.is_described:
        Output(False).say(_NONE)
        raise typer.Exit(ExitCode.RESULT_SAYS_NO)
    raise typer.Exit(ExitCode.RESULT_SAYS_NO if _run(found.status) else ExitCode.DONE)


@service.command()
def remove() -> None:
    """Stop the service, and let it not run again. Models and keys stay."""
    found = _here()
    if not found.is_described:
        raise BadInput(_NONE)
    codes = [_run(command) for command in found.remove]
    if found.file is not None:
        found.file.unlink()
    Output(False).say("removed: the server does not run any more" if not codes[-1] else "removed; it did not run")


def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines, from the end.")] = 100,
) -> None:
    """Print what the installed service has said."""
    found = _here()
    if not found.is_described:
        raise BadInput(_NONE)
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
