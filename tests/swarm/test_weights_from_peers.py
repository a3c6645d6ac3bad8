"""A machine that has nothing joins a swarm and gets from its peers what it serves or needs: real processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.errors import ModelError
from petalnode.node.models import resolve
from tests.swarm.processes import LOOPBACK, Node, Outcome, environment, nodes, petalnode, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import save_tiny

NAME = "nowhere-else"
BLOCKS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several pieces for each block, which no hub has."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "eos_token_id": None}
    path = save_tiny("llama", tmp_path_factory.mktemp("models") / NAME, **wide)
    save_tokenizer(path)
    return path


Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, each on a machine of its own: `start(MACHINE, MODEL, OPTION...)`."""
    with nodes(tmp_path / "nodes") as started:

        def begin(machine: str, model: str | Path, *options: str, program: str = "petalnode", **extra: str) -> Node:
            home = tmp_path / machine
            home.mkdir(exist_ok=True)
            own = ("--until-eof", "--json", "--listen", LOOPBACK, "--identity", str(home / "key"))
            command = ("serve", str(model), *own, *options)
            env = environment(home, PETALNODE_CHECK_INTERVAL="1", **extra)
            node = Node(*command, env=env) if program == "petalnode" else _Program(program, *command, env=env)
            return started._kept(node)

        yield begin


class _Program(Node):
    """The same, of a program that lies."""

    def __init__(self, program: str, *arguments: str, env: dict[str, str]) -> None:
        super(Node, self).__init__([sys.executable, "-m", program, *arguments], env)


def chat(home: Path, model: str | Path, *peers: Node, **extra: str) -> Outcome:
    home.mkdir(exist_ok=True)
    joining = [part for peer in peers for part in ("--peer", peer.address)]
    asked = ("--prompt", "the cat", "--max-new-tokens", "12", "--yes", "--json")
    return petalnode("chat", str(model), *joining, *asked, env=environment(home, **extra))


def cached(home: Path) -> list[Path]:
    return sorted((home / "cache" / "petalnode" / "models").glob("peers-*/part-*"))


def test_a_server_and_a_client_that_have_nothing(start: Start, folder: Path, tmp_path: Path) -> None:
    whole = start("whole", folder, "--new-swarm", "--blocks", "0:6")
    expected = chat(tmp_path / "has-it", folder, whole)
    assert expected.code == 0, expected
    empty = start("empty", NAME, "--peer", whole.address, "--blocks", "1:4")
    assert empty.ready["model_version"] == whole.ready["model_version"]
    complete = [file.name for file in cached(tmp_path / "empty") if file.suffix == ".safetensors"]
    assert complete == ["part-00002.safetensors", "part-00003.safetensors", "part-00004.safetensors"]
    answer = chat(tmp_path / "laptop", NAME, whole)
    assert answer.code == 0, answer
    assert answer.objects[-1]["text"] == expected.objects[-1]["text"]
    complete = [file.name for file in cached(tmp_path / "laptop") if file.suffix == ".safetensors"]
    assert complete == ["part-00000.safetensors", "part-00007.safetensors"]


