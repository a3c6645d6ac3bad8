"""The attacker of under_attack.py: keys at several addresses of this machine, that do what they are told.

    python -m benchmarks.attacker OPTIONS

`OPTIONS` is a JSON object: `victims` (address, served, hidden), `keys`, `sources` (addresses to dial from) and `seed`.
Each line of standard input is a JSON list of names of attacks (tests/attacks/stranger), which take the
place of those before; "busy" only uses the processor. It prints a JSON line with each change: what it has sent since
the one before, and its seconds of processor time.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import trio

from tests.attacks.stranger.catalogue import ATTACKS
from tests.attacks.stranger.http_requests import HTTP_ATTACKS
from tests.attacks.stranger.keys import Key, Victim, keep_up, open_keys


async def busy() -> None:
    """Uses the processor for nothing."""
    while True:
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass
        await trio.lowlevel.checkpoint()


def begin(names: Sequence[str], keys: Sequence[Key], victims: Sequence[Victim], nursery: trio.Nursery) -> None:
    for name in names:
        if name == "busy":
            nursery.start_soon(busy)
            continue
        attacks = ATTACKS[name] if name in ATTACKS else HTTP_ATTACKS[name]
        for key in keys:
            for number, victim in enumerate(victims):
                nursery.start_soon(keep_up, attacks[(key.number + number) % len(attacks)], key, victim)


class Orders:
    """The lines of standard input."""

    def __init__(self) -> None:
        self._stream = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
        self._buffer = b""

    async def next(self) -> list[str] | None:
        """The next one; None at the end."""
        while b"\n" not in self._buffer:
            part = await self._stream.receive_some(1 << 16)
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        names: list[str] = json.loads(line)
        return names


async def main(options: dict[str, Any]) -> None:
    victims = [Victim(**fields) for fields in options["victims"]]
    orders = Orders()
    async with open_keys(options["keys"], options["sources"], options["seed"]) as keys:
        print(json.dumps({"event": "ready"}), flush=True)
        names = await orders.next()
        print(json.dumps({"event": "done", "sent": 0, "cpu": 0.0}), flush=True)
        sent, used = 0, time.process_time()
        while names is not None:
            async with trio.open_nursery() as nursery:
                begin(names, keys, victims, nursery)
                names = await orders.next()
                nursery.cancel_scope.cancel()
            for key in keys:
                await key.leave()
            now, cpu = sum(key.host.socket_bytes.sent for key in keys), time.process_time()
            print(json.dumps({"event": "done", "sent": now - sent, "cpu": cpu - used}), flush=True)
            sent, used = now, cpu


if __name__ == "__main__":
    with suppress(PermissionError):  # a session of its own, as in light_node.py
        os.setsid()
    logging.disable(logging.CRITICAL)
    gc.freeze()
    trio.run(main, json.loads(sys.argv[1]))
