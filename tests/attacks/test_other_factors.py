"""Who computes with other longrope factors than a step is to take is found out, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from petalnode.node.blocks.span import BlockSpan
from petalnode.node.blocks.stack import _rotaries
from petalnode.node.client.sharing import auditable
from petalnode.node.models.folder import ModelFolder, open_folder
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import terms_of
from petalnode.protocols.prefix import PrefixNames, token_digests
from tests.attacks.forger import altered
from tests.greedy import prompt
from tests.swarm.longrope_models import BORDER, FIELDS
from tests.swarm.memory_pool import opened, serving
from tests.swarm.prefix_answers import answer
from tests.tiny_models import save_tiny

LONG, SHORT = (prompt(1, length, seed=8)[0].tolist() for length in (100, 36))
"""Texts beyond the border and below it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = tmp_path_factory.mktemp("factors") / "model"
    return open_folder(
        save_tiny("phi3", folder, max_position_embeddings=2048, eos_token_id=None, **FIELDS["phi3"]), "phi3"
    )


async def shown(swarm: MemorySwarm, model: ModelFolder, text: list[int], kept: bool, **behaviour: Any) -> Bundle:
    """What a client shows of the first step of a session, which began with blocks of an earlier one if `kept`."""
    await serving(swarm, model.path, "0:6", **behaviour)
    async with opened(swarm, model.path) as (client, local):
        if kept:
            assert (await answer(client, local, text))[1] == 0
        client.state.receipts = ReceiptArchive(KEPT_RECEIPTS.shared_bytes)
        assert (await answer(client, local, text))[1] == (len(text) // 32 * 32 if kept else 0)
        (log,) = client.receipts.sessions
        assert log.complete and auditable(client.receipts)
        return session_bundle(client.swarm.identity, log, 0)


def other_factors(blocks: BlockSpan) -> BlockSpan:
    """What computes with the other factors, and names what it keeps as if it had computed it right."""
    run, rotaries = blocks.stack.run, _rotaries(blocks.stack._decoder)

    def falsified(*given: Any, long_factors: bool = False, **options: Any) -> Any:
        for rotary in rotaries if long_factors else ():
            rotary.long_inv_freq = rotary.original_inv_freq
        return run(*given, long_factors=True, **options)

    blocks.stack.run = falsified  # type: ignore[method-assign]
    return blocks


TEXTS: dict[str, tuple[list[int], bool]] = {
    "long": (LONG, False), "short": (SHORT, False), "long, begun with kept blocks": (LONG, True),
    "short, begun with kept blocks": (SHORT, True),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
async def test_honest_servers_are_not_convicted(text: str, swarm: MemorySwarm, model: ModelFolder) -> None:
    tokens, kept = TEXTS[text]
    bundle = await shown(swarm, model, tokens, kept)
    assert bundle.evidence.prefix_tokens == (len(tokens) // 32 * 32 if kept else 0)
    assert bundle.evidence.steps[0].step.long_factors == (len(tokens) > BORDER)
    outcome = check_evidence(bundle, model)
    assert not outcome.proven and not outcome.inconclusive and outcome.signed, outcome


@pytest.mark.parametrize("text", TEXTS)
async def test_server_that_takes_other_factors_is_found(text: str, swarm: MemorySwarm, model: ModelFolder) -> None:
    tokens, kept = TEXTS[text]
    assert check_evidence(await shown(swarm, model, tokens, kept, computing=other_factors), model).proven


def flipped(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
    evidence.steps[0].step.long_factors ^= True


def renamed(evidence: wire.Evidence, payloads: dict[str, bytes]) -> None:
    """The names that the same tokens have with the other factors."""
    named = PrefixNames(terms_of(evidence.opening).prefix_root)
    other = not evidence.steps[0].step.long_factors
    for number, tensor in enumerate(evidence.prefix):
        named.append(token_digests(payloads[f"prefix.{number}"], 1, tensor.shape[1], long_factors=other))
    evidence.opening.prefix.blocks[: len(named.names)] = named.names


@pytest.mark.parametrize("change", [flipped, renamed])
@pytest.mark.parametrize("text", ["long, begun with kept blocks", "short, begun with kept blocks"])
async def test_honest_answer_shown_with_other_factors_convicts_nobody(
    text: str,
    change: Callable[[wire.Evidence, dict[str, bytes]], None],
    swarm: MemorySwarm,
    model: ModelFolder,
) -> None:
    """The server has signed for the factors: with the hash of the step, and with the names of the blocks."""
    tokens, kept = TEXTS[text]
    outcome = check_evidence(altered(await shown(swarm, model, tokens, kept), change), model)
    assert not outcome.proven and not outcome.signed, outcome
