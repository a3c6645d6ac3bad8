"""Over which chains a batch goes, and how much of it over each."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.batch.chains import (
    LEAST_TOKENS,
    MAX_CHAINS,
    Chain,
    Stage,
    apportion,
    choose_chains,
    cut,
    rows_of_micro_batch,
    seconds_of,
    stages_of,
)
from petalnode.node.errors import NoChainError
from petalnode.node.swarm.cost import Estimate
from petalnode.node.swarm.routing import Hop, RouteCandidate
from petalnode.protocols.ids import Span
from petalnode.protocols.training import MICRO_BATCH_TOKENS

ALL = Span(0, 6)


def server(name: str, start: int, end: int, speed: float = 100.0, **fields: float) -> RouteCandidate:
    return RouteCandidate(name, Span(start, end), 0.01, 0.01, 1000, forward_tokens_per_second=speed, **fields)  # type: ignore[arg-type]


def chosen(*candidates: RouteCandidate) -> list[Chain]:
    return choose_chains(candidates, ALL, tokens=256, token_bytes=256, length=64, model_name="tiny")


def names(chain: Chain) -> str:
    return "".join(hop.peer_id for hop in chain)


def test_chains_share_no_server_where_that_is_possible() -> None:
    servers = [server("a", 0, 3), server("b", 0, 3), server("c", 3, 6), server("d", 3, 6)]
    chains = chosen(*servers)
    assert len(chains) == 2
    assert set(names(chains[0])) | set(names(chains[1])) == set("abcd")


def test_chains_share_the_only_server_of_some_blocks() -> None:
    chains = chosen(server("a", 0, 3), server("b", 0, 3), server("c", 3, 6))
    assert sorted(names(chain) for chain in chains) == ["ac", "bc"]


def test_no_chain_is_there_twice() -> None:
    assert [names(chain) for chain in chosen(server("a", 0, 3), server("c", 3, 6))] == ["ac"]


def test_there_are_not_more_chains_than_may_be() -> None:
    assert len(chosen(*(server(f"{number:02}", 0, 6) for number in range(20)))) == MAX_CHAINS


def test_missing_blocks_are_named() -> None:
    with pytest.raises(NoChainError, match="3:6") as caught:
        chosen(server("a", 0, 3))
    assert caught.value.missing == (3, 4, 5)


def test_stage_takes_its_blocks_share_of_time() -> None:
    fast, slow = server("a", 0, 4, 400.0), server("b", 2, 6, 100.0)
    known = {"a": fast, "b": slow}
    seconds = {name: Estimate(value=seconds_of(chain)) for name, chain in known.items()}
    chain = (Hop("a", Span(0, 4)), Hop("b", Span(4, 6)))
    first, second = stages_of(chain, known, seconds, tokens=100, token_bytes=0)
    assert first.work == pytest.approx(0.25) and second.work == pytest.approx(0.5)
    assert first.way == second.way == 0.01


def alone(work: float, way: float = 0.0) -> list[Stage]:
    return [Stage(f"{work}-{way}", work, way)]


def test_work_is_in_proportion_to_speed() -> None:
    shares = Counter(apportion(60, [alone(1.0), alone(2.0), alone(3.0)]))
    assert shares[0] == pytest.approx(33, abs=2) and shares[1] == pytest.approx(16, abs=2)
    assert shares[2] == pytest.approx(11, abs=2)


def test_pipeline_is_as_fast_as_its_slowest_server() -> None:
    pipeline = [Stage("a", 1.0, 0.0), Stage("b", 1.0, 0.0)]
    shares = Counter(apportion(40, [pipeline, alone(2.0)]))
    assert shares[0] == pytest.approx(27, abs=2)


def test_shared_server_does_one_thing_at_time() -> None:
    shared = Stage("c", 1.0, 0.0)
    shares = Counter(apportion(40, [[Stage("a", 2.0, 0.0), shared], [Stage("b", 2.0, 0.0), shared]]))
    assert shares[0] == shares[1] == 20


def test_chain_that_would_delay_all_gets_nothing() -> None:
    assert set(apportion(5, [alone(0.1), alone(60.0)])) == {0}


def test_one_micro_batch_takes_the_best_chain() -> None:
    assert apportion(1, [alone(3.0), alone(1.0)]) == [1]


@given(rows=st.integers(1, 300), tokens=st.integers(1, 5000), servers=st.integers(1, 40))
def test_micro_batches_are_of_a_middle_size(rows: int, tokens: int, servers: int) -> None:
    chosen = rows_of_micro_batch(rows, tokens, servers)
    assert 1 <= chosen <= rows
    assert chosen == 1 or chosen * tokens <= MICRO_BATCH_TOKENS
    assert chosen == rows or chosen * tokens >= LEAST_TOKENS or (chosen + 1) * tokens > MICRO_BATCH_TOKENS


@given(rows=st.integers(1, 300), most=st.integers(1, 40))
def test_first_and_last_micro_batch_are_small(rows: int, most: int) -> None:
    parts = cut(rows, most)
    assert sum(parts) == rows and min(parts) >= 1 and max(parts) <= most
    assert len(parts) == 1 or max(parts[0], parts[-1]) <= max(1, (most + 1) // 2)
    assert len(parts) <= -(-rows // most) + 1


def test_a_large_batch_keeps_all_servers_busy() -> None:
    assert cut(8, 2) == [1, 2, 2, 2, 1] and cut(9, 8) == [4, 1, 4] and cut(3, 1) == [1, 1, 1] and cut(7, 7) == [7]
    assert rows_of_micro_batch(32, 128, 2) == 4
    assert rows_of_micro_batch(8, 128, 2) == 2
    assert rows_of_micro_batch(1000, 128, 2) == 8
    assert rows_of_micro_batch(3, 2000, 2) == 1
