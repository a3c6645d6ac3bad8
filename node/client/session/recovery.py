"""How a session goes on when something fails: pure state machines, without clock and network.

`next_action(state, event)` decides what is done with one step of a session at the servers of its chain. The session
(`step.StepRun`) carries the action out and reports what came of it as the next event:

    Send -> Receive -> Answered -> the next server ... -> Finish
                    -> Late: send what was pushed and perhaps lost; then wait on, while a standby is prepared
                    -> StandbyReady: Switch to it
                    -> StreamEnded: Reconnect; after a head start Race (reconnect or replace, what is ready first)
                    -> ServerError: Replace; too many: GiveUp

A stream ends when the server dies, and just as well when a relay does, when a NAT forgets or when this machine changes
its address. In the latter cases the server still has the cache, and taking the session up again costs a dial and one
round trip where a replacement costs a replay.

`next_path_action(state, event)` does the same for the stream to one server, between steps as well as in the middle of
one; `reconnector.SessionReconnector` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from ..request import MAX_FAILURES

MOST_LOSSES: Final = 4
"""Streams to one server that may end at one step, one after another."""
ROUND_TRIPS: Final = 8
"""For a dial (TCP, Noise, Yamux; a circuit's two more) and the Resume."""
LEAST_HEAD_START: Final = 0.25
MOST_HEAD_START: Final = 2.0
FIRST_TIMEOUT: Final = 2.0
LONGEST_TIMEOUT: Final = 8.0
PAUSE: Final = 0.3
"""Seconds between two attempts to take a session up."""
REFRESH_AFTER: Final = 2
"""Failed attempts after which the swarm is asked where the server is now."""


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
    or until the first attempt has failed; whichever is ready first goes on."""

    rejoin: bool
    replace_after: float


def after_loss(loss: Loss) -> LossPlan:
    """Whether to wait for the same server, and from when on others are prepared meanwhile."""
    if loss.kept <= 0 or loss.gone or loss.standby_ready or loss.losses > MOST_LOSSES:
        return LossPlan(rejoin=False, replace_after=0.0)
    if loss.attempts:
        return LossPlan(rejoin=True, replace_after=0.0)
    head_start = min(MOST_HEAD_START, max(LEAST_HEAD_START, ROUND_TRIPS * loss.round_trip))
    return LossPlan(rejoin=True, replace_after=head_start)


def attempt_timeout(attempts: int, round_trip: float) -> float:
    """Seconds that the next attempt may take after `attempts` that failed."""
    return min(LONGEST_TIMEOUT, FIRST_TIMEOUT * 2.0 ** min(attempts, 8) + ROUND_TRIPS * round_trip)


# --- one step on its way through the chain

Phase = Literal["sending", "pushed", "sent", "late", "reconnecting", "racing", "replacing", "switching", "over"]


@dataclass(frozen=True)
class StepState:
    """A step at one server of the chain.

    servers: of the chain from this one on to the last.
    phase: what is being done. "pushed": the server has the step without us, or another one is sending it there.
    losses: streams to this server that have ended at this step.
    failures: of servers for these blocks at this step. refusals: of these, how many said that the step is wrong.
    """

    servers: int
    phase: Phase = "sending"
    losses: int = 0
    failures: int = 0
    refusals: int = 0


@dataclass(frozen=True)
class Sent:
    """The step has left for the server."""


@dataclass(frozen=True)
class Answered:
    """The server's answer is here and checked; `handed_on`: the server has pushed its output to the next one."""

    handed_on: bool


@dataclass(frozen=True)
class Late:
    """No answer within what was waited for."""


@dataclass(frozen=True)
class StandbyReady:
    """Other servers have come to where the late one is."""


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
class Reconnected:
    """The session goes on at the same server over another stream; `held`: it has the step already."""

    held: bool


@dataclass(frozen=True)
class HeadStartOver:
    """The session is not back after the head start, or an attempt to take it up has failed."""


@dataclass(frozen=True)
class SessionGone:
    """The server does not hold the session any more."""


@dataclass(frozen=True)
class Replaced:
    """So many other servers are in the place of this one, brought to where it was."""

    servers: int


@dataclass(frozen=True)
class SwitchFailed:
    """The standby failed in the last moment."""


@dataclass(frozen=True)
class NobodyElse:
    """No other servers can take the place of this one, and it does not come back."""


StepEvent = (
    Sent
    | Answered
    | Late
    | StandbyReady
    | StreamEnded
    | ServerError
    | Reconnected
    | HeadStartOver
    | SessionGone
    | Replaced
    | SwitchFailed
    | NobodyElse
)


@dataclass(frozen=True)
class Send:
    """Send the step. `anew`: as a new request with a number of its own, for servers that have not been asked."""

    anew: bool


@dataclass(frozen=True)
class Receive:
    """Wait for the answer, as long as is due for a step that was "pushed", was "sent", or is "late" already."""

    phase: Phase


@dataclass(frozen=True)
class Reconnect:
    """Wait until the session is back at the same server, for so many seconds at most."""

    head_start: float


@dataclass(frozen=True)
class Race:
    """Wait on, and bring others to the server's place meanwhile; what is ready first goes on."""


@dataclass(frozen=True)
class Replace:
    """Bring others to the server's place."""


@dataclass(frozen=True)
class Switch:
    """Put the standby in the server's place."""


@dataclass(frozen=True)
class GiveUp:
    """Raise the last error: the session holds what it held before."""


@dataclass(frozen=True)
class Finish:
    """The last server has answered."""


StepAction = Send | Receive | Reconnect | Race | Replace | Switch | GiveUp | Finish

_AWAITED: Final[dict[type[object], tuple[Phase, ...]]] = {
    Sent: ("sending",),
    Answered: ("pushed", "sent", "late"),
    Late: ("pushed", "sent", "late"),
    StandbyReady: ("late",),
    StreamEnded: ("sending", "pushed", "sent", "late"),
    ServerError: ("sending", "pushed", "sent", "late"),
    Reconnected: ("reconnecting", "racing"),
    HeadStartOver: ("reconnecting",),
    SessionGone: ("reconnecting",),
    Replaced: ("racing", "replacing", "switching"),
    SwitchFailed: ("switching",),
    NobodyElse: ("racing", "replacing"),
}
"""In which phases an event can come."""


def begin_step(servers: int) -> tuple[StepState, StepAction]:
    """A step before a chain of so many servers."""
    return StepState(servers), Send(anew=True)


def next_action(state: StepState, event: StepEvent) -> tuple[StepState, StepAction]:
    """What is to be done after `event`.

    Raises:
        ValueError: the event cannot come in this state.
    """
    if state.phase not in _AWAITED[type(event)]:
        raise ValueError(f"{event} cannot come while a step is {state.phase}")
    match event:
        case Sent():
            return replace(state, phase="sent"), Receive("sent")
        case Answered():
            return _after_answer(state, event)
        case Late():
            return _after_silence(state)
        case StandbyReady() if state.failures < MAX_FAILURES:
            return replace(state, phase="switching", failures=state.failures + 1), Switch()
        case SwitchFailed():
            return replace(state, phase="late"), Receive("late")
        case Replaced():
            # Numbers that were given out for the servers behind may be used up: the step is asked anew.
            servers = state.servers - 1 + event.servers
            return replace(state, servers=servers, phase="sending", losses=0), Send(anew=True)
        case Reconnected():
            return _after_return(state, event.held)
        case HeadStartOver():
            return replace(state, phase="racing"), Race()
        case _:
            return _after_failure(state, event)


def _after_answer(state: StepState, event: Answered) -> tuple[StepState, StepAction]:
    if state.servers == 1:
        return replace(state, servers=0, phase="over"), Finish()
    if event.handed_on:
        return StepState(state.servers - 1, "pushed"), Receive("pushed")
    return StepState(state.servers - 1), Send(anew=False)


def _after_silence(state: StepState) -> tuple[StepState, StepAction]:
    if state.phase == "pushed":  # what was pushed may be lost; a repeated step is answered once
        return replace(state, phase="sending"), Send(anew=False)
    if state.phase == "sent":
        return replace(state, phase="late"), Receive("late")
    return _after_failure(state, ServerError())


def _after_return(state: StepState, held: bool) -> tuple[StepState, StepAction]:
    if held:  # what the server had done is answered once more
        return replace(state, phase="pushed"), Receive("pushed")
    return replace(state, phase="sending"), Send(anew=False)


def _after_failure(state: StepState, event: StepEvent) -> tuple[StepState, StepAction]:
    over = replace(state, phase="over"), GiveUp()
    if isinstance(event, NobodyElse):
        return over
    if isinstance(event, SessionGone):
        return replace(state, phase="replacing"), Replace()
    blamed = isinstance(event, ServerError) and event.blames_step
    state = replace(state, failures=state.failures + 1, refusals=state.refusals + blamed)
    if state.failures > MAX_FAILURES or state.refusals > 1:
        return over
    if isinstance(event, StreamEnded):
        state = replace(state, losses=state.losses + 1)
        plan = after_loss(replace(event.loss, losses=state.losses))
        if plan.rejoin and event.returned:
            return _after_return(state, event.held)
        if plan.rejoin and plan.replace_after:
            return replace(state, phase="reconnecting"), Reconnect(plan.replace_after)
        if plan.rejoin:
            return replace(state, phase="racing"), Race()
    return replace(state, phase="replacing"), Replace()


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
class DirectConnection:
    """There is a connection without a relay, and the stream has one."""


@dataclass(frozen=True)
class AttemptFailed:
    """Nothing came of taking the session up, by now; `refused`: the server is there, and the session is not."""

    now: float
    refused: bool = False


@dataclass(frozen=True)
class PathRestored:
    """The session goes on over another stream."""


@dataclass(frozen=True)
class NotMoved:
    """The session could not be moved to a direct connection; the stream that there is still serves."""


@dataclass(frozen=True)
class Dismissed:
    """The session needs this server no more."""


PathEvent = PathLost | DirectConnection | AttemptFailed | PathRestored | NotMoved | Dismissed


@dataclass(frozen=True)
class Watch:
    """Wait until the stream is lost, or a direct connection is there for a relayed one."""


@dataclass(frozen=True)
class TakeUp:
    """Try to take the session up on another stream, after `pause` seconds; `refresh`: ask where the server is now."""

    attempts: int
    pause: float
    refresh: bool


@dataclass(frozen=True)
class Move:
    """Take the session up on a direct connection, between two steps."""


@dataclass(frozen=True)
class Stop:
    """Nothing is left to be done."""


PathAction = Watch | TakeUp | Move | Stop


def next_path_action(state: PathState, event: PathEvent) -> tuple[PathState, PathAction]:
    """What is to be done with the stream to a server after `event`; a session that is gone never comes back."""
    match event:
        case Dismissed():
            state = replace(state, gone=True)
        case PathRestored():
            state = PathState(gone=state.gone)
        case PathLost() if not state.lost:
            state = replace(state, lost=True, until=event.until)
        case AttemptFailed():
            gone = state.gone or event.refused or event.now >= state.until
            state = replace(state, attempts=state.attempts + 1, gone=gone)
        case DirectConnection() if not (state.lost or state.gone):
            return state, Move()
    if state.gone:
        return state, Stop()
    if state.lost:
        refresh = state.attempts >= REFRESH_AFTER
        return state, TakeUp(state.attempts, PAUSE if state.attempts else 0.0, refresh)
    return state, Watch()
