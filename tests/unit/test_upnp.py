"""A port that a router gives, keeps, gives to somebody else, and gets back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio

from petalnode.node.network.addresses import Endpoint
from petalnode.node.network.nat.upnp import Mapping, Upnp, retry_pause

pytestmark = pytest.mark.virtual_time

HOME, OUTSIDE = "192.168.1.2", "11.0.0.1"


class Router:
    """As miniupnpc has it. `taken` are ports of others; `endless`, it knows only mappings without an end."""

    there: ClassVar[bool] = False
    endless: ClassVar[bool] = False
    taken: ClassVar[set[int]] = set()
    mapped: ClassVar[dict[int, tuple[str, int, int]]] = {}
    asked: ClassVar[list[float]] = []

    lanaddr = HOME
    discoverdelay = 0

    def discover(self) -> int:
        assert self.discoverdelay == 2000, "else it waits for no answer, or without end"
        self.asked.append(trio.current_time())
        return int(self.there)

    def selectigd(self) -> None:
        self.externalipaddress = lambda: OUTSIDE

    def addportmapping(
        self, external: int, kind: str, host: str, port: int, name: str, remote: str, lease: int
    ) -> None:
        if external in self.taken or (self.endless and lease) or not 0 < external < 65536:
            raise Exception("refused")
        self.mapped[external] = host, port, lease

    def deleteportmapping(self, external: int, kind: str) -> None:
        if not self.there:
            raise Exception("nobody answers")
        del self.mapped[external]


def mapping(port: int, internal: int) -> Mapping:
    return Mapping(Endpoint(ip_address(OUTSIDE), port), Endpoint(ip_address(HOME), internal))


@asynccontextmanager
async def keeping(port: int) -> AsyncIterator[Upnp]:
    """Keeps the port mapped, by a router that is not there yet."""

    async def at_once(call: Any, *arguments: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*arguments)

    Router.there, Router.endless, Router.taken, Router.mapped = False, False, set(), {}
    Router.asked.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=Router))
        patched.setattr(trio.to_thread, "run_sync", at_once)
        async with trio.open_nursery() as nursery:
            upnp = Upnp()
            nursery.start_soon(upnp.run, port)
            yield upnp
            nursery.cancel_scope.cancel()


async def test_port_is_asked_for_renewed_and_returned() -> None:
    async with keeping(4000) as upnp:
        await trio.sleep(14)
        changed = upnp.changed
        Router.there = True
        await trio.sleep(2)
        assert upnp.mapping == mapping(4000, 4000) and Router.mapped == {4000: (HOME, 4000, 3600)}
        assert changed.is_set() and not upnp.changed.is_set()
        Router.mapped.clear()
        changed = upnp.changed
        await trio.sleep(1800)
        assert Router.mapped == {4000: (HOME, 4000, 3600)} and not changed.is_set()
        Router.taken = {4000}  # it was restarted, and somebody else was quicker
        await trio.sleep(1800)
        assert upnp.mapping == mapping(4001, 4000) and changed.is_set()
        Router.there = False
        await trio.sleep(1800)
        assert upnp.mapping is None
        Router.there = True
        await trio.sleep(16)
        assert upnp.mapping == mapping(4001, 4000)
        Router.mapped = {4001: (HOME, 4000, 3600)}
    assert Router.mapped == {}, "given back"


async def test_router_without_leases_that_vanishes() -> None:
    async with keeping(65534) as upnp:
        Router.there = Router.endless = True
        Router.taken = {65534}
        await trio.sleep(16)
        assert upnp.mapping == mapping(65535, 65534) and Router.mapped == {65535: (HOME, 65534, 0)}
        Router.there = False


async def test_router_that_was_silent_is_soon_asked_again() -> None:
    async with keeping(4000) as upnp:
        await trio.sleep(3000)
        Router.there = True
        await upnp.changed.wait()
        assert upnp.mapping == mapping(4000, 4000)
        pauses = [later - sooner for sooner, later in pairwise(Router.asked)]
    assert pauses == pytest.approx([15, 60, 240, 900, 900, 900])


async def test_unhelpful_router_is_asked_ever_less() -> None:
    assert [retry_pause(failures) for failures in (1, 2, 3, 4, 5, 1000)] == [15, 60, 240, 900, 900, 900]
    async with keeping(4000) as upnp:
        Router.there, Router.taken = True, {4000, 4001, 4002}
        await trio.sleep(15 + 60 + 240 + 1)
        assert upnp.mapping is None and not Router.mapped, "a port far from ours is somebody else's"
        Router.taken = {4000, 4001}
        await trio.sleep(800)
        assert upnp.mapping is None
        await trio.sleep(100)
        assert upnp.mapping == mapping(4002, 4000)
