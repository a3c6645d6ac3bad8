"""Hosts in this process, and hosts in processes of their own, that meet at a relay."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
from multiaddr import Multiaddr

from petalnode.crypto.identity import Identity
from petalnode.node.network.host import Host, open_host
from petalnode.node.network.nat.circuits import Circuits
from petalnode.node.network.nat.relay import RelayLimits, RelayService
from petalnode.node.network.transport.stream_bytes import StreamBytes
from tests.patience import LONGEST_PAUSE, Patience, eventually
from tests.swarm import warm_python
from tests.swarm.processes import LOOPBACK, ReadyNode
from tests.swarm.relay_node import ECHO, STATS, echo

_ROOT = Path(__file__).parents[2]
until = eventually


class RelayNode(ReadyNode):
    """`relay_node.py`, or another module like it, as a process."""

    def __init__(self, module: str = "relay_node", **options: Any) -> None:
        super().__init__(
            [sys.executable, "-m", f"tests.swarm.{module}", json.dumps(options)], warm_python.environment(), _ROOT
        )

    @property
    def addrs(self) -> list[str]:
        return list(self.ready["addrs"])


@contextmanager
def relay_nodes() -> Iterator[Callable[..., RelayNode]]:
    """A function that starts one, not yet waited for; all end with the block."""
    started: list[RelayNode] = []

    def start(module: str = "relay_node", **options: Any) -> RelayNode:
        started.append(RelayNode(module, **options))
        return started[-1]

    try:
        yield start
    finally:
        for node in started:
            node.kill()


@asynccontextmanager
async def host_here(
    *, listens: bool = False, psk: str | None = None, at: str = LOOPBACK, **options: Any
) -> AsyncIterator[Host]:
    """A host in this process that can use relays, and answers `/echo/1`."""
    listen = [Multiaddr(at)] if listens else []
    identity = options.pop("identity", None) or Identity.generate()
    async with open_host(identity, listen=listen, announce=[], psk=psk, **options) as host:
        host.circuits = Circuits(host)
        host.set_stream_handler(ECHO, echo)
        yield host


@asynccontextmanager
async def relay_here(
    psk: str | None = None, at: str = LOOPBACK, **limits: Any
) -> AsyncIterator[tuple[Host, RelayService]]:
    async with host_here(listens=True, psk=psk, at=at) as host:
        relay = RelayService(host, RelayLimits(**limits))
        relay.start()
        yield host, relay


async def reserve(host: Host, relay: Host) -> list[str]:
    """The circuit addresses of `host` at `relay`, peer id included."""
    host.remember(relay.peer_id, relay.addrs())
    reservation = await host.circuits.reserve(relay.peer_id)
    return [f"{addr}/p2p/{host.peer_id}" for addr in reservation.addrs]


async def echoed(stream: StreamBytes, payload: bytes) -> None:
    """Sends `payload` to an echo and checks what comes back, for as long as more of it comes."""
    parts = bytearray()

    async def watch() -> None:
        patience = Patience(LONGEST_PAUSE, os.getpid(), lambda: len(parts), working=0.5)
        while True:
            await trio.sleep(0.5)
            if patience.is_over:
                raise AssertionError(f"{len(parts)} of {len(payload)} bytes came back, and then none for long")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        nursery.start_soon(stream.write, payload)
        while len(parts) < len(payload):
            part = await stream.read(len(payload) - len(parts))
            assert part, f"the stream ended after {len(parts)} bytes"
            parts += part
        nursery.cancel_scope.cancel()
    assert parts == payload


async def received(stream: StreamBytes, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = await stream.read(size - len(parts))
        assert part, f"the stream ended after {len(parts)} bytes"
        parts += part
    return bytes(parts)


async def stats_of(host: Host, relay: RelayNode) -> dict[str, Any]:
    stream = await host.open_stream(relay.peer_id, STATS)
    parts = []
    with trio.fail_after(60):
        while part := await stream.read(1 << 16):
            parts.append(part)
    await stream.close()
    return json.loads(b"".join(parts))


def known(host: Host, nodes: Sequence[RelayNode]) -> None:
    for node in nodes:
        host.remember(node.peer_id, node.addrs)
