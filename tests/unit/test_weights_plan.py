"""Which piece of the weights is asked of which peer."""

from __future__ import annotations

import random

from petalnode.node.weights.plan import PiecePlan


def plan(missing: dict[int, range], **holders: set[int]) -> PiecePlan:
    made = PiecePlan(missing, random.Random(1))
    for peer, parts in holders.items():
        made.set_holder(peer, parts)
    return made


def test_the_rarest_part_comes_first() -> None:
    made = plan({1: range(2), 2: range(2), 3: range(2)}, a={1, 2, 3}, b={1, 2}, c={1})
    assert [made.take("a") for _ in range(6)] == [(3, 0), (3, 1), (2, 0), (2, 1), (1, 0), (1, 1)]


def test_part_that_was_begun_is_completed_before_others() -> None:
    made = plan({number: range(3) for number in range(8)}, a=set(range(8)), b=set(range(8)))
    taken = [made.take(peer) for _ in range(3) for peer in ("a", "b")]
    assert len({part for part, _ in taken if (part, _) is not None}) == 2  # type: ignore[misc]


def test_two_nodes_begin_with_different_parts() -> None:
    firsts = set()
    for seed in range(20):
        made = PiecePlan({number: range(3) for number in range(30)}, random.Random(seed))
        made.set_holder("a", range(30))
        firsts.add(made.take("a"))
    assert len(firsts) > 10


def test_nothing_is_asked_twice_before_all_once() -> None:
    made = plan({1: range(2), 2: range(1)}, a={1}, b={1, 2}, c={1})
    assert made.take("a") == (1, 0)
    assert made.take("a") == (1, 1)
    assert made.take("c") is None  # part 2 was not asked for yet
    assert made.take("b") == (2, 0)
    assert made.take("c", idle=False) is None
    assert made.take("c") == (1, 0)  # the last pieces are asked of others, too
    assert made.take("c") == (1, 1)
    assert made.take("c") is None


def test_last_pieces_are_asked_of_everybody_rarest_first() -> None:
    """Two peers that never send what they were asked for keep nobody else from being asked."""
    made = plan({1: range(2)}, a={1}, b={1}, c={1}, d={1})
    assert [made.take("a"), made.take("a"), made.take("b")] == [(1, 0), (1, 1), (1, 0)]
    assert made.take("c", idle=False) is None
    assert made.take("c") == (1, 1)
    assert made.take("d") in ((1, 0), (1, 1))


def test_unheld_part_leaves_last_pieces_free() -> None:
    made = plan({1: range(1), 2: range(1)}, a={1}, b={1})
    assert made.take("a") == (1, 0)
    assert made.take("b") == (1, 0)


def test_dropped_peers_pieces_are_asked_of_others() -> None:
    made = plan({1: range(2)}, a={1}, b={1})
    assert [made.take("a"), made.take("a")] == [(1, 0), (1, 1)]
    made.got((1, 0))
    made.drop("a")
    assert made.take("b", idle=False) == (1, 1)
    assert made.take("a") is None


def test_other_peers_pieces_stay_asked_for() -> None:
    made = plan({1: range(2)}, a={1}, b={1}, c={1})
    assert (made.take("a"), made.take("b")) == ((1, 0), (1, 1))
    made.give_up("b", (1, 0))  # it was not asked for that
    assert made.take("c", idle=False) is None
    made.drop("a")
    assert made.take("c", idle=False) == (1, 0)
    assert made.take("c", idle=False) is None


def test_part_that_others_have_begun_goes_before_luck() -> None:
    for seed in range(10):
        made = PiecePlan({1: range(3), 2: range(3)}, random.Random(seed))
        for peer, parts in (("a", {1, 2}), ("b", {2}), ("c", {1})):
            made.set_holder(peer, parts)
        assert made.take("b") == (2, 0)
        assert made.take("a") == (2, 1)


def test_peer_that_lost_a_part_is_not_asked() -> None:
    made = plan({1: range(2), 2: range(1)}, a={1, 2})
    asked = made.take("a")
    assert asked == (2, 0) or asked == (1, 0)
    made.lacks("a", asked[0])
    made.give_up("a", asked)
    assert made.unheld() == {asked[0]}
    again = made.take("a")
    assert again is not None and again[0] != asked[0]


def test_a_part_is_complete_with_its_last_piece() -> None:
    made = plan({1: range(2)}, a={1})
    assert not made.got((1, 1))
    assert made.is_missing((1, 0)) and not made.is_missing((1, 1))
    assert made.got((1, 0))
    assert not made.parts
    assert made.holds_all("a") and not made.holds_all("b")


def test_piece_that_came_is_not_asked_again() -> None:
    made = plan({1: range(1)}, a={1}, b={1})
    assert made.take("a") == (1, 0)
    assert made.take("b") == (1, 0)
    made.got((1, 0))
    made.drop("a")
    assert made.take("b") is None
