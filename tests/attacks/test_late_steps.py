"""Who makes a server expect his next steps, and then sends them late, so that everybody's batch waits for him.

He comes back quickly for some steps, as long as it takes to be expected, and is late once; with one session, with many,
and with many identities, whose lateness takes turns.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from petalnode.node.server.turns import BatchCost
from tests.serving import Serving, Times

COST = BatchCost(0.0235, 0.0029)
HONEST = {"honest": [1]}
SECONDS = 10.0


def late_once_in(every: int, phase: int, late: float) -> Callable[[int], float]:
    return lambda count: late if (count + phase) % every == 0 else 0.012


def served(identities: int, sessions: int, every: int, late: float, *, gathers: bool = True) -> Serving:
    """An honest peer with a session, beside a number of the attacker's identities and sessions of each."""
    attackers = {f"attacker {number}": [1] * sessions for number in range(identities)}
    thinks: dict[str, float | Callable[[int], float]] = {"honest": 0.001}
    for number, name in enumerate(attackers):
        thinks[name] = late_once_in(every, number, late)
    return Serving(COST, HONEST | attackers, thinks, gathers=gathers).run(SECONDS)


@pytest.mark.parametrize("every", [4, 12])
@pytest.mark.parametrize(("identities", "sessions"), [(1, 1), (1, 12), (12, 1)], ids=["one", "sessions", "identities"])
def test_lateness_takes_little_of_what_others_had(identities: int, sessions: int, every: int) -> None:
    for late in (0.03, 0.4, 1.5):
        now, before = (served(identities, sessions, every, late, gathers=gathers) for gathers in (True, False))
        assert now.tokens["honest"] >= 0.93 * before.tokens["honest"], late
        bound = 0.5 * COST.seconds(1) * sum(count for peer, count in now.tokens.items() if peer != "honest")
        assert now.idle <= bound


def test_session_that_never_sends_is_waited_for_once() -> None:
    gone = {f"gone {number}": [1] for number in range(12)}

    def leave(count: int) -> float:
        return 0.004 if count < 20 else 1000.0

    serving = Serving(COST, HONEST | gone, {"honest": 0.001} | dict.fromkeys(gone, leave)).run(3.0)
    assert all(serving.tokens[peer] == 20 for peer in gone)
    idle = serving.idle
    serving.run(SECONDS)
    assert serving.idle == idle
    assert serving.sizes[-100:] == [1] * 100


def test_vain_waits_are_paid_by_who_stayed_away() -> None:
    """He is quick whenever nobody counts on it, and takes part in batches that are next to nothing."""
    times = Times().rounds(40)
    earned, waited = 0.5 * 40 * 0.015, 0.0
    while True:
        times.batch("here", "other", seconds=0.001)
        earned += 0.5 * 0.0005
        begun = times.now
        while wait := times.wait():
            times.now += wait
        if times.now == begun:
            break
        waited += times.now - begun
        assert waited <= earned
        for away in [0.5, *[0.002] * 20]:
            times.back("other", away)
            times.gathering.answered("other", "other", 1, times.now)
    assert waited > 0
