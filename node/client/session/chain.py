"""The chain of a session: its servers, the inputs that made their caches, and standbys that may take their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from ...errors import NoChainError, ServerFailed, SwarmError, unwrapped
from ...swarm.routing import Hop
from ..deadlines import RECOVERY_TIMEOUT, REOPEN_TIMEOUT, STANDBY_RETRY
from ..request import StreamLost
from ..router import Router, ServerSearch, note_failure
from .history import Input, InputHistory, merged
from .reconnector import PathChanges, SessionReconnector
from .stream import SessionSpec, SessionStream

STANDBY_LAG: Final = 2
"""Tokens that a standby may be behind when it is called ready: what the switch costs at most."""


class HistoryLost(SwarmError):
    """A server failed whose inputs this process has not seen: the session must be filled anew from its tokens."""


@dataclass(eq=False)
class ServerLink:
    """One server of the chain, and the inputs that made its cache.

    `usual`: seconds that its last answers took per token, beyond the round trip. `reconnector`: once it is in the
    chain.
    """

    server: SessionStream
    history: InputHistory = field(default_factory=InputHistory)
    usual: float | None = None
    standby: Standby | None = None
    reconnector: SessionReconnector | None = None
    no_standby_until: float = 0.0

    def note(self, tokens: int) -> None:
        taken = max(0.0, self.server.timing.total - self.server.round_trip) / tokens
        self.usual = taken if self.usual is None else 0.8 * self.usual + 0.2 * taken

    @property
    def standby_ready(self) -> bool:
        return self.standby is not None and self.standby.ready


@dataclass(eq=False)
class Standby:
    """Servers that are brought to where a link is, to take its place. `applied`: the link's inputs they have."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    links: list[ServerLink] = field(default_factory=list)
    applied: list[Input] = field(default_factory=list)
    ready: bool = False


