"""Which peer gives its place up when one more could be asked for weights."""

from __future__ import annotations

from functools import partial

from petalnode.node.weights.plan import FetchPlace, place_to_free

HERE, THERE = "192.0.2.1", "192.0.2.2"
free = partial(place_to_free, patience=15.0, trial=5.0)


def holding(rate: float, address: str = "", *, held: float = 60.0, idle: float = 1.0, strikes: int = 0) -> FetchPlace:
    return FetchPlace(f"{rate:.0f}", address or f"192.0.2.{rate:.0f}", strikes, rate, held, idle)


def wanting(rate: float | None = None, address: str = THERE, strikes: int = 0) -> FetchPlace:
    return FetchPlace("new", address, strikes, rate)


def test_slowest_yields_to_one_not_asked() -> None:
    slowest = holding(10.0)
    assert free([holding(50.0), slowest, holding(90.0)], wanting()) is slowest


def test_slowest_yields_to_one_twice_as_fast() -> None:
    slowest = holding(10.0)
    assert free([slowest, holding(90.0)], wanting(21.0)) is slowest
    assert free([slowest, holding(90.0)], wanting(20.0)) is None


def test_place_is_kept_for_length_of_trial() -> None:
    new, older = holding(0.0, "192.0.2.9", held=4.9), holding(20.0)
    assert free([new, older, holding(90.0)], wanting()) is older
    assert free([new, holding(90.0)], wanting()) is None


def test_fast_one_stays_beside_many_in_trial() -> None:
    slow = [holding(0.0, f"192.0.2.{number}", held=1.0) for number in range(15)]
    assert free([holding(90.0, "198.51.100.1"), *slow], wanting()) is None


def test_first_asked_of_equals_makes_room() -> None:
    older = holding(5.0, "192.0.2.7", held=90.0)
    assert free([holding(5.0), older, holding(5.0, "192.0.2.8")], wanting()) is older


def test_address_with_most_places_yields_at_once() -> None:
    crowd = [holding(rate, HERE, held=1.0) for rate in (50.0, 10.0, 90.0)]
    assert free(crowd, wanting()) is crowd[1]
    tried = holding(60.0, HERE)  # who had its trial goes before those that have not
    assert free([*crowd, tried], wanting()) is tried


def test_address_with_its_share_gets_no_more() -> None:
    ours, slow = holding(90.0, THERE), holding(1.0, HERE)
    assert free([ours, slow], wanting()) is None
    assert free([ours, slow], wanting(address="192.0.2.3")) is slow


def test_address_uses_its_own_places_as_it_likes() -> None:
    slow = holding(1.0, THERE)
    assert free([slow, holding(50.0, THERE)], wanting()) is slow


def test_one_that_brings_nothing_makes_room_first() -> None:
    silent = holding(80.0, idle=16.0)
    assert free([silent, holding(1.0), holding(90.0)], wanting(0.1)) is silent


def test_more_failures_wait_longer_but_not_for_worse() -> None:
    failed = holding(9.0, idle=29.0, strikes=1)
    fast = holding(90.0)
    assert free([failed, fast], wanting(9.0)) is None
    longer = holding(9.0, idle=31.0, strikes=1)
    assert free([longer, fast], wanting(9.0)) is longer
    assert free([longer, fast], wanting(9.0, strikes=2)) is None
