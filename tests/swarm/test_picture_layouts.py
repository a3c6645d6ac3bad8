"""Pictures whose tokens see each other, or whose features blocks add: kept prefixes, rollbacks, verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.blocks.client_part import ClientModel
from petalnode.node.blocks.images.pictures import PictureTokens
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.errors import BadInput, NoChainError
from petalnode.node.models.folder import open_folder
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from petalnode.node.verification.evidence_check import check_evidence
from tests.inspection import client_of
from tests.noted_blocks import NotedBlocks
from tests.swarm.memory_pool import opened, serving, started
from tests.swarm.older_servers import Older
from tests.tiny_pictures import FAMILIES, save_seeing, seen

NEW = 6


@pytest.fixture
def swarm(cache: Path) -> Iterator[MemorySwarm]:
    """Servers without speeds of earlier runs: by these a client chooses how much of what is kept it takes."""
    with memory_swarm() as swarm:
        yield swarm


def expected(whole: Any, given: dict[str, Any]) -> list[int]:
    said = whole.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return said[0, given["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


async def answer(client: SwarmClient, local: ClientModel, whole: Any, given: dict[str, Any]) -> tuple[list[int], int]:
    """The next tokens by a conversation of its own, and how many of the prompt were not computed for it."""
    config, values = whole.config, {name: value for name, value in given.items() if name != "input_ids"}
    prompt = local.encoder.encode(given["input_ids"], values.pop("attention_mask"), values)
    token = getattr(config, "image_token_id", None) or config.image_token_index
    named = PictureTokens(given["input_ids"][0].tolist(), values, token).named(prompt)
    conversation = Conversation(client, local, max_length=200, stop_tokens=())
    async with aclosing(conversation):
        found = await conversation.answer(named, Sampling(max_new_tokens=NEW), lambda _: None, pictures=prompt)
        return found, conversation.reused


def with_end(given: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    ids = given["input_ids"].clone()
    ids[0, -len(tokens) :] = torch.tensor(tokens)
    return {**given, "input_ids": ids}


@pytest.mark.parametrize(("kind", "reused"), [("gemma3", 20), ("qwen3_vl", 32)])
async def test_second_prompt_begins_with_kept_whole_groups(
    swarm: MemorySwarm, tmp_path: Path, kind: str, reused: int
) -> None:
    """The first kept block ends within the picture's 16 tokens, which begin at the token 20."""
    whole = save_seeing(kind, tmp_path)
    await serving(swarm, tmp_path, "0:2", "2:4")
    given = seen(whole, kind, [(20, 44)])
    texts = [given, with_end(given, [7] * 35), given]
    async with opened(swarm, tmp_path) as (client, local):
        found = [await answer(client, local, whole, text) for text in texts]
        assert [tokens for tokens, _ in found] == [expected(whole, text) for text in texts]
        assert [count for _, count in found] == [0, reused, 64]
        other = {**given, "pixel_values": seen(whole, kind, [(20, 44)], seed=4)["pixel_values"]}
        assert (await answer(client, local, whole, other))[0] == expected(whole, other)


async def shown(swarm: MemorySwarm, folder: Path, whole: Any, given: dict[str, Any]) -> list[Bundle]:
    """What a client shows of its session with the server of the first blocks, up to each step."""
    async with opened(swarm, folder) as (client, local):
        client.state.receipts = ReceiptArchive(KEPT_RECEIPTS.shared_bytes)
        await answer(client, local, whole, given)
        (log,) = [log for log in client.receipts.sessions if log.opening and not log.opening.span.start]
        return [session_bundle(client.swarm.identity, log, step) for step in range(len(log.entries))]


