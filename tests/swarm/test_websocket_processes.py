"""Servers and clients that speak nothing but WebSocket, as commands and as the Python API."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode import AutoDistributedModelForCausalLM
from tests.greedy import prompt
from tests.swarm.certificates import certificate
from tests.swarm.processes import TLS, WS, Nodes, petalnode
from tests.swarm.tcp_proxy import line_to
from tests.tiny_models import load_whole

pytestmark = pytest.mark.usefixtures("dials_awaited")
TOKENS = 16


def test_tokens_over_websocket_are_the_models(node_starter: Nodes, models: Path, tmp_path: Path) -> None:
    """One server with TLS, one without, joined to each other and pushing; then a proxy that cuts what is idle."""
    folder, files = models / "tiny-llama", [str(file) for file in certificate(tmp_path)]
    first = node_starter.server(folder, "0:3", "--listen", WS)
    with_tls = ("--listen", TLS, "--tls-certificate", files[0], "--tls-key", files[1])
    last = node_starter.server(folder, "3:6", *with_tls, peer=first.address)
    assert "/ws/p2p/" in first.address and "/tls/ws/p2p/" in last.address
    ids = prompt(1, 9)
    fixed = {"do_sample": False, "pad_token_id": 0}
    expected = load_whole(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **fixed)
    port = int(first.address.split("/")[4])
    with line_to("127.0.0.1", port) as line:
        peer = first.address.replace(f"/tcp/{port}/", f"/tcp/{line.port}/")
        with (
            AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[peer]) as model,
            model.inference_session(max_length=64) as session,
        ):
            mask = torch.ones_like(ids)
            half = model.generate(ids, session=session, attention_mask=mask, max_new_tokens=TOKENS // 2, **fixed)
            line.cut()
            mask = torch.ones_like(half)
            whole = model.generate(half, session=session, attention_mask=mask, max_new_tokens=TOKENS // 2, **fixed)
            assert [peer_id for peer_id, _ in session.route] == [first.peer_id, last.peer_id]
        assert whole.tolist() == expected.tolist()


def test_what_is_missing_for_tls_is_told(node_starter: Nodes, models: Path, tmp_path: Path) -> None:
    certificate(tmp_path, days=-1)
    files = {"--tls-certificate": str(tmp_path / "cert.pem"), "--tls-key": str(tmp_path / "key.pem")}
    one, both = next(iter(files.items())), [part for pair in files.items() for part in pair]
    taken = "/ip4/127.0.0.1/tcp/1234"
    for options, told in (
        (["--listen", TLS], "needs --tls-certificate and --tls-key"),
        (["--listen", TLS, *one], "go together"),
        (["--listen", TLS, *both[:3], str(tmp_path / "none")], "No such file"),
        (["--listen", f"{taken}/ws", "--listen", taken], "each transport needs its own"),
    ):
        refused = petalnode("bootstrap", "--new-swarm", *options, env=node_starter.env)
        assert refused.code == 2 and told in refused.err and "Traceback" not in refused.err, refused
    node = node_starter.bootstrap("--listen", TLS, *both)
    assert node.address and "ended on" in node.errors
