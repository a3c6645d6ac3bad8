"""Servers whose sessions are opened while nobody wants them any more: each of them is closed again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing

from petalnode.node.client.deadlines import Waits
from petalnode.node.client.session.chain import Chain
from petalnode.node.client.session.history import InputHistory
from petalnode.node.client.session.link import ServerLink, Standby
from petalnode.node.client.session.opening import Opening
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.swarm.routing import Hop
from petalnode.protocols.ids import Span

SPEC = SessionSpec(b"", Span(0, 2), batch=1, max_length=8)


class Server:
    """In place of a `SessionStream`."""

    hop = Hop("server", SPEC.span)

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
            self.closed = True


def link_to(server: Server) -> ServerLink:
    return ServerLink(cast(Any, server))


class Router:
    """In place of a client, of which it has the background tasks."""

    def __init__(self, nursery: trio.Nursery, other: tuple[Hop, ...] | None = None) -> None:
        self._nursery, self._other = nursery, other
        self.paid: list[Hop] = []

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._nursery.start_soon(function, *args)

    def suspect(self, peer_id: str, seconds: float = 0) -> None:
        pass

    async def standby(self, *asked: Any) -> tuple[Hop, ...]:
        if self._other is None:
            await trio.sleep_forever()
        return self._other or ()

    def round_trip(self, peer_id: str) -> float:
        return 0.01

    async def payment(self, hop: Hop, spec: SessionSpec) -> None:
        self.paid.append(hop)
        await trio.sleep_forever()

    @asynccontextmanager
    async def adapter_at(self, hop: Hop, spec: SessionSpec) -> AsyncIterator[None]:
        await trio.sleep_forever()
        yield


class Search:
    """In place of a `ServerSearch`: nobody has refused."""

    refused: dict[str, Any] = {}  # noqa: RUF012
    pays = True


async def find(excluded: Any) -> tuple[Hop, ...]:
    return (Hop("silent", Span(0, 2)),)


class GatedOpening(Opening):
    """One whose chains are a server each, which are ready when they are told."""

    def __init__(self, router: Router, chains: list[tuple[Server, trio.Event, trio.Event]]) -> None:
        made: Any = {"epoch": lambda: 1, "waits": Waits()}
        super().__init__(cast(Any, router), SPEC, InputHistory(), 0, **made)
        self.chains = chains

    async def _open(self, run: Any, epoch: int) -> None:
        server, ready, may_end = self.chains.pop(0)
        run.links.append(link_to(server))
        self._gets_on(run, ["silent"], 1.0)
        try:
            await ready.wait()
        finally:
            with trio.CancelScope(shield=True):
                await may_end.wait()

    async def _replay(self, run: Any, epoch: int) -> None:
        pass


async def test_closing_goes_on_where_it_is_cancelled() -> None:
    servers = [Server() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        chain = Chain(cast(Any, Router(nursery)), SPEC, False)
        chain.links = [link_to(server) for server in servers[:2]]
        for link, server in zip(chain.links, servers[2:], strict=True):
            link.standby = Standby(links=[link_to(server)], ready=True)
        with trio.CancelScope() as scope:
            scope.cancel()
            await chain.end()
    assert [server.closed for server in servers] == [True] * 4


async def open_within(scope: trio.CancelScope, opening: GatedOpening) -> None:
    with scope:
        await opening.run(cast(Any, Search()), find)


@pytest.mark.virtual_time
async def test_servers_ready_after_the_caller_left_are_closed() -> None:
    """The first chain is silent, and takes its time to end; the second is ready, and the caller leaves meanwhile."""
    silent, ready = Server(), Server()
    at_once, never, late = trio.Event(), trio.Event(), trio.Event()
    at_once.set()
    async with trio.open_nursery() as nursery:
        opening = GatedOpening(Router(nursery), [(silent, never, late), (ready, at_once, at_once)])
        scope = trio.CancelScope()
        nursery.start_soon(open_within, scope, opening)
        await trio.sleep(10)  # the silent one is given up, and keeps the other from being handed over
        assert not opening.chains and not ready.closed
        scope.cancel()
        late.set()
    assert silent.closed and ready.closed


async def test_chain_let_go_while_opening_is_closed() -> None:
    server, ready, may_end = Server(), trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        opening = GatedOpening(Router(nursery), [(server, ready, may_end)])
        scope = trio.CancelScope()
        nursery.start_soon(open_within, scope, opening)
        await trio.testing.wait_all_tasks_blocked()
        ready.set()
        await trio.testing.wait_all_tasks_blocked()
        # It goes on with what it has waited for, and meets no other checkpoint: its scope is cancelled in vain.
        may_end.set()
        scope.cancel()
    assert server.closed


@pytest.mark.parametrize("another", [None, Standby()])
async def test_switch_to_a_dismissed_standby_fails(another: Standby | None) -> None:
    """An older step was answered while a younger one, which had found the standby ready, waited for its turn. Another
    one may be on its way meanwhile."""
    server = Server()
    async with trio.open_nursery() as nursery:
        chain = Chain(cast(Any, Router(nursery)), SPEC, False)
        link = link_to(Server())
        chain.links, link.standby = [link], Standby(links=[link_to(server)], ready=True)
        chain.dismiss_standby(link)
        link.standby = another
        assert not await chain.switch(0) and (chain.links, link.standby) == ([link], another)
    assert server.closed


async def test_dismissed_standby_may_be_prepared_again_at_once() -> None:
    """It did not fail: the server may be one that stops."""
    async with trio.open_nursery() as nursery:
        chain = Chain(cast(Any, Router(nursery)), SPEC, False)
        chain.links = [link] = [link_to(Server())]
        for _ in range(2):
            chain.prepare_standby(link)
            assert link.standby is not None
            await trio.testing.wait_all_tasks_blocked()
            chain.dismiss_standby(link)
            await trio.testing.wait_all_tasks_blocked()
            assert link.standby is None


@pytest.mark.parametrize("pays", [True, False])
async def test_standby_that_may_be_dismissed_costs_nothing(pays: bool) -> None:
    """Else who withholds pushes would have points spent at an accomplice."""
    other = Hop("other", SPEC.span)
    async with trio.open_nursery() as nursery:
        router = Router(nursery, (other,))
        chain = Chain(cast(Any, router), SPEC, False)
        chain.links = [link] = [link_to(Server())]
        chain.prepare_standby(link, late=True, pays=pays)
        await trio.testing.wait_all_tasks_blocked()
        assert router.paid == [other] * pays
        chain.dismiss_standby(link)
