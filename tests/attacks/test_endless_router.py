"""A neighbour that answers as a router and never ends keeps one thread, and none of those that the node works in."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

from petalnode.node.network.nat import upnp
from petalnode.node.network.nat.upnp import Upnp
from tests.patience import eventually


async def test_endless_router_questions_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    asked = []

    class Router:
        def discover(self) -> int:
            asked.append(self)
            ended.wait(60)
            return 0

    monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=Router))
    monkeypatch.setattr(upnp, "UPNP", replace(upnp.UPNP, deadline=0.02, retry=(0.01, 0.01)))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Upnp().run, 4000)
            await eventually(lambda: asked, "the router is asked")
            await trio.sleep(0.2)  # many more times, if there were a thread for it
            nursery.cancel_scope.cancel()
        assert len(asked) == 1
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    finally:
        ended.set()
