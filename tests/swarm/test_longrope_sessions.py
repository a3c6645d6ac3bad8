"""Sessions whose text passes the length from which on longrope takes other factors: recovery, conversations, what is
shared, receipts, and servers that do not know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.errors import BadInput, NoChainError
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from petalnode.node.verification.observed import observed_session
from petalnode.node.verification.recomputation import Recomputation, SessionQuestion, joined
from tests.greedy import prompt
from tests.inspection import client_of, session_of
from tests.swarm.deep_drafts import DEEP
from tests.swarm.longrope_models import BORDER, FIELDS, SIZES, given, padded
from tests.swarm.memory_pool import opened, serving, started
from tests.swarm.older_servers import Older
from tests.tiny_models import load_whole, save_tiny


@pytest.fixture(scope="module", params=["phi3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param) / "longrope"
    return save_tiny(request.param, made, eos_token_id=None, **SIZES, **FIELDS[request.param])


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with memory_swarm() as swarm:
        yield swarm


async def answer(conversation: Conversation, tokens: Sequence[int], new: int) -> list[int]:
    return await conversation.answer(tokens, Sampling(max_new_tokens=new), lambda _: None)


whole_of = cache(load_whole)


def expected(folder: Path, tokens: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(tokens)])
    found: list[int] = whole_of(folder).generate(ids, **given(ids, new))[0, len(tokens) :].tolist()
    return found


@pytest.mark.parametrize(("length", "before"), [(BORDER - 12, 4), (BORDER - 12, 20), (BORDER + 30, 5), (600, 2)])
def test_a_server_that_dies_is_replaced(length: int, before: int, swarm: MemorySwarm, folder: Path) -> None:
    """Before the text becomes long, after it has, and where it was long from the start: of two rows, one is shorter."""
    servers = {server.peer_id: server for server in started(swarm, folder, "0:1", "1:3")}
    ids, new = padded(length, length - 9), 30
    made = 0

    def look(tokens: Any, scores: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        if made == before:
            started(swarm, folder, "0:1", "1:3")
            for peer_id, _ in session.route:
                servers[peer_id].kill()
        return scores

    with (
        swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
        model.inference_session(max_length=length + new) as session,
    ):
        found = model.generate(ids, logits_processor=[look], **given(ids, new))
        assert session.recoveries >= 2
    assert found.tolist() == whole_of(folder).generate(ids, **given(ids, new)).tolist()


@pytest.mark.parametrize("drafts", [False, True])
async def test_a_conversation_becomes_long_and_short_again(drafts: bool, swarm: MemorySwarm, folder: Path) -> None:
    await serving(swarm, folder, "0:1", "1:3")
    text = prompt(1, 6, seed=4).repeat(1, 30)[0].tolist()
    async with opened(swarm, folder) as (client, local):
        conversation = Conversation(client, local, max_length=300, stop_tokens=(), drafts=drafts)
        conversation.drafting.fixed = DEEP
        async with aclosing(conversation):
            tokens = text[: BORDER - 20]
            for new in (8, 30, 5):
                made = await answer(conversation, tokens, new)
                assert made == expected(folder, tokens, new)
                tokens = [*tokens, *made, 7, 8, 9]
            for length, new in ((BORDER - 5, 12), (BORDER - 2, 1), (BORDER + 1, 3), (150, 8), (BORDER, 6)):
                assert await answer(conversation, text[:length], new) == expected(folder, text[:length], new)


async def test_kept_blocks_are_shared_among_equal_factors_only(swarm: MemorySwarm, folder: Path) -> None:
    await serving(swarm, folder, "0:1", "1:3")
    text = prompt(1, 200, seed=6)[0].tolist()
    async with opened(swarm, folder) as (client, local):
        for length, reused in ((100, 0), (BORDER - 2, 0), (BORDER, 32), (180, 96), (BORDER - 1, 32)):
            conversation = Conversation(client, local, max_length=300, stop_tokens=())
            async with aclosing(conversation):
                assert await answer(conversation, text[:length], 3) == expected(folder, text[:length], 3)
                assert conversation.reused == reused


async def test_another_process_takes_up_what_is_saved(swarm: MemorySwarm, folder: Path) -> None:
    await serving(swarm, folder, "0:1", "1:3")
    text = prompt(1, 100, seed=7)[0].tolist()
    async with opened(swarm, folder) as (client, local):
        for length in (BORDER - 9, BORDER + 9):
            first = Conversation(client, local, max_length=300, stop_tokens=())
            first.keep([], None)
            made = await answer(first, text[:length], 4)
            held, saved = first.state()
            await first.aclose()
            assert saved is not None
            second = Conversation(client, local, max_length=300, stop_tokens=())
            second.keep(held, saved)
            async with aclosing(second):
                tokens = [*text[:length], *made, 5]
                assert await answer(second, tokens, 20) == expected(folder, tokens, 20)
                assert second.reused >= length


def test_chains_that_are_compared(swarm: MemorySwarm, folder: Path) -> None:
    started(swarm, folder, "0:3", "0:3")
    ids = prompt(1, BORDER - 10)
    with swarm.open_model(AutoDistributedModelForCausalLM, folder, compare_chains=2) as model:
        found = model.generate(ids, **given(ids, 25))
    assert found[0, ids.shape[1] :].tolist() == expected(folder, ids[0].tolist(), 25)


def test_receipts_say_which_factors_step_was_to_take(swarm: MemorySwarm, folder: Path) -> None:
    """Who recomputes a session from its receipts gets what the servers answered, and no other factors fit them.

    Sixteen rows travel in chunks of 32 tokens: the first one ends before the text is long.
    """
    started(swarm, folder, "0:1", "1:3")
    ids = prompt(16, BORDER + 10)
    with (
        swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
        model.inference_session(max_length=100) as session,
    ):
        client_of(model).state.receipts = ReceiptArchive(KEPT_RECEIPTS.shared_bytes)
        model.generate(ids, **given(ids, 2))
        logs = [link.server.log for link in session_of(session).links]
    for log in logs:
        seen = observed_session(log)
        assert seen is not None and isinstance(seen.question, SessionQuestion)
        assert seen.question.steps[0].hidden.shape[1] < BORDER
        assert all(step.long_factors for step in seen.question.steps)
        claimed = torch.cat(list(seen.claimed), dim=1)
        for long_factors, fits in ((True, True), (False, False)):
            steps = tuple(replace(step, long_factors=long_factors) for step in seen.question.steps)
            truth = Recomputation(folder, seen.dtype, seen.quantisation)
            (found,) = truth.answer([replace(seen.question, steps=steps)])
            assert bool((joined(found) - claimed).abs().max() <= 1e-3) == fits


def test_older_server_is_not_used_for_long_texts(swarm: MemorySwarm, folder: Path) -> None:
    """It would ignore what a step says. It is refused in words, and nobody takes it for a cheat."""
    started(swarm, folder, "0:3", prepare=Older(long_factors=None).prepare)
    ids = prompt(1, 20)
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
        found = model.generate(ids, **given(ids, BORDER - 20))
        assert found[0, 20:].tolist() == expected(folder, ids[0].tolist(), BORDER - 20)
        client_of(model).reopen_timeout = 0.2
        with pytest.raises(NoChainError, match=f"no texts of more than {BORDER} tokens"):
            model.generate(ids, **given(ids, BORDER))
        assert model.generate(ids, **given(ids, 3)).shape == (1, 23)


def test_forward_rows_with_different_factors_are_refused(swarm: MemorySwarm, folder: Path) -> None:
    started(swarm, folder, "0:3")
    ids = padded(BORDER + 5, 20)
    mask = given(ids, 1)["attention_mask"]
    with (
        swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
        pytest.raises(BadInput, match="one by one"),
    ):
        model(ids, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), attention_mask=mask)
