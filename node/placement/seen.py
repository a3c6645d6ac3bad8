"""What placement makes of the servers' announcements, and what it does not believe. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...protocols.announcement import Announcement, ServerState
from ..swarm.cost import steps_per_second
from .holder import Holder

MOST_OF_MEDIAN: Final = 100.0
"""No server is taken for faster than so many times the middle one: a liar must not keep everybody else from a block."""
_LEAST: Final = 1e-3
USUAL_LOAD: Final = 20.0
"""Seconds to load a block after which a move counts twice as dear as one that loads at once."""
_DIGITS: Final = 2


@dataclass(frozen=True)
class Seen:
    """The servers of one model.

    `holders` are where each is, or where it goes if it has said so; `serving` those that take sessions, where they are.
    `newcomers` are those that have not begun to load, this one too, where they mean to go; the others of them are among
    the holders, too. `doubts` are sentences about announcements that were corrected or left out, by peer id.
    """

    holders: tuple[Holder, ...]
    serving: tuple[Holder, ...]
    doubts: dict[str, str]
    newcomers: tuple[Holder, ...] = ()

    def of(self, peer_id: str) -> Holder | None:
        return next((holder for holder in self.holders if holder.peer_id == peer_id), None)


def swarm_seen(
    announcements: Sequence[Announcement], num_blocks: int, own: str = "", *, contested: bool = False
) -> Seen:
    """The servers that count for placement, this one (`own`, a peer id) among them, where it is, if it is there.

    `contested` settles what several do at once, without a word between them: the smaller peer id goes first, and does
    not see where the larger ones mean to go. A newcomer that has not begun to load announces its span as its next one,
    too.
    """
    doubts: dict[str, str] = {}
    believed = []
    for said in announcements:
        last = max(said.span.end, said.next_span.end if said.next_span is not None else 0)
        if said.num_blocks != num_blocks or last > num_blocks:
            doubts[said.peer_id] = (
                f"{said.peer_id} announces blocks {said.span} of {said.num_blocks} of a model that has {num_blocks}: "
                "left out"
            )
        else:
            believed.append(said)
    speeds = _believable(believed, doubts)
    holders, serving, newcomers = [], [], []
    for said in believed:
        speed, next_span = speeds[said.peer_id], said.next_span
        if said.state is ServerState.JOINING and next_span is not None:
            newcomers.append(Holder(said.peer_id, next_span, speed, False))
        # Who drains goes, whatever others mean to do.
        undecided = said.state is not ServerState.DRAINING
        if undecided and (said.peer_id == own or (contested and said.peer_id > own)):
            if said.state is ServerState.JOINING and next_span is not None:
                continue
            next_span = None
        if said.state is ServerState.ONLINE and next_span is None:
            holders.append(Holder(said.peer_id, said.span, speed, not said.fixed, _toll(said)))
            serving.append(holders[-1])
        elif said.state is ServerState.JOINING or next_span is not None:
            holders.append(Holder(said.peer_id, next_span or said.span, speed, False))
    return Seen(tuple(holders), tuple(serving), doubts, tuple(newcomers))


def _toll(said: Announcement) -> float:
    """Loading takes time, and the caches of the sessions there are rebuilt elsewhere."""
    used = 1 - said.cache_tokens_free / said.cache_tokens if said.cache_tokens else 0.0
    return (1 + min(said.load_seconds / USUAL_LOAD, 9.0)) * (1 + used)


def _believable(announcements: Sequence[Announcement], doubts: dict[str, str]) -> dict[str, float]:
    """Throughputs by peer id: of computing and network the slower, in few digits, none absurdly high."""
    said = {
        each.peer_id: min(steps_per_second(each.step_seconds), steps_per_second(each.network_seconds))
        if each.network_seconds
        else steps_per_second(each.step_seconds)
        for each in announcements
    }
    measured = [said[each.peer_id] for each in announcements if each.step_seconds]
    middle = statistics.median_low(measured) if measured else 1.0
    believed = {}
    for each in announcements:
        # Who has not measured yet is taken for average.
        speed = said[each.peer_id] if each.step_seconds else middle
        most = MOST_OF_MEDIAN * middle
        if speed > most:
            doubts[each.peer_id] = (
                f"{each.peer_id} announces {speed:.0f} steps/s, {speed / middle:.0f} times the middle of the swarm: "
                f"taken for {most:.0f}"
            )
        believed[each.peer_id] = float(f"{max(_LEAST, min(speed, most)):.{_DIGITS}g}")
    return believed
