"""`serve --allow-client`: a server for listed clients, and what the others are told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from petalnode.crypto.identity import Identity
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.errors import NoChainError
from tests.swarm.processes import Node, Nodes, Outcome, petalnode
from tests.tiny_models import load_whole

pytestmark = pytest.mark.usefixtures("dials_awaited")
FRIEND = Identity.from_seed(b"f" * 32)


@pytest.fixture(scope="module")
def private(node_starter: Nodes, folder: Path) -> Iterator[Node]:
    """The whole model, for FRIEND and another one."""
    other = Identity.from_seed(b"g" * 32)
    listed = ("--allow-client", FRIEND.peer_id, "--allow-client", other.peer_id)
    node = node_starter.server(folder, "0:6", *listed, "--throughput", "900000")
    node.ready  # noqa: B018  (waits)
    yield node
    node.stop()


def chat(node_starter: Nodes, folder: Path, peer: str, *options: str) -> Outcome:
    arguments = ("chat", str(folder), "--peer", peer, "--prompt", "hi", "--max-new-tokens", "3", *options)
    return petalnode(*arguments, env=node_starter.env)


def test_who_is_listed_is_served(private: Node, node_starter: Nodes, folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "friend.key"
    FRIEND.save(key)
    outcome = chat(node_starter, folder, private.address, "--identity", str(key))
    assert outcome.code == 0, outcome
    assert outcome.out.strip()
    assert f"the peer id of this client is {FRIEND.peer_id}" in outcome.err
    with AutoDistributedModelForCausalLM.from_pretrained(
        folder, initial_peers=[private.address], identity=key
    ) as model:
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_a_stranger_is_told_what_to_do(private: Node, node_starter: Nodes, folder: Path) -> None:
    outcome = chat(node_starter, folder, private.address)
    assert outcome.code == 3, outcome
    assert "Traceback" not in outcome.err
    stranger = re.search(r"restart the server with --allow-client (\w+)", outcome.err)
    assert stranger is not None and stranger[1] != FRIEND.peer_id
    assert f"its owner has listed with --allow-client, and {stranger[1]} is none of them" in outcome.err
    assert "petalnode chat --identity FILE" in outcome.err


def test_strangers_go_elsewhere(private: Node, node_starter: Nodes, folder: Path) -> None:
    ids = torch.tensor([[5, 6, 7]])
    with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[private.address]) as model:
        with pytest.raises(NoChainError, match="none of them"):
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        public = node_starter.server(folder, "0:6", "--throughput", "1", peer=private.address)
        public.ready  # noqa: B018  (waits)
        with model.inference_session(max_length=8) as session:
            out = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, session=session)
            assert session.route == [(public.peer_id, (0, 6))]
            assert session.recoveries == 0
    assert torch.equal(out, load_whole(folder).generate(ids, max_new_tokens=3, do_sample=False))
    public.stop()


def test_a_peer_id_that_is_none_is_refused(node_starter: Nodes, folder: Path) -> None:
    outcome = petalnode("serve", str(folder), "--allow-client", "my-laptop", env=node_starter.env)
    assert outcome.code == 2, outcome
    assert "--allow-client my-laptop: this is no peer id" in outcome.err
