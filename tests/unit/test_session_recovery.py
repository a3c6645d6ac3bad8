"""One step of a session through servers that fail in any order: what the state machine decides, and that it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.deadlines import DEADLINES, open_patience
from petalnode.node.client.request import MAX_FAILURES
from petalnode.node.client.session.chain import Interruption, next_interruption
from petalnode.node.client.session.recovery import (
    RECOVERY,
    AskOthers,
    Attempt,
    AttemptFailed,
    AwaitAttempts,
    Loss,
    PathAction,
    PathEvent,
    PathLost,
    PathSignal,
    PathState,
    PathWork,
    Phase,
    Receive,
    Reconnect,
    Reconnected,
    Recover,
    Send,
    ServerError,
    Signal,
    StepAction,
    StepEvent,
    StepState,
    StreamEnded,
    TakeUp,
    after_loss,
    next_action,
    next_path_action,
    next_search_action,
)
from petalnode.node.errors import ServerFailed
from petalnode.node.swarm.routing import Hop
from petalnode.protocols.ids import Span


@dataclass
class Server:
    """What is true of a server, as the swarm around the state machine has it.

    `asked`: the number of its present request; `done`: the last one that it has carried out; `answers`: it has given.
    """

    sequence: int = 0
    asked: int = 0
    done: int = 0
    committed: list[int] = field(default_factory=list)


class World:
    """Servers that do whatever `draw` says, and a client that does what the state machine says.

    `trace`: for each server in turn, what happened there until it had answered, and what was decided.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy[object]], object], servers: int) -> None:
        self._draw = draw
        self.servers = [Server() for _ in range(servers)]
        self.index = 0
        self.trace: list[list[tuple[StepEvent, StepAction]]] = []
        self.handed_on = False

    @property
    def server(self) -> Server:
        return self.servers[self.index]

    @property
    def decided(self) -> list[tuple[StepEvent, StepAction]]:
        return [pair for visit in self.trace for pair in visit]

    def _choose(self, *names: str) -> str:
        return str(self._draw(st.sampled_from(names)))

    def run(self) -> StepState | None:
        """As `Pipeline` does it; the state in which it gave up, or None where all servers have answered."""
        while self.index < len(self.servers):
            self.trace.append([])
            event = None if self.handed_on else self.send(Send(anew=False))
            phase: Phase = "pushed" if self.handed_on else "sent" if event is Signal.SENT else "sending"
            state = StepState(phase)
            if event in (None, Signal.SENT):
                event = self.receive(Receive(phase))
            while event is not None:
                state, action = next_action(state, event)
                self.trace[-1].append((event, action))
                assert len(self.decided) < 40 * (MAX_FAILURES + 1) * 10, "it does not end"
                if action is Recover.GIVE_UP:
                    return state
                event = self.carry_out(action)
        return None

    def carry_out(self, action: StepAction) -> StepEvent | None:
        match action:
            case Send():
                return self.send(action)
            case Receive():
                return self.receive(action)
            case Reconnect():
                return {
                    "back": self.back,
                    "over": lambda: Signal.HEAD_START_OVER,
                    "gone": lambda: Signal.SESSION_GONE,
                }[self._choose("back", "over", "gone")]()
            case Recover.RACE:
                return {"back": self.back, "others": self.others, "nobody": lambda: Signal.NOBODY_ELSE}[
                    self._choose("back", "others", "nobody")
                ]()
            case Recover.REPLACE:
                return self.others() if self._draw(st.integers(0, 4)) else Signal.NOBODY_ELSE
            case Recover.SWITCH:
                return self.others() if self._draw(st.booleans()) else Signal.SWITCH_FAILED
            case _:
                raise AssertionError(action)

    def send(self, action: Send) -> StepEvent:
        server = self.server
        if action.anew or not server.asked:
            before, server.asked = server.asked, server.sequence + 1
            server.sequence = server.asked
            assert server.asked > before, "numbers only go up"
        assert server.asked not in server.committed, "a step that was answered is sent once more"
        outcome = self._choose("sent", "sent", "sent", "lost", "error")
        if outcome == "error":
            return ServerError(bool(self._draw(st.booleans())))
        if outcome == "lost":
            return self.lost(bool(self._draw(st.booleans())))
        if self._draw(st.booleans()):
            server.done = server.asked
        return Signal.SENT

    def receive(self, action: Receive) -> StepEvent | None:
        server = self.server
        assert server.asked, "an answer to nothing is waited for"
        outcomes = ["answer", "answer", "late", "lost", "error"] + ["standby"] * (action.phase == "late")
        match self._choose(*outcomes):
            case "answer":
                server.done = server.asked
                assert server.asked not in server.committed
                server.committed.append(server.asked)
                self.index += 1
                self.handed_on = bool(self._draw(st.booleans())) and self.index < len(self.servers)
                if self.handed_on:
                    following = self.server
                    following.sequence += 1
                    following.asked = following.sequence
                return None
            case "late":
                return Signal.LATE
            case "standby":
                return Signal.STANDBY_READY
            case "error":
                return ServerError(bool(self._draw(st.booleans())))
            case _:
                return self.lost(bool(self._draw(st.booleans())))

    def lost(self, carried_out: bool) -> StepEvent:
        server = self.server
        if carried_out:
            server.done = max(server.done, server.asked)
        loss = self._draw(
            st.builds(
                Loss,
                kept=st.sampled_from([0.0, 15.0]),
                gone=st.booleans(),
                attempts=st.integers(0, 2),
                standby_ready=st.booleans(),
                round_trip=st.floats(0, 10),
            )
        )
        assert isinstance(loss, Loss)
        return StreamEnded(loss, bool(self._draw(st.booleans())), server.done >= server.asked)

    def back(self) -> StepEvent:
        return Reconnected(self.server.done >= self.server.asked)

    def others(self) -> StepEvent:
        count = int(str(self._draw(st.integers(1, 3))))
        self.servers[self.index : self.index + 1] = [Server() for _ in range(count)]
        for server in self.servers[self.index + count :]:
            server.asked = 0
        return Signal.REPLACED


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, StepState | None]:
    world = World(draw, draw(st.integers(1, 4)))
    return world, world.run()


