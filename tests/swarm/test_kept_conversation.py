"""`chat --session FILE`: a conversation goes on in another process."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import environment, petalnode


def ask(swarm: SharedSwarm, file: Path, question: str, *options: str) -> dict[str, object]:
    outcome = petalnode(
        *("chat", str(swarm.folder), "--peer", swarm.peer, "--session", str(file), "--prompt", question),
        *("--json", "--max-new-tokens", "6", *options),
        env=environment(file.parent),
    )
    assert outcome.code == 0, outcome
    return outcome.objects[0]


def test_the_next_process_takes_the_session_up(shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    first = ask(shared_swarm, file, "one two")
    assert first["reused"] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    held = len(json.loads(file.read_text())["tokens"])
    second = ask(shared_swarm, file, "three")
    assert second["reused"] == held  # nothing of it was sent again
    # The same two questions without the servers' memory give the same answers.
    other = tmp_path / "other.json"
    assert ask(shared_swarm, other, "one two")["text"] == first["text"]
    saved = json.loads(other.read_text())
    other.write_text(json.dumps(saved | {"session": None, "tokens": []}))
    again = ask(shared_swarm, other, "three")
    assert (again["reused"], again["text"]) == (0, second["text"])


def test_a_session_that_the_servers_forgot_is_filled_from_the_tokens(shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    ask(shared_swarm, file, "one two")
    saved = json.loads(file.read_text())
    saved["session"]["links"][0][4] = bytes(16).hex()  # another epoch: the server was restarted since
    file.write_text(json.dumps(saved))
    answer = ask(shared_swarm, file, "three")
    assert answer["reused"] == 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "petalnode-chat/1"}'])
def test_a_file_that_is_no_conversation_is_refused(shared_swarm: SharedSwarm, tmp_path: Path, content: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    outcome = petalnode(
        *("chat", str(shared_swarm.folder), "--peer", shared_swarm.peer, "--session", str(file), "--prompt", "hi"),
        env=environment(tmp_path),
    )
    assert outcome.code == 2
    assert "is no saved conversation" in outcome.err
    assert "Traceback" not in outcome.err
    assert file.read_text() == content
