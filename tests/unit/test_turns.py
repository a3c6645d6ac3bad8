"""What peers get of a device that they share: whole servings by the decisions of `turns.py`, in time of their own."""

from __future__ import annotations

from collections import Counter

import pytest

from petalnode.node.blocks.span import PREFILL_CHUNK
from petalnode.node.server.accounts import Accounts, Usage
from petalnode.node.server.turns import (
    TURNS,
    BatchCost,
    CostFit,
    Shares,
    Turn,
    Waiting,
    most_rows,
    next_turn,
    pass_wait,
)
from tests.serving import Serving

COSTS = (BatchCost(5.0, 0.0), BatchCost(4.0, 1.0), BatchCost(1.0, 4.0), BatchCost(0.0, 5.0))
"""From what memory binds, where more rows cost nothing, to what processors bind."""


@pytest.mark.parametrize("cost", COSTS, ids=["base", "mostly base", "mostly rows", "rows"])
@pytest.mark.parametrize("sessions", [16, 100])
def test_many_sessions_leave_one_its_share(cost: BatchCost, sessions: int) -> None:
    """Half of what it would get alone would be even; a turn that has begun before a step came is not broken off."""
    both = Serving(cost, {"many": [1] * sessions, "one": [1]}).run(4000.0).tokens
    for peer, rows in (("many", [1] * sessions), ("one", [1])):
        alone = Serving(cost, {peer: rows}).run(4000.0).tokens[peer]
        assert both[peer] >= 0.34 * alone, (peer, both, alone)


def test_step_of_many_rows_is_not_passed_forever() -> None:
    served = Serving(BatchCost(0.0, 5.0), {"rows": [16], "many": [1] * 16, "one": [1]}).run(4000.0)
    assert all(served.tokens.values())
    assert served.longest["rows"] <= 4 * 16 * 5.0


@pytest.mark.parametrize("cost", COSTS, ids=["base", "mostly base", "mostly rows", "rows"])
def test_peers_who_ask_for_same_share_every_batch(cost: BatchCost) -> None:
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


def test_batch_has_its_allowed_rows() -> None:
    assert len(next_turn([Waiting(1, 1)] * (TURNS.max_decode_rows + 1)).decode) == TURNS.max_decode_rows
    assert next_turn([Waiting(rows, 1) for rows in (200, 100, 50)]).decode == (0, 2)


def test_too_large_a_step_has_its_own_turn() -> None:
    steps = [Waiting(16, 1, peer="rows"), Waiting(1, 1, peer="one")]
    assert next_turn(steps, 0, Shares(BatchCost(0.0, 5.0))).decode == (0, 1)


def test_batch_is_short_for_who_is_coming() -> None:
    assert [most_rows({"many": 20}, Shares(BatchCost(0.0, 5.0), expected={"next": rows})) for rows in (1, 4, 99)] == [
        1,
        4,
        20,
    ]


def test_short_batch_takes_turns_by_address_then_peer() -> None:
    steps = [Waiting(1, 1, peer=peer) for peer in ("one", "other", "far") for _ in range(3)]
    shares = Shares(BatchCost(0.0, 5.0), addresses={"one": "nat", "other": "nat"})
    assert next_turn(steps, 0, shares).decode == (0, 1, 3, 6, 7, 8)
    # A chunk of a prefill takes longer than all of them.
    assert next_turn([*steps, Waiting(1, 100, peer="long")], 0, shares).decode == tuple(range(9))


def test_peers_pay_for_their_rows_of_a_batch() -> None:
    accounts = Accounts()
    steps = [Waiting(1, 1, peer="one"), Waiting(3, 1, peer="other")]
    accounts.shares(steps, 0.0)
    accounts.note_decode({"one": 1, "other": 3}, 2.0, 1.0)
    assert accounts.shares(steps, 1.0).used == {"one": 0.5, "other": 1.5}


def test_prefill_of_who_has_had_least_is_next() -> None:
    steps = [Waiting(1, 4096, 256, peer="long"), Waiting(1, 20, peer="short")]
    assert next_turn(steps, 0, Shares(used={"long": 1.0, "short": 0.0})) == Turn((), 1, 20)
    assert next_turn(steps, 0, Shares(used={"long": 1.0, "short": 2.0})) == Turn((), 0, 256)


def test_chunks_are_short_while_others_generate() -> None:
    accounts, steps = Accounts(), [Waiting(2, 4096, peer="long")]
    accounts.shares([Waiting(1, 1, peer="far")], 0.0)
    accounts.note_decode({"far": 1}, 0.01, 0.0)
    assert next_turn(steps, 0, accounts.shares(steps, 0.9)).chunk == TURNS.chunk_beside // 2
    assert next_turn(steps, 0, accounts.shares(steps, 1.1)).chunk == PREFILL_CHUNK // 2
    accounts.note_decode({"long": 1}, 0.01, 2.0)
    assert next_turn(steps, 0, accounts.shares(steps, 2.1)).chunk == PREFILL_CHUNK // 2


def test_short_prompt_does_not_wait_for_long_ones() -> None:
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
    for rows in range(100, 200):
        fit.note(rows, 5.0)
    assert len(fit.cost.measured) == 64 and 199 in fit.cost.measured
    steep = CostFit()
    for rows, seconds in ((1, 1.0), (9, 99.0)) * 9:
        steep.note(rows, seconds)
    assert steep.cost is not None
    assert steep.cost.base == 0.0 and steep.cost.row == pytest.approx(10.0, rel=0.1)