@given(worlds())
def test_every_step_ends_and_runs_once(ran: tuple[World, StepState | None]) -> None:
    world, state = ran
    if state is None:
        assert world.index == len(world.servers)
        assert all(len(server.committed) == 1 for server in world.servers)
    else:
        assert state.phase == "over"
        event, _ = world.decided[-1]
        assert not isinstance(event, Reconnected) and event is not Signal.REPLACED


@given(worlds())
def test_every_failure_leads_to_reconnection_replacement_or_end(ran: tuple[World, StepState | None]) -> None:
    for event, action in ran[0].decided:
        if isinstance(event, ServerError):
            assert action in (Recover.REPLACE, Recover.GIVE_UP)
        elif isinstance(event, StreamEnded):
            returned = isinstance(action, Receive | Send) and event.returned
            assert returned or isinstance(action, Reconnect | Recover)
        elif event is Signal.SESSION_GONE:
            assert action is Recover.REPLACE


@given(worlds())
def test_returning_server_gets_its_head_start(ran: tuple[World, StepState | None]) -> None:
    """No lost stream leads to a replacement before the patience with its server is over."""
    for visit in ran[0].trace:
        losses = 0
        for event, action in visit:
            if event is Signal.REPLACED:
                losses = 0
            if isinstance(event, StreamEnded):
                losses += 1
                loss = Loss(**{**event.loss.__dict__, "losses": losses})
                if after_loss(loss).replace_after:
                    assert action not in (Recover.RACE, Recover.REPLACE)
            if action is Recover.RACE:
                assert event is Signal.HEAD_START_OVER or (isinstance(event, StreamEnded) and event.loss.attempts)


@given(worlds())
def test_servers_data_is_not_resent_before_late(ran: tuple[World, StepState | None]) -> None:
    for event, action in ran[0].decided:
        if isinstance(event, Reconnected):
            assert action == (Receive("pushed") if event.held else Send(anew=False))


@given(st.sampled_from(["pushed", "sent", "late"]), st.integers(0, MAX_FAILURES))
def test_a_second_refusal_blames_the_step(phase: str, failures: int) -> None:
    state = StepState(phase, failures=failures)  # type: ignore[arg-type]
    state, action = next_action(state, ServerError(blames_step=True))
    assert action is (Recover.REPLACE if failures < MAX_FAILURES else Recover.GIVE_UP)
    if action is Recover.REPLACE:
        state, action = next_action(state, Signal.REPLACED)
        _, action = next_action(state, ServerError(blames_step=True))
        assert action is Recover.GIVE_UP


def test_late_pushed_step_is_sent_then_awaited() -> None:
    state, action = next_action(StepState("pushed"), Signal.LATE)
    assert action == Send(anew=False)
    state, action = next_action(state, Signal.SENT)
    assert action == Receive("sent")
    state, action = next_action(state, Signal.LATE)
    assert action == Receive("late")
    _, action = next_action(state, Signal.LATE)
    assert action is Recover.REPLACE


def test_an_event_that_cannot_come_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot come"):
        next_action(StepState("sending"), Signal.LATE)


# --- the stream to one server

PATH_EVENTS: st.SearchStrategy[PathEvent] = st.one_of(
    st.builds(PathLost, until=st.floats(0, 100)),
    st.builds(AttemptFailed, now=st.floats(0, 200), refused=st.booleans()),
    st.sampled_from(PathSignal),
)


@given(st.lists(PATH_EVENTS, max_size=30))
def test_gone_session_stays_gone_and_lost_is_sought(events: list[PathEvent]) -> None:
    state = PathState()
    action: PathAction
    for event in events:
        gone = state.gone
        state, action = next_path_action(state, event)
        assert state.gone or not gone
        assert (action is PathWork.STOP) == state.gone
        if state.may_return:
            assert action == TakeUp(state.attempts, 0.3 if state.attempts else 0.0, state.attempts >= 2)
        if action is PathWork.MOVE:
            assert not state.lost
        if event is PathSignal.RESTORED:
            assert not state.lost and not state.attempts


