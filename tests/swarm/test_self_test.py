"""`petalnode self-test`: a real run, and what it makes of machines that compute wrong or lack something."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from petalnode.node.blocks import machine_check
from petalnode.node.blocks.kernels import choice
from petalnode.node.blocks.machine_check import GreedyAnswer, ProductSpeed
from petalnode.node.cli.commands import self_test
from petalnode.node.cli.commands.doctor import Finding
from petalnode.node.cli.output import Output
from petalnode.node.errors import MachineError
from tests.swarm.processes import LOOPBACK, environment, petalnode


def test_right_machine_is_told_so_and_left_clean(tmp_path: Path) -> None:
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    temporary.mkdir()
    arguments = ("self-test", "--json", "--new-swarm", "--listen", LOOPBACK, "--timeout", "3600")
    outcome = petalnode(*arguments, env=environment(home, TMPDIR=str(temporary)), timeout=300)
    assert outcome.code == 0, outcome
    *checks, report = outcome.objects
    assert report["event"] == "report" and report["exact"] and report["faults"] == 0, outcome
    verdicts = {check["check"]: check["verdict"] for check in checks if check["verdict"] != "warning"}
    assert {"versions", "device", "compute", "exactness", "swarm"} <= set(verdicts), outcome
    texts = [check["text"] for check in checks]
    assert any(text.startswith("blocks on cpu: 16 tokens as plain transformers") for text in texts), outcome
    assert any("two servers on loopback" in text and "16 tokens as plain" in text for text in texts), outcome
    assert str(home) not in outcome.out and "petalnode self-test: all exact" in outcome.err
    assert not list(temporary.iterdir())
    assert any(" of the time of a step, " in text and "serve" in text for text in texts), outcome


def answer(*tokens: int, logit: float = 0.5) -> GreedyAnswer:
    return GreedyAnswer(tokens, torch.tensor([0.0, logit]))


def test_only_other_tokens_are_a_fault() -> None:
    same = self_test.compared("exactness", "blocks on cpu", answer(1, 2, 3), answer(1, 2, 3, logit=0.5 + 1e-6))
    assert same.verdict == "ok" and "3 tokens as plain transformers" in same.text
    other = self_test.compared("exactness", "blocks on cuda:0", answer(1, 2, 9, 9, logit=1.0), answer(1, 2, 3, 4))
    assert other.verdict == "problem" and "from 2 on" in other.text and "5.0e-01" in other.text and other.advice


def test_a_device_that_multiplies_wrong_is_a_fault() -> None:
    wrong = self_test.product_finding("cpu has no float32", "cpu", ProductSpeed("float32", 1e9, 1e9, 0.5, False))
    assert wrong.verdict == "problem" and wrong.advice
    # A server notices a wrong kernel for quantised weights, and does without it.
    wrong = self_test.quantised_finding("cpu, int8", "int8", (0.5, False))
    assert wrong.verdict == "warning" and wrong.advice


def test_missing_abilities_are_told_and_no_faults() -> None:
    missing = RuntimeError("no kernel for BFloat16\nat torch/lib.cpp:1")
    found = self_test.product_finding("mps has no torch.float32", "mps", missing)
    assert (found.verdict, found.text) == ("warning", "mps has no torch.float32: no kernel for BFloat16")
    found = self_test.quantised_finding("mps, int8", "int8", MachineError("bitsandbytes is not installed"))
    assert (found.verdict, found.text) == ("warning", "mps, int8: not here: bitsandbytes is not installed")


def test_unwritable_folder_is_no_fault_and_devices_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a device that torch names and cannot use."""
    (tmp_path / "file").touch()
    plain, (finding,) = self_test.exactness_findings(tmp_path / "file" / "model")
    assert plain is None and finding.verdict == "warning" and "cannot be written to a temporary folder" in finding.text
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(self_test, "library", lambda: None)
    plain, findings = self_test.exactness_findings(tmp_path / "model")
    assert plain is not None and len(plain.tokens) == 16
    assert [finding.verdict for finding in findings] == ["ok", "warning", "problem"]
    assert "as long on a CPU" in findings[1].text
    assert findings[2].text.startswith("blocks on mps failed: ")
    monkeypatch.setattr(self_test, "library", lambda: SimpleNamespace(is_exact=True, isa="avx2"))
    monkeypatch.setattr(choice, "library", lambda: None)
    assert self_test._compiled_finding(tmp_path / "model", plain).text.startswith("compiled kernels not tested: ")


def test_the_products_of_this_machine_are_right() -> None:
    assert machine_check.products("cpu", torch.float32).right
    for quantisation in ("int8", "nf4"):
        _, right = machine_check.quantised_error("cpu", quantisation)
        assert right


def test_a_report_names_neither_user_nor_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    home = str(Path.home())
    text = (
        f"{home}/.cache at /ip4/203.0.113.9/tcp/31337/p2p/12D3KooWBhrhHZJGkd5mZzQm7dUe, [2001:db8::17] and 127.0.0.1, "
        "torch 2.13.0, at 12:30:45"
    )
    report = self_test.SelfTestReport(Output(as_json=False))
    report.add(Finding("reachability", "ok", text))
    report.machine([Finding("disk", "problem", "full", "make room")])
    assert report.faults == 0
    report.add(Finding("swarm", "problem", "two servers failed"))
    report.end()
    out = capsys.readouterr().out
    for kept in ("127.0.0.1", "torch 2.13.0", "12:30:45", "~/.cache", "/tcp/31337", "-> make room", "1 faults"):
        assert kept in out, out
    for hidden in (f"{home}/.cache", "203.0.113.9", "2001:db8", "BhrhHZJGk"):
        assert hidden not in out, out


def test_report_for_programs_has_a_line_per_check(capsys: pytest.CaptureFixture[str]) -> None:
    report = self_test.SelfTestReport(Output(as_json=True))
    report.add(Finding("compute", "ok", "fine"))
    report.end()
    check, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert check == {"event": "check", "check": "compute", "verdict": "ok", "text": "fine", "advice": ""}
    assert (last["event"], last["exact"], last["faults"]) == ("report", True, 0) and last["platform"]
