"""No plan of any kind has an untrusted server on a trusted block; what cannot be had so is said."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.client.batch.chains import choose_chains
from petalnode.node.client.session.comparing import Weights, plan_chains
from petalnode.node.errors import BadInput, NoChainError
from petalnode.node.swarm.routing import Demand, Hop, RouteCandidate, cheapest_chain, second_best
from petalnode.node.swarm.trusted_servers import TRUSTED_BLOCKS, TrustedServers, trusted_servers
from petalnode.protocols.ids import Span
from tests.unit.plain_chains import ALL, BLOCKS, NAMES, all_chains, check_shape, cost, server, swarms

trusting = st.builds(TrustedServers, st.frozensets(st.sampled_from(NAMES), min_size=1), st.integers(1, BLOCKS))
FLOAT = Weights("float32", "none")


def may_compute(trusted: TrustedServers, peer_id: str, block: int) -> bool:
    """The rule, written plainly."""
    inner = trusted.blocks <= block < BLOCKS - trusted.blocks
    return inner or peer_id in trusted.peers


def check_hops(trusted: TrustedServers, hops: Iterable[Hop]) -> None:
    for hop in hops:
        assert all(may_compute(trusted, hop.peer_id, block) for block in range(hop.span.start, hop.span.end)), hop
        assert trusted.permits(hop, BLOCKS)


@settings(max_examples=150, deadline=None)
@given(swarms(), trusting, st.booleans(), st.data())
def test_trusted_blocks_have_no_strangers_anywhere(
    swarm: list[RouteCandidate], trusted: TrustedServers, pushed: bool, data: st.DataObject
) -> None:
    usable = trusted.restrict(swarm, BLOCKS)
    start, end = data.draw(st.sampled_from([(0, BLOCKS), (0, 2), (1, 4), (2, 4), (BLOCKS - 1, BLOCKS)]))
    wanted = Span(start, end)
    with suppress(NoChainError):
        chain = cheapest_chain(usable, wanted, Demand(tokens=3, token_bytes=8, pushed=pushed))
        check_hops(trusted, chain)
        check_shape(chain, swarm, wanted)
        for index in range(len(chain)):
            check_hops(trusted, second_best(chain, index, usable, Demand(pushed=pushed)) or ())
    with suppress(NoChainError):
        for chain in choose_chains(usable, wanted, tokens=64, token_bytes=8, length=8, model_name="tiny"):
            check_hops(trusted, chain)
    with suppress(NoChainError):
        kinds = {candidate.peer_id: FLOAT for candidate in usable}
        for chain in plan_chains(usable, kinds, wanted, data.draw(st.integers(1, 3)), "tiny")[1]:
            check_hops(trusted, chain)


@settings(max_examples=80, deadline=None)
@given(swarms(), trusting, st.booleans())
def test_route_is_cheapest_of_all_that_are_permitted(
    swarm: list[RouteCandidate], trusted: TrustedServers, pushed: bool
) -> None:
    """What a server announces of itself is for its whole span; the part that it may compute takes its share."""
    ask = Demand(tokens=3, token_bytes=8, pushed=pushed)
    permitted = [chain for chain in all_chains(swarm, ALL) if all(trusted.permits(hop, BLOCKS) for hop in chain)]
    if not permitted:
        with pytest.raises(NoChainError):
            cheapest_chain(trusted.restrict(swarm, BLOCKS), ALL, ask)
        return
    found = cheapest_chain(trusted.restrict(swarm, BLOCKS), ALL, ask)
    # What a trusted server may not push goes through the client, and takes as long.
    paths = [
        replace(
            candidate, rtts={to: rtt for to, rtt in candidate.rtts.items() if trusted.may_push(candidate.peer_id, to)}
        )
        for candidate in swarm
    ]
    least = min(cost(chain, paths, ask) for chain in permitted)
    assert cost(found, paths, ask) == pytest.approx(least, rel=1e-9, abs=1e-9)


@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 39), st.integers(1, 40), st.booleans())
def test_what_a_server_may_compute(blocks: int, num_blocks: int, start: int, length: int, own: bool) -> None:
    span = Span(start, start + length)
    trusted = TrustedServers(frozenset({"own"}), blocks)
    peer = "own" if own else "other"
    usable = trusted.usable(peer, span, num_blocks)
    middle = trusted.middle(num_blocks)
    kept = [] if usable is None else list(range(usable.start, usable.end))
    assert kept == [block for block in range(span.start, span.end) if own or (middle is not None and block in middle)]
    assert trusted.permits(Hop(peer, span), num_blocks) == (len(kept) == length)


def test_trusted_servers_receipts_stay_with_them() -> None:
    trusted = TrustedServers(frozenset({"a", "b"}))
    pairs = [(one, other) for one in "abc" for other in "abc" if not trusted.may_push(one, other)]
    assert pairs == [("a", "c"), ("b", "c")]
    assert TrustedServers().may_push("a", "c")


def test_without_trusted_servers_everybody_computes_everything() -> None:
    swarm = [server("a", 0, 4), server("b", 3, 6)]
    assert TrustedServers().restrict(swarm, BLOCKS) == tuple(swarm)
    assert TrustedServers().closed(range(BLOCKS), BLOCKS) == ()


def test_strangers_have_nothing_where_the_ends_meet() -> None:
    trusted = TrustedServers(frozenset({"a"}), 3)
    assert trusted.middle(BLOCKS) is None
    assert [candidate.peer_id for candidate in trusted.restrict([server("a", 0, 6), server("b", 0, 6)], BLOCKS)] == [
        "a"
    ]
    assert trusted.closed((5, 0, 3), BLOCKS) == (0, 3, 5)


def test_a_strange_server_is_never_the_last_resort() -> None:
    """Also where the trusted one has no room, failed lately, and is a minute away."""
    swarm = [
        RouteCandidate("own", ALL, rtt=60.0, step_seconds=9.0, cache_tokens_free=0, penalty_seconds=60.0),
        server("stranger", 0, 6, step=0.001),
    ]
    chain = cheapest_chain(TrustedServers(frozenset({"own"}), 1).restrict(swarm, BLOCKS), ALL, Demand(cache_tokens=100))
    assert chain == (Hop("own", ALL),)  # and not twice, at both ends


def test_what_a_person_asks_for() -> None:
    assert trusted_servers((), None) == TrustedServers()
    assert trusted_servers(["a"], None) == TrustedServers(frozenset({"a"}), TRUSTED_BLOCKS)
    assert trusted_servers(["a"], 5, allowed=["a", "b"]).blocks == 5
    for peers, blocks, limits in (
        ((), 3, {}),
        (["a"], 0, {}),
        (["a"], None, {"blocked": ["a"]}),
        (["a", "b"], None, {"allowed": ["a"]}),
    ):
        with pytest.raises(BadInput):
            trusted_servers(peers, blocks, **limits)  # type: ignore[arg-type]