class Ignoring(NotedBlocks):
    """Computes pictures as if they were text."""

    def __init__(self, blocks: BlockSpan) -> None:
        super().__init__(blocks)
        blocks.stack.adding = lambda features, first: nullcontext()  # type: ignore[method-assign]

    def make_cache(self, *arguments: Any, **options: Any) -> Any:
        cache: Any = super().make_cache(*arguments, **options)
        cache.groups_of = lambda tokens: None
        return cache


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3_vl"])
def test_who_ignores_what_pictures_say_is_proven_faulty(swarm: MemorySwarm, tmp_path: Path, kind: str) -> None:
    whole = save_seeing(kind, tmp_path)
    started(swarm, tmp_path, "0:2", "2:4")
    given = seen(whole, kind, [(20, 10)])
    folder = open_folder(tmp_path, "tiny")
    found = [check_evidence(bundle, folder) for bundle in swarm.call(shown, swarm, tmp_path, whole, given)]
    assert not any(one.proven for one in found) and all(one.signed for one in found), found
    with memory_swarm() as false:
        started(false, tmp_path, "0:2", "2:4", computing=Ignoring)
        bundles = false.call(shown, false, tmp_path, whole, given)
    liar = [check_evidence(bundle, folder) for bundle in bundles]  # of some steps too much depends on roundings
    assert any(one.proven for one in liar), liar


def test_no_rollback_goes_into_a_group(swarm: MemorySwarm, tmp_path: Path) -> None:
    whole = save_seeing("gemma3", tmp_path)
    started(swarm, tmp_path, "0:2", "2:4")
    given = seen(whole, "gemma3", [(5, 3)])
    with swarm.open_model(AutoDistributedModelForCausalLM, tmp_path) as model:
        images = {name: given[name] for name in ("pixel_values", FAMILIES["gemma3"].types)}
        prompt = model._local.encoder.encode(given["input_ids"], None, images)
        layout = prompt.layout(0, 1, prompt.tokens)
        with model.inference_session(40) as session:
            session.step(prompt.embeddings, layout=layout)
            for position in (6, 20):
                with pytest.raises(BadInput, match="see each other"):
                    session.position = position
            session.position = 21
            session.position = 5


@pytest.mark.parametrize(("kind", "field"), [("gemma3", "groups"), ("qwen3_vl", "features")])
def test_servers_without_such_pictures_are_not_asked(swarm: MemorySwarm, tmp_path: Path, kind: str, field: str) -> None:
    whole = save_seeing(kind, tmp_path)
    given = seen(whole, kind)
    started(swarm, tmp_path, "0:2", "2:4", prepare=Older(**{field: None}).prepare)
    with swarm.open_model(AutoDistributedModelForCausalLM, tmp_path) as model:
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        text = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
        assert torch.equal(model.generate(**text, **options), whole.generate(**text, **options))
        client_of(model).reopen_timeout = 0.2
        with pytest.raises(NoChainError, match=f"knows no {field}"):
            model.generate(**given, **options)


def test_partial_holder_of_feature_blocks_is_not_asked(swarm: MemorySwarm, tmp_path: Path) -> None:
    whole = save_seeing("qwen3_vl", tmp_path)
    started(swarm, tmp_path, "0:1", "1:4")
    with swarm.open_model(AutoDistributedModelForCausalLM, tmp_path) as model:
        client_of(model).reopen_timeout = 0.2
        with pytest.raises(NoChainError, match="a server of the first 2 blocks"):
            model.generate(**seen(whole, "qwen3_vl"), max_new_tokens=NEW, do_sample=False, pad_token_id=0)


async def test_a_text_is_scored_without_the_pictures_before(swarm: MemorySwarm, tmp_path: Path) -> None:
    whole = save_seeing("qwen3_vl", tmp_path)
    await serving(swarm, tmp_path, "0:2", "2:4")
    given, text = seen(whole, "qwen3_vl", [(20, 44)]), list(range(5, 65))
    values = {name: value for name, value in given.items() if name != "input_ids"}

    async def scored(conversation: Conversation) -> torch.Tensor:
        async with aclosing(conversation.score(text)) as found:
            return torch.cat([logits async for _, logits in found])

    async with opened(swarm, tmp_path) as (client, local):
        prompt = local.encoder.encode(given["input_ids"], values.pop("attention_mask"), values)
        named = PictureTokens(given["input_ids"][0].tolist(), values, whole.config.image_token_id).named(prompt)
        one, other = (Conversation(client, local, max_length=200, stop_tokens=()) for _ in range(2))
        async with aclosing(one), aclosing(other):
            await one.answer(named, Sampling(max_new_tokens=1), lambda _: None, pictures=prompt)
            assert torch.allclose(await scored(one), await scored(other), atol=1e-4)
