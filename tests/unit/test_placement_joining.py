"""Newcomers that join at the same time, by themselves and in a swarm whose news come late."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.node.placement import joining
from petalnode.node.placement.joining import Newcomer, SpanChoice, choice_of_newcomer, span_for_newcomer
from petalnode.node.placement.observed import PlacedServer, observe_servers
from petalnode.node.placement.plan import PlacementPlan, Policy
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Boundaries, Span

SPEEDS = [0.5, 1.0, 2.0, 7.0, 30.0]


@pytest.fixture(scope="module", autouse=True)
def _a_plan_is_made_once() -> Iterator[None]:
    """Newcomers that see the same make the same plan, of nothing but what they see."""
    made: dict[str, PlacementPlan] = {}
    make_plan = joining.make_plan

    def remembered(*seen: Any, **options: Any) -> PlacementPlan:
        key = repr((seen, sorted(options.items(), key=itemgetter(0))))
        if key not in made:
            made[key] = make_plan(*seen, **options)
        return made[key]

    with patch.object(joining, "make_plan", remembered):
        yield


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from(SPEEDS)), max_size=4),
    st.lists(st.tuples(st.sampled_from(SPEEDS), st.integers(1, 3)), min_size=1, max_size=5),
)
def test_newcomers_that_see_one_another_reckon_the_same(
    there: list[tuple[int, int, float]], joining: list[tuple[float, int]]
) -> None:
    holders = [
        PlacedServer(f"peer {n}", Span(at, at + count), speed, False) for n, (at, count, speed) in enumerate(there)
    ]
    newcomers = [PlacedServer(f"z {n}", Span(0, count), speed, False) for n, (speed, count) in enumerate(joining)]

    def choices() -> list[SpanChoice]:
        return [
            choice_of_newcomer(
                holders, newcomers, Newcomer(newcomer.peer_id, None, len(newcomer.span)), 8, turnover=number
            )
            for number, newcomer in enumerate(newcomers, start=1)
        ]

    chosen = choices()
    one_by_one = list(holders)
    for newcomer, choice in zip(newcomers, chosen, strict=True):
        assert choice.span == span_for_newcomer(
            one_by_one, newcomer.peer_id, newcomer.throughput, len(newcomer.span), 8
        )
        assert choice.rivals == {other.peer_id for other in newcomers} - {newcomer.peer_id}
        one_by_one.append(replace(newcomer, span=choice.span))
    # Who has said something else is disputed by those behind it; once all have said what was reckoned, nobody is.
    for number, choice in enumerate(chosen):
        wrong = {
            newcomer.peer_id for newcomer, right in zip(newcomers, chosen, strict=True) if newcomer.span != right.span
        }
        assert choice.disputed == wrong & {newcomer.peer_id for newcomer in newcomers[:number]}
    newcomers = [replace(newcomer, span=choice.span) for newcomer, choice in zip(newcomers, chosen, strict=True)]
    assert [replace(choice, disputed=frozenset()) for choice in chosen] == choices()


def test_what_has_to_be_so_before_newcomer_loads() -> None:
    here, there = Span(0, 2), Span(2, 4)
    choice = SpanChoice(here, (), frozenset("ab"))
    assert choice.stands(here, "abc")
    assert not choice.stands(None, "ab")
    assert not choice.stands(there, "ab")
    assert not choice.stands(here, "a")
    assert choice.stands(here, "a", silent="b")
    disputed = replace(choice, disputed=frozenset("b"))
    assert not disputed.stands(here, "ab")
    assert disputed.stands(here, "a", silent="b")


# --- a swarm whose news come late


BLOCKS, COUNT = 6, 2


@dataclass
class Node:
    peer_id: str
    view: dict[str, Announcement] = field(default_factory=dict)

    def hear(self, news: dict[str, Announcement]) -> None:
        for peer_id, said in news.items():
            if peer_id not in self.view or self.view[peer_id].sequence < said.sequence:
                self.view[peer_id] = said

    def announce(self, span: Span, state: ServerState, next_span: Span | None = None) -> None:
        held = self.view.get(self.peer_id)
        said = Announcement(self.peer_id, bytes(32), "m", BLOCKS, span, state, step_seconds=0.2, next_span=next_span)
        self.view[self.peer_id] = replace(said, sequence=1 + (held.sequence if held else 0))

    def choose(self) -> SpanChoice:
        seen = observe_servers(list(self.view.values()), BLOCKS, self.peer_id)
        return choice_of_newcomer(seen.servers, seen.newcomers, Newcomer(self.peer_id, 5.0, COUNT), BLOCKS)


class Simulation:
    """Newcomers join as node/server/lifecycle/rebalancing.py does it; every message takes `late()` seconds.

    The first of them is the one that all others know at first.
    """

    def __init__(self, count: int, late: Callable[[], float], chance: random.Random) -> None:
        self.nodes = {name: Node(name) for name in chance.sample([f"{n:02}" for n in range(count)], count)}
        self.meeting = next(iter(self.nodes))
        self.loading: dict[str, Span] = {}
        self.late, self.chance, self.now = late, chance, 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), then))

    def exchange(self, node: Node, others: set[str]) -> Generator[float | set[str], None, set[str]]:
        answered: set[str] = set()

        def ask(other: Node, own: dict[str, Announcement]) -> None:
            def answer(news: dict[str, Announcement]) -> None:
                node.hear(news)
                answered.add(other.peer_id)

            other.hear(own)
            news = dict(other.view)
            self.after(self.late(), lambda: answer(news))

        own = {node.peer_id: node.view[node.peer_id]}
        for peer_id in others:
            self.after(self.late(), lambda peer_id=peer_id: ask(self.nodes[peer_id], own))
        while answered < others:
            yield 0.1
        return answered

    def join(self, node: Node) -> Generator[float | set[str], None, None]:
        yield self.chance.uniform(0, 0.5)
        announced, told = None, frozenset[str]()
        while True:
            choice = node.choose()
            if choice.stands(announced, told) and (told or len(self.nodes) == 1):
                node.announce(choice.span, ServerState.JOINING)
                self.loading[node.peer_id] = choice.span
                return
            if choice.span != announced:
                announced = choice.span
                node.announce(announced, ServerState.JOINING, announced)
            yield self.chance.uniform(0.7, 1.3)
            others = {*choice.rivals, self.meeting} - {node.peer_id}
            told = frozenset((yield from self.exchange(node, others)) or {self.meeting})

    def step(self, task: Generator[float | set[str], None, None]) -> None:
        pause = next(task, None)
        if pause is not None:
            self.after(float(pause), lambda: self.step(task))

    def run(self) -> list[Span]:
        for node in self.nodes.values():
            self.after(self.chance.uniform(0, 5), lambda node=node: self.step(self.join(node)))
        while self.events:
            self.now, _, then = heapq.heappop(self.events)
            assert self.now < 600, "they never agree"
            then()
        return list(self.loading.values())


def simulated(count: int, late: Callable[[], float], chance: random.Random) -> list[Span]:
    """Where `count` newcomers go."""
    return Simulation(count, late, chance).run()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.5, 3.0, 10.0]))
def test_ten_newcomers_spread_evenly_however_late_news_are(seed: int, most: float) -> None:
    chance = random.Random(seed)
    spans = simulated(10, lambda: chance.uniform(0, most), chance)
    held = [sum(block in span for span in spans) for block in range(BLOCKS)]
    assert sorted(held) == [3, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("count", [1, 2, 21])
def test_few_and_many_newcomers_agree(count: int) -> None:
    chance = random.Random(count)
    spans = simulated(count, lambda: chance.uniform(0, 0.5), chance)
    held = [sum(block in span for span in spans) for block in range(BLOCKS)]
    assert len(spans) == count
    assert min(held) >= count // 3


@pytest.mark.parametrize("count", range(1, 7))
def test_rivals_impossible_number_of_blocks_is_survived(count: int) -> None:
    policy = Policy(boundaries=Boundaries(8, 6, undivided=(Span(0, 4),)))
    rival = PlacedServer("a", Span(0, count), 1.0, movable=False)
    for span in (Span(4, 6), Span(0, 4), Span(0, 6)):
        newcomer = Newcomer("b", None, len(span))
        assert choice_of_newcomer([], [rival], newcomer, 6, policy=policy).span == span
