"""What one request can ask of the servers: whom it trusts, how many chains are compared, an adapter, hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load

from petalnode.node.client.chat import Text
from petalnode.node.client.generation.draft_model import load_draft_model
from petalnode.node.client.generation.drafting import Draft, DraftPlan
from petalnode.node.errors import BadInput
from petalnode.node.models import resolve
from petalnode.node.swarm.trusted_servers import TrustedServers
from petalnode.node.testing.memory_servers import MemoryServer, in_loop, memory_swarm
from tests.api.tokenizer import save_api_tokenizer
from tests.memory_api import MemoryApi, memory_api
from tests.peft_adapters import save_lora
from tests.tiny_models import load_whole, save_tiny

MODEL = "tiny-llama"
ASKED: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 6, "temperature": 0}


@dataclass(frozen=True)
class TwoChains:
    """Both servers hold all blocks; `other` holds the adapter in `folder`, too."""

    api: MemoryApi
    client: openai.OpenAI
    own: MemoryServer
    other: MemoryServer
    folder: Path

    def ask(self, **options: Any) -> Any:
        return self.client.completions.create(**ASKED, extra_body={"x_petalnode": options})


@pytest.fixture(scope="module")
def two(api_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoChains]:
    adapter = tmp_path_factory.mktemp("held") / "poet"
    save_lora(api_model, adapter, ["q_proj"])
    with memory_swarm() as swarm:
        own = swarm.start(api_model, "0:6", cache_tokens=20_000)
        other = swarm.start(api_model, "0:6", cache_tokens=20_000, adapters=[adapter])
        for server in (own, other):
            server.ready  # noqa: B018  (waits)
        with (
            memory_api(swarm, api_model) as running,
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=None) as client,
        ):
            yield TwoChains(running, client, own, other, adapter)


def route(answer: Any) -> list[Any]:
    return [(hop["peer_id"], hop["blocks"]) for hop in answer.model_extra["x_petalnode"]["choices"][0]["route"]]


def test_only_trusted_servers_compute_the_ends(two: TwoChains) -> None:
    text = two.client.completions.create(**ASKED).choices[0].text
    for server in (two.own, two.other):
        answer = two.ask(trusted_servers=[server.peer_id], trusted_blocks=2)
        assert answer.choices[0].text == text
        hops = route(answer)
        assert hops[0][0] == hops[-1][0] == server.peer_id
        assert all(peer == server.peer_id or (blocks[0] >= 2 and blocks[1] <= 4) for peer, blocks in hops)
    # Not gone on with at servers that are not trusted: conversations are kept apart.
    again = two.ask(trusted_servers=[two.own.peer_id], trusted_blocks=2)
    assert route(again)[0][0] == two.own.peer_id
    with pytest.raises(openai.InternalServerError) as raised:
        two.ask(trusted_servers=["12D3KooWNobodyAtAll"])
    assert raised.value.status_code == 503
    assert "12D3KooWNobodyAtAll is not in this swarm" in raised.value.message


def test_chains_are_compared(two: TwoChains) -> None:
    answer = two.ask(compare_chains=2)
    assert answer.choices[0].text == two.client.completions.create(**ASKED).choices[0].text
    compared = answer.model_extra["x_petalnode"]["choices"][0]["compared_routes"]
    assert {chain[0]["peer_id"] for chain in compared} == {two.own.peer_id, two.other.peer_id}
    with pytest.raises(openai.InternalServerError) as raised:
        two.ask(compare_chains=3)
    assert raised.value.code == "model_unavailable"


def test_drafts_change_nothing_but_their_own_counts(two: TwoChains, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tokens nor their log-probabilities, nor where a stop ends the answer."""

    def deepest(plan: object, drafts: Iterator[Draft], most: int) -> Draft:
        draft = next(drafts, Draft())
        return Draft(draft.tokens[:most], draft.match, draft.place)

    def ask(draft: str, **more: Any) -> tuple[Any, Any]:
        answer = two.client.completions.create(
            model=MODEL,
            prompt="abcabcabcab",
            temperature=0,
            logprobs=2,
            logit_bias={str(3 + ord(letter) - 32): 20 for letter in "abc"},
            extra_body={"x_petalnode": {"draft": draft}},
            **more,
        )
        return answer.choices[0], answer.model_extra["x_petalnode"]["choices"][0].get("drafts")

    monkeypatch.setattr(DraftPlan, "choose", deepest)
    core = two.api.core
    in_loop(two.api.token, lambda: setattr(core, "drafts", True))
    try:
        for more in ({"max_tokens": 40}, {"max_tokens": 40, "stop": ["aaa", "bbb", "ccc", "ab", "ca"]}):
            (plain, none), (drafted, drafts) = ask("none", **more), ask("auto", **more)
            assert none is None and (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason)
            assert drafted.logprobs.tokens == plain.logprobs.tokens
            assert drafted.logprobs.token_logprobs == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)
            if "stop" not in more:
                assert 0 < drafts["accepted"] <= drafts["drafted"] and drafts["steps"]
    finally:
        in_loop(two.api.token, lambda: setattr(core, "drafts", False))
    with pytest.raises(openai.BadRequestError) as raised:
        ask("sometimes")
    assert "give auto or none" in raised.value.message


