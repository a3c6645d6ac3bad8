"""At which relays to hold a place: a pure decision, taken anew whenever something changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

_SPARE: Final = 1  # places kept beyond those wanted, when a lost relay is back
FAITH: Final = 2.0  # seconds for a lost relay to come back before another one takes its place
_AT_ONCE: Final = 4  # relays tried side by side
_QUICK: Final = (0.25, 1.0)  # seconds between tries of a relay that we held a place at: the first, the longest
_QUICK_TRIES: Final = 120  # after which it is tried as seldom as a stranger
_SLOW: Final = (1.0, 60.0)  # the same of one that we never held a place at
_REFUSED: Final = (30.0, 600.0)  # of one that has no place for us


class Bond(Enum):
    """How we stand with a relay."""

    RESERVING = "asking for a place"
    HELD = "holding a place"
    LOST = "out of reach"
    REFUSED = "it has no place for us"


@dataclass(frozen=True)
class Candidate:
    """A relay to choose from. Those of a lower `rank` are preferred."""

    peer_id: str
    rank: int


@dataclass(frozen=True)
class RelayState:
    """`failures` are those in a row; `lost_at` is when we lost the last place that we held there, if ever; times are
    in seconds."""

    bond: Bond
    failures: int = 0
    held_before: bool = False
    lost_at: float = 0.0
    retry_at: float = 0.0


@dataclass(frozen=True)
class RelayPlan:
    """Relays to begin with and to give up now, and when to think again (None: when something changes)."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    wake: float | None = None


def retry_pause(bond: Bond, failures: int, held_before: bool) -> float:
    """Seconds until a relay is tried again after so many `failures` in a row."""
    if bond is Bond.REFUSED:
        first, longest = _REFUSED
    else:
        first, longest = _QUICK if held_before and failures < _QUICK_TRIES else _SLOW
    return float(min(first * 2 ** min(failures - 1, 16), longest))


def plan_relays(
    candidates: Sequence[Candidate], states: Mapping[str, RelayState], *, wanted: int, now: float
) -> RelayPlan:
    """What to do to hold `wanted` places. `states` are those of all relays that were ever tried, by peer id.

    A relay that held a place for us is tried until it is back, which is quick since its clients know it; another one
    takes its place meanwhile if it stays away. At one place too many we stay: the next loss then costs nothing.
    """
    ranks = {each.peer_id: each.rank for each in candidates}
    held = [peer for peer, state in states.items() if state.bond is Bond.HELD]
    busy = [peer for peer, state in states.items() if state.bond is Bond.RESERVING]
    lost = {peer: state for peer, state in states.items() if state.bond in (Bond.LOST, Bond.REFUSED)}
    old = [peer for peer in (*busy, *lost) if states[peer].held_before]
    # Whom we may expect back any moment. Without any place left, there is nothing to wait for.
    expected = [peer for peer in old if held and now - states[peer].lost_at < FAITH]
    missing = wanted - len(held) - len(expected) - sum(not states[peer].held_before for peer in busy)

    due = [peer for peer in ranks if peer not in states or (peer in lost and lost[peer].retry_at <= now)]
    due += [peer for peer in old if peer in lost and peer not in ranks and lost[peer].retry_at <= now]
    due.sort(key=lambda peer: (peer not in old, ranks.get(peer, 99), _failures(states, peer)))
    strangers = [peer for peer in due if peer not in old]
    wanted_now = [peer for peer in due if peer in old] + strangers[: max(missing, 0)]
    start = wanted_now[: max(_AT_ONCE - len(busy), 0)]

    surplus = sorted(held, key=lambda peer: ranks.get(peer, 99))[wanted + _SPARE :]
    wakes = [state.retry_at for peer, state in lost.items() if peer in old or missing > 0]
    wakes += [states[peer].lost_at + FAITH for peer in old]  # then faith ends
    if len(wanted_now) > len(start):
        wakes.append(now + 1.0)
    future = [when for when in wakes if when > now]
    return RelayPlan(tuple(start), tuple(surplus), min(future, default=None))


def _failures(states: Mapping[str, RelayState], peer: str) -> int:
    return states[peer].failures if peer in states else 0
