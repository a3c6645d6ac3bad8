"""The chain of a session: its servers, the inputs that made their caches, and standbys that may take their place."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import trio

from ....protocols import wire_pb2 as wire
from ....protocols.inference import session_name
from ...errors import BadInput, ServerFailed, SwarmError, unwrapped
from ...swarm.cost import StageCost
from ...swarm.routing import Hop
from ..deadlines import DEADLINES, WaitCause, Waits
from ..losses import ReplayBudget
from ..request import PushedOther, StreamLost, WireTensor
from ..router import Router, ServerSearch, note_failure
from .history import Input, InputHistory, merged
from .link import PathChanges, ServerLink, SessionReconnector, Standby, close_links, step_limit
from .opening import FindRoute, Opening
from .prefixes import Beginning
from .recovery import Phase, Receive, Reconnect, Recover, Send, StepAction
from .replacement import AnsweredWrong, check_replay
from .stream import SessionSpec

log = logging.getLogger(__name__)

STANDBY_LAG: Final = 2
"""Tokens that a standby may be behind when it is called ready: what the switch costs at most."""
_RECEIVING: Final[dict[Phase, WaitCause]] = {"pushed": "push", "sent": "answer", "late": "late"}


@dataclass(frozen=True)
class Interruption:
    """Why a step does not get on, for people: the server of `hop` is gone or silent, and others are looked for.

    Attributes:
        lost: whether its stream has ended, or it has failed; else it is silent.
        reason: what it failed by; "" if it is silent.
        since: when that was noticed, in seconds of trio's clock.
        waits: for how many seconds others are looked for, from then on.
    """

    hop: Hop
    lost: bool
    reason: str
    since: float
    waits: float


def next_interruption(
    before: Interruption | None,
    action: StepAction,
    hop: Hop,
    failure: ServerFailed | None,
    now: float,
    step_timeout: float,
) -> Interruption | None:
    """What holds a step up at `hop` from `now` on, told once for each server that is gone; None where nothing does.

    `failure` is the newest at this step, `step_timeout` for how long a silent server is waited for, in seconds.
    """
    match action:
        case Reconnect() | Recover.RACE | Recover.REPLACE if failure is not None:
            if before is None or before.hop != hop or not before.lost:
                return Interruption(hop, True, str(failure), now, DEADLINES.recovery)
        case Receive("late") if before is None:
            return Interruption(hop, False, "", now, step_timeout)
        case Send(anew=True):
            return None
    return before


def wait_cause(action: StepAction) -> WaitCause:
    """By what a step waits while it carries out an action."""
    match action:
        case Send():
            return "send"
        case Receive():
            return _RECEIVING[action.phase]
        case Reconnect():
            return "reconnect"
        case Recover.RACE:
            return "race"
        case Recover.SWITCH:
            return "switch"
        case _:
            return "replace"


class HistoryLost(SwarmError):
    """A server failed whose inputs this process has not seen: the session must be filled anew from its tokens."""


class Chain:
    """The servers of one session, and all ways in which they change. One caller at a time, but for `prepare_standby`.

    Attributes:
        links: one for each server, in the order of their blocks.
        route_epoch: counts the changes.
        recoveries: servers that were replaced so far.
        paths: how often a server's session went on over another stream instead.
        between_steps: held by every step.
        no_push: until when a server does not push to another one, because a push between them was lost.
        waits: what its steps and its looking for servers took.
        interruption: what its step is held up by; None while all is well.
        replays: how often it may still be filled anew.
    """

    def __init__(self, router: Router, spec: SessionSpec, wait: bool) -> None:
        self.router = router
        self.spec = spec
        self.links: list[ServerLink] = []
        self.route_epoch = 0
        self.recoveries = 0
        self.paths = PathChanges()
        self.between_steps = trio.Lock()
        self.no_push: dict[tuple[str, str], float] = {}
        self.waits = Waits()
        self.interruption: Interruption | None = None
        self.replays = ReplayBudget()
        self._wait = wait
        self._openings: set[Opening] = set()

    @property
    def coming(self) -> set[str]:
        """The servers that may come into the chain: those that are asked right now, and standbys."""
        standbys = [link.standby for link in self.links if link.standby is not None]
        held = {link.server.hop.peer_id for standby in standbys for link in standby.links}
        return held.union(*(opening.peers for opening in self._openings))

    @property
    def route(self) -> tuple[Hop, ...]:
        return tuple(link.server.hop for link in self.links)

    def stage_costs(self, links: Sequence[ServerLink], *, push: bool) -> list[StageCost]:
        """What steps of a prompt cost at each of `links`, in their order. May be called from any thread."""
        costs: list[StageCost] = []
        for before, link in zip((None, *links), links, strict=False):
            pushed = push and before is not None and self._streams(before, link)
            costs.append(link.cost(self.router.seconds_per_byte(link.server.hop.peer_id), pushed=pushed))
        return costs

    def _streams(self, sender: ServerLink, receiver: ServerLink) -> bool:
        both = sender.server.bytes_in_flight > 0 and receiver.server.bytes_in_flight > 0
        return both and self.spec.trusted.may_push(sender.server.hop.peer_id, receiver.server.hop.peer_id)

    def may_stream(self, sender: ServerLink, receiver: ServerLink) -> bool:
        """Whether a server may push several steps to another one now before any of them is answered."""
        return self._streams(sender, receiver) and self.may_push(sender, receiver)

    def may_push(self, sender: ServerLink, receiver: ServerLink) -> bool:
        """Whether a server may push to another one now: the client allows it, and no push was lost between them."""
        pair = sender.server.hop.peer_id, receiver.server.hop.peer_id
        lost = self.no_push.get(pair, 0.0) > trio.current_time()
        return not lost and self.spec.trusted.may_push(*pair)

    async def open(self, beginning: Beginning | None = None, position: int = 0) -> int:
        """Finds servers and brings them to `position` of `beginning`; where all have kept more of it, to that. Returns
        how many tokens of a row they hold.

        Raises:
            NoChainError, BadInput: no servers take a session like this.
        """
        inputs = () if beginning is None else beginning.inputs.get(self.spec.span.start, ())
        self.links = await self._opened(self.spec, InputHistory(inputs), position, None, None, beginning)
        return position or min(link.history.end for link in self.links)

    def reconnector(self, link: ServerLink) -> SessionReconnector:
        """The link's reconnector, which is started when the link is first used in the chain."""
        if link.reconnector is None:
            link.reconnector = SessionReconnector(self.router, link.server, self.between_steps, self.paths)
            self.router.start_soon(link.reconnector.run)
        return link.reconnector

    async def abandon(self, link: ServerLink) -> None:
        """Has the server drop the steps that it was sent and has not begun; the session goes on by another stream.
        Never waits, never raises."""
        if link.server.is_behind and link.server.kept:
            await link.server.abandon()
            self.reconnector(link).report_lost()

    async def send_watched(self, link: ServerLink, asked: wire.Step, chunk: WireTensor) -> bool:
        """Sends a large step; false if the server does not read it for long, and a standby is ready to take its place.

        The stream is reset then; the session at the server is taken up again if the switch fails.

        Raises:
            StreamLost: the server is gone.
        """
        sent = False

        async def watch() -> None:
            await trio.sleep(link.patience(chunk))
            while not link.standby_ready:
                self.prepare_standby(link, late=True)
                await trio.sleep(DEADLINES.standby_poll)
            nursery.cancel_scope.cancel()

        with unwrapped(ServerFailed):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                await link.server.send(asked, chunk)
                sent = True
                nursery.cancel_scope.cancel()
        return sent

    async def end(self) -> None:
        """Gives the servers their caches back, or leaves them there for as long as `spec.keep` says. Never raises."""
        links, self.links = self.links, []
        for link in links:
            if link.standby is not None:
                link.standby.scope.cancel()
                await close_links(link.standby.links)
        await close_links(links, leave=self.spec.keep > 0)

    # --- others in the place of a server that failed

    async def replace(self, index: int, position: int, error: ServerFailed) -> None:
        """Puts others in the place of the server at `index`, brought to `position`.

        Raises:
            NoChainError: nobody else holds its blocks.
            HistoryLost: what it held is not known here.
            SwarmError: servers have lost it too often, or what it held was wrong, or may have been.
        """
        failed = self.links[index]
        note_failure(self.router, error)
        if failed.history.end and not isinstance(error, PushedOther):
            self.router.note_loss(error.peer_id, admitted=failed.has_lost(position, error))
        name = session_name(failed.server.nonce)
        log.info("session %s: others take its place: %s", name, error, extra={"session": name})
        if failed.standby_ready and await self.switch(index):
            return
        if failed.standby is not None:
            failed.standby.scope.cancel()
        if not isinstance(error, StreamLost):
            await close_links([failed])
        if failed.history.end and not self.replays.take(len(self.links)):
            raise SwarmError(f"its servers lose what this session holds again and again: {error}")
        spec = replace(self.spec, span=failed.server.hop.span)
        try:
            others = await self._opened(spec, failed.history, position, error, failed.reconnector)
        except AnsweredWrong:
            failed.server.misled = True  # also where its stream comes back
            raise
        self.links[index : index + 1] = others
        self.router.start_soon(close_links, [failed])
        self.recoveries += 1

    async def _opened(
        self,
        spec: SessionSpec,
        history: InputHistory,
        position: int,
        because: ServerFailed | None,
        reconnector: SessionReconnector | None,
        beginning: Beginning | None = None,
    ) -> list[ServerLink]:
        """Links for `spec.span` that hold what `history` says, up to `position`.

        Servers that refuse or cannot be reached are left out and the rest tried. When none is left, all are asked again
        until the deadline (for ever with `wait`), because servers come and go. Where nobody is known who could be
        asked, a new session does not wait. `because` is the failure of the server whose place is taken. It is left out
        as long as its session may return (`reconnector`).

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
            HistoryLost: the history does not go back to the beginning.
        """
        if history.start:
            raise HistoryLost(f"{because}; what it held before this process started is not known here")
        reopen = DEADLINES.reopen if spec.reopen_timeout is None else spec.reopen_timeout
        search = ServerSearch(
            self.router,
            {} if because is None else {because.peer_id: because},
            until=trio.current_time() + (reopen if because is None else DEADLINES.recovery),
            wait=self._wait,
            lost=because is not None,
            ask_again=lambda failure: failure is not because or reconnector is None or not reconnector.state.may_return,
        )
        find: FindRoute = partial(self.router.route, spec)
        if beginning is not None and beginning.shared:
            find = partial(self.router.route, spec, again=beginning.route, held=beginning.shared)
        return await self._open(spec, history, position, find, search, beginning)

    async def _open(
        self,
        spec: SessionSpec,
        history: InputHistory,
        position: int,
        find: FindRoute,
        search: ServerSearch,
        beginning: Beginning | None = None,
    ) -> list[ServerLink]:
        opening = Opening(
            self.router,
            spec,
            history,
            position,
            epoch=self._next_epoch,
            waits=self.waits,
            beginning=beginning,
        )
        self._openings.add(opening)
        try:
            return await opening.run(search, find)
        finally:
            self._openings.discard(opening)

    def _next_epoch(self) -> int:
        self.route_epoch += 1
        return self.route_epoch

    # --- standbys

    def prepare_standby(self, link: ServerLink, *, late: bool = False, pays: bool = True) -> None:
        """Begins to prepare other servers for the blocks of `link`, unless that was begun or tried just now.

        `late`: a step waits for it, and it is tried again soon. What may not be needed after all must not cost points:
        the server before would take part in spending them by losing its pushes.
        """
        pause = DEADLINES.retry_interval if late else DEADLINES.standby_retry
        if link.standby is None and trio.current_time() >= link.standby_failed + pause:
            link.standby = Standby()
            self.router.start_soon(self._prepare, link, link.standby, pays)

    async def _prepare(self, link: ServerLink, standby: Standby, pays: bool) -> None:
        with standby.scope:
            try:
                await self._bring(link, standby, pays)
                # Who has cancelled it has seen no servers to close, if these were just on their way to us.
                if not standby.scope.cancel_called:
                    standby.ready = True
                    return
            except (SwarmError, BadInput) as error:
                link.server.misled = link.server.misled or isinstance(error, AnsweredWrong)  # else nobody else can
                link.standby_failed = trio.current_time()
        if link.standby is standby:
            link.standby = None
        await close_links(standby.links)

    async def _bring(self, link: ServerLink, standby: Standby, pays: bool) -> None:
        if link.history.start:
            raise HistoryLost("what the server held before this process started is not known here")

        async def find(excluded: Collection[str]) -> tuple[Hop, ...]:
            # Others may have taken its place meanwhile.
            route, index = (self.route, self.links.index(link)) if link in self.links else ((link.server.hop,), 0)
            return await self.router.standby(self.spec, route, index, excluded)

        spec = replace(self.spec, span=link.server.hop.span)
        now, applied = trio.current_time(), link.history.needed(link.history.end)
        search = ServerSearch(self.router, {}, until=now, wait=False, lost=True, ask_again=lambda _: True, pays=pays)
        history = InputHistory(applied, signer=link.history.signer)
        standby.links = await self._open(spec, history, link.history.end, find, search)
        standby.applied = applied
        while await self._catch_up(link, standby) > STANDBY_LAG:
            pass

    def dismiss_standby(self, link: ServerLink) -> None:
        """Lets the servers go that were prepared, or are being prepared, for the blocks of `link`."""
        standby = link.standby
        if standby is not None and standby.ready:
            link.standby = None
            self.router.start_soon(close_links, standby.links)
        elif standby is not None:
            standby.scope.cancel()  # `_prepare` lets them go

    async def switch_to_standbys(self) -> None:
        """Puts every standby that is ready in its place."""
        index = 0
        while index < len(self.links):
            if self.links[index].standby_ready:
                await self.switch(index)
            index += 1

    async def switch(self, index: int) -> bool:
        """Puts the standby of a link in its place; false if it has just failed, or an older step has dismissed it."""
        link = self.links[index]
        standby = link.standby
        if standby is None or not standby.ready:
            return False
        link.standby = None
        try:
            await self._catch_up(link, standby)
        except BaseException as error:
            link.standby_failed = trio.current_time()
            self.router.start_soon(close_links, standby.links)
            if not isinstance(error, SwarmError):
                raise
            return False
        self.links[index : index + 1] = standby.links
        self.route_epoch += 1
        self.recoveries += 1
        self.router.start_soon(close_links, [link])
        return True

    async def _catch_up(self, link: ServerLink, standby: Standby) -> int:
        """Gives the standby what the link has had and it has not; returns how many tokens that were.

        Raises:
            SwarmError: a server of the standby failed, or it cannot follow (rows changed places and back).
        """
        if link.history.start:
            raise HistoryLost("what the server held before this process started is not known here")
        wanted = link.history.needed(link.history.end)
        common = 0
        for mine, theirs in zip(standby.applied, wanted, strict=False):
            if mine is not theirs:
                break
            common += 1
        if any(step.reorder for step in standby.applied[common:]):
            raise SwarmError("the standby took a reorder that was undone")
        todo = wanted[common:]
        for step in merged(todo, step_limit(standby.links)):
            left = await self._replay_soon(standby.links, step)
            await check_replay(link.history, self.spec, standby.links, left)
        standby.applied = wanted
        return sum(step.chunk.tokens for step in todo)

    async def _replay_soon(self, links: Sequence[ServerLink], step: Input) -> Input:
        """Runs one input through the servers of a standby, for whose answers something may be waiting; returns what
        has left the last one.

        Raises:
            ServerFailed: one of them failed, or did not answer in time.
        """
        try:
            for link in links:
                patience = link.patience(step.chunk)
                with trio.move_on_after(patience) as scope:
                    step = await link.replay(step, self.route_epoch)
                if scope.cancelled_caught:
                    raise link.server.silent(patience)
        except ServerFailed as error:
            note_failure(self.router, error)
            raise
        return step
