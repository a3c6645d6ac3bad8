"""Streams in memory that note what is written to them."""

from __future__ import annotations

import trio
import trio.testing

PEER = "12D3KooWPeer"


class MemoryEnd:
    """One end of an in-memory stream, with the manners of a real one."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self._stream = stream
        self.writes: list[int] = []
        self.was_reset = False

    async def read(self, n: int) -> bytes:
        try:
            return bytes(await self._stream.receive_some(n))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError("reset") from error

    async def write(self, data: bytes) -> None:
        self.writes.append(len(data))
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError("reset") from error

    def write_nowait(self, data: bytes) -> bool:
        return False

    async def close(self) -> None:
        await self._stream.send_eof()

    async def reset(self) -> None:
        self.was_reset = True
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)

    @property
    def is_lost(self) -> bool:
        return self.was_reset

    async def wait_lost(self) -> None:
        await trio.sleep_forever()


def ends(lockstep: bool = False) -> tuple[MemoryEnd, MemoryEnd]:
    pair = trio.testing.lockstep_stream_pair() if lockstep else trio.testing.memory_stream_pair()
    return MemoryEnd(pair[0]), MemoryEnd(pair[1])
