"""How a session goes on when something fails: pure state machines, without clock and network.

`next_action(state, event)` decides what is done with one step of a session at one server of its chain. It is asked from
the first thing that goes wrong there until an answer is read. `step.PipelineStep` carries the action out and reports
what came of it as the next event:

    LATE: Send what was pushed and perhaps lost; then Receive on, while a standby is prepared
    STANDBY_READY: SWITCH to it
    StreamEnded: Reconnect; after a head start RACE (reconnect or replace)
    ServerError: REPLACE; too many: GIVE_UP
    Misled: Send again, or REPLACE the server before
    Reconnected, REPLACED: Send, or Receive what the server has

A stream ends when the server dies. It ends, too, when a relay does, when a NAT forgets or when this machine changes its
address. Then the server still has the cache. Taking the session up again costs a dial and one round trip, and a
replacement a replay.

`next_path_action(state, event)` does the same for the stream to one server, between steps as well as in the middle of
one; `link.SessionReconnector` carries it out.

`next_search_action(attempts, now, not_before)` says when others are asked to take some blocks beside those that were
asked already and are silent; `opening.Opening` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal

from ...network.shares import backoff
from ..request import MAX_FAILURES


@dataclass(frozen=True)
class RecoveryPolicy:
    """How often, and for how long, a session is taken up again."""

    most_losses: int = 4  # Streams to one server that may end at one step, one after another
    round_trips: int = 8  # For a dial (TCP, Noise, Yamux; a circuit's two more) and the Resume
    least_head_start: float = 0.25
    most_head_start: float = 2.0
    first_timeout: float = 2.0
    longest_timeout: float = 8.0
    pause: float = 0.3  # Seconds between two attempts to take a session up
    most_attempts: int = 8
    """Chains for the same blocks that are asked side by side: each reserves room at its servers until one is chosen."""
    least_attempt: float = 4.0
    """Seconds that a silent chain has at least before it makes room for another one beside `MOST_ATTEMPTS`."""
    refresh_after: int = 2  # Failed attempts after which the swarm is asked where the server is now


RECOVERY: Final = RecoveryPolicy()


# --- wait for the same server, or take others?


@dataclass(frozen=True)
class Loss:
    """What is known when a stream has ended in the middle of a step.

    kept: seconds for which the server said it keeps the session; 0: not at all.
    gone: the session is known to be over there, or was looked for long enough.
    attempts: how often taking it up again has failed since.
    losses: streams to this server that have ended at this step, this one included.
    standby_ready: others are prepared to take its place.
    round_trip: to the server, in seconds.
    """

    kept: float
    gone: bool = False
    attempts: int = 0
    losses: int = 1
    standby_ready: bool = False
    round_trip: float = 0.0


@dataclass(frozen=True)
class LossPlan:
    """`rejoin`: wait for the same server. `replace_after`: seconds until others are brought to its place beside that,
    or until the first attempt has failed. Whichever is ready first goes on."""

    rejoin: bool
    replace_after: float


def after_loss(loss: Loss) -> LossPlan:
    """Whether to wait for the same server, and from when on others are prepared meanwhile."""
    if loss.kept <= 0 or loss.gone or loss.standby_ready or loss.losses > RECOVERY.most_losses:
        return LossPlan(rejoin=False, replace_after=0.0)
    if loss.attempts:
        return LossPlan(rejoin=True, replace_after=0.0)
    head_start = min(RECOVERY.most_head_start, max(RECOVERY.least_head_start, RECOVERY.round_trips * loss.round_trip))
    return LossPlan(rejoin=True, replace_after=head_start)


def attempt_timeout(attempts: int, round_trip: float) -> float:
    """Seconds that the next attempt may take after `attempts` that failed."""
    longest = RECOVERY.longest_timeout
    return min(longest, backoff(attempts + 1, RECOVERY.first_timeout, longest) + RECOVERY.round_trips * round_trip)


# --- one step at one server

Phase = Literal["sending", "pushed", "sent", "late", "reconnecting", "racing", "replacing", "switching", "over"]


@dataclass(frozen=True)
class StepState:
    """A step at one server of the chain.

    phase: what is being done. "pushed": the server has the step without us, or another one is sending it there.
    losses: streams to this server that have ended at this step.
    failures: of servers for these blocks at this step. refusals: of these, how many said that the step is wrong.
    misled: whether this server has been pushed something else before.
    """

    phase: Phase = "sending"
    losses: int = 0
    failures: int = 0
    refusals: int = 0
    misled: bool = False


class Signal(Enum):
    """What happened, where there is nothing more to say of it."""

    SENT = "the step has left for the server"
    LATE = "no answer came within what was waited for"
    STANDBY_READY = "other servers have come to where the late one is"
    HEAD_START_OVER = "the session is not back after the head start, or an attempt to take it up has failed"
    SESSION_GONE = "the server does not hold the session any more"
    REPLACED = "others are in the place of the server, brought to where it was"
    SWITCH_FAILED = "the standby failed in the last moment"
    NOBODY_ELSE = "no others can take the place of the server, and it does not come back"


@dataclass(frozen=True)
class StreamEnded:
    """The stream to the server has ended. `returned`: the session goes on over another one by now, and `held` whether
    the server has the step."""

    loss: Loss
    returned: bool = False
    held: bool = False


@dataclass(frozen=True)
class ServerError:
    """The server failed, refused or cheated; `blames_step`: it says that the step is wrong."""

    blames_step: bool = False


@dataclass(frozen=True)
class Misled:
    """The server before has pushed something else than it answered; `proved`: the step is back before it then."""

    proved: bool


@dataclass(frozen=True)
class Reconnected:
    """The session goes on at the same server over another stream; `held`: it has the step already."""

    held: bool


StepEvent = Signal | StreamEnded | ServerError | Misled | Reconnected


@dataclass(frozen=True)
class Send:
    """Send the step. `anew`: as a new request with a number of its own, for servers that have not been asked."""

    anew: bool


@dataclass(frozen=True)
class Receive:
    """Wait for the answer, as long as is due for a step that was "pushed", "sent", or is "late"."""

    phase: Phase


@dataclass(frozen=True)
class Reconnect:
    """Wait until the session is back at the same server, for these seconds at most."""

    head_start: float


class Recover(Enum):
    """What else there is to do."""

    RACE = "wait on for the same server, and bring others to its place meanwhile; what is ready first goes on"
    REPLACE = "bring others to the server's place"
    SWITCH = "put the standby in the server's place"
    GIVE_UP = "raise the last error: the session holds what it held before"


StepAction = Send | Receive | Reconnect | Recover

_WAITING: Final = ("pushed", "sent", "late")
_AWAITED: Final[dict[Signal | type, tuple[Phase, ...]]] = {
    Signal.SENT: ("sending",),
    Signal.LATE: _WAITING,
    Signal.STANDBY_READY: ("sending", "late"),
    Signal.HEAD_START_OVER: ("reconnecting",),
    Signal.SESSION_GONE: ("reconnecting",),
    Signal.REPLACED: ("racing", "replacing", "switching"),
    Signal.SWITCH_FAILED: ("switching",),
    Signal.NOBODY_ELSE: ("racing", "replacing"),
    StreamEnded: ("sending", *_WAITING),
    ServerError: ("sending", *_WAITING),
    Misled: _WAITING,
    Reconnected: ("reconnecting", "racing"),
}
"""In which phases an event can come."""


def next_action(state: StepState, event: StepEvent) -> tuple[StepState, StepAction]:
    """What is to be done after `event`.

    Raises:
        ValueError: the event cannot come in this state.
    """
    if state.phase not in _AWAITED[event if isinstance(event, Signal) else type(event)]:
        raise ValueError(f"{event} cannot come while a step is {state.phase}")
    match event:
        case Reconnected():
            return _after_return(state, event.held)
        case Signal.REPLACED:
            # Numbers that were given out for the servers behind may be used up: the step is asked anew.
            return replace(state, phase="sending", losses=0, misled=False), Send(anew=True)
        case Signal.SENT:
            return replace(state, phase="sent"), Receive("sent")
        case Signal.LATE if state.phase == "pushed":  # it may be lost; a repeated step is answered once
            return replace(state, phase="sending"), Send(anew=False)
        case Signal.SWITCH_FAILED | Signal.LATE if state.phase != "late":
            return replace(state, phase="late"), Receive("late")
        case Signal.HEAD_START_OVER:
            return replace(state, phase="racing"), Recover.RACE
        case Signal.SESSION_GONE:
            return replace(state, phase="replacing"), Recover.REPLACE
        case Signal.NOBODY_ELSE:
            return replace(state, phase="over"), Recover.GIVE_UP
        case _:
            return _after_failure(state, event)


def _after_return(state: StepState, held: bool) -> tuple[StepState, StepAction]:
    if held:  # what the server had done is answered once more
        return replace(state, phase="pushed"), Receive("pushed")
    return replace(state, phase="sending"), Send(anew=False)


def _after_failure(state: StepState, event: StepEvent) -> tuple[StepState, StepAction]:
    """The server has failed, or is so late that others have overtaken it."""
    blamed = isinstance(event, ServerError) and event.blames_step
    state = replace(state, failures=state.failures + 1, refusals=state.refusals + blamed)
    if state.failures > MAX_FAILURES or state.refusals > 1:
        return replace(state, phase="over"), Recover.GIVE_UP
    if isinstance(event, Misled) and event.proved:
        return replace(state, phase="replacing", losses=0), Recover.REPLACE
    if isinstance(event, Misled) and not state.misled:
        return replace(state, phase="sending", misled=True), Send(anew=True)
    if event is Signal.STANDBY_READY:
        return replace(state, phase="switching"), Recover.SWITCH
    if isinstance(event, StreamEnded):
        state = replace(state, losses=state.losses + 1)
        plan = after_loss(replace(event.loss, losses=state.losses))
        if plan.rejoin and event.returned:
            return _after_return(state, event.held)
        if plan.rejoin and plan.replace_after:
            return replace(state, phase="reconnecting"), Reconnect(plan.replace_after)
        if plan.rejoin:
            return replace(state, phase="racing"), Recover.RACE
    return replace(state, phase="replacing"), Recover.REPLACE


# --- the stream to one server


@dataclass(frozen=True)
class PathState:
    """The stream to one server.

    lost: it has ended, and is looked for until `until`, seconds of the caller's clock.
    gone: the session is over at the server, or was looked for long enough.
    attempts: of taking the session up that have failed since the stream was lost.
    """

    lost: bool = False
    gone: bool = False
    attempts: int = 0
    until: float = 0.0

    @property
    def may_return(self) -> bool:
        return self.lost and not self.gone


@dataclass(frozen=True)
class PathLost:
    """The stream has ended; the server keeps the session until then."""

    until: float


@dataclass(frozen=True)
class AttemptFailed:
    """Nothing came of taking the session up, by now; `refused`: the server is there, and the session is not."""

    now: float
    refused: bool = False


class PathSignal(Enum):
    """What else happens to a stream."""

    DIRECT = "there is a connection without a relay, and the stream has one"
    RESTORED = "the session goes on over another stream"
    NOT_MOVED = "the session could not be moved to a direct connection; the stream that there is still serves"
    DISMISSED = "the session needs this server no more"


PathEvent = PathLost | AttemptFailed | PathSignal


@dataclass(frozen=True)
class TakeUp:
    """Try to take the session up on another stream, after `pause` seconds; `refresh`: ask where the server is now."""

    attempts: int
    pause: float
    refresh: bool


class PathWork(Enum):
    """What else there is to do for a stream."""

    WATCH = "wait until the stream is lost, or a direct connection is there for a relayed one"
    MOVE = "take the session up on a direct connection, between two steps"
    STOP = "nothing"


PathAction = TakeUp | PathWork


def next_path_action(state: PathState, event: PathEvent) -> tuple[PathState, PathAction]:
    """What is to be done with the stream to a server after `event`; a session that is gone never comes back."""
    match event:
        case PathSignal.DISMISSED:
            state = replace(state, gone=True)
        case PathSignal.RESTORED:
            state = PathState(gone=state.gone)
        case PathLost() if not state.lost:
            state = replace(state, lost=True, until=event.until)
        case AttemptFailed():
            gone = state.gone or event.refused or event.now >= state.until
            state = replace(state, attempts=state.attempts + 1, gone=gone)
    if state.gone:
        return state, PathWork.STOP
    if state.lost:
        return state, TakeUp(
            state.attempts, RECOVERY.pause if state.attempts else 0.0, state.attempts >= RECOVERY.refresh_after
        )
    return state, PathWork.MOVE if event is PathSignal.DIRECT else PathWork.WATCH


# --- servers for some blocks, several chains side by side


@dataclass(frozen=True)
class Attempt:
    """A chain of servers that is asked to take some blocks.

    begun: when; due: when something should have come of what it does now, both seconds of the caller's clock. routed:
    it is known which servers these are.
    """

    begun: float
    due: float
    routed: bool


@dataclass(frozen=True)
class AskOthers:
    """Ask other servers beside those that were asked, without those of them that are silent; `instead_of`: in the place
    of this one of the attempts."""

    instead_of: int | None = None


@dataclass(frozen=True)
class AwaitAttempts:
    """Wait until an attempt ends or gets on, but only until then."""

    until: float


SearchAction = AskOthers | AwaitAttempts


def next_search_action(attempts: Sequence[Attempt], now: float, not_before: float) -> SearchAction:
    """What is to be done while chains of servers are asked to take some blocks.

    Others are asked when all are overdue: one that gets on is waited for. `not_before` that moment there are no others
    (seconds of the caller's clock).
    """
    if not attempts:
        return AskOthers()
    if not all(attempt.routed for attempt in attempts):
        return AwaitAttempts(math.inf)
    due = max(not_before, *(attempt.due for attempt in attempts))
    if now < due:
        return AwaitAttempts(due)
    if len(attempts) < RECOVERY.most_attempts:
        return AskOthers()
    oldest = min(range(len(attempts)), key=lambda index: attempts[index].begun)
    over = attempts[oldest].begun + RECOVERY.least_attempt
    return AskOthers(instead_of=oldest) if now >= over else AwaitAttempts(over)