def test_server_is_sought_while_it_keeps_the_session() -> None:
    state, _ = next_path_action(PathState(), PathLost(until=20.0))
    state, action = next_path_action(state, PathLost(until=30.0))  # the step says so, too
    assert state.until == 20.0 and isinstance(action, TakeUp)
    state, action = next_path_action(state, AttemptFailed(now=19.0))
    assert isinstance(action, TakeUp) and state.attempts == 1
    state, action = next_path_action(state, AttemptFailed(now=20.0))
    assert action is PathWork.STOP and state.gone


# --- several chains side by side


def test_nobody_is_asked_beside_one_that_gets_on() -> None:
    assert next_search_action([], 7.0, 0.0) == AskOthers()
    assert next_search_action([Attempt(0.0, 9.0, True)], 7.0, 0.0) == AwaitAttempts(9.0)
    assert next_search_action([Attempt(0.0, 5.0, True), Attempt(5.0, 9.0, True)], 7.0, 0.0) == AwaitAttempts(9.0)
    assert next_search_action([Attempt(0.0, 5.0, True), Attempt(5.0, 6.0, True)], 7.0, 0.0) == AskOthers()


def test_unknown_server_cannot_be_avoided_by_another() -> None:
    assert next_search_action([Attempt(0.0, float("inf"), False)], 7.0, 0.0) == AwaitAttempts(float("inf"))


def test_nobody_is_asked_before_the_next_look_alone() -> None:
    assert next_search_action([Attempt(0.0, 5.0, True)], 7.0, 8.0) == AwaitAttempts(8.0)


def test_full_search_makes_room_of_the_oldest() -> None:
    many = [Attempt(0.1 * number, 0.1 * number + 0.1, True) for number in range(RECOVERY.most_attempts)]
    assert next_search_action(many, 2.0, 0.0) == AwaitAttempts(RECOVERY.least_attempt)
    assert next_search_action(many, RECOVERY.least_attempt, 0.0) == AskOthers(instead_of=0)
    assert next_search_action(many[::-1], RECOVERY.least_attempt, 0.0) == AskOthers(
        instead_of=RECOVERY.most_attempts - 1
    )


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5), st.booleans()), max_size=RECOVERY.most_attempts),
    st.floats(0, 60),
    st.floats(0, 60),
)
def test_search_asks_others_or_waits_a_moment(
    attempts: list[tuple[float, float, bool]], now: float, not_before: float
) -> None:
    states = [Attempt(begun, begun + patience, routed) for begun, patience, routed in attempts]
    match next_search_action(states, now, not_before):
        case AskOthers(None):
            assert len(states) < RECOVERY.most_attempts
            assert not states or all(state.routed and state.due <= now for state in states)
        case AskOthers(int(index)):
            assert states[index].begun + RECOVERY.least_attempt <= now
        case AwaitAttempts(until):
            assert until > now, "it would look again at once"


def test_last_of_many_silent_is_found_slowly_growing() -> None:
    """Each of them seems better than the one that is well, and all are silent from the first moment on."""

    def until_asked(silent: int) -> float:
        attempts: list[Attempt] = []
        now = 0.0
        while len(attempts) < silent:
            action = next_search_action(attempts, now, 0.0)
            if isinstance(action, AwaitAttempts):
                now = action.until
            else:
                attempts.append(Attempt(now, now + open_patience(0.1) / (1 + len(attempts)), True))
        return max(attempt.due for attempt in attempts)

    assert until_asked(1) <= 1.0
    assert until_asked(RECOVERY.most_attempts - 1) <= 3.0


def test_delaying_thing_is_kept_until_it_goes_on() -> None:
    hop, failure = Hop("12D3KooWlost", Span(0, 6)), ServerFailed("it is gone", "12D3KooWlost")

    def after(
        before: Interruption | None, action: StepAction, failure: ServerFailed | None, now: float = 0
    ) -> Interruption | None:
        return next_interruption(before, action, hop, failure, now, step_timeout=60.0)

    assert after(None, Receive("sent"), None) is None
    silent = after(None, Receive("late"), None, now=7)
    assert silent == Interruption(hop, False, "", since=7, waits=60.0)
    lost = after(silent, Reconnect(0.5), failure, now=8)
    assert lost == Interruption(hop, True, "it is gone", since=8, waits=DEADLINES.recovery)
    assert after(lost, Recover.RACE, failure, now=9) is lost  # it is told once, from when it was noticed
    other = replace(hop, peer_id="12D3KooWnext")
    assert next_interruption(lost, Recover.RACE, other, failure, 9, 60.0) == replace(lost, hop=other, since=9)
    assert after(lost, Send(anew=True), failure) is None