class Chain:
    """The servers of one session, and all ways in which they change. One caller at a time, but for `prepare_standby`.

    Attributes:
        links: one for each server, in the order of their blocks.
        route_epoch: counts the changes.
        recoveries: servers that were replaced so far.
        paths: how often a server's session went on over another stream instead.
        between_steps: held by every step.
        no_push: until when a server does not push to another one, because a push between them was lost.
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
        self._wait = wait

    @property
    def route(self) -> tuple[Hop, ...]:
        return tuple(link.server.hop for link in self.links)

    async def open(self) -> None:
        """Raises NoChainError, BadInput: no servers take a session like this."""
        self.links = await self._opened(self.spec, InputHistory(), 0, None, None)

    def reconnector(self, link: ServerLink) -> SessionReconnector:
        """The link's reconnector, which is started when the link is first used in the chain."""
        if link.reconnector is None:
            link.reconnector = SessionReconnector(self.router, link.server, self.between_steps, self.paths)
            self.router.start_soon(link.reconnector.run)
        return link.reconnector

    async def end(self) -> None:
        """Gives the servers their caches back, or leaves them there for as long as `spec.keep` says. Never raises."""
        links, self.links = self.links, []
        for link in links:
            if link.standby is not None:
                link.standby.scope.cancel()
                await close_links(link.standby.links)
        await close_links(links, leave=self.spec.keep > 0)

    # --- others in the place of a server that failed

    async def replace(self, links: list[ServerLink], index: int, position: int, error: ServerFailed) -> int:
        """Puts others in the place of the server at `index` of `links`, brought to `position`; returns how many.

        Raises:
            NoChainError: nobody else holds its blocks.
            HistoryLost: what it held is not known here.
        """
        failed = links[index]
        note_failure(self.router, error)
        if failed.standby_ready and (switched := await self.switch(links, index)):
            return switched
        if failed.standby is not None:
            failed.standby.scope.cancel()
        if not isinstance(error, StreamLost):
            await close_links([failed])
        spec = replace(self.spec, span=failed.server.hop.span)
        others = await self._opened(spec, failed.history, position, error, failed.reconnector)
        links[index : index + 1] = others
        self.router.start_soon(close_links, [failed])
        self.recoveries += 1
        return len(others)

    async def _opened(
        self,
        spec: SessionSpec,
        history: InputHistory,
        position: int,
        because: ServerFailed | None,
        reconnector: SessionReconnector | None,
    ) -> list[ServerLink]:
        """Links for `spec.span` that hold what `history` says, up to `position`.

        Servers that refuse or cannot be reached are left out and the rest tried; when none is left, all are asked again
        until the deadline (for ever with `wait`), because servers come and go. Where nobody is known who could be
        asked, a new session does not wait. `because` is the failure of the server whose place is taken; it is left out
        as long as its session may return (`reconnector`).

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
            HistoryLost: the history does not go back to the beginning.
        """
        if history.start:
            raise HistoryLost(f"{because}; what it held before this process started is not known here")
        search = ServerSearch(
            self.router,
            {} if because is None else {because.peer_id: because},
            until=trio.current_time() + (REOPEN_TIMEOUT if because is None else RECOVERY_TIMEOUT),
            wait=self._wait,
            lost=because is not None,
            ask_again=lambda failure: failure is not because or reconnector is None or not reconnector.state.may_return,
        )
        while True:
            try:
                route = await self.router.route(spec, search.refused)
            except NoChainError as error:
                await search.found_nobody(error)
                continue
            links: list[ServerLink] = []
            try:
                await self._open_links(spec, route, links)
                await self._replay(links, history.replay(position, step_limit(links)))
            except ServerFailed as error:
                await close_links(links)
                search.refuse(error)
            except BaseException:
                await close_links(links)
                raise
            else:
                return links

    async def _open_links(self, spec: SessionSpec, route: Sequence[Hop], links: list[ServerLink]) -> None:
        """Opens a session at every server of `route`, side by side. `links` then has those that must be closed.

        Raises:
            ServerFailed: one of them cannot be reached or refuses.
        """
        opened: dict[Hop, ServerLink] = {}
        self.route_epoch += 1
        epoch, router = self.route_epoch, self.router

        async def open_one(index: int, hop: Hop) -> None:
            payment = await router.payment(hop, spec)
            async with router.adapter_at(hop, spec):
                stream = await router.connect(hop)
                claims, log = router.claims_of(hop.peer_id), router.receipts.session(hop.peer_id)
                server = SessionStream(stream, hop, spec, router.peer_id, claims=claims, log=log)
                opened[hop] = ServerLink(server)
                await server.open(
                    epoch,
                    upstream=route[index - 1].peer_id if index else None,
                    downstream=route[index + 1].peer_id if spec.push and index + 1 < len(route) else None,
                    payment=payment,
                )
                if payment is not None and server.priority:
                    router.paid(payment)

        try:
            with unwrapped(ServerFailed):
                async with trio.open_nursery() as nursery:
                    for index, hop in enumerate(route):
                        nursery.start_soon(open_one, index, hop)
        finally:
            links.extend(opened[hop] for hop in route if hop in opened)

    async def _replay(self, links: Sequence[ServerLink], steps: Sequence[Input]) -> None:
        """Runs `steps` through new links, one server after the other, to build their caches.

        Raises:
            ServerFailed: one of them failed.
        """
        epoch = self.route_epoch
        for step in steps:
            for link in links:
                chunk = await link.server.exchange(step.chunk, step.position, step.reorder, epoch)
                link.history.append(step)
                step = replace(step, chunk=chunk)

    # --- standbys

    def prepare_standby(self, link: ServerLink) -> None:
        """Begins to prepare other servers for the blocks of `link`, unless that is under way or was tried just now."""
        if link.standby is None and trio.current_time() >= link.no_standby_until:
            link.standby = Standby()
            self.router.start_soon(self._prepare, link, link.standby)

    async def _prepare(self, link: ServerLink, standby: Standby) -> None:
        with standby.scope:
            try:
                spec = replace(self.spec, span=link.server.hop.span)
                route = await self.router.standby(self.spec, self.route, self.links.index(link))
                await self._open_links(spec, route, standby.links)
                while await self._catch_up(link, standby) > STANDBY_LAG:
                    pass
                standby.ready = True
                return
            except (SwarmError, ValueError):
                pass  # nobody else can, or the link has left the chain meanwhile
        link.standby = None
        link.no_standby_until = trio.current_time() + STANDBY_RETRY
        await close_links(standby.links)

    async def switch_to_standbys(self) -> None:
        """Puts every standby that is ready in its place."""
        index = 0
        while index < len(self.links):
            if self.links[index].standby_ready:
                await self.switch(self.links, index)
            index += 1

    async def switch(self, links: list[ServerLink], index: int) -> int:
        """Puts the standby of a link in its place; returns of how many servers it is, 0 if it has just failed."""
        link = links[index]
        standby = link.standby
        assert standby is not None
        link.standby = None
        try:
            await self._catch_up(link, standby)
        except BaseException as error:
            link.no_standby_until = trio.current_time() + STANDBY_RETRY
            self.router.start_soon(close_links, standby.links)
            if not isinstance(error, SwarmError):
                raise
            return 0
        links[index : index + 1] = standby.links
        self.route_epoch += 1
        self.recoveries += 1
        self.router.start_soon(close_links, [link])
        return len(standby.links)

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
        await self._replay(standby.links, merged(todo, step_limit(standby.links)))
        standby.applied = wanted
        return sum(step.chunk.tokens for step in todo)


def step_limit(links: Sequence[ServerLink]) -> int:
    """Tokens of a row that one step through all of `links` may have."""
    return min((link.server.max_step_tokens for link in links), default=1)


async def close_links(links: Sequence[ServerLink], leave: bool = False) -> None:
    """Ends the sessions of `links`, side by side, or leaves them at their servers. Never raises."""
    async with trio.open_nursery() as nursery:
        for link in links:
            if link.reconnector is not None:
                link.reconnector.cancel()
            nursery.start_soon(link.server.leave if leave else link.server.close)
