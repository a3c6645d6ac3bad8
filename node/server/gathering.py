"""Whether a batch of decode steps begins at once, or waits a moment for sessions that are about to come back.

After a batch its sessions are answered one after the other. Their clients send the next steps within some milliseconds.
If the device begins again with the first that is back, the others become a second batch, and the two alternate for
ever. Each reads all weights, for half of the sessions. To wait for the others costs the device that time, and saves a
batch. Two things say which of both gives more tokens a second: what batches of each size take (`BatchCost`), and how
long each session was away after its last answers. `gathering_time`, a pure function, decides it anew whenever a step
has come. The device's idle time counts against waiting longer, so it waits no longer than a batch takes. Where a
prefill waits it does not: all who are quick come back during its chunk.

How long a session is away is smoothed as the timer of RFC 6298, section 2, does it: a mean and a mean deviation. Of
several that are equally far, the last is expected later than one alone: times count as exponential beyond their least.
It is the harmonic number of them, less one, in spreads. A session is expected for four deviations, and not any longer
when those are over. So one that is gone or slow is waited for once at most, and a chain with long links never.

A client may come back quickly for a while and then late, to make others wait in vain. So a peer is waited for no longer
than its credit. That is half of the device's time that its own steps took, less what was waited for it in vain. By any
number of identities he wastes at most that part of what he could use by asking for steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..network.shares import middle
from ..swarm.cost import Estimate, EstimateRule
from .turns import Shares, Turn, Waiting, most_rows


@dataclass(frozen=True)
class GatheringPolicy:
    """When a batch waits for sessions that are about to come back."""

    worth: float = 1.05  # Waiting has to promise this multiple of the tokens a second
    few: int = 2  # Turn-around times that have to be known of a session
    spread: float = 1.36  # Mean of an exponential distribution over its mean deviation: e / 2
    least: float = 0.0002  # Seconds of a wait: less than what a thread needs to wake
    late: int = 4  # Mean deviations after which a session is not expected any more: the timer of RFC 6298, section 2
    away: float = 1.0  # Seconds after which a session has paused: what is known of it is from another time
    earned: float = 0.5
    saved: int = 4  # Times of a batch that a peer's credit may grow to
    peers: int = 1024


GATHERING: Final = GatheringPolicy()

_TURN_AROUND: Final = EstimateRule(newest=1 / 8, most=1e9)
"""As the timer of RFC 6298 has it. Who comes back late is not to be taken for one that is quick."""


class Wait(NamedTuple):
    """A wait of `seconds` for a number of steps; 0: a batch begins at once."""

    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class Returning:
    """A session whose next step, of `rows`, is to be here in `due` seconds, for `peer`; `spread`: by how much later the
    later ones of such sessions come, as the mean of an exponential distribution."""

    rows: int
    due: float
    spread: float = 0.0
    peer: str = ""


def gathering_time(
    waiting: Sequence[Waiting],
    turn: Turn,
    returning: Sequence[Returning],
    shares: Shares,
    idle: float = 0.0,
    usual: float = 0.0,
) -> Wait:
    """The wait for some of `returning` before steps are chosen again, or none: `turn`, chosen from `waiting`, begins.

    Args:
        idle: seconds for which the device has had nothing to do.
        usual: the turn-around time of those that wait, in seconds.
    """
    cost = shares.cost
    if cost is None or turn.prefill is not None or not turn.decode or shares.behind:
        return Wait()
    now = sum(waiting[index].rows for index in turn.decode)
    here = sum(step.rows for step in waiting)
    seconds = cost.seconds(now)
    soon = sorted((one for one in returning if one.due < seconds), key=lambda one: one.due)
    if not soon:
        return Wait()
    most = _most_rows(waiting, soon, shares)
    # What comes of beginning: this batch in turns with one of all others, or again and again without those.
    others = min(here - now + sum(one.rows for one in soon), most)
    best = GATHERING.worth * max((now + others) / (seconds + cost.seconds(others)), now / (max(idle, usual) + seconds))
    wait, order = Wait(), 0.0
    for place, one in enumerate(soon):
        order += 1 / (len(soon) - place)  # spreads until this number of equal ones is here, on average
        due = max(one.due + one.spread * (order - 1), 0.0)
        here += one.rows
        rows = min(here, most)
        rate = rows / (idle + due + cost.seconds(rows))
        if rate > best:
            best, wait = rate, Wait(max(due, GATHERING.least), place + 1)
    return wait


def _most_rows(waiting: Sequence[Waiting], soon: Sequence[Returning], shares: Shares) -> int:
    """Rows of a batch in which all of them may take part, by the shares of the peers."""
    rows_of: Counter[str] = Counter()
    for step in waiting:
        rows_of[step.peer] += step.rows
    for one in soon:
        rows_of[one.peer] += one.rows
    return most_rows(rows_of, shares)


@dataclass
class _Session:
    """What is known of a session. `answered`: when its last step was; None while one waits."""

    peer: str
    rows: int
    answered: float | None = None
    away: Estimate = field(default_factory=Estimate)
    awaited: bool = False

    def came(self, now: float) -> None:
        if self.answered is None:
            return
        away, self.answered, self.awaited = max(0.0, now - self.answered), None, False
        if away > GATHERING.away or not self.away.count:
            self.away = Estimate(_TURN_AROUND)
        if away <= GATHERING.away:
            self.away.note(away)

    def returning(self, now: float) -> Returning:
        assert self.answered is not None
        spread = GATHERING.spread * self.away.deviation
        return Returning(self.rows, max(self.answered + self.away.value - now, spread), spread, self.peer)

    def left(self, now: float) -> float:
        """Seconds from `now` after which it is not expected any more."""
        assert self.answered is not None
        return self.answered + self.away.value + GATHERING.late * self.away.deviation - now


class Gathering:
    """Which sessions were answered and are about to come back, and how much waiting each peer may cause.

    Sessions are any hashable objects; all times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._sessions: dict[Hashable, _Session] = {}
        self._credit: dict[str, float] = {}
        self._ended = 0.0  # when the device last had nothing to do any more
        self._wait: tuple[float, float] | None = None  # since when it waits, and until when at most
        self._steps = 0  # the number of waiting ones with which it is decided anew

    def came(self, session: Hashable, now: float) -> None:
        """A step of the session is there since `now`."""
        if session in self._sessions:
            self._sessions[session].came(now)

    def gone(self, session: Hashable) -> None:
        self._sessions.pop(session, None)
        self._steps = 0

    def left(self, steps: int, now: float) -> float:
        """Seconds left of a wait that has not brought what it is for yet, where `steps` decode steps wait; else 0."""
        return max(self._wait[1] - now, 0.0) if self._wait is not None and steps < self._steps else 0.0

    def answered(self, session: Hashable, peer: str, rows: int, now: float) -> None:
        """A decode step of the session has been answered."""
        known = self._sessions.setdefault(session, _Session(peer, rows))
        known.rows, known.answered = rows, now

    def note_decode(self, rows: Mapping[str, int], seconds: float, now: float) -> None:
        """A batch with these numbers of rows of each peer took `seconds`, and ended `now`."""
        self.worked(now)
        total = sum(rows.values())
        for peer, count in rows.items():
            earned = GATHERING.earned * seconds * count / total
            self._credit[peer] = min(self._credit.pop(peer, 0.0) + earned, GATHERING.saved * seconds)
        while len(self._credit) > GATHERING.peers:
            del self._credit[next(iter(self._credit))]  # who has had no step for longest
        self._sessions = {
            session: known
            for session, known in self._sessions.items()
            if known.answered is None or now - known.answered <= GATHERING.away
        }

    def generating(self, now: float) -> bool:
        """Whether a decode step was answered lately in a session that may come back."""
        return any(
            known.answered is not None and now - known.answered <= GATHERING.away for known in self._sessions.values()
        )

    def worked(self, now: float) -> None:
        """The device did something until `now`."""
        self._ended = now

    def time(
        self, waiting: Sequence[Waiting], sessions: Sequence[Hashable], turn: Turn, shares: Shares, now: float
    ) -> float:
        """As `gathering_time` has it, for the waiting steps of `sessions`; 0 has the turn begin."""
        usual = (known.away.value for key in sessions if (known := self._sessions.get(key)) and known.away.count)
        away = [
            known
            for known in self._sessions.values()
            if known.answered is not None and known.away.count >= GATHERING.few
        ]
        awaited = [known for known in away if 0 < known.left(now) <= self._credit.get(known.peer, 0.0)]
        wait = gathering_time(
            waiting,
            turn,
            [known.returning(now) for known in awaited],
            shares,
            now - self._ended,
            middle(usual),
        )
        if wait.seconds > 0:
            since = self._wait[0] if self._wait is not None else now
            self._wait, self._steps = (since, now + wait.seconds), len(waiting) + wait.steps
            for known in awaited:
                known.awaited = True
            return wait.seconds
        if self._wait is not None:
            since, until = self._wait
            for peer in {known.peer for known in away if known.awaited and known.left(now) <= 0}:
                self._credit[peer] = max(0.0, self._credit.get(peer, 0.0) - (min(now, until) - since))
            self._wait, self._steps = None, 0
            for known in away:
                known.awaited = False
        return 0.0
