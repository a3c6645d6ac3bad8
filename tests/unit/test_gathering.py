"""Batches wait for sessions that are about to come back where that gives more tokens: decisions, and whole servings in
virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from petalnode.node.server.gathering import Returning, Wait, gathering_time
from petalnode.node.server.turns import BatchCost, Shares, Turn, Waiting, next_turn
from tests.serving import MEMORY_BOUND, Serving, Times

TWO_COST_MORE = BatchCost(0.055, 0.0037, {1: 0.025, 2: 0.073, 4: 0.066, 8: 0.081})
"""The four blocks of `MEMORY_BOUND` by torch: two rows at once take longer than one after the other."""
ROWS_ONLY = BatchCost(0.0, 0.005)
ONE = [Waiting(1, 1, peer="0")]


def time_for(
    returning: list[Returning], cost: BatchCost = MEMORY_BOUND, waiting: list[Waiting] = ONE, idle: float = 0.0
) -> float:
    shares = Shares(cost)
    return gathering_time(waiting, next_turn(waiting, 0, shares), returning, shares, idle).seconds


def test_batch_waits_for_who_is_about_to_come() -> None:
    assert time_for([Returning(1, 0.003, peer="1")]) == 0.003
    assert time_for([Returning(1, 0.003 + place / 1000, peer=str(place)) for place in range(3)]) == 0.005


def test_of_equal_sessions_the_last_is_expected_later() -> None:
    four = [Returning(1, 0.003, 0.001, str(place)) for place in range(4)]
    assert time_for(four) == pytest.approx(0.003 + 0.001 * (1 / 2 + 1 / 3 + 1 / 4))


@pytest.mark.parametrize("cost", [ROWS_ONLY, TWO_COST_MORE], ids=["rows only", "two cost more"])
def test_nobody_waits_where_a_batch_saves_nothing(cost: BatchCost) -> None:
    assert time_for([Returning(1, 0.001, peer="1")], cost) == 0.0


def test_nobody_waits_longer_than_a_batch_saves() -> None:
    assert time_for([Returning(1, 0.0255, peer="far")]) == 0.0
    assert time_for([Returning(1, 0.003, peer="near"), Returning(1, 0.2, peer="far")]) == 0.003


def test_time_that_device_was_idle_counts_against_waiting() -> None:
    assert time_for([Returning(1, 0.003, peer="1")], idle=0.015) == 0.003
    assert time_for([Returning(1, 0.003, peer="1")], idle=0.024) == 0.0
    assert time_for([Returning(1, 0.003, peer="1")], idle=60.0) == 0.0


def test_nobody_waits_before_costs_are_known() -> None:
    soon = [Returning(1, 0.003, peer="1")]
    assert gathering_time(ONE, Turn((0,), None), soon, Shares()) == Wait()
    assert time_for(soon, waiting=[*ONE, Waiting(1, 300, peer="2")]) == 0.0
    assert gathering_time([], Turn((), None), soon, Shares(MEMORY_BOUND)) == Wait()


def test_rows_the_shares_exclude_are_not_waited_for() -> None:
    """Beside one with a single session, a peer has some ten rows of a batch; here they are there already."""
    many = [Waiting(1, 1, peer="many") for _ in range(12)]
    assert time_for([Returning(1, 0.003, peer="many") for _ in range(4)], waiting=[*ONE, *many]) == 0.0


def test_session_that_came_back_quickly_twice_is_awaited() -> None:
    times = Times().rounds(1)
    times.batch("here", "other")
    assert times.wait() == 0.0
    times = Times().rounds(3)
    times.batch("here", "other")
    assert 0.0015 < times.wait() < 0.004


def test_late_session_is_not_waited_for() -> None:
    times = Times().rounds(8)
    times.batch("here", "other")
    assert times.wait() > 0
    times.gathering.gone("other")
    assert times.wait() == 0.0
    times = Times().rounds(8)
    times.batch("here", "other")
    times.now += 0.02
    assert times.wait() == 0.0


def test_wait_goes_on_until_its_steps_are_there() -> None:
    times = Times().rounds(8)
    times.batch("here", "other")
    assert times.gathering.left(1, times.now) == 0.0
    wait = times.wait()
    assert times.gathering.left(1, times.now) == wait > 0
    assert times.gathering.left(2, times.now) == 0.0
    assert times.gathering.left(1, times.now + 2 * wait) == 0.0
    times.gathering.gone("other")
    assert times.gathering.left(1, times.now) == 0.0


def test_after_pause_session_is_known_no_more() -> None:
    times = Times().rounds(8)
    times.batch("here", "other")
    times.back("other", 2.0)
    times.batch("here", "other")
    assert times.wait() == 0.0


def around(mean: float, seed: int) -> Callable[[int], float]:
    """Turn-around times of this mean, in seconds: half of it, and the rest by chance."""
    chance = random.Random(seed)
    return lambda count: mean / 2 + chance.expovariate(2 / mean)


def served(
    cost: BatchCost, peers: dict[str, int], mean: float, *, gathers: bool = True, seconds: float = 10.0
) -> Serving:
    thinks = {peer: around(mean, seed) for seed, peer in enumerate(peers)}
    rows = {peer: [1] * sessions for peer, sessions in peers.items()}
    return Serving(cost, rows, thinks, gathers=gathers).run(seconds)


def percentile(serving: Serving, part: float) -> float:
    times = sorted(seconds for session in serving.sessions for seconds in session.latencies)
    return times[int(part * len(times))]


@pytest.mark.parametrize(("clients", "mean", "gain"), [(2, 0.002, 1.6), (4, 0.003, 1.5), (8, 0.006, 1.2)])
def test_clients_of_equal_speed_are_computed_together(clients: int, mean: float, gain: float) -> None:
    peers = {str(client): 1 for client in range(clients)}
    before, now = (served(MEMORY_BOUND, peers, mean, gathers=gathers) for gathers in (False, True))
    assert sum(now.tokens.values()) >= gain * sum(before.tokens.values())
    assert percentile(now, 0.5) < percentile(before, 0.5)
    assert percentile(now, 0.95) < percentile(before, 0.95)
    assert percentile(now, 0.95) <= 2 * percentile(now, 0.5)


@pytest.mark.parametrize("cost", [ROWS_ONLY, MEMORY_BOUND], ids=["rows only", "one client"])
def test_device_is_never_idle_where_waiting_gains_nothing(cost: BatchCost) -> None:
    peers = {str(client): 1 for client in range(1 if cost is MEMORY_BOUND else 8)}
    assert served(cost, peers, 0.003).idle <= 0.01


def test_chains_with_long_links_are_not_waited_for() -> None:
    peers = {str(client): 1 for client in range(4)}
    assert served(MEMORY_BOUND, peers, 0.3).idle <= 0.02


def test_near_clients_do_not_wait_for_far_ones() -> None:
    rows = {str(client): [1] for client in range(7)}
    thinks = {peer: around(0.004, seed) for seed, peer in enumerate(rows)}
    alone = Serving(MEMORY_BOUND, rows, thinks).run(10.0)
    beside = Serving(MEMORY_BOUND, rows | {"far": [1]}, thinks | {"far": around(0.09, 9)})
    without = Serving(MEMORY_BOUND, rows | {"far": [1]}, thinks | {"far": around(0.09, 9)}, gathers=False)
    near = sum(beside.run(10.0).tokens[peer] for peer in rows)
    assert near > sum(without.run(10.0).tokens[peer] for peer in rows)
    assert near > 0.75 * sum(alone.tokens.values())


@pytest.mark.parametrize(
    ("cost", "many", "one"),
    [(MEMORY_BOUND, 0.7, 0.5), (BatchCost(0.05, 0.0), 0.95, 0.9)],
    ids=["measured", "rows cost nothing"],
)
def test_peer_with_one_session_keeps_more(cost: BatchCost, many: float, one: float) -> None:
    """Without waiting, a batch of the others begins each time just before it is back."""
    sessions = {"many": 16, "one": 1}
    alone = {peer: served(cost, {peer: count}, 0.002).tokens[peer] for peer, count in sessions.items()}
    both, before = (served(cost, sessions, 0.002, gathers=gathers).tokens for gathers in (True, False))
    assert both["many"] >= many * alone["many"]
    assert both["one"] >= one * alone["one"]
    assert both["one"] > 1.3 * before["one"] and both["many"] > 1.1 * before["many"]
