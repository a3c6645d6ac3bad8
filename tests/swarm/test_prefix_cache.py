"""Sessions of one client that begin alike share what servers have computed for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.crypto.evidence import ACCUSATION_DOMAIN
from petalnode.crypto.identity import Identity
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.client.sharing import auditable
from petalnode.node.errors import BadInput
from petalnode.node.models.folder import open_folder
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm
from petalnode.node.trust.bundle import Bundle, session_bundle
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.protocols import wire_pb2 as wire
from tests.noted_blocks import NotedBlocks
from tests.swarm.memory_pool import opened, serving, started
from tests.swarm.prefix_answers import answer
from tests.tiny_models import VOCABULARY, load_whole, save_tiny

PREFIX = torch.randint(3, VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(1))[0].tolist()
"""Three whole blocks and four tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("prefix"), eos_token_id=None)


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with memory_swarm() as swarm:
        yield swarm


whole_of = cache(load_whole)


def expected(folder: Path, prompt: Sequence[int], tokens: int = 5) -> list[int]:
    out = whole_of(folder).generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


async def test_second_session_begins_with_what_first_has_left(swarm: MemorySwarm, folder: Path) -> None:
    servers = await serving(swarm, folder, "0:2", "2:6")
    async with opened(swarm, folder) as (client, local):
        first = await answer(client, local, [*PREFIX, 5, 6])
        computed = [server.tallies.prefill.tokens for server in servers]
        assert first == (expected(folder, [*PREFIX, 5, 6]), 0)
        again = await answer(client, local, [*PREFIX, 7, 8, 9])
        assert again == (expected(folder, [*PREFIX, 7, 8, 9]), 96)
        assert [server.tallies.prefill.tokens for server in servers] == [total + 7 for total in computed]


@pytest.mark.parametrize(
    ("kind", "length", "reused"),
    [
        ("qwen3_5", 300, {290: 256, 255: 128, 100: 0}),
        ("nemotron_h", 300, {290: 256, 255: 128, 100: 0}),
        ("jamba", 150, {140: 128, 100: 0}),  # transformers computes it token by token
    ],
)
async def test_session_with_states_begins_behind_kept_ones(
    kind: str, length: int, reused: dict[int, int], small_pieces: None, swarm: MemorySwarm, tmp_path: Path
) -> None:
    """`reused`: tokens, by those that another text has in common with the first."""
    folder = save_tiny(kind, tmp_path / "model", max_position_embeddings=1024, eos_token_id=None)
    servers = await serving(swarm, folder, "0:3", "3:6")
    text = torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(2))[0].tolist()
    async with opened(swarm, folder) as (client, local):
        assert await answer(client, local, text, length=400) == (expected(folder, text), 0)
        computed = [server.tallies.prefill.tokens for server in servers]
        for shared, kept in reused.items():
            other = [*text[:shared], 5, 6, 7]
            assert await answer(client, local, other, length=400) == (expected(folder, other), kept)
            computed = [total + shared + 3 - kept for total in computed]
            assert [server.tallies.prefill.tokens for server in servers] == computed


async def test_another_process_finds_it_at_whole_servers(swarm: MemorySwarm, folder: Path) -> None:
    (server,) = await serving(swarm, folder, "0:6")
    identity = Identity.generate()
    async with opened(swarm, folder, identity) as (client, local):
        await answer(client, local, PREFIX)
    computed = server.tallies.prefill.tokens
    async with opened(swarm, folder, identity) as (client, local):
        assert await answer(client, local, PREFIX) == (expected(folder, PREFIX), 96)
    assert server.tallies.prefill.tokens == computed + 4


async def test_others_and_other_salts_share_nothing(swarm: MemorySwarm, folder: Path) -> None:
    await serving(swarm, folder, "0:6")
    identity = Identity.generate()
    async with opened(swarm, folder, identity) as (client, local):
        await answer(client, local, PREFIX)
        assert (await answer(client, local, PREFIX, salt=b"another"))[1] == 0
        assert (await answer(client, local, PREFIX, salt=b"another"))[1] == 96
    async with opened(swarm, folder) as (stranger, local):
        # It knows the text.
        assert (await answer(stranger, local, PREFIX)) == (expected(folder, PREFIX), 0)


async def test_one_salts_clients_share_where_allowed(swarm: MemorySwarm, folder: Path) -> None:
    await serving(swarm, folder, "0:6", prefix_cache="salted")
    for salt, reused in ((b"known to several", 0), (b"known to several", 96), (b"known to nobody else", 0)):
        async with opened(swarm, folder) as (client, local):
            client.state.prefix_salt = salt
            assert await answer(client, local, PREFIX) == (expected(folder, PREFIX), reused)


