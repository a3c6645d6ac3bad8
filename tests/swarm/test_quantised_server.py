"""A server of quantised blocks: what it says of itself, and what a client gets from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.span import load_span
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.protocols.ids import Span
from tests.swarm.processes import Nodes, petalnode
from tests.tiny_models import NUM_BLOCKS, VOCABULARY

pytestmark = pytest.mark.usefixtures("dials_awaited")


def test_a_server_of_nf4_blocks(node_starter: Nodes, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gets what the same quantised blocks give in its own process."""
    folder = models / "tiny-llama"
    server = node_starter.server(folder, "0:6", "--quant", "nf4")
    assert server.ready["quantisation"] == "nf4"
    ids = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[server.address]) as model:
        generated = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)

    status = petalnode("status", "--peer", server.address, "--json", env=node_starter.env)
    assert status.objects[0]["servers"][0]["quantisation"] == "nf4", status

    monkeypatch.setenv("PETALNODE_CACHE", node_starter.env["PETALNODE_CACHE"])  # the blocks that the server has kept
    blocks = load_span(folder, Span(0, NUM_BLOCKS), quantisation="nf4", progress=_refuse)
    client = load_client(folder)
    cache = blocks.make_cache(1, 32)
    hidden = blocks.forward(client.embed(ids), cache)
    expected = ids
    for position in range(9, 29):
        expected = torch.cat([expected, client.head(hidden[:, -1:]).argmax(-1)], 1)
        hidden = blocks.decode([(client.embed(expected[:, -1:], position), cache)])[0]
    assert torch.equal(generated, expected)


def _refuse(what: str, done: int, total: int | None) -> None:
    assert not what.startswith("Quantising"), "the server keeps its blocks for the next start"
