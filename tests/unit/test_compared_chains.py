"""How chains without a common server are chosen, and what is made of it when they answer differently."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.client.session.comparing import (
    Weights,
    decide,
    differing_blocks,
    disjoint_chains,
    held_least,
    partition,
    plan_chains,
    tail,
    tolerance_between,
)
from petalnode.node.errors import NoChainError
from petalnode.node.swarm.routing import Demand, RouteCandidate
from petalnode.node.verification.tolerances import Tolerance
from petalnode.protocols.ids import Span

BLOCKS = Span(0, 6)
FLOAT = Weights("float32", "none")
LIMITS = Tolerance(ok_worst=2e-3, ok_mean=1e-3, faulty_worst=4e-3, faulty_mean=2e-3)


def server(name: str, start: int, end: int, rtt: float = 0.01, longest: int | None = None) -> RouteCandidate:
    return RouteCandidate(
        name, Span(start, end), rtt=rtt, step_seconds=0.01, cache_tokens_free=100, max_session_length=longest
    )


spans = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda pair: (pair[0], min(6, pair[0] + pair[1]))), max_size=12
)


@settings(max_examples=80, deadline=None)
@given(spans, st.integers(1, 4))
def test_chains_are_as_many_as_rarest_blocks_servers(held: list[tuple[int, int]], count: int) -> None:
    servers = [server(f"s{number}", *span) for number, span in enumerate(held)]
    enough = held_least([server.span for server in servers], BLOCKS) >= count
    chains = disjoint_chains(servers, BLOCKS, count)
    assert (chains is not None) == enough
    if chains is None:
        return
    names = [hop.peer_id for chain in chains for hop in chain]
    assert len(chains) == count
    assert sum(len({hop.peer_id for hop in chain}) for chain in chains) == len(set(names))
    for chain in chains:
        assert [block for hop in chain for block in range(hop.span.start, hop.span.end)] == list(range(6))
    for group in partition(servers, BLOCKS, count):
        assert held_least([server.span for server in group], BLOCKS) >= 1


def test_cheap_chain_leaves_what_another_needs() -> None:
    """The cheapest chain is x and then z, and leaves no other: y lacks the beginning."""
    servers = [server("x", 0, 4, 0.001), server("y", 0, 3, 1.0), server("z", 3, 6, 0.001), server("w", 4, 6, 1.0)]
    chains = disjoint_chains(servers, BLOCKS, 2)
    assert chains is not None
    assert sorted(sorted(hop.peer_id for hop in chain) for chain in chains) == [["w", "x"], ["y", "z"]]


def test_only_servers_of_the_same_weights_are_compared() -> None:
    servers = [server("a", 0, 6), server("b", 0, 6), server("c", 0, 3), server("d", 0, 6, rtt=9.0)]
    weights = {"a": FLOAT, "b": Weights("bfloat16", "none"), "c": FLOAT, "d": FLOAT}
    kind, chains = plan_chains(servers, weights, BLOCKS, 2, "tiny")
    assert kind == FLOAT and {hop.peer_id for chain in chains for hop in chain} == {"a", "d"}
    with pytest.raises(
        NoChainError, match=r"3 chains of tiny .* that compute in float32 make 2: blocks 3:6 are"
    ) as caught:
        plan_chains(servers, weights, BLOCKS, 3, "tiny")
    assert caught.value.missing == (3, 4, 5)
    with pytest.raises(NoChainError, match="make 0"):
        plan_chains([], {}, BLOCKS, 2, "tiny")


def test_exact_servers_are_mixed_only_where_needed() -> None:
    exact = Weights("float32", "none/exact-1")
    servers = [server("a", 0, 6, 1.0), server("b", 0, 6, 1.0), server("stranger", 0, 6), server("c", 0, 6)]
    weights = {"a": exact, "b": exact, "stranger": FLOAT, "c": Weights("bfloat16", "none")}
    kind, chains = plan_chains(servers, weights, BLOCKS, 2, "tiny")
    assert kind == exact and {hop.peer_id for chain in chains for hop in chain} == {"a", "b"}
    kind, chains = plan_chains(servers, weights, BLOCKS, 3, "tiny")
    assert kind == FLOAT and {hop.peer_id for chain in chains for hop in chain} == {"a", "b", "stranger"}
    with pytest.raises(NoChainError, match="that compute in float32 make 3"):
        plan_chains(servers, weights, BLOCKS, 4, "tiny")
    assert FLOAT.includes(exact) and FLOAT.includes(FLOAT) and exact.includes(exact) and not exact.includes(FLOAT)


def test_servers_that_take_shorter_sessions_make_no_chain() -> None:
    servers = [server("a", 0, 6), server("b", 0, 6, longest=10)]
    assert disjoint_chains(servers, BLOCKS, 2, Demand(max_length=10)) is not None
    assert disjoint_chains(servers, BLOCKS, 2, Demand(max_length=11)) is None


def noisy(truth: torch.Tensor, amount: float, seed: int) -> torch.Tensor:
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))
    return truth + amount * noise * truth.norm() / noise.norm()


TRUTH = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=7), st.integers(0, 1000))
def test_most_chains_decide_and_no_majority_is_none(lies: list[bool], seed: int) -> None:
    outputs = [noisy(TRUTH, 0.5 if lie else 1e-4, seed + number) for number, lie in enumerate(lies)]
    found = decide(outputs, LIMITS)
    honest = [number for number, lie in enumerate(lies) if not lie]
    if 2 * len(honest) > len(lies):
        assert sorted(found.agreed) == honest
        assert list(found.dissenting) == [number for number, lie in enumerate(lies) if lie]
    else:  # liars that make up what they say do not agree with each other
        assert not found.agreed and len(found.dissenting) == len(lies)
    assert (found.error > found.tolerance) == any(lies)


def test_colluding_liars_need_to_be_most() -> None:
    lie = noisy(TRUTH, 0.5, 1)
    assert decide([TRUTH, lie, TRUTH, lie], LIMITS).agreed == ()
    assert decide([TRUTH, lie, TRUTH], LIMITS).dissenting == (1,)
    assert decide([lie, TRUTH], LIMITS).agreed == ()


def test_the_fault_is_found_between_junctions() -> None:
    clean = {2: TRUTH, 3: TRUTH, 4: TRUTH, 6: TRUTH}
    wrong = noisy(TRUTH, 0.5, 1)
    assert differing_blocks([clean, {2: TRUTH, 4: wrong, 6: wrong}], BLOCKS, LIMITS) == Span(2, 4)
    assert differing_blocks([clean, {4: wrong, 6: wrong}], BLOCKS, LIMITS) == Span(0, 4)
    assert differing_blocks([clean, {3: TRUTH, 6: wrong}], BLOCKS, LIMITS) == Span(3, 6)
    assert differing_blocks([{6: TRUTH}, {3: TRUTH, 6: wrong}], BLOCKS, LIMITS) == Span(0, 6)


def test_possible_growth_is_not_blamed_on_the_last() -> None:
    """A small lie that blocks behind it make larger: its junction is not called right."""
    little, much = noisy(TRUTH, 9e-4, 1), noisy(TRUTH, 3e-3, 1)
    assert differing_blocks([{3: TRUTH, 6: TRUTH}, {3: little, 6: much}], BLOCKS, LIMITS) == Span(0, 6)


def test_tolerances_are_those_that_were_measured() -> None:
    same = tolerance_between(FLOAT, ["cpu", "cpu"], 6, "none", "float32", 2)
    rounded = tolerance_between(FLOAT, ["cpu"], 6, "none", "bfloat16", 2)
    longer = tolerance_between(FLOAT, ["cpu"], 24, "none", "float32", 2)
    assert same and rounded and longer
    assert rounded.ok_mean > 1e-3 > longer.ok_mean > same.ok_mean
    assert tolerance_between(FLOAT, ["cpu+cuda"], 6, "none", "float32", 2) is None
    assert tolerance_between(Weights("float16", "nf4"), ["cpu"], 6, "none", "float32", 2) is None
    assert tolerance_between(FLOAT, ["cpu", "abacus"], 6, "none", "float32", 2) is None
    assert tolerance_between(FLOAT, [""], 6, "none", "float32", 2) is not None


def test_the_end_of_a_session_in_parts() -> None:
    parts = [(0, TRUTH), (3, 2 * TRUTH), (6, 3 * TRUTH)]
    assert torch.equal(tail(parts, 5), torch.cat([2 * TRUTH[:, 2:], 3 * TRUTH], dim=1))
    assert torch.equal(tail(parts, 6), 3 * TRUTH)
