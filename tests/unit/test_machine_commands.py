"""Commands about petalnode on this machine: a service, what it says, completion, and the manual page."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from petalnode.crypto.identity import Identity
from petalnode.node.cli import app
from petalnode.node.cli.commands.machine import manual, service
from petalnode.node.cli.commands.machine import update as update_command
from petalnode.node.errors import BadInput, MachineError
from petalnode.node.links.format import Invite, key_hash, to_link
from tests.import_graph import ROOT

COMMAND = ("/opt/py thon", "-m", "petalnode", "serve", "--name", 'my "50%" $box')
SERVE = service.Program(COMMAND, Path("/home/a 5% b"), {"OMP_NUM_THREADS": "2", "HF_HOME": "/x $y"})


def test_each_system_has_its_service(tmp_path: Path) -> None:
    log = tmp_path / "log"
    linux = service.system("linux", tmp_path, log, SERVE)
    assert linux.file == tmp_path / ".config/systemd/user/petalnode.service"
    assert b'"serve" "--name" "my \\"50%%\\" $$box"\nWorkingDirectory=-/home/a 5%% b\n' in linux.text
    assert b'Environment="OMP_NUM_THREADS=2"\nEnvironment="HF_HOME=/x $y"\n' in linux.text
    assert linux.install[-1] == ("systemctl", "--user", "enable", "--now", "petalnode")
    mac = service.system("darwin", tmp_path, log, SERVE)
    agent = plistlib.loads(mac.text)
    assert agent["ProgramArguments"] == [*COMMAND] and agent["EnvironmentVariables"] == SERVE.variables
    assert agent["WorkingDirectory"] == "/home/a 5% b"
    assert mac.install[0][:2] == ("launchctl", "bootstrap") and mac.install[0][-1] == str(mac.file)
    windows = service.system("win32", tmp_path, log, SERVE)
    task = ElementTree.fromstring(windows.text.decode("utf-16").partition("?>")[2])
    told = {found.tag.partition("}")[2]: found.text or "" for found in task.iter()}
    assert told["ExecutionTimeLimit"] == "PT0S" and told["StopIfGoingOnBatteries"] == "false"
    assert told["WorkingDirectory"] == "/home/a 5% b" and told["Arguments"].endswith(f'>> "{log}" 2>&1"')
    assert 'set "OMP_NUM_THREADS=2"&& ' in told["Arguments"] and windows.install[0][-2:] == ("/XML", str(windows.file))
    with pytest.raises(MachineError, match="sunos5"):
        service.system("sunos5", tmp_path, log, SERVE)


TASK = {
    "Task": {"RegistrationInfo", "Triggers", "Settings", "Data", "Principals", "Actions"},
    "Triggers": {"LogonTrigger"},
    "LogonTrigger": {"UserId", "Delay"},
    "Principals": {"Principal"},
    "Principal": {"UserId", "LogonType", "GroupId", "DisplayName", "RunLevel"},
    "Settings": {
        *(
            "AllowHardTerminate",
            "AllowStartOnDemand",
            "DeleteExpiredTaskAfter",
            "DisallowStartIfOnBatteries",
            "Enabled",
        ),
        *("ExecutionTimeLimit", "Hidden", "IdleSettings", "MultipleInstancesPolicy", "NetworkSettings", "Priority"),
        *("RestartOnFailure", "RunOnlyIfIdle", "RunOnlyIfNetworkAvailable", "StartWhenAvailable"),
        *("StopIfGoingOnBatteries", "WakeToRun"),
    },
    "RestartOnFailure": {"Interval", "Count"},
    "Actions": {"Exec"},
    "Exec": {"Command", "Arguments", "WorkingDirectory"},
}
"""What Microsoft's "Task Scheduler Schema" lets stand in these elements, in any order."""
VALUES = {
    "UserId": r".+",
    "LogonType": r"S4U|Password|InteractiveToken",
    "DisallowStartIfOnBatteries": r"true|false",
    "StopIfGoingOnBatteries": r"true|false",
    "ExecutionTimeLimit": r"PT\d+S",
    "Interval": r"PT[1-9]\d*M",  # a minute at least
    "Count": r"[1-9]\d?|1\d\d|2[0-4]\d|25[0-5]",
    "Command": r".{1,260}",
    "Arguments": r".*",
    "WorkingDirectory": r".{1,260}",
}


