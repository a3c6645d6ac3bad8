"""What recovery does for models with keys and values alone, it does for those whose blocks keep states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.testing.memory_network import MemoryNetwork
from petalnode.node.testing.memory_servers import MemoryServer
from tests.greedy import generate, prompt
from tests.inspection import client_of
from tests.swarm.fleet import At, Fleet, Model
from tests.swarm.memory_pool import MemoryPool
from tests.tiny_models import HIDDEN, save_tiny

pytestmark = pytest.mark.usefixtures("blocks_as_served")
TOLERANCE = 2e-4
ONE_WAY = 0.05
"""Seconds from any node to any other."""
Accident = Callable[[Fleet, MemoryServer], object]
ACCIDENTS: dict[str, Accident] = {
    "killed": Fleet.kill,
    "drained": Fleet.drain,
    "frozen": lambda fleet, server: server.freeze(),
}


KINDS = ("qwen3_5", "nemotron_h", "jamba", "bamba")
PLACES = (0, 1, 2)


def cases(turn: int) -> list[tuple[str, str]]:
    """The accidents on the first kind, and one on each other, which another `turn` has meet with another."""
    names = list(ACCIDENTS)
    others = [(kind, names[(number + turn) % len(names)]) for number, kind in enumerate(KINDS[1:])]
    return [*((KINDS[0], name) for name in names), *others]


def meets(turn: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("kind", "accident"), cases(turn), indirect=["kind"])


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    endless = {"max_position_embeddings": 1024, "eos_token_id": None}
    return save_tiny(kind, tmp_path_factory.mktemp("hybrid") / kind, **endless)


@pytest.fixture(scope="module")
def fleet(pool: MemoryPool) -> Fleet:
    return Fleet(pool, each=2)


@pytest.fixture(scope="module")
def opened(pool: MemoryPool, fleet: Fleet, folder: Path) -> Iterator[Model]:
    with pool.swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
        yield model


@pytest.fixture
def model(opened: Model, fleet: Fleet) -> Model:
    fleet.ready(opened)
    return opened


@pytest.fixture(autouse=True)
def far(opened: Model, pool: MemoryPool, model: Model) -> Iterator[None]:
    """A round trip between any two nodes takes 100 ms."""
    peers = [client_of(opened).swarm.peer_id, *(server.peer_id for server in pool.alive)]

    def delay(network: MemoryNetwork, seconds: float) -> None:
        for one, other in combinations(peers, 2):
            network.link(one, other).delay = seconds

    pool.swarm.change(partial(delay, seconds=ONE_WAY))
    yield
    pool.swarm.change(partial(delay, seconds=0.0))


@pytest.mark.parametrize(
    ("kind", "accident", "place"),
    [(*case, place) for place in PLACES for case in cases(place) if place == 1 or case[0] == KINDS[0]],
    indirect=["kind"],
)
def test_a_server_is_lost_while_tokens_come(accident: str, place: int, model: Model, fleet: Fleet, whole: Any) -> None:
    ids = prompt(1, 80, seed=place)
    with model.inference_session(max_length=120) as session:
        hit: list[MemoryServer] = []

        def meet() -> None:
            hit.append(fleet.at(session, place))
            ACCIDENTS[accident](fleet, hit[0])

        out = generate(model, ids, session=session, max_new_tokens=10, streamer=At({4: meet}))
        hit[0].thaw()
        assert torch.equal(out, generate(whole, ids, max_new_tokens=10))
        assert session.recoveries >= (accident != "drained")


@meets(0)
def test_a_padded_batch_far_away(accident: str, model: Model, fleet: Fleet, whole: Any) -> None:
    ids = prompt(2, 40, seed=3)
    mask = (torch.arange(40) >= torch.tensor([0, 9])[:, None]).long()
    expected = generate(whole, ids, attention_mask=mask, max_new_tokens=10)
    with model.inference_session(max_length=60) as session:
        first = generate(model, ids, attention_mask=mask, session=session, max_new_tokens=4)
        hit = fleet.at(session, 1)
        ACCIDENTS[accident](fleet, hit)
        mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], dim=1)
        out = generate(model, first, attention_mask=mask, session=session, max_new_tokens=6)
        hit.thaw()
    assert torch.equal(out, expected)


@meets(1)
def test_drafts_far_away(accident: str, model: Model, fleet: Fleet, whole: Any) -> None:
    ids = prompt(1, 6, seed=4).repeat(1, 4)
    with model.inference_session(max_length=80) as session:
        hit: list[MemoryServer] = []

        def meet() -> None:
            hit.append(fleet.at(session, 1))
            ACCIDENTS[accident](fleet, hit[0])

        out = generate(
            model, ids, session=session, max_new_tokens=16, prompt_lookup_num_tokens=4, streamer=At({5: meet})
        )
        hit[0].thaw()
    assert torch.equal(out, generate(whole, ids, max_new_tokens=16))


@pytest.mark.parametrize(
    ("kind", "accident", "place"),
    [*((*case, 1) for case in cases(2)), (KINDS[0], "killed", 0), (KINDS[0], "killed", 2)],
    indirect=["kind"],
)
def test_what_was_rolled_back_is_sent_to_nobody(accident: str, place: int, model: Model, fleet: Fleet) -> None:
    hidden = torch.randn(2, 30, HIDDEN, generator=torch.Generator().manual_seed(0))
    other = torch.randn(2, 30, HIDDEN, generator=torch.Generator().manual_seed(1))
    with model.inference_session(max_length=40) as session, torch.no_grad():
        session.step(hidden[:, :20])
        session.step(other[:, 20:24])
        session.position = 21
        hit = fleet.at(session, place)
        ACCIDENTS[accident](fleet, hit)
        out = session.step(hidden[:, 21:25])
        hit.thaw()
        sequence = torch.cat([hidden[:, :20], other[:, 20:21], hidden[:, 21:25]], dim=1)
        right = model.remote_blocks(sequence)[:, -4:]
        assert (out - right).abs().max() <= TOLERANCE * right.abs().max()
        assert session.recoveries >= (accident != "drained")


@meets(2)
def test_reordered_rows_are_replayed_as_they_were(accident: str, model: Model, fleet: Fleet) -> None:
    hidden = torch.randn(3, 12, HIDDEN, generator=torch.Generator().manual_seed(0))
    with model.inference_session(max_length=12) as session, torch.no_grad():
        session.step(hidden[:, :4])
        session.step(hidden[:, 4:5], reorder=(2, 0, 0))
        session.step(hidden[:, 5:6], reorder=(1, 1, 0))
        hit = fleet.at(session, 1)
        ACCIDENTS[accident](fleet, hit)
        out = session.step(hidden[:, 6:8])
        hit.thaw()
        assert session.recoveries >= (accident != "drained")
        one, two = torch.tensor([2, 0, 0]), torch.tensor([1, 1, 0])
        sequence = torch.cat([torch.cat([hidden[one, :4], hidden[:, 4:5]], dim=1)[two], hidden[:, 5:8]], dim=1)
        right = model.remote_blocks(sequence)[:, -2:]
        assert (out - right).abs().max() <= TOLERANCE * right.abs().max()


@meets(3)
def test_a_fork_goes_on_without_a_server(accident: str, model: Model, fleet: Fleet, whole: Any) -> None:
    ids = prompt(1, 70, seed=6)
    with model.inference_session(max_length=120) as session:
        said = generate(model, ids, session=session, max_new_tokens=3)
        with session.fork() as fork:
            hit = fleet.at(session, 1)
            ACCIDENTS[accident](fleet, hit)
            other = torch.cat([said, prompt(1, 3, seed=7)], dim=1)
            for text, held in ((other, fork), (said, session)):
                expected = generate(whole, text, max_new_tokens=3)
                assert torch.equal(generate(model, text, session=held, max_new_tokens=3), expected)
        hit.thaw()