@pytest.mark.usefixtures("patient")
async def test_dead_server_is_replaced_with_what_came_before(swarm: MemorySwarm, folder: Path) -> None:
    first, second = await serving(swarm, folder, "0:2", "2:6")
    async with opened(swarm, folder) as (client, local):
        await answer(client, local, PREFIX)
        conversation = Conversation(client, local, max_length=200, stop_tokens=())
        async with aclosing(conversation):
            prompt = [*PREFIX, 7, 8, 9]
            begun = await conversation.answer(prompt, Sampling(max_new_tokens=4), lambda _: None)
            assert conversation.reused == 96
            (third,) = await serving(swarm, folder, "2:6")
            second.kill()
            rest = await conversation.answer([*prompt, *begun], Sampling(max_new_tokens=4), lambda _: None)
            assert conversation.recoveries == 1
            assert [*begun, *rest] == expected(folder, prompt, 8)
            assert third.tallies.prefill.tokens >= 96
    assert first.alive


def test_a_fork_goes_on_by_itself(swarm: MemorySwarm, folder: Path) -> None:
    servers = started(swarm, folder, "0:2", "2:6")
    ids = torch.tensor([PREFIX])
    options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model, model.inference_session(200) as session:
        begun = model.generate(ids, session=session, **options)
        computed = [server.tallies.prefill.tokens for server in servers]
        with session.fork() as one, session.fork() as other:
            assert one.position == other.position == session.position == 105
            assert one.route == session.route
            # Nine of the 105 tokens are in no whole block.
            assert [server.tallies.prefill.tokens for server in servers] == [total + 18 for total in computed]
            texts = {fork: torch.cat([begun, torch.tensor([[token, 5]])], 1) for fork, token in ((one, 7), (other, 8))}
            outs = {fork: model.generate(text, session=fork, **options) for fork, text in texts.items()}
            last = model.generate(begun, session=session, **options)
            for text, out in ((texts[one], outs[one]), (texts[other], outs[other]), (begun, last)):
                assert out[0, text.shape[1] :].tolist() == expected(folder, text[0].tolist(), 6)
            with other.fork() as third:
                assert third.position == other.position
        with pytest.raises(BadInput, match="closed"):
            one.fork()
        with model.inference_session(50) as unused, unused.fork() as empty:
            assert empty.position == 0


def test_a_fork_of_beams_is_computed_anew(swarm: MemorySwarm, folder: Path) -> None:
    started(swarm, folder, "0:6")
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model, model.inference_session(200) as session:
        states = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(3))
        session.step(states[:, :40])
        session.step(states[:, 40:60], reorder=[1, 1])
        with session.fork() as fork:
            torch.testing.assert_close(fork.step(states[:, 60:]), session.step(states[:, 60:]))


async def shared_bundle(swarm: MemorySwarm, folder: Path) -> Bundle:
    """What a client shows of the first step of a session that began with an earlier one's blocks."""
    async with opened(swarm, folder) as (client, local):
        client.state.receipts = ReceiptArchive(KEPT_RECEIPTS.shared_bytes)
        await answer(client, local, PREFIX)
        assert (await answer(client, local, PREFIX))[1] == 96
        (shown,) = [log for log in client.receipts.sessions if log.prefix]
        assert shown.complete and len(auditable(client.receipts)) == 10
        return session_bundle(client.swarm.identity, shown, 0)


def resigned(bundle: Bundle, payloads: dict[str, bytes], **changes: Any) -> Bundle:
    accuser = Identity.generate()
    evidence = wire.Evidence.FromString(bundle.statement)
    for name, value in changes.items():
        setattr(evidence, name, value)
    statement = evidence.SerializeToString(deterministic=True)
    return Bundle(
        statement, accuser.peer_id, accuser.sign(ACCUSATION_DOMAIN, statement), {**bundle.payloads, **payloads}
    )


def test_what_was_reused_is_recomputed_by_auditors(swarm: MemorySwarm, folder: Path) -> None:
    started(swarm, folder, "0:6")
    bundle = swarm.call(shared_bundle, swarm, folder)
    model = open_folder(folder, "tiny")
    assert bundle.evidence.prefix_tokens == 96
    outcome = check_evidence(bundle, model)
    assert not outcome.proven and not outcome.inconclusive and outcome.signed, outcome
    other = bytearray(bundle.payloads["prefix.0"])
    other[40] ^= 1
    assert check_evidence(resigned(bundle, {"prefix.0": bytes(other)}), model).exchanged
    assert check_evidence(resigned(bundle, {"prefix.0": b""}), model).exchanged
    for tokens in (0, 32, 64, 97, 1 << 40):
        refuted = check_evidence(resigned(bundle, {}, prefix_tokens=tokens), model)
        assert not refuted.proven and not refuted.exchanged and not refuted.signed


class Forgetful(NotedBlocks):
    """Keeps zeros for later sessions."""

    def make_cache(self, *arguments: Any, **options: Any) -> Any:
        cache: Any = super().make_cache(*arguments, **options)
        read = cache.read
        cache.read = lambda *part: [replace(held, values=held.values * 0) for held in read(*part)]
        return cache


def test_server_that_did_not_keep_it_is_found(swarm: MemorySwarm, folder: Path) -> None:
    started(swarm, folder, "0:6", computing=Forgetful)
    outcome = check_evidence(swarm.call(shared_bundle, swarm, folder), open_folder(folder, "tiny"))
    assert outcome.proven, outcome
