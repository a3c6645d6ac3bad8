"""Every attack by HTTP is carried out as it is meant: requests as HTTP has them, from the attacker's address."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import trio

from tests.attacks.stranger.http_requests import HTTP_ATTACKS, slow_headers
from tests.attacks.stranger.keys import Attack, Victim, keep_up, open_keys

SOURCE = "127.0.0.2" if sys.platform == "linux" else None
ALL = [attack for attacks in HTTP_ATTACKS.values() for attack in attacks]


@pytest.mark.parametrize("attack", ALL, ids=lambda attack: attack.__name__)
async def test_an_attack_sends_what_it_says(attack: Attack) -> None:
    came = bytearray()
    heard = trio.Event()

    async def take(stream: trio.SocketStream) -> None:
        if SOURCE is not None:
            assert stream.socket.getpeername()[0] == SOURCE
        async for part in stream:
            came.extend(part)
            heard.set()
            if b"\r\n\r\n" in came and attack is not slow_headers:
                return

    async with open_keys(1, (SOURCE,), seed=1) as [key], trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, take, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        served = {"http": ["127.0.0.1", port], "api_key": "pn-own", "model": "m"}
        nursery.start_soon(keep_up, attack, key, Victim("", served))
        with trio.fail_after(600):
            await heard.wait()
            while attack is not slow_headers and b"\r\n\r\n" not in came:  # noqa: ASYNC110  (nobody tells)
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    head, complete, _ = bytes(came).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert bool(complete) == (attack is not slow_headers)
    assert (b"Bearer pn-own" in head) == (attack.__name__ != "without_key")
