"""`chat --image`: a picture on the command line has the answer of transformers, over servers that are processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import Nodes, Outcome, petalnode
from tests.tiny_pictures import answer_of, png, save_processor, save_seeing

NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing") / "tiny-seeing"


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    made = save_seeing("qwen2_vl", folder)
    save_processor(folder)
    return made


@pytest.fixture(scope="module")
def peer(node_starter: Nodes, folder: Path, whole: Any) -> str:
    meeting = node_starter.bootstrap()
    for node in [node_starter.server(folder, blocks, peer=meeting.address) for blocks in ("0:2", "2:4")]:
        _ = node.ready
    return meeting.address


def ask(nodes: Nodes, folder: Path, peer: str, *options: str) -> Outcome:
    return petalnode(
        *("chat", str(folder), "--peer", peer, "--prompt", "What?", "--temperature", "0"),
        *("--max-new-tokens", str(NEW), "--json", *options),
        env=nodes.env,
    )


def test_the_answer_is_that_of_transformers(
    node_starter: Nodes, folder: Path, whole: Any, peer: str, tmp_path: Path
) -> None:
    pictures = png(), png(colour=0xF01020)
    files = [tmp_path / "one.png", tmp_path / "other.png"]
    for file, picture in zip(files, pictures, strict=True):
        file.write_bytes(picture)
    for shown in ([0], [1], [0, 1]):
        given = [option for place in shown for option in ("--image", str(files[place]))]
        outcome = ask(node_starter, folder, peer, *given)
        assert outcome.code == 0, outcome
        asked = [pictures[place] for place in shown]
        assert outcome.objects[0]["text"] == answer_of(whole, folder, *asked, tokens=NEW)


def test_a_kept_conversation_goes_on_without_the_picture(
    node_starter: Nodes, folder: Path, peer: str, tmp_path: Path
) -> None:
    file, kept = tmp_path / "one.png", tmp_path / "chat.json"
    file.write_bytes(png())
    for options in (("--image", str(file)), ()):
        outcome = ask(node_starter, folder, peer, "--session", str(kept), *options)
        assert outcome.code == 0, outcome


def test_what_is_no_picture_is_refused(node_starter: Nodes, folder: Path, peer: str, tmp_path: Path) -> None:
    text = tmp_path / "note.txt"
    text.write_text("not a picture")
    for file, says in (
        (tmp_path / "missing.png", "No such file"),
        (tmp_path, "Is a directory"),
        (text, "no picture that can be opened"),
    ):
        refused(ask(node_starter, folder, peer, "--image", str(file)), says)


def test_a_model_of_text_says_so(node_starter: Nodes, shared_swarm: SharedSwarm, tmp_path: Path) -> None:
    file = tmp_path / "one.png"
    file.write_bytes(png())
    refused(ask(node_starter, shared_swarm.folder, shared_swarm.peer, "--image", str(file)), "takes no pictures")


def refused(outcome: Outcome, says: str) -> None:
    assert outcome.code == 2, outcome
    lines = [line for line in outcome.err.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1 and says in lines[0], outcome
