"""A server in the middle reads the tokens of a session off the receipt of the server before it, without hidden states.

The receipt that comes with a push has the hash of the pusher's request. Of a decode step at the first blocks all fields
of that request are known to the next server but the input, and that is one of as many embeddings as there are tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from petalnode.crypto.receipts import Receipt
from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.models import compute_manifest
from petalnode.node.models.folder import ModelFolder
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm, memory_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import PUSH, hash_of_step, sha256
from petalnode.protocols.tensors import encode
from tests.inspection import session_of
from tests.signing_server import SigningServer
from tests.tiny_models import VOCABULARY

PROMPT = [5, 6, 7]


def guess(receipt: Receipt, step: wire.Step, tensor: wire.Tensor, model: ClientModel) -> list[int]:
    """The tokens whose embedding has the hash that the receipt signs."""
    embeddings = model.embed(torch.arange(VOCABULARY).unsqueeze(1))
    payloads = [bytes(encode(embeddings[token : token + 1], "none")[1]) for token in range(VOCABULARY)]
    return [
        token
        for token, payload in enumerate(payloads)
        if hash_of_step(step, tensor, sha256(payload)) == receipt.request_hash
    ]


@pytest.mark.parametrize("token", [3, 42, VOCABULARY - 1])
def test_receipt_names_token_of_decode_step(folder: ModelFolder, token: int) -> None:
    first = SigningServer(folder.path, compute_manifest(folder).version, Span(0, 2))
    model = load_client(folder.path, dtype="float32")
    log = first.session([(0, model.embed(torch.tensor([PROMPT])), ()), (3, model.embed(torch.tensor([[token]])), ())])
    entry = log.entries[-1]
    assert entry.step is not None and entry.asked is not None
    assert guess(entry.receipt, entry.step, entry.asked, model) == [token]


def pushes(swarm: MemorySwarm, sender: MemoryServer, receiver: MemoryServer) -> int:
    """Streams for pushes between two servers."""
    return swarm.change(
        lambda network: [name for name, _ in network.link(sender.peer_id, receiver.peer_id).streams].count(PUSH.id)
    )


@pytest.mark.parametrize("trusting", [True, False])
def test_stranger_gets_no_receipt_of_trusted_server(folder: ModelFolder, trusting: bool) -> None:
    with memory_swarm() as swarm:
        first, stranger, last = (swarm.start(folder.path, blocks) for blocks in ("0:2", "2:4", "4:6"))
        peers = [server.ready["peer_id"] for server in (first, stranger, last)]
        options: dict[str, Any] = {"trusted_servers": [peers[0], peers[2]]} if trusting else {}
        with (
            swarm.open_model(AutoDistributedModelForCausalLM, folder.path, dtype="float32", **options) as model,
            model.inference_session(200) as session,
        ):
            prompt = torch.tensor([PROMPT])
            pushed = [0, 0, 0]
            # The streams for pushes are opened beside the first steps.
            while not (pushed[2] and (trusting or pushed[1])):
                model.generate(prompt, session=session, max_new_tokens=2, do_sample=False)
                pushed = [link.server.pushed_steps for link in session_of(session).links]
            assert [peer for peer, _ in session.route] == peers
            assert pushes(swarm, stranger, last)
            assert bool(pushes(swarm, first, stranger)) == bool(pushed[1]) == (not trusting)
