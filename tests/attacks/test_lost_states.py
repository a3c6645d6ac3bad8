"""Servers that lose what a session holds again and again, so that the client sends and has computed its history anew.

It costs such a server an error of a few bytes, and the client all of its inputs. What is counted are sessions that were
granted: each of them begins with a replay but for the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.deadlines import DEADLINES
from petalnode.node.client.losses import LOSSES, LossRecord, ReplayBudget
from petalnode.node.client.session import chain
from petalnode.node.errors import SwarmError
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE
from tests.greedy import generate, prompt
from tests.inspection import allow_servers, client_of
from tests.swarm.faulty_server import order
from tests.swarm.fleet import At, Model, heard_of
from tests.swarm.memory_pool import MemoryPool, memory_pool
from tests.swarm.watched_streams import watch_opened
from tests.tiny_models import HIDDEN, load_whole, save_tiny

pytestmark = pytest.mark.usefixtures("blocks_as_served", "patient")
TOKENS = 24
ADMITTED = 3
"""Losses that a server may admit, of which the last is one too many."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid."""
    endless = {"max_position_embeddings": 1024, "eos_token_id": None}
    return save_tiny("qwen3_5", tmp_path_factory.mktemp("lossy"), **endless)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return load_whole(folder)


@pytest.fixture
def pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryPool]:
    """Clients that look for other servers for less than half a minute."""
    monkeypatch.setattr(chain, "DEADLINES", replace(DEADLINES, recovery=6.0))
    with memory_pool(folder) as started:
        yield started


