"""The bytes of one stream of a connection, for the protocol spoken on it; and a circuit made of such a stream."""

from __future__ import annotations

from typing import cast

import trio
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError

from .limits import metered
from .muxed_stream import WINDOW, MuxedStream
from .negotiation import question
from .raw_connection import READ_SIZE, ByteSink, Path, RawConnection
from .yamux import Muxer


class Connection:
    """One connection among those to a peer, for whoever cares which one a stream runs on."""

    def __init__(self, conn: SwarmConn) -> None:
        self._conn = conn
        self._muxer = cast(Muxer, conn.muxed_conn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Connection) and other._conn is self._conn

    def __hash__(self) -> int:
        return hash(self._conn)

    @property
    def path(self) -> Path:
        path: Path = self._muxer.path
        return path

    @property
    def origin(self) -> str:
        """The address that it comes from, as `limits` counts addresses."""
        return str(self._muxer.secured_conn.origin)

    @property
    def is_lost(self) -> bool:
        return self._muxer.is_closed

    @property
    def open_streams(self) -> int:
        return self._muxer.open_streams

    @property
    def local_host(self) -> str | None:
        """The address of this machine that a direct connection runs from; without that address, it is dead."""
        return self._muxer.secured_conn.local_host

    async def close(self) -> None:
        await self._conn.close()

    def suspect(self) -> None:
        """Asks the peer for a sign of life: if none comes, the connection is dropped within 4 s."""
        self._muxer.suspect()

    async def open_stream(self, protocol: str, *, window: int = WINDOW) -> StreamBytes:
        """A new stream of that protocol. Does not wait for the peer's consent: the first read raises on a refusal.

        Raises:
            ConnectionError: the connection is gone, or has too many streams.
        """
        try:
            muxed = await self._muxer.open_stream(window)
            try:
                stream = await self._conn._add_stream(muxed)
                stream.set_protocol(TProtocol(protocol))
                muxed.agree(protocol)
                await muxed.write(question(protocol))
            except BaseException:  # nobody else knows of it
                await muxed.reset()
                self._conn.streams -= {held for held in self._conn.streams if held.muxed_stream is muxed}
                raise
        except Exception as error:  # libp2p raises many kinds
            raise ConnectionError(str(error) or type(error).__name__) from error
        return StreamBytes(stream, protocol)


class StreamBytes:
    """The bytes of one stream, for `MessageStream`: a `RawStream`.

    `asked` is the protocol that the peer was asked for and has not agreed on yet.
    """

    def __init__(self, stream: NetStream, asked: str | None = None) -> None:
        self._stream = stream
        self._muxed = cast(MuxedStream, stream.muxed_stream)
        self._asked = asked
        self._answer = b"" if asked is None else question(asked)  # the part of it that has not come yet

    @property
    def path(self) -> Path:
        """The way of the connection that this stream belongs to; it never changes."""
        return self._muxed.muxed_conn.path

    @property
    def direct(self) -> bool:
        """Whether no relay is on that way."""
        return self.path.direct

    @property
    def connection(self) -> Connection:
        """The connection that this stream belongs to."""
        conn = self._stream.swarm_conn
        assert conn is not None
        return Connection(conn)

    @property
    def origin(self) -> str:
        """The address that its connection comes from."""
        return self.connection.origin

    async def turn(self) -> None:
        """Returns when the next question of the peer may be answered: with others, its address takes turns."""
        await trio.lowlevel.checkpoint()  # so that the answer before is counted
        muxer = cast(Muxer, self._muxed.muxed_conn)
        self._muxed.waits_turn = True  # which shall not count, or it would wait for what waiting takes
        try:
            await muxer.limits.work_turn(muxer.address)
        finally:
            self._muxed.waits_turn = False

    async def metered(self, serve: StreamHandlerFn) -> None:
        """Serves the stream in the turn of the peer's address. Its processor time counts for that until something is
        granted on it."""
        muxer = cast(Muxer, self._muxed.muxed_conn)

        async def in_turn() -> None:
            await self.turn()
            await serve(self._stream)

        await metered(in_turn(), muxer.limits, muxer.address, self._muxed)

    def grant(self, window: int = WINDOW) -> None:
        """Lets the peer send up to `window` bytes that were not read yet, since it was granted something."""
        self._muxed.grant(window)

    def widen(self, window: int = WINDOW) -> None:
        """Lets the peer send up to `window` bytes that were not read yet, though it was granted nothing."""
        self._muxed.widen(window)

    def divert(self, sink: ByteSink) -> None:
        """Offers what comes to `sink` first, at once and in order; what it does not take can be read."""
        self._muxed.divert(sink)

    async def read(self, n: int) -> bytes:
        try:
            if self._answer:
                await self._receive_answer()
            return await self._muxed.read(n)
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError as error:
            unsettled = f", which has not agreed on {self._asked}" if self._answer else ""
            raise ConnectionResetError(f"{error}{unsettled}") from error

    async def _receive_answer(self) -> None:
        while self._answer:
            part = await self._muxed.read(len(self._answer))
            if not self._answer.startswith(part):
                await self.reset()
                raise ConnectionRefusedError(f"the peer does not speak {self._asked}")
            self._answer = self._answer[len(part) :]

    async def write(self, data: bytes | memoryview) -> None:
        try:
            await self._muxed.write(data)
        except MuxedStreamError as error:
            raise ConnectionResetError(str(error)) from error

    def write_nowait(self, data: bytes) -> bool:
        try:
            return self._muxed.write_nowait(data)
        except MuxedStreamError as error:
            raise ConnectionResetError(str(error)) from error

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            self._muxed.discard()
            await self._stream.close()

    async def close_write(self) -> None:
        """Ends our direction and keeps on reading. Never waits for the peer."""
        await self._muxed.close()

    async def reset(self) -> None:
        with trio.CancelScope(shield=True):
            await self._stream.reset()

    async def end(self) -> None:
        """Leaves nothing of the stream: resets it unless both directions were closed in order."""
        with trio.CancelScope(shield=True):
            done = self._muxed.read_closed and self._muxed.write_closed
            await (self._stream.close() if done else self._stream.reset())

    async def wait_lost(self) -> None:
        await self._muxed.wait_lost()

    @property
    def is_lost(self) -> bool:
        """Whether the stream was reset or its connection is gone."""
        return self._muxed.lost is not None


class CircuitConnection(RawConnection):
    """A stream that a relay has connected with another peer's."""

    is_socket = False

    def __init__(self, stream: StreamBytes, path: Path) -> None:
        super().__init__(path)
        self.origin = stream.origin
        self._stream = stream

    def send_nowait(self, data: bytes) -> int:
        return len(data) if self._stream.write_nowait(data) else 0

    async def send(self, data: bytes) -> None:
        await self._stream.write(data)

    async def receive(self, n: int = READ_SIZE) -> bytes:
        return await self._stream.read(n)

    def divert(self, sink: ByteSink) -> None:
        self._stream.divert(sink)

    async def close(self) -> None:
        await self._stream.close()
