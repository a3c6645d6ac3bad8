"""What the doctor makes of what it sees."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from petalnode.node.cli.commands import doctor as checks


def test_this_environment_has_what_the_package_asks_for() -> None:
    finding = checks.check_versions()
    assert finding.verdict == "ok", finding
    assert "torch 2" in finding.text


def test_a_missing_and_an_old_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["trio>=999", "no-such-package>=1", "pytest>=1; extra == 'dev'", "rich"]
    real = checks.metadata.requires
    monkeypatch.setattr(checks.metadata, "requires", lambda name: wanted if name == "petalnode" else real(name))
    finding = checks.check_versions()
    assert finding.verdict == "problem"
    assert "trio is 0" in finding.text
    assert "no-such-package is missing" in finding.text
    assert "pytest" not in finding.text
    assert finding.advice


def test_every_device_computes() -> None:
    found = list(checks.check_devices())
    assert [finding.verdict for finding in found] == ["ok"] * len(found)
    assert found[0].text.startswith("cpu")


@pytest.mark.parametrize(
    ("offsets", "verdict", "says"),
    [
        ((), "ok", "no peer"),
        ((0.2, -0.1, 0.3), "ok", "behind"),
        ((-4.0, -5.0, 900.0), "warning", "ahead"),  # one peer's own clock is wrong
        ((60.0, 61.0), "problem", "61.0 s behind"),
    ],
)
def test_the_clock_is_judged_by_the_middle_of_the_peers(offsets: tuple[float, ...], verdict: str, says: str) -> None:
    finding = checks.judge_clock(offsets)
    assert finding.verdict == verdict
    assert says in finding.text
    assert bool(finding.advice) == (verdict != "ok")


def test_a_port_that_is_taken_is_seen() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        finding = checks.check_port(holder.getsockname()[1])
        assert finding.verdict == "warning"
        assert "--listen" in finding.advice
        port = holder.getsockname()[1]
    assert checks.check_port(port).verdict == "ok"


def test_a_folder_that_cannot_be_written_is_a_problem_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    finding = checks.check_disk(file / "models", "models", "PETALNODE_CACHE")
    assert finding.verdict == "problem"
    assert "PETALNODE_CACHE" in finding.advice
    good = checks.check_disk(tmp_path / "new", "models", "PETALNODE_CACHE")
    assert good.verdict in ("ok", "warning")
    assert not list((tmp_path / "new").iterdir())


def test_little_memory_and_few_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        total = 8 << 30
        available = 2 << 30

    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: Memory)
    assert checks.check_memory().verdict == "warning"
    Memory.available = 1 << 20
    assert checks.check_memory().verdict == "problem"
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = checks.check_open_files()
    assert finding.verdict == "warning"
    assert "4096" in finding.advice
