"""Machines on one local network find each other with no option at all, and without an internet."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.nat.lab import Lab
from tests.nat.nodes import LISTEN, LabNodes
from tests.swarm.processes import until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny

# Has the port of mDNS for itself.
_TAKE_MDNS = """
import socket, sys
held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
held.bind(("", 5353))
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=512, eos_token_id=None))
    return folder


def test_two_laptops_serve_and_chat_with_no_option(lab: Lab, nodes: LabNodes, model: Path) -> None:
    lan = lab.lan("cabin")
    one, other = lan.host("one"), lan.host("other")
    server = nodes.command(one, "serve", str(model), "--until-eof")
    assert server.ready["joined"] is None and server.address.startswith(f"/ip4/{one.address}/tcp/")
    answer = nodes.run(other, "chat", str(model), "--prompt", "hi", "--max-new-tokens", "4", "--json")
    assert answer.code == 0, answer
    assert [hop["peer_id"] for hop in answer.objects[0]["route"]] == [server.peer_id]

    # Whatever the other one does next, it remembers.
    second = nodes.command(other, "serve", str(model), "--until-eof", "--blocks", "0:1", "--no-mdns")
    assert second.ready["joined"] == {"way": "remembered", "peer_id": server.peer_id}
    until(lambda: "remembered from another run" in second.errors, "it says how it joined")


def test_neighbours_that_start_together_find_each_other(lab: Lab, nodes: LabNodes) -> None:
    lan = lab.lan("cabin")
    start = time.perf_counter()
    started = [nodes.light(lan.host(f"h{n}"), listen=[LISTEN], mdns=True, blocks=[n, n + 1]) for n in range(3)]
    for node in started:
        for other in started:
            if other is not node:
                node.ask("wait_server", peer=other.peer_id)
    print(f"all know each other {time.perf_counter() - start:.1f} s after their processes began")


def test_neighbours_lose_each_other_and_meet_again(lab: Lab, nodes: LabNodes) -> None:
    """Nobody has an address that was given to it."""
    lan = lab.lan("cabin")
    one, other = lan.host("one"), lan.host("other")
    first = nodes.light(one, listen=[LISTEN], mdns=True, blocks=[0, 4])
    second = nodes.light(other, listen=[LISTEN], mdns=True)
    second.ask("wait_server", peer=first.peer_id)
    start = time.perf_counter()
    lost = second.tell("wait_lost", peer=first.peer_id)
    assert second.ask("connected") == [first.peer_id]  # hence it waits by now
    other.change_address()
    second.answer(lost)
    noticed = time.perf_counter()
    second.ask("reach", peer=first.peer_id)
    print(f"noticed after {noticed - start:.1f} s, back {time.perf_counter() - noticed:.1f} s later")


def test_a_private_swarm_has_neighbours_of_its_own(lab: Lab, nodes: LabNodes) -> None:
    lan = lab.lan("cabin")
    keys = {"public": None, "red": "ab" * 32, "red2": "ab" * 32, "blue": "cd" * 32}
    started = {
        name: nodes.light(lan.host(name), listen=[LISTEN], mdns=True, psk=psk, blocks=[0, 1])
        for name, psk in keys.items()
    }
    started["red"].ask("wait_server", peer=started["red2"].peer_id)
    connected = {name: node.ask("connected") for name, node in started.items()}
    red, red2 = (started[name].peer_id for name in ("red", "red2"))
    assert connected == {"public": [], "red": [red2], "red2": [red], "blue": []}


def test_node_for_this_machine_only_has_no_neighbours(lab: Lab, nodes: LabNodes) -> None:
    lan = lab.lan("cabin")
    one, other = lan.host("one"), lan.host("other")
    local = nodes.light(one, listen=["/ip4/127.0.0.1/tcp/0"], mdns=True, blocks=[0, 1])
    seen = nodes.light(one, listen=[LISTEN], mdns=True, blocks=[1, 2])
    near = nodes.light(other, listen=[LISTEN], mdns=True)
    near.ask("wait_server", peer=seen.peer_id)
    assert local.peer_id not in near.ask("connected")
    assert local.ask("connected") == []


def test_a_machine_without_multicast_goes_on(lab: Lab, nodes: LabNodes) -> None:
    alone = lab.lan("cabin").host("alone")
    greedy = nodes.program(alone, [sys.executable, "-S", "-c", _TAKE_MDNS])
    assert greedy.line() == "taken"
    node = nodes.light(alone, listen=[LISTEN], mdns=True, log_level="DEBUG")
    assert node.ready["addrs"]
    assert node.ask("connected") == []
    node.stop()
    assert "no mDNS on" in node.errors and "Traceback" not in node.errors
