"""Streams of a node whose frames a test sees, and may change, on their way: what a peer says that lies, or is older."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

Hook = Callable[[Any, Any, Sequence[Any]], Any]
"""Gets the stream, a frame, which it may change, and its payloads. Returns other payloads, or None for the same; may be
a coroutine function."""


class WatchedStream:
    """A message stream whose frames are shown."""

    def __init__(self, stream: Any, *, sent: Hook | None = None, received: Hook | None = None) -> None:
        self._stream, self._sent, self._received = stream, sent, received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, frame: Any, payloads: Sequence[Any] = (), *, timeout: float) -> None:
        payloads = await self._shown(self._sent, frame, payloads)
        await self._stream.send(frame, payloads, timeout=timeout)

    async def receive(self, **options: Any) -> tuple[Any, Sequence[Any]]:
        frame, payloads = await self._stream.receive(**options)
        return frame, await self._shown(self._received, frame, payloads)

    async def _shown(self, hook: Hook | None, frame: Any, payloads: Sequence[Any]) -> Sequence[Any]:
        changed = None if hook is None else hook(self._stream, frame, payloads)
        if inspect.isawaitable(changed):
            changed = await changed
        return payloads if changed is None else changed


def watch_served(node: Any, protocol: Any, *, sent: Hook | None = None, received: Hook | None = None) -> None:
    """From now on handlers of `protocol` that the node sets talk on watched streams."""
    honest = node.set_handler

    def set_handler(asked: Any, handler: Any, **options: Any) -> None:
        async def handle(stream: Any) -> None:
            await handler(WatchedStream(stream, sent=sent, received=received))

        honest(asked, handle if asked == protocol else handler, **options)

    node.set_handler = set_handler


def watch_opened(node: Any, protocol: Any, *, sent: Hook | None = None, received: Hook | None = None) -> None:
    """Streams of `protocol` that the node opens from now on are watched."""
    connect = node.new_stream

    async def new_stream(peer_id: str, asked: Any, **options: Any) -> Any:
        stream = await connect(peer_id, asked, **options)
        return WatchedStream(stream, sent=sent, received=received) if asked == protocol else stream

    node.new_stream = new_stream
