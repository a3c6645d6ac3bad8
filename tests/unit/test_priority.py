"""Points buy a place further ahead, and never somebody else's turn; each payment buys one session."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.credits import Clearing, Transfer
from petalnode.crypto.identity import Identity
from petalnode.node.credits import payment_verifier as verifier_module
from petalnode.node.credits.payment_verifier import PaymentVerifier
from petalnode.node.server.budget import BUDGETS, MemoryBudget, next_in_line, now_overtaken
from petalnode.node.server.turns import Turn, Waiting, next_turn
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.credits import CREDITS_LIMITS, clearing_to_wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import SessionTerms

pytestmark = pytest.mark.virtual_time

ISSUER, CLIENT, SERVER, OTHER = (Identity.from_seed(letter * 32) for letter in (b"i", b"c", b"s", b"o"))
START = 1_800_000_000_000
TERMS = SessionTerms(bytes(32), Span(0, 2), 50, 2, (), "none", bytes(16), 1, "float32")
COST = 100


def served(arrivals: list[bool]) -> list[int]:
    """The order in which a queue is served that is there from the start."""
    line, overtaken, order = list(enumerate(arrivals)), 0, []
    while line:
        paid = [has_paid for _, has_paid in line]
        place = next_in_line(paid, overtaken)
        overtaken = now_overtaken(paid, place, overtaken)
        order.append(line.pop(place)[0])
    return order


@given(st.lists(st.booleans(), max_size=40))
def test_nobody_starves(arrivals: list[bool]) -> None:
    order = served(arrivals)
    assert sorted(order) == list(range(len(arrivals)))
    for kind in (True, False):
        same = [arrival for arrival in order if arrivals[arrival] is kind]
        assert same == sorted(same), "among equals it is first come, first served"
    ahead = 0
    for place, arrival in enumerate(order):
        ahead = ahead + 1 if arrivals[arrival] and not all(arrivals[i] for i in order[place:]) else 0
        assert ahead <= BUDGETS.most_overtaking


@given(st.integers(0, 30), st.booleans())
def test_where_all_are_alike_the_first_is_first(count: int, paid: bool) -> None:
    assert served([paid] * count) == list(range(count))


def test_who_has_paid_goes_first_three_times() -> None:
    assert served([False, False, True, True, True, True, True]) == [2, 3, 4, 0, 5, 6, 1]


def test_prefills_of_who_has_paid_go_first() -> None:
    steps = [Waiting(1, 1000), Waiting(1, 1), Waiting(1, 40, paid=True), Waiting(1, 1, paid=True)]
    assert next_turn(steps) == Turn((1, 3), 2, 40, 1)
    assert next_turn(steps, BUDGETS.most_overtaking) == Turn((1, 3), 0, 256, 0)
    assert next_turn(steps[:2], 1) == Turn((1,), 0, 256, 0)


async def test_cache_is_granted_to_who_has_paid_first() -> None:
    order: list[str] = []
    budget = MemoryBudget(10)
    first = await budget.acquire(10, 0)

    async def wait(name: str, tokens: int, paid: bool) -> None:
        lease = await budget.acquire(tokens, 1000, paid=paid)
        order.append(name)
        await trio.sleep(1)
        lease.release()

    async with trio.open_nursery() as nursery:
        names = ["first", "second", *(f"paid {number}" for number in range(5))]
        for name in names:
            nursery.start_soon(wait, name, 10, name.startswith("paid"))
            await trio.testing.wait_all_tasks_blocked()
        first.release()
    assert order == ["paid 0", "paid 1", "paid 2", "first", "paid 3", "paid 4", "second"]


async def test_free_cache_is_for_payers_if_others_wait() -> None:
    budget = MemoryBudget(10)
    await budget.acquire(5, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.acquire, 10, 1000)
        await trio.testing.wait_all_tasks_blocked()
        await budget.acquire(5, 0, paid=True)
        assert budget.free == 0 and budget.waiting == 1
        nursery.cancel_scope.cancel()


class Clock:
    now = START

    def __call__(self) -> int:
        return self.now


def opened(clearing: Clearing) -> wire.Open:
    return wire.Open(clearing=clearing_to_wire(clearing))


def cleared(points: int = COST, sequence: int = 1, time_ms: int = START, recipient: Identity = SERVER) -> Clearing:
    transfer = Transfer(ISSUER.peer_id, CLIENT.peer_id, recipient.peer_id, points, sequence, time_ms + 1)
    return Clearing(transfer.signed(CLIENT), time_ms).signed(ISSUER)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(clock: Clock) -> PaymentVerifier:
    return PaymentVerifier(SERVER.peer_id, [ISSUER.peer_id], clock)


def test_a_payment_is_taken_once(verifier: PaymentVerifier) -> None:
    payment = verifier.take(opened(cleared()), CLIENT.peer_id, TERMS)
    assert payment is not None
    assert verifier.take(opened(cleared()), CLIENT.peer_id, TERMS) is None
    verifier.give_back(payment)
    assert verifier.take(opened(cleared()), CLIENT.peer_id, TERMS) is not None
    assert verifier.take(opened(cleared(sequence=2)), CLIENT.peer_id, TERMS) is not None


GOOD = cleared()
BAD = {
    "too few points": opened(cleared(COST - 1)),
    "for another server": opened(cleared(recipient=OTHER)),
    "not cleared": opened(replace(GOOD, signature=bytes(64))),
    "cleared by another one": opened(
        replace(GOOD, signature=OTHER.sign("petalnode/credit-clearing/1", GOOD.canonical_bytes()))
    ),
    "not ordered": opened(
        Clearing(replace(GOOD.transfer, signature=bytes(64)), START).signed(ISSUER),
    ),
    "cleared before the server began": opened(cleared(time_ms=START - 1)),
    "from the future": opened(cleared(time_ms=START + CREDITS_LIMITS.skew_ms + 1)),
    "nonsense": wire.Open(clearing=wire.CreditClearing()),
    "nothing": wire.Open(),
}


@pytest.mark.parametrize("why", BAD)
def test_what_buys_nothing_is_no_error(verifier: PaymentVerifier, why: str) -> None:
    assert verifier.take(BAD[why], CLIENT.peer_id, TERMS) is None
    assert verifier.take(opened(GOOD), CLIENT.peer_id, TERMS) is not None


def test_nobody_pays_with_what_another_one_paid(verifier: PaymentVerifier) -> None:
    assert verifier.take(opened(GOOD), OTHER.peer_id, TERMS) is None


def test_points_of_others_buy_nothing(clock: Clock) -> None:
    for issuers in ([], [OTHER.peer_id]):
        assert PaymentVerifier(SERVER.peer_id, issuers, clock).take(opened(GOOD), CLIENT.peer_id, TERMS) is None


def test_old_payment_is_never_taken_once_forgotten(verifier: PaymentVerifier, clock: Clock) -> None:
    assert verifier.take(opened(GOOD), CLIENT.peer_id, TERMS) is not None
    for _ in range(5):
        clock.now += CREDITS_LIMITS.honoured_ms // 3
        assert verifier.take(opened(GOOD), CLIENT.peer_id, TERMS) is None
    clock.now += CREDITS_LIMITS.honoured_ms
    assert verifier.take(opened(GOOD), CLIENT.peer_id, TERMS) is None
    assert verifier.take(opened(cleared(sequence=2)), CLIENT.peer_id, TERMS) is None, (
        "nor one that was not shown in time"
    )


def test_what_is_remembered_is_bounded(
    verifier: PaymentVerifier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_module, "MOST_SPENT", 2)
    taken = [verifier.take(opened(cleared(sequence=number)), CLIENT.peer_id, TERMS) for number in range(1, 4)]
    assert [payment is not None for payment in taken] == [True, True, False]
    clock.now += CREDITS_LIMITS.honoured_ms + 3 * CREDITS_LIMITS.skew_ms
    assert verifier.take(opened(cleared(sequence=4, time_ms=clock.now)), CLIENT.peer_id, TERMS) is not None
