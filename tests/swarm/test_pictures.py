"""Models that take pictures: the tokens of transformers, over several servers, none of which is sent a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.errors import BadInput, NoChainError
from petalnode.node.testing.memory_servers import MemoryServer, MemorySwarm, memory_swarm
from tests.inspection import client_of
from tests.swarm.memory_pool import started
from tests.swarm.older_servers import Older
from tests.tiny_models import save_tiny
from tests.tiny_pictures import FAMILIES, save_seeing, seen

NEW = 6


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing") / kind


@pytest.fixture(scope="module")
def whole(kind: str, folder: Path) -> Any:
    return save_seeing(kind, folder)


@pytest.fixture(scope="module")
def servers(swarm: MemorySwarm, folder: Path, whole: Any) -> list[MemoryServer]:
    return started(swarm, folder, "0:2", "2:4")


def say(model: Any, given: dict[str, Any], **options: Any) -> torch.Tensor:
    said: torch.Tensor = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
    return said


class _After:
    """A streamer that kills a server of the session in the middle of an answer."""

    def __init__(self, model: Any, servers: list[MemoryServer], tokens: int) -> None:
        self._left = tokens
        self._servers = servers

    def put(self, value: Any) -> None:
        self._left -= 1
        if not self._left:
            self._servers.pop(0).kill()

    def end(self) -> None:
        pass


def test_a_picture_is_seen_as_transformers_sees_it(kind: str, whole: Any, model: Any) -> None:
    given = seen(whole, kind)
    said = say(whole, given)
    assert torch.equal(say(model, given), said)
    assert torch.equal(say(model, given, prompt_lookup_num_tokens=3), said)
    if FAMILIES[kind].beams:
        assert torch.equal(say(model, given, num_beams=2), say(whole, given, num_beams=2))
    other = seen(whole, kind, seed=4)["pixel_values"]
    assert not torch.equal(say(model, {**given, "pixel_values": other}), said), "the picture makes no difference"


def test_a_forward_pass_sees_pictures_and_has_gradients(kind: str, whole: Any, model: Any) -> None:
    given = seen(whole, kind)
    with torch.no_grad():
        assert torch.equal(model(**given).logits, whole(**given).logits)
    labels = given["input_ids"]
    loss = model(**given, labels=labels).loss
    assert torch.allclose(loss, whole(**given, labels=labels).loss, atol=1e-5)


def test_prompt_with_picture_that_is_cut_in_pieces(kind: str, whole: Any, model: Any) -> None:
    """The picture lies across the border of what a server computes at once."""
    given = seen(whole, kind, [(253, 40)])
    assert torch.equal(say(model, given), say(whole, given))


def test_rows_with_pictures_of_which_one_is_padded(kind: str, whole: Any, model: Any) -> None:
    given = seen(whole, kind, [(7, 3), (4, 2)])
    assert torch.equal(say(model, given), say(whole, given))


@pytest.mark.parametrize(
    "kind", ["llava", "qwen2_vl", "qwen3_5", "lfm2_vl", "gemma3", "gemma4", "qwen3_vl", "mistral3"], indirect=True
)
def test_server_is_killed_in_middle_of_answer(
    kind: str, whole: Any, model: Any, swarm: MemorySwarm, folder: Path, servers: list[MemoryServer]
) -> None:
    """One of each kind of positions, groups, features and states."""
    servers += started(swarm, folder, "0:2", "2:4")
    given = seen(whole, kind, [(30, 5)])
    said = say(whole, given)
    with model.inference_session(max_length=4) as session:
        del session  # pictures have a session of their own
        assert torch.equal(say(model, given, streamer=_After(model, servers, 4)), said)
    assert torch.equal(say(model, given), said)


def test_what_cannot_be_is_said_in_words(kind: str, whole: Any, model: Any) -> None:
    given = seen(whole, kind)
    with pytest.raises(BadInput, match="do not fit each other"):
        say(model, {**given, "input_ids": given["input_ids"][:, :-5], "attention_mask": None, **types(kind, given)})
    with model.inference_session(max_length=40) as session, pytest.raises(BadInput, match="session="):
        say(model, given, session=session)


def types(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    name = FAMILIES[kind].types
    return {name: given[name][:, :-5]} if name else {}


def test_a_model_without_an_encoder_says_so(swarm: MemorySwarm, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    server = swarm.start(folder, "0:6")
    _ = server.ready
    with (
        swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
        pytest.raises(ValueError, match="pixel_values"),
    ):
        model.generate(torch.tensor([[5, 6]]), pixel_values=torch.zeros(1, 3, 28, 28))


def test_servers_that_know_no_positions_are_not_asked(tmp_path: Path) -> None:
    whole = save_seeing("qwen2_vl", tmp_path)
    given = seen(whole, "qwen2_vl")
    with memory_swarm() as swarm:
        started(swarm, tmp_path, "0:2", "2:4", prepare=Older(positions=None).prepare)
        with swarm.open_model(AutoDistributedModelForCausalLM, tmp_path) as model:
            text = {name: given[name] for name in ("input_ids", "attention_mask")}
            assert torch.equal(say(model, text), say(whole, text))
            client_of(model).reopen_timeout = 0.2
            with pytest.raises(NoChainError, match="knows no positions"):
                say(model, given)
