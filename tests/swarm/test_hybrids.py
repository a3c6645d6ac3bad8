"""Models whose blocks keep states, or hand on more than hidden states, say over several servers what transformers says,
whatever happens to the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from petalnode.node.client.generation.draft_model import MOST_DRAFTED
from petalnode.node.models.folder import open_folder
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm
from tests.greedy import generate, prompt
from tests.swarm.conftest import PIECE
from tests.swarm.deep_drafts import LOOKUP, Few
from tests.swarm.fleet import heard_of
from tests.tiny_models import CROSSING, CUTS, HYBRIDS, WHOLE, save_tiny

pytestmark = pytest.mark.usefixtures("small_pieces")
Model = DistributedModelForCausalLM
TOLERANCE = 2e-4
LONG, LONG_ROWS = PIECE + 8, PIECE // 3 + 12
"""Tokens of a prompt, of one row or of three, that servers compute in several pieces."""
BEAMS = {"num_beams": 3}
on_each_state = pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_5", "kimi_linear", "lfm2", "nemotron_h", "jamba", "minimax", "recurrent_gemma"),
        *("deepseek_v4", "qwen4_exp", "gemma4_shared", "gemma3n", "zamba2"),
    ],
    indirect=True,
)
"""One family of each kind of state, and of each thing that blocks hand on: what befalls a session is tried on these."""


@pytest.fixture(scope="module", params=[*HYBRIDS, *WHOLE, *CROSSING])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    endless = {"max_position_embeddings": 1024, **({} if kind == "qwen4_exp" else {"eos_token_id": None})}
    return save_tiny(kind, tmp_path_factory.mktemp("hybrid") / kind, **endless)


def serving(swarm: MemorySwarm, folder: Path, kind: str) -> list[MemoryServer]:
    """The first by the compiled kernels, where these are there, the others by torch. They are slow: prompts travel
    whole."""
    cuts = zip(CUTS.get(kind, ("0:2", "2:6")), ("auto", "torch", "torch"), strict=False)
    return [swarm.start(folder, str(blocks), kernels=kernels, throughput=20.0) for blocks, kernels in cuts]


@pytest.fixture(scope="module")
def servers(swarm: MemorySwarm, folder: Path, kind: str) -> list[MemoryServer]:
    return serving(swarm, folder, kind)


@pytest.fixture(scope="module")
def model(swarm: MemorySwarm, servers: list[MemoryServer], folder: Path) -> Iterator[Model]:
    assert all(server.ready for server in servers)
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as opened:
        yield opened


@pytest.mark.parametrize(("length", "options"), [(1, {}), (LONG, {}), (LONG_ROWS, BEAMS)])
def test_the_same_tokens_come(length: int, options: dict[str, Any], model: Model, whole: Any) -> None:
    ids = prompt(1, length)
    # In transformers, beams that change places leave the states of these where they are.
    cached = {"use_cache": False} if options and whole.config.model_type in ("minimax", "recurrent_gemma") else {}
    assert torch.equal(generate(model, ids, **options), generate(whole, ids, **options, **cached))


def padded(length: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(length) >= torch.tensor([0, 5, length - 4])[:, None]).long()
    return {"ids": prompt(3, length), "attention_mask": mask}


def test_a_padded_batch_says_the_same(model: Model, whole: Any) -> None:
    assert torch.equal(generate(model, **padded(LONG_ROWS)), generate(whole, **padded(LONG_ROWS)))


@on_each_state
def test_rows_with_drafts_say_the_same(model: Model, whole: Any) -> None:
    """Each in a session of its own."""
    assert torch.equal(generate(model, **padded(12), **LOOKUP), generate(whole, **padded(12)))


@on_each_state
def test_a_step_is_rolled_back(model: Model, folder: Path) -> None:
    """Also into the middle of a step, and of steps that were rolled back themselves."""
    width = open_folder(folder, "tiny").boundaries.width(0)
    hidden = torch.randn(2, 60, width, generator=torch.Generator().manual_seed(0))
    with model.inference_session(max_length=80) as session, torch.no_grad():
        session.step(hidden[:, :30])
        expected = [session.step(hidden[:, at : at + 6]) for at in range(30, 60, 6)]
        for position in (54, 47, 41, 45, 44, 30):
            session.position = position
            again = session.step(hidden[:, position : position + 3])
            place = (position - 30) // 6, (position - 30) % 6
            right = torch.cat(expected, 1)[:, position - 30 : position - 27]
            assert (again - right).abs().max() <= TOLERANCE * right.abs().max(), place
            session.position = position
            session.step(hidden[:, position : min(position + 6, 60)])
        assert session.recoveries == 0


ONE_STEP, MANY_STEPS = [1 + MOST_DRAFTED], [8] * 10 + [1] * (MOST_DRAFTED - 79)


@pytest.mark.parametrize("steps", [ONE_STEP, MANY_STEPS], ids=["one step", "many steps"])
@on_each_state
def test_longest_draft_is_undone_without_a_replay(steps: list[int], model: Model, folder: Path) -> None:
    """Servers compute its tokens one by one, however they come."""
    width = open_folder(folder, "tiny").boundaries.width(0)
    hidden = torch.randn(1, 31 + MOST_DRAFTED, width, generator=torch.Generator().manual_seed(0))
    with model.inference_session(max_length=150) as session, torch.no_grad():
        session.step(hidden[:, :30])
        drafted = torch.cat([session.step(part) for part in torch.split(hidden[:, 30:], steps, dim=1)], dim=1)
        for position in (90, 31):
            session.position = position
            again = session.step(hidden[:, position : position + 3])
            right = drafted[:, position - 30 : position - 27]
            assert (again - right).abs().max() <= TOLERANCE * right.abs().max()
        assert session.recoveries == 0


@on_each_state
def test_session_goes_back_farther_than_servers_keep_states(model: Model, whole: Any, kind: str) -> None:
    """What led there is sent again."""
    ids = prompt(1, 2 * PIECE + 8)
    with model.inference_session(max_length=350) as session:
        generate(model, ids, session=session, max_new_tokens=20)
        other = torch.cat([ids[:, :9], prompt(1, 5, seed=1)], dim=1)
        assert torch.equal(generate(model, other, session=session), generate(whole, other))
        assert (session.recoveries > 0) == (not kind.startswith("gemma"))


@on_each_state
def test_a_server_is_killed_in_the_middle(
    model: Model, whole: Any, swarm: MemorySwarm, folder: Path, kind: str
) -> None:
    ids = prompt(2, 9, seed=2)
    extra = serving(swarm, folder, kind)
    heard_of(model, extra)
    with model.inference_session(max_length=64) as session:
        for at, killed in ((4, 0), (9, 1)):
            out = generate(model, ids, session=session, max_new_tokens=at)
            ids = out
            for server in extra:
                if server.peer_id == session.route[killed][0]:
                    server.kill()
        assert torch.equal(generate(model, ids, session=session), generate(whole, ids))


@on_each_state
def test_drafts_change_no_token(model: Model, whole: Any, kind: str) -> None:
    options = {"logits_processor": [Few()], "max_new_tokens": 20}
    ids = torch.tensor([[5, 6, 7, 8, 9, 8, 7, 6, 5, 8, 6, 5, 6, 7]])
    drafted = generate(model, ids, **options, **LOOKUP)
    assert torch.equal(drafted, generate(whole, ids, **options))
    drafts = model.drafts
    assert drafts["drafted"] >= drafts["accepted"] > 0
    if kind not in ("gemma4_shared", "recurrent_gemma"):  # these only repeat themselves
        assert drafts["drafted"] > drafts["accepted"]
