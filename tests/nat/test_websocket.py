"""WebSocket where nothing else gets through: a relay between two NATs that cannot be punched, and a reverse proxy."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.nat.clients import Client
from tests.nat.expected import Expected
from tests.nat.lab import Kind, Lab
from tests.nat.nodes import LISTEN, LabNodes
from tests.swarm.certificates import certificate
from tests.swarm.processes import ReadyNode
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


def test_answers_come_through_a_reverse_proxy(lab: Lab, nodes: LabNodes, tmp_path: Path) -> None:
    """It ends TLS, hands bytes on late and in other pieces, and cuts connections in the middle of an answer."""
    folder = tmp_path / "tiny-llama"
    save_tokenizer(save_tiny("llama", folder, max_position_embeddings=4096, eos_token_id=None))
    web, cafe = lab.host("web"), lab.nat("cafe", Kind.SYMMETRIC).host("phone")
    files = [str(file) for file in certificate(tmp_path)]
    command = web.command([sys.executable, "-m", "tests.nat.reverse_proxy", "443", "8080", *files])
    proxy: ReadyNode = nodes.kept(ReadyNode(command, nodes.env(web), Path(__file__).parents[2]))
    assert proxy.ready
    at = ("--listen", "/ip4/127.0.0.1/tcp/8080/ws", "--announce", f"/ip4/{web.address}/tcp/443/tls/ws")
    server = nodes.command(web, "serve", str(folder), "--new-swarm", "--blocks", "0:6", *at)
    assert server.address == f"/ip4/{web.address}/tcp/443/tls/ws/p2p/{server.peer_id}"
    client = Client(nodes, cafe, folder, server.address)
    client.order(3000, until={"changed": 1}, more=12)
    client.token(8)
    before = cut(proxy)
    done = client.done()
    assert done["ids"] == Expected(folder)(done["ids"])
    assert done["direct"] == [True]
    assert cut(proxy) > before  # there is no other way


def cut(proxy: ReadyNode) -> int:
    """Ends all connections through it; how many it has had."""
    assert proxy.process.stdin is not None
    proxy.process.stdin.write("\n")
    proxy.process.stdin.flush()
    return int(proxy.event("cut")["requests"])
