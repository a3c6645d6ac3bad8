"""`petalnode invite` and `petalnode join`, from a link to an answer, with real processes on loopback."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.swarm.processes import LOOPBACK, Node, Nodes, environment, nodes, petalnode, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("dials_awaited")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose context is short, and so is every answer: `petalnode join` has no limit for it."""
    root = tmp_path_factory.mktemp("models")
    save_tokenizer(save_tiny("llama", root / "tiny-llama", max_position_embeddings=48, eos_token_id=None))
    return root


@pytest.fixture(scope="module")
def half(models: Path, node_starter: Nodes) -> Node:
    """The first three blocks of tiny-llama, in a swarm of its own."""
    server = node_starter.server(models / "tiny-llama", "0:3", "--cache-tokens", "4000")
    server.ready  # noqa: B018  (waits)
    return server


@pytest.fixture(scope="module")
def link(half: Node, node_starter: Nodes) -> str:
    outcome = petalnode("invite", "--json", "--peer", half.address, env=node_starter.env)
    assert outcome.code == 0, outcome
    (said,) = outcome.objects
    assert said["event"] == "invite" and said["model"] == "tiny-llama" and not said["has_key"], said
    assert said["peers"] == [half.address] and said["command"] == f"petalnode join {said['link']}"
    return str(said["link"])


def test_a_server_prints_its_link(half: Node) -> None:
    printed = half.event("link")["link"]
    assert printed.startswith("petalnode:")


def test_a_friend_joins_and_both_answer_together(half: Node, link: str, models: Path, node_starter: Nodes) -> None:
    env = environment(node_starter.home / "friend")
    own = ("--listen", LOOPBACK, "--json")
    friend = Node("join", link, "--yes", "--num-blocks", "3", *own, env=env)  # with nothing: peers hand on the weights
    node_starter.running.append(friend)
    prospect = friend.event("prospect")
    assert prospect["blocks"] == [3, 6] and prospect["fetch_bytes"] > 1000 and prospect["memory_bytes"] > 0
    assert friend.ready["blocks"] == [3, 6]
    guest = environment(node_starter.home / "guest")
    words = ("--chat", "--yes", "--prompt", "hello there", "--json")
    outcome = petalnode("join", link, *words, env=guest)
    assert outcome.code == 0, outcome
    assert {tuple(hop["blocks"]) for hop in outcome.objects[-1]["route"]} == {(0, 3), (3, 6)}
    # Where --peer stands, too: MODEL may be left out, as it is on this machine.
    chat = petalnode("chat", "--peer", link, "--prompt", "hello", "--json", "--yes", env=guest, cwd=models)
    assert chat.code == 0 and chat.objects[-1]["tokens"] > 0, chat
    told = petalnode("invite", "tiny-llama", "--peer", link, env=guest)
    assert told.code == 0 and "tiny-llama@" in told.out, told
    status = petalnode("status", "--peer", link, "--json", env=guest)
    assert status.code == 0 and len(status.objects[0]["servers"]) == 2, status


def test_qr_codes_and_what_a_person_reads(models: Path, tmp_path: Path) -> None:
    with nodes(tmp_path / "own") as own:  # where no other server is remembered
        server = own.server(models / "tiny-llama", "0:3")
        by_address, env = ("--peer", server.address), own.env | {"PETALNODE_REMEMBER": "1"}
        # Without an address, the swarm of a server of one's own.
        for name, where in (("code.svg", ()), ("code.png", by_address), ("code.txt", by_address)):
            file = tmp_path / name
            outcome = petalnode("invite", *where, "--qr", str(file), "--valid", "30m", env=env)
            assert outcome.code == 0 and file.stat().st_size > 500, outcome
        assert "check word: " in outcome.out and "this machine only" in outcome.err, outcome
        wrong = petalnode("invite", *by_address, "--qr", str(tmp_path / "code.doc"), env=env)
        assert wrong.code == 2 and "code.doc" in wrong.err, wrong
        assert petalnode("invite", *by_address, "--valid", "soon", env=env).code == 2


def test_no_link_names_a_peer_that_is_gone(models: Path, half: Node, node_starter: Nodes) -> None:
    gone = node_starter.server(models / "tiny-llama", "3:6", peer=half.address)
    address = gone.address
    gone.kill()
    outcome = petalnode("invite", "--json", "--peer", half.address, "--peer", address, env=node_starter.env)
    assert outcome.code == 0, outcome
    peers = outcome.objects[0]["peers"]
    assert half.address in peers and address not in peers, outcome


def test_private_swarm_is_joined_by_its_link_alone(models: Path, node_starter: Nodes, tmp_path: Path) -> None:
    key = tmp_path / "swarm.key"
    assert petalnode("swarm-key", str(key), env=node_starter.env).code == 0
    server = node_starter.server(models / "tiny-llama", "0:6", "--swarm-key", str(key))
    invite = ("invite", "--json", "--peer", server.address, "--swarm-key", str(key))
    said = petalnode(*invite, env=node_starter.env).objects[0]
    assert said["has_key"]
    words = ("--chat", "--yes", "--prompt", "hello", "--json")
    guest = environment(tmp_path / "guest")
    outcome = petalnode("join", *words, env=guest, cwd=models, given=said["link"])
    assert outcome.code == 0 and outcome.objects[-1]["tokens"] > 0, outcome
    without = petalnode(*invite, "--without-key", env=node_starter.env).objects[0]
    assert not without["has_key"]
    refused = petalnode("join", without["link"], *words, env=guest, cwd=models)
    assert refused.code == 2 and "--swarm-key FILE" in refused.err, refused
    # What a server prints may be kept in a log: never the key.
    printed = server.event("link")["link"]
    assert petalnode("join", printed, *words, env=guest, cwd=models).code == 2


def test_python_and_the_page_know_links(models: Path, node_starter: Nodes) -> None:
    server = node_starter.server(models / "tiny-llama", "0:6", "--cache-tokens", "4000")
    address = server.address
    link = server.event("link")["link"]
    script = node_starter.script(
        "import sys; from petalnode import AutoDistributedModelForCausalLM as Model\n"
        "with Model.from_pretrained(sys.argv[1], initial_peers=[sys.argv[2]]) as model:\n"
        "    print(model.generate(max_new_tokens=2, inputs=__import__('torch').tensor([[1, 2, 3]])).shape[1])",
        str(models / "tiny-llama"),
        link,
    )
    assert script.line() == "5", script.errors
    api = Node("api", str(models / "tiny-llama"), "--peer", link, "--http-port", "0", "--json", env=node_starter.env)
    node_starter.running.append(api)
    url = api.event("ready")["url"]
    found = httpx.get(f"{url}/v1/petalnode/invite", timeout=None).json()
    assert found["command"] == f"petalnode join {found['link']}" and len(found["qr"]) == len(found["qr"][0]) > 20
    chat = petalnode("join", found["link"], "--chat", "--yes", "--prompt", "hi", env=node_starter.env, cwd=models)
    assert chat.code == 0, chat
    assert address in _help(url)
    server.kill()
    until(lambda: _refused(url), "a link through a dead peer")
    until(lambda: "--peer" not in _help(url), "the page names nobody who is gone")  # a report is kept for a second


def _refused(url: str) -> bool:
    return httpx.get(f"{url}/v1/petalnode/invite", timeout=None).status_code == 503


def _help(url: str) -> str:
    """The command by which the page says that others can help."""
    return str(httpx.get(f"{url}/v1/petalnode/swarm", timeout=None).json()["help"]["command"])