def test_windows_task_follows_its_schema() -> None:
    task = ElementTree.fromstring(
        service.task_bytes(SERVE, Path("C:/log"), r"HOME\me").decode("utf-16").partition("?>")[2]
    )
    space = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"
    assert task.tag == f"{space}Task"
    for element in task.iter():
        name, inner = element.tag.removeprefix(space), [child.tag.removeprefix(space) for child in element]
        if name in VALUES:
            assert not inner and re.fullmatch(VALUES[name], element.text or ""), name
        else:
            assert set(inner) <= TASK[name] and len(set(inner)) == len(inner) > 0, name
    words = service.Program(("C:/p.exe", "x&y", "a|b\\", "c d")).command
    assert " ".join(map(service._cmd_word, words)) == 'C:/p.exe "x&y" "a|b\\\\" "c d"'
    principal, actions = (task.find(f".//{space}{name}") for name in ("Principal", "Actions"))
    assert principal is not None and actions is not None and principal.get("id") == actions.get("Context")


def test_agents_of_launchd_have_its_keys() -> None:
    """Those of launchd.plist(5), of its types."""
    own = plistlib.loads(service.agent_bytes(SERVE, Path("/log")))
    for agent in (own, plistlib.loads((ROOT / "packaging" / "org.petalnode.serve.plist").read_bytes())):
        kinds = {"Label": str, "ProgramArguments": list, "WorkingDirectory": str, "EnvironmentVariables": dict}
        kinds |= {"RunAtLoad": bool, "KeepAlive": dict, "ThrottleInterval": int, "ExitTimeOut": int}
        kinds |= {"ProcessType": str, "StandardOutPath": str, "StandardErrorPath": str}
        assert agent.keys() <= kinds.keys() and all(type(agent[name]) is kinds[name] for name in agent)
        assert agent["ProcessType"] == "Background" and agent["KeepAlive"] == {"SuccessfulExit": False}
        assert all(type(word) is str for word in agent["ProgramArguments"])


def test_a_service_outlives_its_links_and_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    maker, key = Identity.generate(), "ab" * 32
    address = f"/ip4/192.0.2.7/tcp/4001/p2p/{maker.peer_id}"
    invite = Invite(maker.peer_id, (address,), "smollm2", bytes(32), int(time.time()) + 60, key, key_hash(key))
    link, shell = to_link(invite, maker), {"OMP_NUM_THREADS": "2", "HOME": "/home/a", "PETALNODE_PEERS": "/nowhere"}
    found = service.program_of(["--num-blocks", "3", "--peer", link, "--pause-when-busy"], shell)
    assert found.command[3:] == ("serve", f"smollm2@{bytes(32).hex()}", "--num-blocks", "3", "--pause-when-busy")
    assert found.variables == {
        "OMP_NUM_THREADS": "2",
        "PETALNODE_PEERS": address,
        "PETALNODE_SWARM_KEY": key,
    }
    assert found.folder == tmp_path
    ended = to_link(replace(invite, expires=1), maker)
    with pytest.raises(BadInput, match="this link ended"):
        service.program_of([f"--peer={ended}"], shell)
    with pytest.raises(app._UsageError, match="No such option"):
        service.program_of(["--num-block", "3"], shell)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd is of Linux")
