"""A relay that speaks nothing but WebSocket, between two NATs that cannot be punched."""

from __future__ import annotations

from pathlib import Path

from tests.nat.clients import Client
from tests.nat.expected import Expected
from tests.nat.lab import Kind, Lab
from tests.nat.nodes import LISTEN, LabNodes
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import save_tiny


def test_an_answer_by_websocket_and_a_circuit(lab: Lab, nodes: LabNodes, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    home, cafe = lab.nat("home", Kind.SYMMETRIC).host("server"), lab.nat("cafe", Kind.SYMMETRIC).host("phone")
    relay = nodes.command(lab.host("relay"), "bootstrap", "--new-swarm", "--listen", f"{LISTEN}/ws")
    serve = ("serve", str(folder), "--listen", LISTEN, "--peer", relay.address, "--blocks", "0:6")
    server = nodes.command(home, *serve)
    client = Client(nodes, cafe, folder, relay.address)
    client.order(24, allowed=[server.peer_id])
    done = client.done()
    assert done["ids"] == Expected(folder)(done["ids"])
    assert done["direct"] == [False] and done["recoveries"] == 0
