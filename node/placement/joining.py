"""Where a newcomer goes, and whether those that join at the same time are agreed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...protocols.ids import Span
from .holder import Holder, gaps
from .petals import joining_span
from .plan import DEFAULT, Policy, make_plan

_MOST_FIRST: Final = 32
"""Newcomers whose choice is worked out before one's own; each costs as much time as a plan."""
_MOST_RIVALS: Final = 64


@dataclass(frozen=True)
class Choice:
    """The blocks that a newcomer takes if it begins to load now.

    `others` are the servers that it reckons with, the newcomers before it where it reckons that they go. `rivals` are
    the peer ids of newcomers that have not begun to load, either, and with whom it has to agree; `disputed` those of
    them that go before it and have announced something else than it reckons.
    """

    span: Span
    others: tuple[Holder, ...]
    rivals: frozenset[str] = frozenset()
    disputed: frozenset[str] = frozenset()

    def stands(self, announced: Span | None, told: Collection[str], silent: Collection[str] = ()) -> bool:
        """Whether the newcomer may begin to load: it has announced this, its rivals have been `told` of that and have
        answered, and those before it mean to do what it reckons with. It does not wait for those that are `silent`.

        If it is so for two newcomers, they have reckoned with each other. Say A goes before B, and B begins to load.
        Then B had told A, and knew of A what A had announced. If A has changed its mind since, A tells B before it
        loads, and has in B's answer that B loads.
        """
        return announced == self.span and self.rivals <= {*told, *silent} and self.disputed <= set(silent)


def choice_of_newcomer(
    holders: Sequence[Holder],
    newcomers: Sequence[Holder],
    newcomer: str,
    throughput: float | None,
    count: int,
    num_blocks: int,
    *,
    turnover: float = 1.0,
    policy: Policy = DEFAULT,
) -> Choice:
    """The `count` blocks that `newcomer` (a peer id) takes, while `newcomers`, it may be one of them, choose theirs.

    The newcomers choose in the order of their peer ids: all who see the same servers reckon the same. So what depends
    on who looks does not count as long as there are several: nobody else is moved along, and throughputs are those
    that are announced. `throughput` is for the time before that.
    """
    known = {each.peer_id: each for each in newcomers}
    others = [holder for holder in holders if holder.peer_id not in known and holder.peer_id != newcomer]
    if newcomer in known:
        throughput = known.pop(newcomer).throughput
    if not known:
        span = span_for_newcomer(others, newcomer, throughput, count, num_blocks, turnover=turnover, policy=policy)
        return Choice(span, tuple(others))
    others = [replace(holder, movable=False) for holder in others]
    before = sorted(peer_id for peer_id in known if peer_id < newcomer)
    after = sorted(peer_id for peer_id in known if peer_id > newcomer)
    disputed = set()
    for each in (known[peer_id] for peer_id in before[:_MOST_FIRST]):
        span = span_for_newcomer(others, each.peer_id, each.throughput, len(each.span), num_blocks, policy=policy)
        others.append(replace(each, span=span, movable=False))
        if span != each.span:
            disputed.add(each.peer_id)
    span = span_for_newcomer(others, newcomer, throughput, count, num_blocks, policy=policy)
    rivals = frozenset([*before[:_MOST_FIRST], *after][:_MOST_RIVALS])
    return Choice(span, tuple(others), rivals, frozenset(disputed))


def span_for_newcomer(
    holders: Sequence[Holder],
    newcomer: str,
    throughput: float | None,
    count: int,
    num_blocks: int,
    *,
    turnover: float = 1.0,
    policy: Policy = DEFAULT,
) -> Span:
    """The `count` blocks that `newcomer` (a peer id) takes: those that nobody holds, then where it raises the swarm's
    throughput most, by the plan that moves others along with it. `throughput` in steps a second, None: average.
    """
    others = [holder for holder in holders if holder.peer_id != newcomer]
    first = joining_span(others, num_blocks, count)
    if not others:
        return first
    speeds = sorted(holder.throughput for holder in others)
    own = Holder(newcomer, first, throughput or speeds[(len(speeds) - 1) // 2])
    # Where blocks have no server, nobody waits for the others to move along.
    around = [replace(holder, movable=False) for holder in others] if gaps(others, num_blocks) else others
    plan = make_plan([*around, own], num_blocks, turnover=turnover, newcomers={newcomer}, policy=policy)
    move = plan.of(newcomer)
    return first if move is None else move.target