def test_accounts_forget_who_is_away() -> None:
    accounts = Accounts()
    for number in range(1100):
        step = Waiting(1, 1, peer=f"peer {number}")
        accounts.shares([step], float(number))
        accounts.note_decode({step.peer: 1}, 0.5, number + 0.5)
        accounts.shares([Waiting(1, 1, peer="always", address="home")], number + 0.6)
    kept = accounts.shares([Waiting(1, 1, peer="last")], 2000.0)
    assert kept.used is not None and len(kept.used) <= 2
    assert kept.address("always") == "home" and len(kept.addresses) == 1024
    assert not kept.expected


KEYS = {f"key {number}": f"127.0.0.{2 + number % 5}" for number in range(20)}
"""Of one attacker, at five addresses."""


@pytest.mark.parametrize("cost", COSTS[2:], ids=["mostly rows", "rows"])
def test_many_keys_have_the_share_of_their_addresses(cost: BatchCost) -> None:
    peers = {key: [1] for key in KEYS} | {"honest": [1]}
    alone = Serving(cost, {"honest": [1]}).run(4000.0).tokens["honest"]
    beside = Serving(cost, peers, addresses=KEYS).run(4000.0).tokens
    assert beside["honest"] >= 0.6 * alone / 6  # five addresses and its own
    assert max(beside[key] for key in KEYS) <= 1.2 * min(beside[key] for key in KEYS)


def test_two_peers_at_one_address_share_evenly() -> None:
    addresses = {"one": "nat", "other": "nat"}
    served = Serving(BatchCost(0.0, 5.0), {"one": [1] * 16, "other": [1], "far": [1]}, addresses=addresses).run(4000.0)
    alone = Serving(BatchCost(0.0, 5.0), {"other": [1]}).run(4000.0).tokens["other"]
    assert served.tokens["other"] >= 0.6 * alone / 4
    assert served.tokens["far"] >= 0.6 * alone / 2


def test_least_served_addresss_prefill_is_next() -> None:
    accounts = Accounts()
    steps = [Waiting(1, 100, peer=peer, address=KEYS[peer]) for peer in KEYS]
    accounts.shares(steps, 0.0)
    accounts.note_prefill("key 0", 1.0)
    served = []
    waiting = [*steps[1:], Waiting(1, 100, peer="honest")]
    while len(served) < 10:
        turn = next_turn(waiting, 0, accounts.shares(waiting, 1.0))
        assert turn.prefill is not None
        step = waiting.pop(turn.prefill)
        accounts.note_prefill(step.peer, 1.0)
        served.append(step.address or step.peer)
    assert "honest" in served[:5]
    assert max(Counter(served).values()) == 2


def passes_served(clients: dict[str, str], times: int) -> Counter[str]:
    """How many passes of a second each peer has had, where all of them always have one that waits."""
    usage, served = Usage(), Counter[str]()
    names = [(address, peer) for peer, address in clients.items()]
    for _ in range(times):
        address, peer = names[usage.next_of(names)]
        usage.charge(address, peer, 1.0)
        served[peer] += 1
    return served


def test_many_keys_passes_share_their_addresses_part() -> None:
    served = passes_served({**KEYS, "honest": "10.0.0.1", "one": "nat", "other": "nat"}, 700)
    assert served["honest"] == 100
    assert served["one"] == served["other"] == 50
    assert {served[key] for key in KEYS} == {25}


def test_new_key_does_not_precede_its_address() -> None:
    usage = Usage()
    for number in range(100):
        waiting = [("nat", f"new {number}"), ("nat", "old"), ("home", "honest")]
        address, peer = waiting[usage.next_of(waiting)]
        usage.charge(address, peer, 1.0)
    usage.settle([("home", "honest"), ("nat", "old")])
    assert abs(usage.of_addresses["home"] - usage.of_addresses["nat"]) <= 1.0
    assert usage.of_peers.get("old", 0.0) <= usage.of_addresses["nat"]
    for _ in range(1000):
        usage.settle([("home", "honest")])
        usage.charge("home", "honest", 1.0)
    assert len(usage.of_peers) <= 3 and len(usage.of_addresses) <= 2


def tokens_beside_passes(seconds: float, part: float, *, shared: bool = True) -> tuple[int, float]:
    """Tokens of a session whose steps take 1 s and come back 1 s later, beside passes in parts of `part` seconds that
    always wait; and the seconds that passes had. Without `shared`, they run whenever no step waits."""
    now, coming, tokens, passed, took, ended = 0.0, 0.0, 0, 0.0, 0.0, 0.0
    while now < seconds:
        if coming <= now:
            now, tokens = now + 1.0, tokens + 1
            coming = now + 1.0
        elif shared and (wait := pass_wait(took, now - ended, generating=True)):
            now = min(now + wait, coming)
        else:
            now, passed, took = now + part, passed + part, part
            ended = now
    return tokens, passed


@pytest.mark.parametrize("part", [0.125, 1.0, 4.0, 16.0])
def test_session_keeps_half_of_its_speed_beside_passes(part: float) -> None:
    alone = 5000
    tokens, passed = tokens_beside_passes(2 * alone, part)
    assert tokens >= 0.5 * alone
    assert passed > 0.15 * 2 * alone
    if part == 16.0:
        assert tokens_beside_passes(2 * alone, part, shared=False)[0] <= 0.14 * alone


def test_passes_have_all_of_time_when_nobody_generates() -> None:
    assert pass_wait(10.0, 0.0, generating=False) == 0.0
    assert pass_wait(10.0, 4.0, generating=True) == 6.0
    assert pass_wait(10.0, 11.0, generating=True) == 0.0
