"""The two ends of a stream in memory: `RawStream`s, which carry `MessageStream`s with the real framing, and faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio
from google.protobuf.message import Message

from ...protocols.framing import MessageStream, PayloadRoom
from ...protocols.ids import StreamProtocol

WINDOW: Final = 1 << 20
"""Bytes that the other end may leave unread before `write` waits."""

F = TypeVar("F", bound=Message)


class MemoryStream:
    """One end. What a test does to it is done to the stream as a network would do it.

    Attributes:
        delay: seconds that bytes written from now on need to the other end.
        on_write: called with the bytes of each write; what it returns goes on its way, b"" drops them.
        written: bytes written so far.
        origin: the address that the other end comes from.
        granted: whether the other end has granted it something.
        widened: whether the other end lets it send much.
    """

    direct = True

    def __init__(self, window: int = WINDOW) -> None:
        self.delay = 0.0
        self.on_write: Callable[[bytes], bytes] = lambda data: data
        self.written = 0
        self.origin = ""
        self.granted = self.widened = False
        self._window = window
        self._other = self
        self._incoming = bytearray()
        self._coming: list[tuple[float, bytes]] = []  # when they arrive
        self._ended = self._closed = self._frozen = False
        self._lost = trio.Event()
        self._changed = trio.Event()

    # --- faults

    def cut(self) -> None:
        """Ends the stream for both, as when a connection breaks; what was not read is gone."""
        for end in (self, self._other):
            end._incoming.clear()
            end._coming.clear()
            end._lost.set()
            end._wake()

    def freeze(self) -> None:
        """Nothing arrives at either end any more and nobody is told, until `thaw` or `cut`."""
        self._frozen = self._other._frozen = True

    def thaw(self) -> None:
        for end in (self, self._other):
            end._frozen = False
            end._wake()

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed."""
        return self._closed

    async def turn(self) -> None:
        """Nobody else has a turn."""
        await trio.lowlevel.checkpoint()

    # --- RawStream

    def grant(self) -> None:
        """Tells the other end; its window is as wide as it will be."""
        self._other.granted = self._other.widened = True

    def widen(self, window: int) -> None:
        """Tells the other end; its window is as wide as it will be."""
        self._other.widened = True

    async def read(self, n: int) -> bytes:
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check()
            if not self._frozen:
                self._arrive()
                if self._incoming:
                    data = bytes(self._incoming[:n])
                    del self._incoming[:n]
                    self._other._wake()
                    return data
                if self._ended and not self._coming:
                    return b""
            changed = self._changed
            with trio.move_on_at(self._coming[0][0] if self._coming and not self._frozen else float("inf")):
                await changed.wait()

    async def write(self, data: bytes | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while view:
            self._check(writes=True)
            room = self._window - self._other._unread
            if room > 0:
                self._put(bytes(view[:room]))
                view = view[room:]
            else:
                await self._changed.wait()

    def write_nowait(self, data: bytes) -> bool:
        self._check(writes=True)
        if self._window - self._other._unread < len(data):
            return False
        self._put(data)
        return True

    async def close(self) -> None:
        self._closed = True
        self._other._ended = True
        self._other._wake()

    async def reset(self) -> None:
        self.cut()

    async def wait_lost(self) -> None:
        await self._lost.wait()

    @property
    def _unread(self) -> int:
        return len(self._incoming) + sum(len(data) for _, data in self._coming)

    def _check(self, *, writes: bool = False) -> None:
        if self._lost.is_set():
            raise ConnectionResetError("the stream was cut")
        if writes and self._closed:
            raise ConnectionResetError("the stream was closed on this side")

    def _put(self, data: bytes) -> None:
        self.written += len(data)
        if passed := self.on_write(data):
            self._other._coming.append((trio.current_time() + self.delay, passed))
            self._other._wake()

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= trio.current_time():
            self._incoming += self._coming.pop(0)[1]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def stream_pair(window: int = WINDOW) -> tuple[MemoryStream, MemoryStream]:
    """The two ends of a stream that carries bytes in memory; for tasks of one trio loop."""
    one, other = MemoryStream(window), MemoryStream(window)
    one._other, other._other = other, one
    return one, other


def message_streams(
    protocol: StreamProtocol[F],
    one_id: str,
    other_id: str,
    *,
    ends: tuple[MemoryStream, MemoryStream] | None = None,
    room: PayloadRoom | None = None,
) -> tuple[MessageStream[F], MessageStream[F]]:
    """The ends of a message stream between two peers: that of peer `one_id`, then that of `other_id`. It keeps in
    `room` what comes, as a node does of streams that it serves."""
    one, other = stream_pair() if ends is None else ends
    served = MessageStream(other, protocol, one_id, room=room, keeps_room=room is not None)
    return MessageStream(one, protocol, other_id), served