def test_a_service_is_installed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    unit = tmp_path / ".config/systemd/user/petalnode.service"

    def run(*arguments: str) -> tuple[int, str]:
        code = app.run([*arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    for command, code in ((("service", "remove"), 2), (("service", "status"), 1), (("logs",), 2)):
        told = run(*command)
        assert told[0] == code and "no service is installed: `petalnode service install`" in told[1]
    assert run("service", "install", "smollm2")[0] == 4 and not unit.exists()  # no systemctl
    for program in ("systemctl", "journalctl"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
        (tmp_path / program).chmod(0o755)
    code, said = run("service", "install", "--show", "smollm2", "--num-blocks", "3")
    assert code == 0 and '"--num-blocks" "3"' in said and not unit.exists()
    assert run("service", "install", "smollm2", "--num-blocks", "3")[0] == 0
    assert unit.stat().st_mode & 0o077 == 0 and '"smollm2" "--num-blocks" "3"' in unit.read_text()
    assert run("service", "install", "smollm2", "--num-block", "3")[0] == 2  # before the one that runs is ended
    assert run("service", "install", "smollm2", "--num-blocks", "4")[0] == 0
    assert run("service", "status")[0] == 0 and run("logs", "-n", "7")[0] == 0
    assert run("service", "remove")[0] == 0 and not unit.exists()
    called = (tmp_path / "called").read_text().splitlines()
    begin = ["--user daemon-reload", "--user enable --now petalnode"]
    assert called[:5] == [*begin, "--user disable --now petalnode", *begin]
    assert called[-2:] == ["--user --no-pager --unit petalnode --lines 7", "--user disable --now petalnode"]


def test_logs_of_a_file_are_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, task = tmp_path / "serve.log", tmp_path / "serve.xml"
    monkeypatch.setattr(service, "_here", lambda: service.System(task, b"", (), (), (), log=log))
    with pytest.raises(BadInput, match="service install"):
        service.logs(2)
    task.touch()
    log.write_text("one\ntwo\nthree\n")
    service.logs(2)
    assert capsys.readouterr().out == "two\nthree\n"


def test_completion_has_every_command_and_option(tmp_path: Path) -> None:
    commands = app.every_command()
    script = manual.completion_script(commands, "bash")
    assert all(f'"{name}") words="' in script for name in app.COMMANDS)
    asked = tmp_path / "asked.sh"
    asked.write_text(
        f'{script}\nask() {{ COMP_WORDS=(petalnode "$@"); COMP_CWORD=$#; _petalnode; echo ${{COMPREPLY[@]}}; }}\n'
        "ask sto; ask serve --num-b; ask service inst; ask service install --sh"
    )
    if bash := shutil.which("bash"):
        told = subprocess.run([bash, str(asked)], capture_output=True, text=True, check=True).stdout
        assert told.splitlines() == ["stop", "--num-blocks", "install", "--show"]
    assert "bashcompinit" in manual.completion_script(commands, "zsh")
    fish = manual.completion_script(commands, "fish")
    assert "-n '__petalnode_in serve' -l num-blocks" in fish and "-eq 2' -f -a 'install status remove'" in fish
    with pytest.raises(BadInput, match="bash, zsh or fish"):
        manual.completion_script(commands, "tcsh")


def test_the_manual_page_has_every_command() -> None:
    page = manual.man_page(app.every_command(), "1.2.3")
    for name in app.COMMANDS:
        assert f".SS petalnode {name}".replace("-", "\\-") in page
    assert "\\-\\-num\\-blocks" in page and "[bold]" not in page


WHEEL = "/py -m pip install --upgrade FILE, with the newer wheel (this one was '/none/a b.whl')"


def directly(url: str, **more: object) -> dict[str, object]:
    return {"url": url, **more}


@pytest.mark.parametrize(
    ("noted", "prefix", "command"),
    [
        (None, "/home/a/venv", "/py -m pip install --upgrade petalnode"),
        (None, "/home/a/.local/share/pipx/venvs/petalnode", "pipx upgrade petalnode"),
        (None, "/home/a/.local/share/uv/tools/petalnode", "uv tool upgrade petalnode"),
        (directly("https://git.example/p.git", vcs_info={}), "/v", "/py -m pip install --upgrade git+https://git.example/p.git"),
        (directly("file:///", dir_info={"editable": True}), "/v", "git -C / pull && make -C / setup"),
        (directly("file:///", dir_info={}), "/v", "git -C / pull && /py -m pip install --upgrade /"),
        (directly("file:///none/a%20b.whl", archive_info={}), "/v", WHEEL),
    ],
)  # fmt: skip
def test_an_update_comes_from_where_the_program_came(noted: Any, prefix: str, command: str) -> None:
    found = update_command.how_installed(noted, Path(prefix), "/py")
    assert (found.command, found.from_index) == (command, noted is None)


@pytest.mark.parametrize(
    ("versions", "newer", "says"),
    [
        (("99.1",), True, "99.1 is newer. Get it with"),
        (("0.0.1",), False, "nothing to do"),
        ((), None, "has no petalnode"),
    ],
)
def test_newer_versions_are_asked_of_pips_index(
    versions: tuple[str, ...],
    newer: bool | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for version in versions:
        with zipfile.ZipFile(tmp_path / f"petalnode-{version}-py3-none-any.whl", "w") as wheel:
            text = f"Metadata-Version: 2.1\nName: petalnode\nVersion: {version}\n"
            wheel.writestr(f"petalnode-{version}.dist-info/METADATA", text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(update_command, "_direct_url", lambda: None)
    code = 0
    try:
        update_command.update(as_json=False)
    except typer.Exit as ended:
        code = ended.exit_code
    assert says in capsys.readouterr().out
    assert code == (4 if newer is None else 0)
