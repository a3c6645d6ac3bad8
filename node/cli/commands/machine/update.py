"""`petalnode update`: whether a newer version is there, and the command that installs it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import typer

from ....errors import ExitCode
from ....version import __version__
from ...option import JsonFlag
from ...output import Output

_NAME: Final = "petalnode"
_ASK_SECONDS: Final = 60
_NEWEST: Final = re.compile(r"LATEST: +(\S+)|^petalnode \((\S+)\)", re.MULTILINE)
_OFFLINE: Final = ("connection", "name resolution", "timed out", "proxy", "unreachable", "max retries")


@dataclass(frozen=True)
class Installed:
    """How this petalnode came here: the command that brings a newer one, and whether a package index has these."""

    command: str
    from_index: bool = False


def how_installed(direct_url: Mapping[str, Any] | None, prefix: Path, python: str) -> Installed:
    """`direct_url` is what the installer noted (PEP 610), None if it came from an index. What came from a folder or a
    repository is not looked for in an index: a package of the same name there may be somebody else's."""
    pip = f"{shlex.quote(python)} -m pip install --upgrade"
    if direct_url is None:
        parts = prefix.parts
        if "pipx" in parts:
            return Installed(f"pipx upgrade {_NAME}", True)
        if "uv" in parts and "tools" in parts:
            return Installed(f"uv tool upgrade {_NAME}", True)
        return Installed(f"{pip} {_NAME}", True)
    url = str(direct_url.get("url", ""))
    if "vcs_info" in direct_url:
        return Installed(f"{pip} {shlex.quote(f'git+{url}')}")
    if urlsplit(url).scheme != "file":
        return Installed(f"{pip} URL, with that of the newer wheel (this one came from {url})")
    folder = shlex.quote(url2pathname(urlsplit(url).path))
    if not Path(url2pathname(urlsplit(url).path)).is_dir():
        return Installed(f"{pip} FILE, with the newer wheel (this one was {folder})")
    again = f"make -C {folder} setup" if direct_url.get("dir_info", {}).get("editable") else f"{pip} {folder}"
    return Installed(f"git -C {folder} pull && {again}")


def _direct_url() -> dict[str, Any] | None:
    try:
        text = distribution(_NAME).read_text("direct_url.json")
        found = None if text is None else json.loads(text)
    except (PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) or found is None else {}


def newest_in_index(python: str) -> tuple[str | None, str]:
    """The newest version that pip finds where it is configured to look, or None and why not."""
    if find_spec("pip") is None:
        return None, "pip is not in this environment, so no package index was asked"
    command = [python, "-m", "pip", "index", "versions", _NAME, "--disable-pip-version-check", "--retries", "1"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None, "the package index did not answer: this machine may be offline"
    found = _NEWEST.search(asked.stdout)
    if asked.returncode == 0 and found:
        return found[1] or found[2], ""
    offline = any(word in asked.stderr.lower() for word in _OFFLINE)
    why = "cannot be reached: this machine may be offline" if offline else f"has no {_NAME}"
    return None, f"the package index {why}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def update(as_json: JsonFlag = False) -> None:
    """Say whether a newer version is there, and the command that installs it."""
    output = Output(as_json)
    installed = how_installed(_direct_url(), Path(sys.prefix), sys.executable)
    output.say(f"this is petalnode {__version__}")
    newest, why = None, "it came from no package index, so none is asked"
    if installed.from_index:
        newest, why = newest_in_index(sys.executable)
    newer = None if newest is None else _numbers(newest) > _numbers(__version__)
    output.emit(version=__version__, newest=newest, newer=newer, command=installed.command, reason=why)
    if newer is False:
        output.say(f"the newest is {newest}: nothing to do")
        return
    output.say(f"{newest} is newer. Get it with" if newer else f"{why}. A newer one comes with")
    output.say(f"  {installed.command}")
    output.say("Servers that run go on with the old one until they are started again (`petalnode stop`).")
    if newer is None and installed.from_index:
        raise typer.Exit(ExitCode.MACHINE_CANNOT)
