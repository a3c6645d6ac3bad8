"""Real servers and real clients of a model in this process, on a network in memory.

The servers load, measure, announce, serve and drain as `petalnode serve` has them do it; the clients are the models of
the Python API. Each server computes in a thread of its own, everything else runs in one trio thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trio

from ...crypto.identity import Identity
from ...protocols.ids import Span
from ..client.api import model as model_module
from ..client.api.runtime import TrioThread
from ..credits.payment_verifier import PaymentVerifier
from ..models.progress import no_progress
from ..server.lifecycle.options import ServerOptions
from ..server.lifecycle.server import run_server
from .memory_network import Link, MemoryNetwork, MemoryNode

STEPS_PER_SECOND = 1000.0
"""That servers announce unless told otherwise: measuring it takes longer than most tests."""


class MemoryServer:
    """One server.

    Attributes:
        events: what it has told so far, as the lines of `petalnode serve --json`.
        ready: its ready event.
    """

    def __init__(self, node: MemoryNode) -> None:
        self.node = node
        self.peer_id = node.peer_id
        self.events: list[dict[str, Any]] = []
        self.alive = True
        self._stop = trio.Event()
        self._ready = trio.Event()
        self._ended = trio.Event()
        self._scope = trio.CancelScope()

    @property
    def ready(self) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == "ready")

    @property
    def span(self) -> tuple[int, int]:
        start, end = self.ready["blocks"]
        return start, end

    async def run(self, options: ServerOptions) -> None:
        node: Any = self.node  # in place of a Swarm
        payments = partial(PaymentVerifier, self.peer_id)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.node.nursery = nursery  # its handlers end with it
                    await run_server(node, node.identity, options, self._on_event, no_progress, self._stop, payments)
                    nursery.cancel_scope.cancel()
        finally:
            self.alive = False
            self.node.network.remove(self.node)
            self._ended.set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def kill(self) -> None:
        """Ends it as if its process were killed: nobody is told."""
        self.node.network.remove(self.node)
        self._scope.cancel()
        await self._ended.wait()

    async def stop(self) -> None:
        """Tells it to stop, and waits until its clients have left or had the time to."""
        self._stop.set()
        await self._ended.wait()

    def _on_event(self, name: str, **fields: Any) -> None:
        self.events.append({"event": name, **fields})
        if name == "ready":
            self._ready.set()


class MemorySwarm:
    """Servers and models for callers that are not trio; made by `memory_swarm`. Its methods wait."""

    def __init__(self, thread: TrioThread[MemoryNetwork]) -> None:
        self._thread = thread
        self.network = thread.value

    def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Runs `await function(*args)` where the nodes live."""
        return self._thread.call(function, *args)

    def servers(self, model: Path, *blocks: str, **options: Any) -> list[MemoryServer]:
        """Starts servers of these blocks ("0:2"), side by side; `options` are fields of `ServerOptions`."""

        async def start() -> list[MemoryServer]:
            started = []
            for span in blocks:
                first, _, end = span.partition(":")
                server = MemoryServer(self.network.node())
                given: dict[str, Any] = {
                    "throughput": STEPS_PER_SECOND,
                    "cache_tokens": 60_000,
                    "device": "cpu",
                    "offline": True,
                }
                wanted = ServerOptions(str(model), Span(int(first), int(end)), **given | options)
                self.network.nursery.start_soon(server.run, wanted)
                started.append(server)
            for server in started:
                await server.wait_ready()
            return started

        return list(self.call(start))

    def kill(self, *servers: MemoryServer) -> None:
        for server in servers:
            self.call(server.kill)

    def stop(self, server: MemoryServer) -> None:
        self.call(server.stop)

    def link(self, one: str, other: str) -> Link:
        """The way between two peers. To be changed in `call`, or by whoever runs there."""
        return self.network.link(one, other)

    def open_model(self, kind: Any, folder: Path, **options: Any) -> Any:
        """`kind.from_pretrained` of a model that uses this network."""
        peer = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"  # well-formed; nobody is dialed
        with (
            patch.object(model_module, "open_swarm", self.network.open_swarm),
            patch.object(model_module, "TrioThread", partial(_Resource, self._thread)),
        ):
            return kind.from_pretrained(folder, initial_peers=[peer], **options)


class _Resource:
    """A resource that is held open in a trio thread that there is; used in place of a `TrioThread` of its own."""

    def __init__(
        self, thread: TrioThread[MemoryNetwork], resource: Callable[[], AbstractAsyncContextManager[Any]]
    ) -> None:
        self._thread = thread
        self._stop = trio.Event()
        self._ended = trio.Event()
        self.value = thread.call(self._start, resource)

    async def _start(self, resource: Callable[[], AbstractAsyncContextManager[Any]]) -> Any:
        async def hold(task_status: trio.TaskStatus[Any]) -> None:
            try:
                async with resource() as value:
                    task_status.started(value)
                    await self._stop.wait()
            finally:
                self._ended.set()

        return await self._thread.value.nursery.start(hold)

    def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return self._thread.call(function, *args)

    def close(self) -> None:
        async def close() -> None:
            self._stop.set()
            await self._ended.wait()

        if not self._stop.is_set():
            self._thread.call(close)


@contextmanager
def memory_swarm() -> Iterator[MemorySwarm]:
    """A network in memory with a trio thread of its own, for the length of the block."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[MemoryNetwork]:
        async with trio.open_nursery() as nursery:
            yield MemoryNetwork(nursery)
            nursery.cancel_scope.cancel()

    thread = TrioThread(opened, "memory-swarm")
    try:
        yield MemorySwarm(thread)
    finally:
        thread.close()
