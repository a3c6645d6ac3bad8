"""Sessions, pushes, recovery and gradients under each codec, over servers in memory; and when `auto` takes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import load_client
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.chunks import to_chunks
from petalnode.node.client.core import CODEC_OF, ClientOptions, open_client
from petalnode.node.client.generation.conversation import Conversation, Sampling
from petalnode.node.client.session.session import ClientSession, SavedSession
from petalnode.node.client.session.stream import HopTiming, SessionSpec
from petalnode.node.client.swarm_model import identify_model
from petalnode.node.errors import BadInput
from petalnode.node.models import resolve
from petalnode.node.swarm.config import SwarmConfig
from petalnode.protocols.ids import Span
from tests.inspection import call, client_of, session_of
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.tiny_models import HIDDEN, NUM_BLOCKS, VOCABULARY

ROUNDING = {"none": 1e-4, "float16": 5e-3, "bfloat16": 4e-2, "int8": 8e-2}
"""Of what comes out of three servers, relative to it."""


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return models / "tiny-llama"


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[MemoryPool]:
    with memory_pool(folder) as started:
        for blocks in ("0:2", "2:4", "4:6"):
            started.start(blocks)
        for server in started.servers:
            server.ready  # noqa: B018  (waits)
        yield started


def opened(pool: MemoryPool, folder: Path, **options: Any) -> Any:
    """A model whose chains have three servers."""
    lone = [server.peer_id for server in pool.alive if server.span == (0, 6)]
    return pool.swarm.open_model(AutoDistributedModelForCausalLM, folder, **{"blocked_servers": lone} | options)


def hidden(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.fixture(scope="module")
def right(pool: MemoryPool, folder: Path) -> list[torch.Tensor]:
    """A prompt, a token, and two tokens in the place of the last ones, as the blocks answer without a codec."""
    with opened(pool, folder) as model, model.inference_session(max_length=40) as session:
        return steps_of(session)


def steps_of(session: Any, between: Any = lambda: None) -> list[torch.Tensor]:
    outputs = [session.step(hidden(9)), session.step(hidden(1, 1))]
    between()
    session.position = 8
    return [*outputs, session.step(hidden(2, 2))]


@pytest.mark.parametrize("codec", CODEC_OF)
def test_a_session_under_a_codec(codec: str, pool: MemoryPool, folder: Path, right: list[torch.Tensor]) -> None:
    with opened(pool, folder, codec=codec) as model, model.inference_session(max_length=40) as session:
        found = steps_of(session)
        inner = session_of(session)
        assert inner.spec.codec == CODEC_OF[codec]
        while inner.pushed_steps < 2:  # what servers hand on themselves has the codec too
            session.position = 8
            session.step(hidden(2, 2))
        for link in inner.links:
            assert {step.chunk.tensor.codec for step in link.history.needed(10)} == {CODEC_OF[codec]}
    assert all(error(*pair) <= ROUNDING[codec] for pair in zip(found, right, strict=True))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_a_replacement_gets_the_same_bytes(
    codec: str, pool: MemoryPool, folder: Path, right: list[torch.Tensor]
) -> None:
    """The server in the middle is lost; what is replayed into the other is what the lost one had."""
    pool.start("2:4").ready  # noqa: B018  (waits)

    def lose() -> None:
        pool.of(session_of(session).route[1].peer_id).kill()

    with opened(pool, folder, codec=codec) as model, model.inference_session(max_length=40) as session:
        found = steps_of(session, lose)
        assert session_of(session).recoveries == 1
    assert all(error(*pair) <= ROUNDING[codec] for pair in zip(found, right, strict=True))


@pytest.mark.parametrize("codec", CODEC_OF)
def test_gradients_under_a_codec(codec: str, pool: MemoryPool, folder: Path, whole: Any) -> None:
    """Of a loss so small that float16 could not hold them as they are."""
    inputs, plain = (hidden(6, 4).requires_grad_() for _ in range(2))
    with opened(pool, folder, batch_codec=codec) as model:
        output = model.remote_blocks(inputs)
        (1e-8 * output.square().mean()).backward()
    expected = plain
    positions = torch.arange(6).unsqueeze(0)
    for block in whole.model.layers:
        expected = block(expected, position_embeddings=whole.model.rotary_emb(expected, positions), attention_mask=None)
        expected = expected if isinstance(expected, torch.Tensor) else expected[0]
    (1e-8 * expected.square().mean()).backward()
    assert inputs.grad is not None and plain.grad is not None
    assert float(plain.grad.abs().max()) < 1e-7
    assert error(output.detach(), expected.detach()) <= ROUNDING[codec]
    assert error(inputs.grad, plain.grad) <= 2 * ROUNDING[codec]


def test_compared_chains_that_are_rounded_agree(pool: MemoryPool, folder: Path) -> None:
    pool.start("0:6").ready  # noqa: B018  (waits)
    with opened(pool, folder, codec="int8", compare_chains=2, blocked_servers=()) as model:
        ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
        model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert model.disagreements == ()


@pytest.mark.parametrize(("mbit", "codec"), [(1.0, "float16"), (1e6, "none")])
def test_auto_measures_first(mbit: float, codec: str, pool: MemoryPool, folder: Path) -> None:
    with opened(pool, folder, codec="auto") as model:
        client = client_of(model)
        for number, expected in enumerate(["none", codec, codec]):
            with model.inference_session(max_length=40) as session:
                session.step(hidden(9))
                inner = session_of(session)
                assert inner.spec.codec == expected, number
                for hop in inner.route:
                    while (seconds := client.round_trip(hop.peer_id)) is None:
                        call(model, client.candidates)
                    timing = HopTiming(hop.peer_id, seconds + (1 << 17) * 8e-6 / mbit, 0.0, 0.0)
                    client.note_transfer(timing, 1 << 17)


@pytest.mark.parametrize("codec", CODEC_OF)
def test_conversations_share_their_beginning_under_a_codec(codec: str, pool: MemoryPool, folder: Path) -> None:
    """But for int8, of which a token has no bytes of its own. The answer is the same either way."""
    prompt = torch.randint(3, VOCABULARY, (1, 70), generator=torch.Generator().manual_seed(2))[0].tolist()

    async def answer(client: Any, local: Any) -> tuple[list[int], int]:
        conversation = Conversation(client, local, max_length=100, stop_tokens=())
        async with aclosing(conversation):
            assert conversation.codec == "none"
            found = await conversation.answer(prompt, Sampling(max_new_tokens=4), lambda _: None)
            assert conversation.codec == codec
            return found, conversation.reused

    with opened(pool, folder, codec=codec) as model:
        local = load_client(folder)
        first, again = (call(model, answer, client_of(model), local) for _ in range(2))
    assert first[0] == again[0] and first[1] == 0
    assert again[1] == (0 if codec == "int8" else 64)


async def test_session_is_resumed_under_its_codec(pool: MemoryPool, folder: Path) -> None:
    identity = Identity.generate()
    spec = SessionSpec(b"", Span(0, NUM_BLOCKS), batch=1, max_length=40, keep=100.0)

    async def held(codec: str, saved: SavedSession | None) -> tuple[str, int, SavedSession | None]:
        async with pool.swarm.network.open_swarm(SwarmConfig(identity)) as node:
            model = await identify_model(node, resolve(str(folder)))
            async with (
                open_client(node, model, ClientOptions(codec=codec)) as client,
                client.session(spec, saved=saved) as session,
            ):
                assert isinstance(session, ClientSession)
                position = session.position
                if saved is None:
                    await session.step(to_chunks(hidden(5), session.spec.codec, 40))
                return session.spec.codec, position, session.saved()

    codec, position, saved = await held("float16", None)
    assert (codec, position) == ("float16", 0) and saved is not None and saved.codec == "float16"
    assert (await held("none", saved))[:2] == ("none", 0)  # a new one
    assert (await held("auto", saved))[0] == "float16"


def test_a_codec_that_there_is_not(pool: MemoryPool, folder: Path) -> None:
    with pytest.raises(BadInput, match="'zip': give auto, none, float16, bfloat16, int8"):
        opened(pool, folder, codec="zip")
    with pytest.raises(BadInput, match="'auto': give none"):
        opened(pool, folder, batch_codec="auto")
