"""`make check-wheels` says what has no wheel on which system, and that no registry answers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.import_graph import ROOT

PACKAGING = ROOT / "packaging"


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    sys.path.insert(0, str(PACKAGING))
    try:
        return importlib.import_module("check_wheels")
    finally:
        sys.path.remove(str(PACKAGING))


def test_registry_is_one_that_pip_is_configured_with(wheels: ModuleType) -> None:
    settings = """\
global.index-url='https://a.example/simple'
:env:.index-url='https://b.example/simple'
global.extra-index-url='file:///one https://c.example/two'
global.find-links='/opt/wheels'
install.trusted-host='c.example'
global.cert='/etc/ssl/all.crt'
freeze.timeout='10'
"""
    found = wheels.registry(settings)
    assert found.certificates == "/etc/ssl/all.crt" and not found.offline
    assert found.options() == [
        *("--default-index", "https://b.example/simple"),
        *("--index", "file:///one", "--index", "https://c.example/two"),
        *("--find-links", "/opt/wheels", "--allow-insecure-host", "c.example"),
    ]
    assert wheels.registry("").options() == []
    assert wheels.registry(":env:.no-index='1'").offline


class Answers:
    """In place of `subprocess.run`: pip and uv as they answer. Remembers what was asked."""

    def __init__(
        self,
        *,
        pip: tuple[int, str] = (0, ""),
        uv: tuple[int, str] = (0, ""),
        built: str = "any",
        stops: str = "download",
    ) -> None:
        self.pip, self.uv, self.built, self.stops = pip, uv, built, stops
        self.asked: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["timeout"] > 0 and options["env"]["CC"] == "/bin/false"
        self.asked.append(command)
        if "uv" in command:
            return subprocess.CompletedProcess(command, self.uv[0], "trio==1\ntorch==2\n", self.uv[1])
        if "wheel" in command:
            folder = Path(command[command.index("-w") + 1])
            folder.mkdir(exist_ok=True)
            wanted = Path(command[-1]).read_text()
            assert wanted.count("--hash=sha256:") >= 1 or "--require-hashes" not in command
            (folder / f"{wanted.partition('=')[0]}-1-py3-none-{self.built}.whl").touch()
        failed = self.pip[0] if self.stops in command else 0
        return subprocess.CompletedProcess(command, failed, "", self.pip[1])


def checked(wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: Answers, *options: str) -> int:
    monkeypatch.setattr(wheels.subprocess, "run", answers)
    monkeypatch.setattr(sys, "argv", ["check_wheels.py", *options])
    return wheels.main()  # type: ignore[no-any-return]


def test_every_system_and_python_is_checked_with_pins(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers()
    assert checked(wheels, monkeypatch, answers) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and all(line.startswith("ok") and line.endswith("2 wheels") for line in lines)
    compiled = [command for command in answers.asked if "uv" in command]
    assert {command[command.index("--python-version") + 1] for command in compiled} == {"3.11", "3.12", "3.13"}
    assert all(str(PACKAGING / "constraints.txt") in command and "--only-binary" in command for command in compiled)
    built = [command for command in answers.asked if "wheel" in command]
    assert built and all("--require-hashes" in command and "--no-build-isolation" in command for command in built)


def test_newest_versions_are_those_that_pip_takes(wheels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    assert checked(wheels, monkeypatch, answers, "--newest") == 0
    compiled = [command for command in answers.asked if "uv" in command]
    assert len(compiled) == 24 and sum("--only-binary" in command for command in compiled) == 12
    assert not any(str(PACKAGING / "constraints.txt") in command for command in answers.asked)


BROKEN = "WARNING: Retrying (Retry(total=4)) after connection broken by 'X'\nERROR: No matching distribution found"
NO_SOLUTION = "x No solution found when resolving dependencies:\n hint: network-thing has no wheels"


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        (Answers(uv=(1, NO_SOLUTION)), 1, "NO  Linux x86-64, Python 3.11: x No solution"),
        (Answers(uv=(2, "error: unexpected argument")), 1, "unexpected argument"),
        (Answers(uv=(2, "error: Failed to fetch: `https://a.example`")), 0, "skipped: no registry (error: Failed"),
        (Answers(pip=(1, "ERROR: No matching distribution found")), 0, "skipped: no registry (ERROR: No matching"),
        (Answers(pip=(1, BROKEN), stops="wheel"), 0, "skipped: no registry (ERROR: No matching"),
        (
            Answers(pip=(1, "ERROR: command 'cc' failed"), stops="wheel"),
            1,
            "not built without a compiler: ERROR: command",
        ),
        (Answers(built="linux_x86_64"), 1, "varint-1-py3-none-linux_x86_64.whl is for this system only"),
    ],
    ids=["no wheel", "uv fails", "registry stops", "no registry", "registry stops early", "compiles", "compiled"],
)
def test_faults_are_told_and_missing_registry_is_none(
    wheels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: Answers,
    code: int,
    says: str,
) -> None:
    assert checked(wheels, monkeypatch, answers) == code
    assert says in capsys.readouterr().out


def test_a_registry_that_never_answers_is_given_up(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "config" in command:
            return subprocess.CompletedProcess(command, 0, "", "")
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(wheels.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["check_wheels.py"])
    assert wheels.main() == 0
    assert capsys.readouterr().out == "skipped: no registry (not done in 240 s)\n"
