"""A private swarm by its key's file, as the commands and the Python API take it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode import AutoDistributedModelForCausalLM, SwarmError
from petalnode.crypto.swarm_key import load_swarm_key, make_swarm_key
from petalnode.node.errors import BadInput
from tests.swarm.processes import Nodes, petalnode, until


def test_who_has_the_file_gets_an_answer(node_starter: Nodes, models: Path, tmp_path: Path) -> None:
    key, other_key, folder = tmp_path / "swarm.key", tmp_path / "other.key", models / "tiny-llama"
    for path in (key, other_key):
        make_swarm_key(path)
    server = node_starter.server(folder, "0:6", "--swarm-key", str(key))
    peer = server.address
    # People can copy the command as it stands.
    command = f"petalnode chat tiny-llama --peer {peer} --swarm-key {key}"
    until(lambda: command in server.errors, "the command with which others talk to it")

    answers = []
    for given in (key, load_swarm_key(key)):
        with AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[peer], swarm_key=given) as model:
            answers.append(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).tolist())
    assert answers[0] == answers[1] and len(answers[0][0]) == 7

    for given, words in ((None, "private swarm, which needs its --swarm-key"), (other_key, "another swarm key")):
        with pytest.raises(SwarmError, match=words):
            AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[peer], swarm_key=given)
    with pytest.raises(BadInput, match="cannot read the swarm key"):
        AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[peer], swarm_key=tmp_path / "nothing")

    chat = ("chat", "--prompt", "hi", "--max-new-tokens", "4", "--peer", peer)
    outcome = petalnode(*chat, "--swarm-key", str(key), "--json", env=node_starter.env, cwd=models)
    assert outcome.code == 0 and outcome.objects[0]["tokens"] == 4, outcome
    refused = petalnode(*chat, env=node_starter.env, cwd=models)
    assert refused.code == 3 and "--swarm-key" in refused.err and "Traceback" not in refused.err, refused
