"""Every server is asked for every block it has, over chains that hold together."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.validator.probe_inputs import question
from petalnode.node.validator.probe_plan import (
    TRAINING,
    Probe,
    ProbedServer,
    chain_through,
    next_probe,
    waiting_seconds,
    whole_round,
)
from petalnode.protocols.ids import Span

NUM_BLOCKS = 12


@st.composite
def swarms(draw: st.DrawFn) -> list[ProbedServer]:
    spans = draw(
        st.lists(
            st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS)).map(
                lambda pair: Span(pair[0], min(NUM_BLOCKS, pair[0] + pair[1]))
            ),
            min_size=1,
            max_size=7,
        )
    )
    return [ProbedServer(f"server-{index}", span) for index, span in enumerate(spans)]


def check_chain(probe: Probe, servers: list[ProbedServer]) -> None:
    spans = {server.peer_id: server.span for server in servers}
    for hop in probe.route:
        assert spans[hop.peer_id].covers(hop.span)
    for one, other in zip(probe.route, probe.route[1:], strict=False):
        assert one.span.end == other.span.start
        assert one.peer_id != other.peer_id


@given(swarms(), st.randoms(use_true_random=False))
def test_round_asks_servers_for_all_their_blocks(servers: list[ProbedServer], random: Random) -> None:
    probes = whole_round(servers, NUM_BLOCKS, random)
    for kind in ("chat", *TRAINING):
        asked = {(hop.peer_id, hop.span) for probe in probes if probe.kind == kind for hop in probe.route}
        assert asked >= {(server.peer_id, server.span) for server in servers}
    for probe in probes:
        check_chain(probe, servers)


@given(swarms(), st.randoms(use_true_random=False))
def test_chain_is_as_long_as_swarm_allows(servers: list[ProbedServer], random: Random) -> None:
    """A conversation needs all blocks: a shorter chain than could be had is no user's."""
    for target in servers:
        route = chain_through(target, servers, NUM_BLOCKS, random)
        others = [server for server in servers if server.peer_id != target.peer_id]
        start, end = route[0].span.start, route[-1].span.end
        assert not any(start - 1 in other.span for other in others)
        assert not any(end in other.span for other in others)


def test_longest_unasked_servers_are_preferred() -> None:
    servers = [ProbedServer("fresh", Span(0, 6)), ProbedServer("stale", Span(0, 6))]
    random = Random(1)
    targets = [
        next_probe(servers, {"fresh": 1.0, "stale": 999.0}, 6, random).route[0].peer_id  # one server holds it all
        for _ in range(200)
    ]
    assert targets.count("stale") > 150
    assert targets.count("fresh") > 0 or targets.count("stale") < 200


def test_waiting_has_the_mean_that_was_asked_for() -> None:
    random = Random(2)
    waits = [waiting_seconds(30.0, random) for _ in range(4000)]
    assert sum(waits) / len(waits) == pytest.approx(30.0, rel=0.1)
    assert min(waits) < 1.0 and max(waits) > 120.0  # no server can tell when the next one comes


def test_questions_differ() -> None:
    random = Random(3)
    assert len({question(random) for _ in range(500)}) > 400
