"""Models of which more than hidden states goes from block to block: gradients, evidence, and who serves what.

What they say is that of transformers, as that of models whose blocks keep states: `test_hybrids.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.blocks.stack import closed, opened
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.errors import BadInput
from petalnode.node.models.folder import open_folder
from petalnode.node.models.manifest import compute_manifest
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm, memory_swarm
from petalnode.node.trust.bundle import Bundle, batch_bundle, session_bundle
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols.ids import Span
from tests.greedy import generate, prompt
from tests.signing_server import SigningServer, Spoil, honest, spoiled
from tests.swarm.memory_pool import opened as opened_client
from tests.tiny_models import CROSSING, CUTS, load_whole, save_tiny

Model = DistributedModelForCausalLM


@pytest.fixture(scope="module", params=CROSSING)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    endless = {"max_position_embeddings": 1024, **({} if kind == "qwen4_exp" else {"eos_token_id": None})}
    return save_tiny(kind, tmp_path_factory.mktemp("crossing") / kind, **endless)


@pytest.fixture(scope="module")
def servers(swarm: MemorySwarm, folder: Path, kind: str) -> list[MemoryServer]:
    return [swarm.start(folder, str(span)) for span in CUTS[kind]]


@pytest.fixture(scope="module")
def model(swarm: MemorySwarm, servers: list[MemoryServer], folder: Path) -> Iterator[Model]:
    assert all(server.ready for server in servers)
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as opened:
        yield opened


def test_sessionless_batch_equals_transformers_loss_and_gradients(model: Model, whole: Any) -> None:
    ids = prompt(2, 11)
    losses, gradients = [], []
    for one in (model, whole):
        head = one.get_output_embeddings().weight.requires_grad_()
        head.grad = None
        loss = one(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append(head.grad)
        head.requires_grad_(False)
    assert torch.allclose(*losses, atol=1e-4) and torch.allclose(*gradients, atol=1e-4)


async def _shown(swarm: MemorySwarm, folder: Path, ids: list[int], first: int) -> list[Bundle]:
    """What a client shows of its session with the server whose blocks begin at `first`, up to each step."""
    async with opened_client(swarm, folder) as (client, local):
        client.state.receipts = ReceiptArchive(KEPT_RECEIPTS.shared_bytes)
        async with aclosing(Conversation(client, local, max_length=64, stop_tokens=())) as conversation:
            await conversation.answer(ids, Sampling(max_new_tokens=3), lambda _: None)
        (log,) = [log for log in client.receipts.sessions if log.opening and log.opening.span.start == first]
        return [session_bundle(client.swarm.identity, log, step) for step in range(len(log.entries))]


def forged(blocks: BlockSpan) -> BlockSpan:
    """What computes other values of what goes from block to block."""
    stack, run = blocks.stack, blocks.stack.run

    def forging(*given: Any, **options: Any) -> torch.Tensor:
        inside, ahead = opened(stack.boundaries, run(*given, **options))
        if not ahead.shape[2]:
            inside = inside.roll(1, dims=-1)
        return closed(stack.boundaries, inside, ahead.roll(1, dims=2))

    stack.run = forging  # type: ignore[method-assign]
    return blocks


def test_who_forges_what_blocks_make_is_proven_faulty(
    model: Model, swarm: MemorySwarm, folder: Path, kind: str
) -> None:
    first, there, ids = CUTS[kind][1].start, open_folder(folder, "tiny"), prompt(1, 9)[0].tolist()
    found = [check_evidence(bundle, there) for bundle in swarm.call(_shown, swarm, folder, ids, first)]
    assert not any(one.proven for one in found) and all(one.signed for one in found), found
    with memory_swarm() as false:
        for span in CUTS[kind]:
            assert false.start(folder, str(span), computing=forged if span.start == first else None).ready
        bundles = false.call(_shown, false, folder, ids, first)
    liar = [check_evidence(bundle, there) for bundle in bundles]
    assert all(one.proven for one in liar), liar


@pytest.mark.parametrize("spoil", [honest, spoiled])
def test_who_spoils_a_gradient_is_proven_faulty(folder: Path, kind: str, spoil: Spoil) -> None:
    """The gradient that comes in is narrower than the hidden states, by what blocks got for themselves."""
    there, span = open_folder(folder, "tiny"), Span(CUTS[kind][1].start, CUTS[kind][1].end)
    server = SigningServer(folder, compute_manifest(there).version, span)
    # Large and many: what the norms of a tiny block make of small values depends on roundings, which proves nothing.
    entering, leaving = (16 * torch.randn(1, 40, there.boundaries.width(block)) for block in (span.start, span.end))
    shown = batch_bundle(Identity.generate(), server.work(entering, leaving, spoil=spoil))
    outcome = check_evidence(Bundle.from_bytes(shown.to_bytes()), there)
    assert outcome.signed and outcome.proven == (spoil is spoiled), outcome


def test_servers_choose_blocks_that_one_may_hold(tmp_path: Path) -> None:
    """One of them has two devices: blocks 2 to 5 stay on one."""
    folder = save_tiny("gemma3n_shared", tmp_path / "model", eos_token_id=None)
    whole, ids = load_whole(folder), prompt(1, 9)
    with memory_swarm() as swarm:
        for count, devices in ((1, 1), (5, 2), (1, 1)):
            ready = swarm.start(folder, None, num_blocks=count, devices=("cpu",) * devices).ready
            assert ready["devices"][-1]["blocks"] == (ready["blocks"] if devices == 1 else [2, 6])
        with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
            assert torch.equal(generate(model, ids), generate(whole, ids))
            with model.inference_session(max_length=32) as session:
                generate(model, ids, session=session)
                assert session.route[-1][1] in ((1, 6), (2, 6))
            with pytest.raises(BadInput, match="take 0:2 or 0:6"):
                model.remote_blocks[0:4](torch.zeros(1, 3, 4 * 64 + 6 * 12))
            with pytest.raises(BadInput, match="take 2:6"), model.remote_blocks[3:6].inference_session(8) as session:
                session.step(torch.zeros(1, 3, 4 * 64 + 3 * 12))
