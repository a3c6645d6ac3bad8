"""What peers get of a device that they share: whole servings by the decisions of `turns.py`, in time of their own."""

from __future__ import annotations

import pytest

from petalnode.node.server.turns import Accounts, BatchCost, CostFit, Shares, Turn, Waiting, next_turn
from tests.serving import Serving

COSTS = (BatchCost(5.0, 0.0), BatchCost(4.0, 1.0), BatchCost(1.0, 4.0), BatchCost(0.0, 5.0))
"""From what memory binds, where more rows cost nothing, to what processors bind."""


@pytest.mark.parametrize("cost", COSTS, ids=["base", "mostly base", "mostly rows", "rows"])
@pytest.mark.parametrize("sessions", [16, 100])
def test_a_peer_with_many_sessions_leaves_a_share_to_one_with_one(cost: BatchCost, sessions: int) -> None:
    """Half of what it would get alone would be even; a turn that has begun before a step came is not broken off."""
    both = Serving(cost, {"many": [1] * sessions, "one": [1]}).run(4000.0).tokens
    for peer, rows in (("many", [1] * sessions), ("one", [1])):
        alone = Serving(cost, {peer: rows}).run(4000.0).tokens[peer]
        assert both[peer] >= 0.34 * alone, (peer, both, alone)


def test_a_step_of_many_rows_is_not_passed_over_for_ever() -> None:
    served = Serving(BatchCost(0.0, 5.0), {"rows": [16], "many": [1] * 16, "one": [1]}).run(4000.0)
    assert all(served.tokens.values())
    assert served.longest["rows"] <= 4 * 16 * 5.0


@pytest.mark.parametrize("cost", COSTS, ids=["base", "mostly base", "mostly rows", "rows"])
def test_peers_who_ask_for_the_same_share_every_batch(cost: BatchCost) -> None:
    served = Serving(cost, {str(peer): [1] for peer in range(8)}).run(4000.0)
    assert len(set(served.tokens.values())) == 1
    assert max(served.longest.values()) <= 2 * cost.seconds(8)


def test_all_sessions_of_a_peer_have_their_turn() -> None:
    serving = Serving(BatchCost(0.0, 5.0), {"many": [1] * 16, "one": [1]}).run(200.0)
    serving.longest = dict.fromkeys(serving.longest, 0.0)  # of the first turns, before anything was measured
    serving.run(4000.0)
    assert serving.longest["many"] <= 16 * 4 * 5.0
    assert serving.longest["one"] <= 4 * 5.0


def test_who_comes_seldom_costs_the_others_little() -> None:
    cost, many = BatchCost(1.0, 1.0), {"many": [1] * 16}
    alone = Serving(cost, many).run(4000.0).tokens["many"]
    beside = Serving(cost, many | {"far": [1]}, {"far": 300.0}).run(4000.0).tokens
    assert beside["far"] >= 10 and beside["many"] > 0.9 * alone


def test_a_prefill_of_who_has_had_least_is_next() -> None:
    steps = [Waiting(1, 4096, 256, peer="long"), Waiting(1, 20, peer="short")]
    assert next_turn(steps, 0, Shares(used={"long": 1.0, "short": 0.0})) == Turn((), 1, 20)
    assert next_turn(steps, 0, Shares(used={"long": 1.0, "short": 2.0})) == Turn((), 0, 256)


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    accounts = Accounts()
    done, order = 0, []
    waiting = [Waiting(1, 4096, peer="long")]
    while waiting:
        turn = next_turn(waiting, 0, accounts.shares(waiting, float(len(order))))
        assert turn.prefill is not None
        step = waiting[turn.prefill]
        order.append(step.peer)
        accounts.note_prefill(step.peer, 1.0)
        if step.peer == "long":
            done += turn.chunk
            waiting = [Waiting(1, 4096, done, peer="long"), *waiting[1:]] if done < 4096 else waiting[1:]
        else:
            waiting.remove(step)
        if len(order) == 3:
            waiting.append(Waiting(1, 100, peer="short"))
    assert order[3:5].count("short") == 1 and len(order) == 17


def test_the_cost_of_a_batch_is_learned() -> None:
    fit = CostFit()
    assert fit.cost is None
    fit.note(17, 34.0)
    assert fit.cost == BatchCost(0.0, 2.0)
    for rows in (1, 5, 8, 3) * 30:
        fit.note(rows, 3.0 + 2.0 * rows)
    assert fit.cost is not None
    assert fit.cost.base == pytest.approx(3.0, abs=0.2) and fit.cost.row == pytest.approx(2.0, abs=0.05)
    for rows in (1, 8) * 100:
        fit.note(rows, 5.0)
    assert fit.cost.row == pytest.approx(0.0, abs=0.1)


def test_accounts_forget_who_is_away() -> None:
    accounts = Accounts()
    for number in range(1000):
        step = Waiting(1, 1, peer=f"peer {number}")
        accounts.shares([step], float(number))
        accounts.note_decode({step.peer: 1}, 0.5, number + 0.5)
    kept = accounts.shares([Waiting(1, 1, peer="last")], 2000.0)
    assert kept.used is not None and len(kept.used) <= 2
    assert not kept.expected