def test_program_in_python_and_training_that_have_nothing(
    start: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start("whole", folder, "--new-swarm", "--blocks", "0:6")
    ids = torch.tensor([[5, 9, 11, 3]])
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "program" / "cache" / "petalnode"))
    answers = []
    for name in (folder, NAME):
        with AutoDistributedModelForCausalLM.from_pretrained(name, initial_peers=[whole.address]) as model:
            answers.append(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
            path = model.path
    assert answers[0] == answers[1]
    assert AutoTokenizer.from_pretrained(path).chat_template
    complete = [file.name for file in cached(tmp_path / "program") if file.suffix == ".safetensors"]
    assert complete == ["part-00000.safetensors", "part-00007.safetensors"]
    with pytest.raises(ModelError, match="nobody serves"):
        AutoDistributedModelForCausalLM.from_pretrained("unknown-here", initial_peers=[whole.address])
    (tmp_path / "data.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 3)
    home = tmp_path / "trainer"
    home.mkdir()
    tuned = petalnode(
        *("tune", NAME, "--peer", whole.address, "--data", str(tmp_path / "data.jsonl"), "--method", "prompt"),
        *("--virtual-tokens", "2", "--steps", "1", "--sample-tokens", "2", "--out", str(tmp_path / "tuned"), "--json"),
        env=environment(home),
    )
    assert tuned.code == 0, tuned
    assert [file.name for file in cached(home) if file.suffix == ".safetensors"] == complete


def test_a_gguf_file_from_peers(start: Start, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "few-bits.gguf", "Q4_0")
    whole = start("whole", file, "--new-swarm", "--blocks", "0:3")
    expected = chat(tmp_path / "has-it", file, whole)
    assert expected.code == 0, expected
    empty = start("empty", "few-bits", "--peer", whole.address, "--blocks", "0:3")
    assert empty.ready["model_version"] == whole.ready["model_version"]
    assert empty.ready["dtype"] == whole.ready["dtype"]
    answer = chat(tmp_path / "laptop", "few-bits", whole)
    assert answer.code == 0, answer
    assert answer.objects[-1]["text"] == expected.objects[-1]["text"]


def test_one_peer_is_killed_and_one_lies(start: Start, folder: Path, tmp_path: Path) -> None:
    """What the one has sent stays, what the other sends is noticed; the third has all that is missing."""
    slow = ("--max-upload", "3MB")
    honest = start("honest", folder, "--new-swarm", "--blocks", "0:6", *slow)
    join = ("--peer", honest.address, "--blocks", "0:6")
    dying, liar = (
        start("dying", folder, *join, *slow),
        start("liar", folder, *join, program="tests.swarm.false_weights"),
    )
    assert dying.ready and liar.ready
    empty = start("empty", NAME, *join)
    home = tmp_path / "empty"
    until(lambda: len(cached(home)) > BLOCKS + 2, "something came")  # beside the headers of all files
    dying.process.kill()
    assert empty.ready["model_version"] == honest.ready["model_version"]
    assert f"{liar.peer_id} sent a false piece" in empty.errors
    assert f"{dying.peer_id} sent a false piece" not in empty.errors
    assert f"{honest.peer_id} sent a false piece" not in empty.errors


def test_next_blocks_come_before_old_ones_go(start: Start, folder: Path, tmp_path: Path) -> None:
    """The only holder of blocks 3:6 goes; who takes its place has them on its disk when it begins to leave its own."""
    gone = start("gone", folder, "--new-swarm", "--blocks", "3:6")
    moving = start("moving", NAME, "--peer", gone.address, "--num-blocks", "3")
    assert moving.ready["blocks"] == [0, 3]
    staying = start("staying", folder, "--peer", gone.address, "--blocks", "0:3", "--max-upload", "3MB")
    assert staying.ready
    gone.process.kill()
    assert moving.event("moving")["to"] == [3, 6]
    complete = {file.name for file in cached(tmp_path / "moving") if file.suffix == ".safetensors"}
    assert {f"part-{block + 1:05}.safetensors" for block in range(3, 6)} <= complete
    assert moving.event("moved")["blocks"] == [3, 6]


def test_whoever_does_not_share_is_not_fetched_from(start: Start, folder: Path, tmp_path: Path) -> None:
    whole = start("whole", folder, "--new-swarm", "--blocks", "0:6", "--share-weights", "off")
    answer = chat(tmp_path / "laptop", NAME, whole)
    assert answer.code == 3
    assert f"no peer hands on {NAME}" in answer.err


class _PackageIndex(SimpleHTTPRequestHandler):
    """Counts what it is asked for."""

    def log_message(self, *_: object) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """A package index that has nothing."""
    (tmp_path / "index").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_PackageIndex, directory=str(tmp_path / "index")))
    server.asked = 0  # type: ignore[attr-defined]
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


def test_index_is_asked_until_peers_have_helped(start: Start, index: Any, tmp_path: Path) -> None:
    home = tmp_path / "has-it" / "cache" / "petalnode" / "models"
    home.mkdir(parents=True)
    package = resolve("smollm2").path
    (home / package.name).symlink_to(package)
    pip = {"PIP_INDEX_URL": f"http://127.0.0.1:{index.server_port}/simple", "PIP_CONFIG_FILE": os.devnull}
    pip |= {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    whole = start("has-it", "smollm2", "--new-swarm", "--blocks", "0:30", **pip)
    assert whole.ready and not index.asked
    for is_first in (True, False):
        index.asked = 0
        answer = chat(tmp_path / "laptop", "smollm2", whole, **pip)
        assert answer.code == 0, answer
        said = answer.err.count("cannot be downloaded here: peers of the swarm hand it on")
        assert (said, bool(index.asked)) == (is_first, is_first), answer
        index.asked = 0
        server = start("laptop", "smollm2", "--peer", whole.address, "--blocks", f"{2 * is_first}:4", **pip)
        assert server.ready["model_version"] == whole.ready["model_version"]
        assert server.stop() == 0 and not index.asked
