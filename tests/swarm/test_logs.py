"""Logs: lines for a person or JSON, which nobody else can forge, and the names of sessions in them."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.cli import process
from petalnode.node.errors import BadInput
from petalnode.node.testing.memory_servers import memory_swarm


@contextmanager
def standard_error() -> Iterator[io.StringIO]:
    """What comes to standard error of a process whose log has begun; all is as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("petalnode")
    handlers, level, own, stream = root.handlers[:], root.level, ours.level, sys.stderr
    written = io.StringIO()
    root.handlers[:], sys.stderr = [], written
    try:
        process.begin_logs()
        yield written
    finally:
        root.handlers[:], sys.stderr = handlers, stream
        root.setLevel(level)
        ours.setLevel(own)


def test_lines_for_a_person_and_for_a_program() -> None:
    log = logging.getLogger("petalnode.made.up")
    with standard_error() as written:
        log.info("nobody asked for that")
        log.warning("for a person")
        process.set_logs("info", "json")
        other = io.StringIO()
        sys.stderr = other  # as a panel at a terminal does
        log.info("a session %s", "1f2e", extra={"session": "1f2e"})
        try:
            raise RuntimeError("a\nfault")
        except RuntimeError:
            log.exception("it failed")
    assert written.getvalue().endswith("WARNING petalnode.made.up: for a person\n")
    assert "nobody" not in written.getvalue()
    first, second = map(json.loads, other.getvalue().splitlines())
    assert {name: first[name] for name in ("level", "logger", "message", "session")} == {
        "level": "info",
        "logger": "petalnode.made.up",
        "message": "a session 1f2e",
        "session": "1f2e",
    }
    assert first["time"].endswith("Z") and len(first["time"]) == len("2026-01-31T12:00:00.123Z")
    assert second["traceback"].endswith("RuntimeError: a\nfault") and "session" not in second


@pytest.mark.parametrize("form", process.LOG_FORMATS)
def test_a_peer_cannot_make_lines_of_its_own(form: str) -> None:
    said = "no\n2026-01-31 12:00:00,000 ERROR petalnode: forged\r\x1b[2J\u2028\x9b"
    with standard_error() as written:
        process.set_logs("info", form)
        logging.getLogger("petalnode.made.up").info("refused: %s", said)
    (line,) = written.getvalue().splitlines()
    assert "forged" in line and "\x1b" not in line and "\x9b" not in line


def test_what_is_no_level_or_format_is_told() -> None:
    with pytest.raises(BadInput, match="--log-level loud"):
        process.set_logs("loud", "text")
    with pytest.raises(BadInput, match="--log-format xml"):
        process.set_logs("info", "xml")


def test_session_has_one_name_at_both_ends(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "petalnode")
    with memory_swarm() as swarm:
        servers = [swarm.start(models / "tiny-llama", blocks, cache_tokens=1000) for blocks in ("0:3", "3:6")]
        assert all(server.ready for server in servers)
        model = swarm.open_model(AutoDistributedModelForCausalLM, models / "tiny-llama")
        with model.inference_session(max_length=50) as session:
            session.step(torch.zeros(1, 1, model.config.hidden_size))
        model.close()
    by_side: dict[bool, set[str]] = {True: set(), False: set()}
    for record in caplog.records:
        if "granted" in record.getMessage():
            name = record.session  # type: ignore[attr-defined]
            assert len(name) == 8 and name in record.getMessage()
            by_side[".client." in record.name].add(name)
    assert by_side[True] == by_side[False] and len(by_side[True]) == 2