def test_an_adapter_that_servers_hold(two: TwoChains) -> None:
    plain = two.client.completions.create(**ASKED).choices[0].text
    answer = two.ask(adapter="poet")
    assert answer.choices[0].text != plain
    assert {peer for peer, _ in route(answer)} == {two.other.peer_id}
    with pytest.raises(openai.InternalServerError) as raised:
        two.ask(adapter="nobodys")
    assert "nobodys" in raised.value.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"trusted_server": ["a"]}, "x_petalnode.trusted_server"),
        ({"compare_chains": 99}, "x_petalnode.compare_chains"),
        ({"trusted_servers": 1}, "x_petalnode.trusted_servers"),
        ({"trusted_servers": ["a"] * 1000}, "x_petalnode.trusted_servers"),
        ({"trusted_blocks": 1}, None),
    ],
    ids=["misspelt", "many-chains", "number", "many-peers", "no-peers"],
)
def test_options_that_cannot_be_had(options: dict[str, Any], param: str | None, two: TwoChains) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        two.ask(**options)
    assert raised.value.param == param


def test_a_request_never_trusts_more_than_the_api(two: TwoChains) -> None:
    """A key lets nobody take back what the person at the machine has asked for."""
    own, other = two.own.peer_id, two.other.peer_id

    def look() -> None:
        client = two.api.core.client.variant(trusted=TrustedServers(frozenset({own}), 2), compare_chains=1)
        assert client.narrowed((), None) == client.trusted
        assert client.narrowed((), 3) == TrustedServers(frozenset({own}), 3)
        assert client.narrowed([own], None) == client.trusted
        for peers, blocks in (([other], 2), ([own, other], 2), ([own], 1)):
            with pytest.raises(BadInput):
                client.narrowed(peers, blocks)

    in_loop(two.api.token, look)


def states_of(two: TwoChains, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **fields}
    return httpx.post(f"{two.api.url}/v1/petalnode/hidden_states", json=body, timeout=None)


def test_hidden_states_of_chosen_blocks(two: TwoChains, api_model: Path) -> None:
    answer = states_of(two, input="hidden states", blocks=[5, 0, 3])
    assert answer.headers["content-type"] == "application/octet-stream"
    found = load(answer.content)
    assert sorted(found) == ["block.0", "block.3", "block.5", "tokens"]
    tokens = found["tokens"].tolist()
    assert tokens == two.api.core.text.encode("hidden states")
    whole = load_whole(api_model)
    with torch.no_grad():
        expected = whole(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for block in (0, 3):
        torch.testing.assert_close(found[f"block.{block}"], expected[block + 1][0], rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # transformers has the last one behind the final norm
        torch.testing.assert_close(whole.model.norm(found["block.5"]), expected[6][0], rtol=1e-4, atol=1e-4)
    narrowed = load(states_of(two, input=tokens, x_petalnode={"trusted_servers": [two.own.peer_id]}).content)
    torch.testing.assert_close(narrowed["block.5"], found["block.5"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [[], [6], [-1], [True], "all"], ids=["none", "behind", "before", "truth", "text"])
def test_blocks_that_there_are_not(blocks: Any, two: TwoChains) -> None:
    refused = states_of(two, input="a", blocks=blocks)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "blocks")


def test_a_draft_model_has_the_same_tokenizer(api_model: Path, tmp_path: Path) -> None:
    text = Text(resolve(str(api_model), need="client", offline=True))
    other = save_tiny("llama", tmp_path / "other", max_position_embeddings=64)
    save_api_tokenizer(other, special=("<other>",))
    with pytest.raises(BadInput, match="its tokenizer is not that of the model that the swarm serves"):
        load_draft_model(resolve(str(other), offline=True), text)
    loaded = load_draft_model(resolve(str(api_model), offline=True), text)
    assert loaded.blocks.quantisation == "int8" and len(loaded.blocks.span) == loaded.part.num_blocks
