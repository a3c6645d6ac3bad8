"""hypercorn on trio: who pipelines a request and goes is not noticed, and who reads nothing cannot be given up."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

CURED = "hypercorn has cured it: docs/decisions/http-server.md says what can be thrown away"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """hypercorn with one application, on loopback."""

    def __init__(self, nursery: trio.Nursery, application: Any) -> None:
        self._nursery = nursery
        self._application = application

    async def connect(self) -> trio.SocketStream:
        config = Config()
        config.bind, config.errorlog, config.graceful_timeout = ["127.0.0.1:0"], None, 0.1
        (bound,) = await self._nursery.start(partial(serve, self._application, config))
        return await trio.open_tcp_stream("127.0.0.1", int(bound.rpartition(":")[2]))


async def test_client_that_pipelines_and_goes_is_not_noticed() -> None:
    told = trio.Event()
    asked = trio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError
        await receive()
        asked.set()
        if (await receive())["type"] == "http.disconnect":
            told.set()

    async with trio.open_nursery() as nursery:
        stream = await Served(nursery, application).connect()
        await stream.send_all(GET + GET)
        await asked.wait()
        await stream.aclose()
        with trio.move_on_after(1):
            await told.wait()
        assert not told.is_set(), CURED
        nursery.cancel_scope.cancel()


async def test_client_that_reads_nothing_cannot_be_given_up() -> None:
    given_up, giving_up = trio.Event(), trio.CancelScope()
    sent = 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with giving_up:
            while True:
                sent += 1
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        given_up.set()

    async def stuck() -> None:
        looks = before = 0
        while looks < 10 or not sent:
            looks, before = (looks + 1 if sent == before else 0), sent
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        stream = await Served(nursery, application).connect()
        await stream.send_all(GET)
        await stuck()
        giving_up.cancel()
        with trio.move_on_after(3):
            await given_up.wait()
        assert not given_up.is_set(), CURED
        await stream.aclose()
        nursery.cancel_scope.cancel()
