"""Real servers and real clients of a model in this process, on a network in memory.

The servers load, measure, announce, serve and drain as `petalnode serve` has them do it. The clients are the models of
the Python API. Each server computes in a thread of its own, everything else runs in one trio thread.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import trio

from ...crypto.identity import Identity
from ...protocols.ids import Span
from ..client.api import opening
from ..client.api.runtime import TrioThread
from ..credits.payment_verifier import PaymentVerifier
from ..models.progress import no_progress
from ..server.lifecycle.options import ServerOptions, ServerParts
from ..server.lifecycle.pausing import Pause
from ..server.lifecycle.server import run_server
from ..server.tallies import ServerTallies
from .memory_network import MemoryNetwork, MemoryNode, open_network

T = TypeVar("T")
Computing = Callable[[Any], Any]
"""Is given loaded blocks (`BlockSpan`) and returns blocks."""

USUAL: Final[dict[str, Any]] = {"throughput": 1000.0, "cache_tokens": 60_000, "devices": ("cpu",), "offline": True}
"""Options of servers unless told otherwise. To measure how fast they are takes longer than most tests."""


_PATCHING = threading.Lock()
"""Two threads that open models at once would each restore what the other one had put there."""


class MemoryServer:
    """One server. Its methods may be called in its trio thread and in every other.

    Attributes:
        events: what it has told so far, as the lines of `petalnode serve --json`.
        tallies: what it counts.
        pause: makes it pause; for its trio thread.
    """

    def __init__(
        self, node: MemoryNode, token: trio.lowlevel.TrioToken, known: dict[object, Any], computing: Computing | None
    ) -> None:
        self.node = node
        self.peer_id = node.peer_id
        self.events: list[dict[str, Any]] = []
        self.tallies = ServerTallies()
        self.pause = Pause()
        self.alive = True
        self._token = token
        self._known = known
        self._computing = computing
        self._stop = trio.Event()
        self._settled = trio.Event()
        self._failure: Exception | None = None
        self._scope = trio.CancelScope()

    @property
    def ready(self) -> dict[str, Any]:
        """Its ready event; waits for it the first time, which only other threads can."""
        if not self._settled.is_set():
            trio.from_thread.run(self._settled.wait, trio_token=self._token)
        if self._failure is not None:
            raise self._failure
        return next(event for event in self.events if event["event"] == "ready")

    @property
    def is_ready(self) -> bool:
        return self._settled.is_set() and self._failure is None

    @property
    def span(self) -> tuple[int, int]:
        start, end = self.ready["blocks"]
        return start, end

    @property
    def errors(self) -> str:
        """What a person would read."""
        return "\n".join(event["text"] for event in self.events if event["event"] == "status")

    async def run(self, options: ServerOptions) -> None:
        node: Any = self.node  # in place of a Swarm
        payments = partial(PaymentVerifier, self.peer_id)
        parts = ServerParts(
            *(self._on_event, no_progress, payments, None, self.tallies, self.pause, self._known, self._computing),
            shared=True,
        )
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await node.start(nursery)  # its handlers end with it
                    await run_server(node, options, parts, self._stop)
                    nursery.cancel_scope.cancel()
        except Exception as error:
            self._failure = error
        finally:
            self.alive = False
            self.node.end()
            self._settled.set()

    def kill(self) -> None:
        """Ends it as if its process were killed: nobody is told."""

        def kill() -> None:
            self.alive = False
            self.node.end()
            self._scope.cancel()

        in_loop(self._token, kill)

    def terminate(self) -> None:
        """Tells it to stop; it does when its clients have left or had the time to."""
        self.alive = False
        in_loop(self._token, self._stop.set)

    def want_pause(self, reason: str | None) -> None:
        """From now on it is to pause for this reason, or with None no more."""
        in_loop(self._token, lambda: self.pause.want("test", reason))

    def freeze(self) -> None:
        """It holds its connections and answers nothing, until the others give them up."""
        in_loop(self._token, partial(self._set_frozen, True))

    def thaw(self) -> None:
        in_loop(self._token, partial(self._set_frozen, False))

    def _set_frozen(self, frozen: bool) -> None:
        for link in self.node.network.links_of(self.peer_id):
            if frozen:
                link.freeze()
            else:
                link.mend()

    def _on_event(self, name: str, **fields: Any) -> None:
        self.events.append({"event": name, **fields})
        if name == "ready":
            self._settled.set()


def in_loop(token: trio.lowlevel.TrioToken, function: Callable[[], T]) -> T:
    """Runs `function` in the trio thread of `token`, also if that is this one."""
    try:
        here = trio.lowlevel.current_trio_token() is token
    except RuntimeError:
        here = False
    return function() if here else trio.from_thread.run_sync(function, trio_token=token)


class MemorySwarm:
    """Servers and models for callers that are not trio; made by `memory_swarm`."""

    def __init__(self, thread: TrioThread[MemoryNetwork]) -> None:
        self._thread = thread
        self._token: trio.lowlevel.TrioToken = thread.call(_current_token)
        self.network = thread.value
        self._known: dict[object, Any] = {}

    def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Runs `await function(*args)` where the nodes live."""
        return self._thread.call(function, *args)

    def start(
        self,
        model: Path,
        blocks: str | None = None,
        *,
        identity: Identity | None = None,
        prepare: Callable[[MemoryNode], object] = lambda node: None,
        computing: Computing | None = None,
        **options: Any,
    ) -> MemoryServer:
        """A server of these blocks ("0:2"), which it chooses itself if none are given. Returns at once; `ready` waits.

        `options` are fields of `ServerOptions`. `prepare` may change the node before it serves. `computing` is given
        the blocks that it loads, and returns what computes in their place.
        """

        def start() -> MemoryServer:
            node = self.network.node(identity)
            prepare(node)
            server = MemoryServer(node, self._token, self._known, computing)
            self.network.nursery.start_soon(server.run, ServerOptions(str(model), span, **USUAL | options))
            return server

        first, _, end = (blocks or "").partition(":")
        span = Span(int(first), int(end)) if blocks is not None else None
        return in_loop(self._token, start)

    def change(self, function: Callable[[MemoryNetwork], T]) -> T:
        """Runs `function(network)` where the nodes live: to cut, freeze or slow down the way between two of them."""
        return in_loop(self._token, lambda: function(self.network))

    def hold(self, resource: AbstractAsyncContextManager[Any]) -> HeldResource:
        """Opens `resource` where the nodes live, until it is closed."""
        return HeldResource(self._thread, resource)

    def open_model(self, kind: Any, folder: Path, **options: Any) -> Any:
        """`kind.from_pretrained` of a model that uses this network."""
        peer = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"  # well-formed; nobody is dialed
        with (
            _PATCHING,
            patch.object(opening, "open_swarm", self.network.open_swarm),
            patch.object(opening, "TrioThread", partial(HeldResource, self._thread)),
        ):
            return kind.from_pretrained(folder, initial_peers=[peer], **options)


class HeldResource:
    """A resource that is held open in a trio thread that there is; used in place of a `TrioThread` of its own."""

    def __init__(self, thread: TrioThread[MemoryNetwork], resource: AbstractAsyncContextManager[Any]) -> None:
        self._thread = thread
        self._stop = trio.Event()
        self._ended = trio.Event()
        self.value = thread.call(self._start, resource)

    async def _start(self, resource: AbstractAsyncContextManager[Any]) -> Any:
        async def hold(task_status: trio.TaskStatus[Any]) -> None:
            try:
                async with resource as value:
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


async def _current_token() -> trio.lowlevel.TrioToken:
    return trio.lowlevel.current_trio_token()


@contextmanager
def memory_swarm(kind: type[MemoryNode] = MemoryNode) -> Iterator[MemorySwarm]:
    """A network in memory, of nodes of this kind, with its own trio thread, for the block."""

    thread = TrioThread(open_network(kind), "memory-swarm")
    try:
        yield MemorySwarm(thread)
    finally:
        thread.close()