def granted_to(model: Model) -> Counter[str]:
    """The sessions that each server grants to a client."""
    granted: Counter[str] = Counter()

    def note(stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        granted[stream.peer_id] += frame.WhichOneof("body") == "granted"

    watch_opened(client_of(model).swarm, INFERENCE, received=note)
    return granted


def lossy(pool: MemoryPool, control: Path, fault: str, at: int, blocks: str = "2:6") -> MemoryServer:
    """A server that everybody believes to be the fastest; the answer number `at` of each session fails."""
    order(control, fault, at=at)
    return pool.start(blocks, throughput=900000.0, fault=control)


def opened(pool: MemoryPool, folder: Path) -> Any:
    return pool.swarm.open_model(AutoDistributedModelForCausalLM, folder)


def test_who_always_has_lost_its_state_is_replaced(pool: MemoryPool, folder: Path, whole: Any, tmp_path: Path) -> None:
    liar, first = lossy(pool, tmp_path / "liar", "lost", 3), pool.start("0:2")
    ids = prompt(1, 40)
    expected = generate(whole, ids, max_new_tokens=TOKENS)
    with opened(pool, folder) as model:
        granted, trust = granted_to(model), client_of(model).swarm.trust
        heard_of(model, [liar, first])
        with pytest.raises(SwarmError, match=f"{liar.peer_id}.*had lost what a session held"):
            generate(model, ids, max_new_tokens=TOKENS)
        assert granted[liar.peer_id] == ADMITTED
        assert trust.is_banned(liar.peer_id) and not trust.is_banned(first.peer_id)
        assert trust.reputation(liar.peer_id) == 0
        honest = pool.start("2:6", throughput=1.0)
        heard_of(model, [honest])
        with model.inference_session(max_length=80) as session:
            assert torch.equal(generate(model, ids, session=session, max_new_tokens=TOKENS), expected)
            assert session.recoveries == 0
        assert granted[liar.peer_id] == ADMITTED


@pytest.mark.parametrize("fault", ["error", "reset", "lost"])
def test_session_of_failing_servers_is_not_filled_forever(
    fault: str, pool: MemoryPool, folder: Path, tmp_path: Path
) -> None:
    """Three keys of one attacker, whose sessions go well for a step each."""
    liars = [lossy(pool, tmp_path / f"liar{number}", fault, 3, "0:6") for number in range(3)]
    with opened(pool, folder) as model:
        granted = granted_to(model)
        heard_of(model, liars)
        with pytest.raises(SwarmError):
            generate(model, prompt(1, 40), max_new_tokens=200)
        assert sum(granted.values()) <= 2 * LOSSES.replays


@pytest.mark.usefixtures("briefly_kept")
def test_who_fails_at_each_session_is_asked_rarely(pool: MemoryPool, folder: Path, tmp_path: Path) -> None:
    first, honest = pool.start("0:2"), pool.start("2:6", throughput=1.0)
    liar = lossy(pool, tmp_path / "liar", "error", 1)
    with opened(pool, folder) as model:
        granted = granted_to(model)
        heard_of(model, [first, honest, liar])
        allow_servers(model, [first.peer_id, honest.peer_id])
        with model.inference_session(max_length=80) as session:

            def lose() -> None:
                allow_servers(model, [])
                honest.kill()

            with pytest.raises(SwarmError):
                generate(model, prompt(1, 40), session=session, max_new_tokens=TOKENS, streamer=At({4: lose}))
        assert 1 <= granted[liar.peer_id] <= LOSSES.failed_replays


def test_server_that_lost_session_once_is_none_worse(
    pool: MemoryPool, folder: Path, whole: Any, tmp_path: Path
) -> None:
    control = tmp_path / "honest"
    server = lossy(pool, control, "lost", 6, "0:6")
    ids = prompt(1, 40)
    with opened(pool, folder) as model:
        trust = client_of(model).swarm.trust
        heard_of(model, [server])
        with model.inference_session(max_length=80) as session:
            out = generate(model, ids, session=session, max_new_tokens=TOKENS, streamer=At({3: lambda: order(control)}))
            assert session.recoveries == 1
        assert torch.equal(out, generate(whole, ids, max_new_tokens=TOKENS))
        assert not trust.is_banned(server.peer_id) and trust.reputation(server.peer_id) > 0


def test_to_go_back_far_is_held_against_nobody(pool: MemoryPool, folder: Path) -> None:
    """A hybrid's server keeps states of the last 128 tokens: what led to older ones is sent again, every time."""
    server = pool.start("0:6")
    hidden = torch.randn(1, 400, HIDDEN, generator=torch.Generator().manual_seed(0))
    with opened(pool, folder) as model, torch.no_grad():
        heard_of(model, [server])
        with model.inference_session(max_length=500) as session:
            for number in range(2 * ADMITTED):
                session.position = 2 * ADMITTED - number if number else 0
                for at in range(session.position, 400, 79):
                    session.step(hidden[:, at : at + 79])
            assert session.recoveries == 2 * ADMITTED - 1
        trust = client_of(model).swarm.trust
        assert not trust.is_banned(server.peer_id) and trust.reputation(server.peer_id) > 0


def test_losses_are_forgotten() -> None:
    record = LossRecord()
    for _ in range(2):
        assert not record.note("a", 0.0, admitted=True).is_too_much
    assert record.note("a", 1.0, admitted=True).is_too_much
    assert record.penalty_seconds("a", 1.0) == pytest.approx(2 * LOSSES.seconds, rel=0.01)
    assert record.penalty_seconds("b", 1.0) == record.penalty_seconds("a", 2 * LOSSES.half_life) == 0
    assert not record.note("a", 3 * LOSSES.half_life, admitted=True).is_too_much
    for number in range(2 * LOSSES.most_servers):
        record.note(str(number), 0.0, admitted=False)
    assert record.penalty_seconds("a", 0.0) == 0 and not record.note("0", 0.0, admitted=False).is_too_much


def test_session_earns_replays_by_steps_that_are_answered() -> None:
    budget = ReplayBudget()
    assert [budget.take(2) for _ in range(2 * LOSSES.replays + 1)] == [True] * 2 * LOSSES.replays + [False]
    for _ in range(LOSSES.steps):
        assert not budget.take(2)
        budget.answered()
    assert budget.take(2) and not budget.take(2)
