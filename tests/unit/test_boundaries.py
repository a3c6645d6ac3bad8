"""Models whose blocks share keys and values, or get values for themselves: where servers part, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from petalnode.node.blocks.stack import read_ids, written_ids
from petalnode.node.client.core import CODEC_CHOICES, exact_for
from petalnode.node.errors import BadInput, MachineError, ModelError, NoChainError
from petalnode.node.models.folder import ModelFolder, boundaries_of
from petalnode.node.placement.joining import span_for_newcomer
from petalnode.node.placement.observed import PlacedServer, gaps
from petalnode.node.placement.plan import DEFAULT, make_plan
from petalnode.node.server.lifecycle.devices import _parted
from petalnode.node.server.lifecycle.memory import Sizing
from petalnode.node.server.lifecycle.options import ServerOptions, check_blocks
from petalnode.node.server.requests.admission import Hosted, check_terms
from petalnode.node.swarm.routing import Demand, Hop, RouteCandidate, cheapest_chain
from petalnode.protocols.ids import Boundaries, Span
from petalnode.protocols.inference import Refusal, SessionTerms
from tests.unit.plain_chains import ALL, BLOCKS, all_chains, asks, cost, swarms

KINDS = ["sliding_attention", "full_attention"] * 4
SHARING: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 3,
    "layer_types": KINDS,
}
EIGHT = boundaries_of(SHARING, 64, 8)
"""Blocks 5 to 7 take keys and values of 3 and 4."""


def test_what_a_configuration_says() -> None:
    assert Boundaries(64, 8, 1, 12, (Span(3, 8),)) == EIGHT
    assert [EIGHT.width(block) for block in (0, 3, 8)] == [160, 124, 64]
    inside = {"model_type": "gemma4", "text_config": SHARING}
    assert ModelFolder("it", Path(), inside, 8, 64).boundaries == EIGHT
    usual = {"model_type": "gemma3n_text", "num_hidden_layers": 30, "layer_types": ["a", "a", "a", "a", "b"] * 6}
    assert boundaries_of(usual, 64, 30) == Boundaries(64, 30, 4, 256, (Span(13, 30),))
    assert boundaries_of({"num_hidden_layers": 8}, 64, 8) == Boundaries(64, 8)


@pytest.mark.parametrize(("said", "ids"), [([-5], 0), ([], 0), ([1, 2], 2), ([99], 4)])
def test_blocks_that_look_ids_up_are_the_models(said: list[int], ids: int) -> None:
    config = {"model_type": "qwen4_exp_text", "hyper_connection_streams": 4, "ple_layer_ids": said}
    assert boundaries_of(config, 64, 4).ids == ids


ZAMBA: dict[str, Any] = {
    "model_type": "zamba2",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "layers_block_type": ["linear_attention", "hybrid"] * 3 + ["linear_attention"] * 2,
    "num_mem_blocks": 2,
}


QWEN: dict[str, Any] = {"model_type": "qwen4_exp_text", "num_hidden_layers": 8, "ple_layer_ids": [2, 5]}


def test_ids_travel_to_their_last_reader() -> None:
    found = boundaries_of(QWEN, 64, 8)
    assert [found.width(block) for block in (0, 4, 5, 8)] == [260, 260, 256, 256]
    assert boundaries_of({**QWEN, "ple_layer_ids": []}, 64, 8).ids == 0
    with pytest.raises(ModelError, match="ple_layer_ids"):
        boundaries_of({**QWEN, "ple_layer_ids": ["5"]}, 64, 8)
    ids = torch.randint(0, 1 << 24, (3, 50), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(read_ids(written_ids(ids, dtype)), ids)
    assert read_ids(torch.tensor([[[torch.nan, torch.inf, -5.0, 1e30]]])).item() == 63 * (64 + 262144)
    assert [exact_for(name, found) for name in CODEC_CHOICES] == ["none", "none", "float16", "bfloat16", "float16"]
    assert [exact_for(name, EIGHT) for name in CODEC_CHOICES] == list(CODEC_CHOICES)


DEEPSEEK: dict[str, Any] = {"model_type": "deepseek_v4", "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        ({}, 3),
        ({"num_hash_layers": 2, "hc_mult": 4}, 2),
        ({"num_hash_layers": -1}, 0),
        ({"mlp_layer_types": ["hash_moe", "moe", "hash_moe", *["moe"] * 5]}, 3),
        ({"mlp_layer_types": ["moe"] * 8, "num_hash_layers": 2}, 0),
        ({"mlp_layer_types": ["hash_moe"] * 99}, 8),
    ],
)
def test_blocks_that_route_by_ids_are_counted(said: dict[str, Any], ids: int) -> None:
    found = boundaries_of({**DEEPSEEK, **said}, 64, 8)
    assert (found.streams, found.axis, found.ids) == (4, 2, ids)
    with pytest.raises(ModelError, match="num_hash_layers"):
        boundaries_of({**DEEPSEEK, "num_hash_layers": "3"}, 64, 8)


GLM: dict[str, Any] = {"model_type": "glm_moe_dsa", "num_hidden_layers": 11}
GLM_SPANS = (Span(2, 6), Span(6, 10))


@pytest.mark.parametrize(
    ("said", "spans"),
    [
        ({}, ()),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, GLM_SPANS),
        ({"index_topk_pattern": "FFFSSSFSSSF"}, GLM_SPANS),
        ({"indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 2, "index_topk_freq": 2}, GLM_SPANS),
        ({"model_type": "hy_v4", "hc_mult": 2}, (Span(1, 5), Span(5, 9), Span(9, 11))),
    ],
)
def test_blocks_that_take_a_choice_stay_with_it(said: dict[str, Any], spans: tuple[Span, ...]) -> None:
    """As transformers makes `indexer_types`."""
    found = boundaries_of({**GLM, **said}, 64, 11)
    assert found.undivided == spans
    made = AutoConfig.for_model(**{**GLM, **said})
    assert [not found.may_part(block) for block in range(11)] == [kind == "shared" for kind in made.indexer_types]


@pytest.mark.parametrize("said", [["full"] * 10, ["shared", *["full"] * 10], 7, "SFFFFFFFFFF"])
def test_choices_that_nobody_makes_are_refused(said: Any) -> None:
    with pytest.raises(ModelError, match="indexer_types"):
        boundaries_of({**GLM, "indexer_types": said}, 64, 11)


def test_between_several_undivided_spans_servers_part() -> None:
    found = Boundaries(64, 11, undivided=GLM_SPANS)
    assert [found.most(count) for count in (1, 3, 4, 7, 9, 11)] == [1, 2, 4, 6, 9, 11]
    assert found.usable(Span(1, 9)) == Span(1, 6) and found.usable(Span(3, 11)) == Span(6, 11)
    assert found.usable(Span(3, 5)) is None and found.refusal(Span(2, 10)) is None
    assert str(found.refusal(Span(1, 9))).endswith("1:9 cannot be served, take 1:6 or 1:10")
    assert str(found.refusal(Span(3, 8))).endswith("3:8 cannot be served, take 2:10")


def test_first_input_travels_to_its_last_reader() -> None:
    found = boundaries_of(ZAMBA, 64, 8)
    assert [found.width(block) for block in (0, 5, 6, 8)] == [128, 128, 64, 64]
    assert found.left_by(Span(2, 7)) == 64 and found.left_by(Span(1, 4)) == found.left_by(Span(6, 8)) == 0


def test_who_serves_block_gets_weights_that_it_shares() -> None:
    folder = ModelFolder("tiny", Path(), ZAMBA, 8, 64)
    assert folder.parts(Span(4, 6)) == (1, 4, 5) and folder.parts(Span(3, 5)) == (3, 4)
    assert folder.parts(Span(6, 8)) == (6, 7) and folder.parts("config") == ()
    assert folder.parts(Span(0, 8)) == tuple(range(8))


@pytest.mark.parametrize("wrong", [{"num_mem_blocks": 0}, {"num_mem_blocks": "1"}, {"layers_block_type": ["hybrid"]}])
def test_shared_weights_of_no_model(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="which blocks share weights"):
        boundaries_of({**ZAMBA, **wrong}, 64, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_kv_shared_layers": 8},
        {"num_kv_shared_layers": -1},
        {"layer_types": KINDS[:7]},
        {"layer_types": None},
        {"layer_types": [*["full_attention"] * 7, "other"]},
        {"hidden_size_per_layer_input": -3},
        {"hidden_size_per_layer_input": 1 << 40},
        {"altup_num_inputs": 0},
        {"altup_num_inputs": 1000},
    ],
)
def test_configurations_of_no_model(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        boundaries_of({**SHARING, **wrong}, 64, 8)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (Span(0, 4), "take 0:3 or 0:8"),
        (Span(1, 7), "take 1:3 or 1:8"),
        (Span(4, 8), "take 3:8"),
        (Span(5, 6), "take 3:8"),
    ],
)
def test_who_cuts_elsewhere_is_told_where(span: Span, words: str) -> None:
    folder = ModelFolder("tiny", Path(), SHARING, 8, 64)
    with pytest.raises(BadInput, match=words):
        check_blocks(ServerOptions("tiny", blocks=span), folder)
    hosted = Hosted(b"m" * 32, "tiny", 8, Span(0, 8), 64, "float32", "none", 128, boundaries=EIGHT)
    terms = SessionTerms(b"m" * 32, span, 16, 1, (), "none", b"n" * 16, 1, "float32")
    with pytest.raises(Refusal, match=words):
        check_terms(terms, hosted)
    for fit in (Span(0, 3), Span(1, 3), Span(3, 8), Span(2, 8), Span(0, 8)):
        check_blocks(ServerOptions("tiny", blocks=fit), folder)
        check_terms(replace(terms, span=fit), hosted)


def test_how_many_blocks_a_server_takes() -> None:
    folder = ModelFolder("tiny", Path(), SHARING, 8, 64)
    assert [EIGHT.most(count) for count in range(1, 9)] == [1, 2, 3, 3, 5, 6, 7, 8]
    assert [_parted(Sizing(count, "why", 5), folder).count for count in (2, 4, 5)] == [2, 3, 5]
    with pytest.raises(BadInput, match="at most 3, or at least 5"):
        check_blocks(ServerOptions("tiny", num_blocks=4), folder)
    all_of_one = {**SHARING, "num_kv_shared_layers": 7, "layer_types": ["full_attention"] * 8}
    with pytest.raises(MachineError, match=r"of tiny that share something .*\(0:8\)"):
        _parted(Sizing(6, "why", 5), ModelFolder("tiny", Path(), all_of_one, 8, 64))


def settled(wishes: list[tuple[int, float]], boundaries: Boundaries) -> list[PlacedServer]:
    """Servers with these (blocks, speed) after they have joined one by one and then moved."""
    policy, blocks = replace(DEFAULT, boundaries=boundaries), boundaries.num_blocks
    servers: list[PlacedServer] = []
    for number, (count, speed) in enumerate(wishes):
        assert boundaries.most(count) == count
        span = span_for_newcomer(servers, f"s{number}", speed, count, blocks, policy=policy)
        assert len(span) == count and boundaries.refusal(span) is None
        servers.append(PlacedServer(f"s{number}", span, speed))
    targets = {move.peer_id: move.target for move in make_plan(servers, blocks, policy=policy).moves}
    assert all(boundaries.refusal(target) is None for target in targets.values())
    return [replace(one, span=targets.get(one.peer_id, one.span)) for one in servers]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 6, 8]), st.floats(0.5, 20)), min_size=1, max_size=8))
def test_servers_part_where_the_model_allows_it(wishes: list[tuple[int, float]]) -> None:
    servers = settled(wishes, EIGHT)
    # Who holds the shared blocks is there, and others enough for the rest.
    counts = [count for count, _ in wishes]
    if 8 in counts or (5 in counts and sum(count for count in counts if count <= 3) >= 3 and min(counts) == 1):
        assert not gaps(servers, 8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 4, 5, 8, 9]), st.floats(0.5, 20)), min_size=4, max_size=8))
def test_servers_are_placed_between_undivided_spans(wishes: list[tuple[int, float]]) -> None:
    servers = settled(wishes, Boundaries(64, 9, undivided=(Span(1, 5), Span(5, 9))))
    counts = [count for count, _ in wishes]
    if 9 in counts or (1 in counts and counts.count(4) > 1) or (5 in counts and 4 in counts):
        assert not gaps(servers, 9)


def server(name: str, start: int, end: int, step: float = 1.0) -> RouteCandidate:
    return RouteCandidate(name, Span(start, end), 0.0, step, 1000, undivided=EIGHT.undivided)


def test_no_chain_changes_the_server_among_shared_blocks() -> None:
    """Though half of the blocks would be quicker elsewhere."""
    quick, slow = server("quick", 0, 8, 1.0), server("slow", 0, 8, 100.0)
    assert cheapest_chain([slow, quick], Span(0, 8)) == (Hop("quick", Span(0, 8)),)
    tail, head = server("tail", 2, 8), server("head", 0, 3)
    chain = cheapest_chain([tail, head], Span(0, 8))
    assert [hop.peer_id for hop in chain] == ["head", "tail"] and chain[1].span.start in (2, 3)
    assert EIGHT.usable(Span(2, 6)) == Span(2, 3) and EIGHT.usable(Span(4, 8)) is None
    with pytest.raises(NoChainError, match="3:8"):
        cheapest_chain([head, replace(tail, span=Span(2, 3))], Span(0, 8))


@settings(max_examples=100, deadline=None)
@given(swarms(), st.sets(st.integers(1, BLOCKS - 1)), asks)
def test_no_other_chain_that_is_possible_is_cheaper(
    candidates: list[RouteCandidate], parting: set[int], ask: Demand
) -> None:
    ends = pairwise([0, *sorted(parting), BLOCKS])
    boundaries = Boundaries(64, BLOCKS, undivided=tuple(Span(*one) for one in ends if one[1] - one[0] > 1))
    usable = [(candidate, boundaries.usable(candidate.span)) for candidate in candidates]
    servers = [replace(one, span=span, undivided=boundaries.undivided) for one, span in usable if span is not None]
    chains = all_chains(servers, ALL)
    possible = [chain for chain in chains if all(boundaries.may_part(hop.span.start) for hop in chain)]
    if not possible:
        with pytest.raises(NoChainError):
            cheapest_chain(servers, ALL, ask)
        return
    chain = cheapest_chain(servers, ALL, ask)
    assert all(boundaries.may_part(hop.span.start) for hop in chain)
    least = min(cost(chain, servers, ask) for chain in possible)
    assert cost(chain, servers, ask) == pytest.approx(least, rel=1e-12, abs=1e-9)
