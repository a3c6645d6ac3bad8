"""What the doctor makes of what it sees."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from rich.console import Console

from petalnode.node.cli.commands import doctor as checks
from petalnode.node.cli.commands import status
from petalnode.node.cli.commands.validate import findings_table
from petalnode.node.errors import MachineError, SwarmError
from petalnode.protocols.announcement import ServerState
from petalnode.protocols.ids import Span
from tests.connections import free_port


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


def test_missing_kernels_are_told_with_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "library", lambda: None)
    found = next(iter(checks.check_devices()))
    assert found.verdict in ("warning", "ok") and "two to four times as long" in found.text
    assert "make setup" in found.advice


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
        ((60.0, 61.0), "problem", "60.0 s behind"),
    ],
)
def test_clock_is_judged_by_middle_of_peers(offsets: tuple[float, ...], verdict: str, says: str) -> None:
    finding = checks.judge_clock(offsets)
    assert finding.verdict == verdict
    assert says in finding.text
    assert bool(finding.advice) == (verdict != "ok")


def test_a_port_that_is_taken_is_seen() -> None:
    with socket.socket() as holder:
        port = free_port()
        holder.bind(("0.0.0.0", port))
        holder.listen()
        finding = checks.check_port(port)
        assert finding.verdict == "warning"
        assert "--listen" in finding.advice
    assert checks.check_port(port).verdict == "ok"


def test_unwritable_folder_is_a_problem_with_advice(tmp_path: Path) -> None:
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


def test_own_machines_nodes_cannot_tell_reachability() -> None:
    peer = "p2p/12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV"
    here, there = f"/ip4/127.0.0.1/tcp/1/{peer}", f"/ip4/203.0.113.7/tcp/1/{peer}"
    assert checks.are_here([here, f"/ip6/::1/tcp/1/{peer}"])
    assert not checks.are_here([here, there]) and not checks.are_here([])
    assert not checks.are_here([f"/dns4/localhost/tcp/1/{peer}"])  # a name may be any machine's
    finding = trio.run(checks.check_reachability, None, True)  # type: ignore[arg-type]
    assert finding.verdict == "warning" and "cannot be told" in finding.text and finding.advice


def test_machines_fault_is_not_blamed_on_addresses() -> None:
    for error, advice in ((MachineError("no key can be written"), "solve this first"), (SwarmError("x"), "addresses")):
        finding = checks.not_joined(error)
        assert finding.verdict == "problem" and str(error) in finding.text and advice in finding.advice


@pytest.mark.parametrize("width", [40, 80])
def test_tables_can_be_read_on_a_narrow_terminal(width: int) -> None:
    server: Any = SimpleNamespace(
        span=Span(10, 22), public_name="attic", peer_id="12D3KooWBhrhHZJG", state=ServerState.ONLINE, fixed=True,
        next_span=None, step_seconds=0.02, cache_tokens_free=16384,
    )  # fmt: skip
    verdict: Any = SimpleNamespace(
        blocks=Span(0, 22), verdict="inconclusive", error=0.125, tolerance=0.0625, requests=12,
        reason="the answer is further off than usual, and not as far as to be certain",
    )  # fmt: skip
    console = Console(width=width, record=True, file=io.StringIO())
    model = status.ModelServers("tiny-llama", bytes(32), 22, (server,))
    console.print(status.server_table(model, narrow=width < 80))
    console.print(findings_table({"12D3KooWBhrhHZJG": (0.0, verdict)}, {"12D3KooWBhrhHZJG": 3}, narrow=True))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "10:22" in text and "attic" in text and "50.0" in text and "16384" in text and "blocks" in text
    assert "…rhHZJG"[-6:] in text and "(3x)" in text
    words = " ".join(" ".join(line.strip("┃│ ").rpartition("│")[2].split()) for line in lines)
    assert width < 80 or "further off" in words
