"""Messages of libp2p's standard protocols on a stream: one varint length, one protobuf message.

Our own protocols use `framing.py`, which reads ahead. Here not a byte is taken that does not belong to the message:
behind the last one, a relayed connection's own bytes may follow.
"""

from __future__ import annotations

import contextlib
from typing import Final, TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from .framing import ProtocolError, RawStream, StreamClosed, StreamTimeout, varint

MAX_MESSAGE: Final = 4096  # bytes, as the standards say; those of identify are longer
_MAX_VARINT: Final = 3  # bytes

M = TypeVar("M", bound=Message)


class DelimitedStream:
    """Messages with one peer, both ways. One task may send while another one receives."""

    def __init__(self, stream: RawStream, peer_id: str, *, max_message: int = MAX_MESSAGE) -> None:
        self.peer_id = peer_id
        self._stream = stream
        self._max_message = max_message

    async def send(self, message: Message, *, timeout: float) -> None:
        """Sends one message; `timeout` in seconds.

        Raises:
            StreamTimeout: the peer did not read in time; the stream was reset.
            StreamClosed: the stream has ended.
        """
        data = message.SerializeToString()
        with trio.move_on_after(timeout):
            try:
                await self._stream.write(varint(len(data)) + data)
            except OSError as error:
                raise StreamClosed(f"the stream to {self.peer_id} is closed: {error}", self.peer_id) from error
            except BaseException:
                await self.reset()  # nobody can tell where in the message it stopped
                raise
            return
        raise StreamTimeout(f"{self.peer_id} did not read a message within {timeout:g} s", self.peer_id)

    async def receive(self, kind: type[M], *, timeout: float) -> M:
        """The next message. After an error, the stream is of no use any more.

        Raises:
            StreamTimeout: it did not come in time.
            StreamClosed: the stream has ended.
            ProtocolError: too long, cut short, or no message of this kind; the stream was reset.
        """
        data = await self.receive_bytes(timeout=timeout)
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise await self._violation(f"what is no {kind.DESCRIPTOR.name}") from error

    async def receive_bytes(self, *, timeout: float) -> bytes:
        """As `receive`, of a message that the caller parses."""
        with trio.move_on_after(timeout):
            return await self._read_exactly(await self._receive_size())
        raise StreamTimeout(f"nothing came from {self.peer_id} within {timeout:g} s", self.peer_id)

    async def _receive_size(self) -> int:
        size = 0
        for turn in range(_MAX_VARINT):
            (byte,) = await self._read_exactly(1, may_end=turn == 0)
            size |= (byte & 0x7F) << (7 * turn)
            if byte < 0x80:
                break
        else:
            raise await self._violation("a message length that is no length")
        if size > self._max_message:
            raise await self._violation(f"a message of {size} bytes; {self._max_message} are allowed")
        return size

    async def _read_exactly(self, n: int, *, may_end: bool = False) -> bytes:
        data = bytearray()
        while len(data) < n:
            try:
                part = await self._stream.read(n - len(data))
            except OSError as error:
                raise StreamClosed(f"the stream to {self.peer_id} is closed: {error}", self.peer_id) from error
            if not part and may_end:
                raise StreamClosed(f"{self.peer_id} closed the stream", self.peer_id)
            if not part:
                raise await self._violation("a message that is cut short")
            data += part
        return bytes(data)

    async def _violation(self, what: str) -> ProtocolError:
        await self.reset()
        return ProtocolError(f"{self.peer_id} sent {what}", self.peer_id)

    async def close(self) -> None:
        """Says that we send nothing more. Never waits for the peer."""
        with contextlib.suppress(OSError):
            await self._stream.close()

    async def reset(self) -> None:
        """Ends the stream at once in both directions. Never waits for the peer."""
        with contextlib.suppress(OSError):
            await self._stream.reset()
