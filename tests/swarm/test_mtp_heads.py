"""Answers drafted by a model's MTP head are those without; most is drafted where it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
import trio

from petalnode.node.blocks.client_part import ClientModel
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.draft_model import FixedDrafts
from petalnode.node.client.generation.drafting import DraftCounts
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.errors import BadInput
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm, memory_swarm
from tests.greedy import generate, prompt
from tests.mtp_heads import HEADS, save_with_head
from tests.swarm.memory_pool import opened
from tests.tiny_models import load_whole, save_tiny

LENGTH = 20
GUESSED = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
ENDLESS = {"max_position_embeddings": 1024, "eos_token_id": None}


@pytest.fixture(scope="module")
def swarm() -> Iterator[MemorySwarm]:
    with memory_swarm() as swarm:
        yield swarm


def serve(swarm: MemorySwarm, folder: Path) -> list[MemoryServer]:
    # They are slow: prompts travel whole.
    started = [swarm.start(folder, blocks, throughput=20.0) for blocks in ("0:2", "2:6")]
    assert all(server.ready for server in started)
    return started


@pytest.mark.parametrize(
    ("architecture", "forgets"),
    [*((architecture, True) for architecture in HEADS), ("deepseek_v3", False), ("qwen3_next", False)],
)
def test_generate_says_what_transformers_does(
    architecture: str, forgets: bool, swarm: MemorySwarm, tmp_path: Path
) -> None:
    folder = save_with_head(architecture, tmp_path, forgets=forgets, **ENDLESS)
    servers = serve(swarm, folder)
    ids = prompt(1, 20)
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
        drafted = generate(model, ids, max_new_tokens=LENGTH, use_mtp=True, **GUESSED)
        counts = model.drafts
    assert torch.equal(drafted, generate(load_whole(folder), ids, max_new_tokens=LENGTH))
    assert counts["drafted"] > 4
    if forgets:  # only what is under way at the end is in vain
        assert counts["accepted"] > LENGTH / 2 and counts["drafted"] - counts["accepted"] <= 2 * 4
    for server in servers:
        server.kill()


def test_model_without_a_head_cannot_draft_by_it(swarm: MemorySwarm, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    servers = serve(swarm, folder)
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
        with pytest.raises(BadInput, match="use_mtp: this model has no MTP head"):
            generate(model, prompt(1, 4), use_mtp=True)
        assert torch.equal(generate(model, prompt(1, 4), use_mtp=False), generate(model, prompt(1, 4)))
    for server in servers:
        server.kill()


async def chat(
    client: SwarmClient,
    local: ClientModel,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    drafts: bool = True,
    on_token: Callable[[Conversation], object] = id,
) -> tuple[list[int], DraftCounts, int]:
    """The text in the end, each prompt behind what was said so far; what was drafted; what servers had of the last."""
    text: list[int] = []
    conversation = Conversation(client, local, max_length=1024, stop_tokens=(), drafts=drafts)
    conversation.drafting.fixed = FixedDrafts(0, 4)
    async with aclosing(conversation):
        for given in prompts:
            text += given
            text += await conversation.answer(text, sampling, lambda _: on_token(conversation))
        return text, conversation.drafting.counts, conversation.reused


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
async def test_conversations_say_the_same(architecture: str, swarm: MemorySwarm, tmp_path: Path) -> None:
    """Greedy and sampled, over several prompts, one longer than a chunk; behind what servers have kept of a prompt; and
    when one of them dies."""
    folder = save_with_head(architecture, tmp_path, forgets=True, **ENDLESS)
    servers = await trio.to_thread.run_sync(serve, swarm, folder)
    prompts = [prompt(1, 300)[0].tolist(), prompt(1, 30, seed=2)[0].tolist()]
    async with opened(swarm, folder) as (client, local):
        greedy = Sampling(LENGTH)
        said: list[list[int]] = []
        for sampling in (greedy, Sampling(LENGTH, 0.8, 0.95, seed=4)):
            plain, none, _ = await chat(client, local, prompts, sampling, drafts=False)
            said.append(plain)
            drafted, counts, _ = await chat(client, local, prompts, sampling)
            assert drafted == plain and not none.drafted and counts.accepted > LENGTH
            again, counts, reused = await chat(client, local, prompts[:1], sampling)
            assert again == plain[: 300 + LENGTH] and counts.accepted > LENGTH / 2
            assert reused > 200 or architecture == "qwen3_next"  # of whose states servers keep nothing
        servers.extend(await trio.to_thread.run_sync(serve, swarm, folder))
        made: list[str] = []

        def kill_one(conversation: Conversation) -> None:
            made.append(conversation.route[1].peer_id)
            if len(made) == LENGTH // 2:
                next(one for one in servers if one.ready["peer_id"] == made[-1]).kill()

        drafted, counts, _ = await chat(client, local, prompts, greedy, on_token=kill_one)
        assert drafted == said[0] and counts.accepted and made[0] != made[-1]
    for server in servers:
        server.kill()
