"""What carries the bytes of a connection: a TCP socket, or a stream of another connection (a circuit).

Besides what libp2p's handshakes want (read and write), a wire can be written to without waiting for one's turn in
trio's loop, which costs more than sending.
"""

from __future__ import annotations

import contextlib
import os
import socket
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio
from libp2p.abc import ConnectionType, IRawConnection
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from .bandwidth import Bandwidth, Recent, Throttle
from .path import Path

if TYPE_CHECKING:
    from .stream_bytes import StreamBytes

READ_SIZE: Final = 256 * 1024
_QUIET: Final = 64 * 1024  # bytes lately, below which a connection need not wait for those that carry much
_LEAST_RECEIVED: Final = 64 * 1024  # bytes of a socket's buffer
_DRAIN: Final = 1.0  # seconds for a stranger to read what we said before we close
_NOT_SENT: Final = 256 * 1024  # bytes that the kernel may hold back unsent


class Wire(IRawConnection):
    """One task may read at a time, and one write. All methods but `close` raise OSError when the wire is gone."""

    # A gap after which TCP would forget its window is ours to fill (see `yamux.py`).
    is_socket: bool

    def __init__(self, path: Path, upload: Throttle | None = None) -> None:
        self.path = path
        self.upload = upload  # whoever writes much has to wait for its turn there; what a circuit carries, does below
        self.is_initiator = not path.inbound
        self.local_host: str | None = None  # the address of this machine that it runs from

    @abstractmethod
    def send_nowait(self, data: bytes) -> int:
        """Takes as much of `data` as needs no waiting; returns how many bytes that were."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Sends all of it."""

    @abstractmethod
    async def receive(self, n: int = READ_SIZE) -> bytes:
        """1 to `n` bytes, or none at the end. Cancelled, nothing is lost."""

    def divert(self, take: Callable[[bytes], None]) -> None:
        """Where that is possible, from now on `take` gets what comes without a turn of trio's loop.

        Only the end, and what had come before, is told by `receive`.
        """

    async def drain(self) -> None:
        """Says that we send nothing more, and lets the peer read what we sent, for a moment."""

    @abstractmethod
    async def close(self) -> None: ...

    # --- what libp2p's handshakes use

    async def read(self, n: int | None = None) -> bytes:
        try:
            data = await self.receive(READ_SIZE if n is None else n)
        except OSError as error:
            raise ConnectionClosedError(str(error)) from error
        if not data and n != 0:
            raise ConnectionClosedError("the peer closed the connection")
        return data

    async def write(self, data: bytes) -> None:
        try:
            await self.send(data)
        except OSError as error:
            raise ConnectionClosedError(str(error)) from error

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [] if self.path.remote_addr is None else [Multiaddr(self.path.remote_addr)]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT if self.path.direct else ConnectionType.RELAYED


class SocketWire(Wire):
    """A TCP socket, with no Nagle and little unsent data in the kernel, where nothing can overtake it."""

    is_socket = True

    def __init__(self, stream: trio.SocketStream, path: Path, bandwidth: Bandwidth) -> None:
        super().__init__(path, bandwidth.upload)
        self._stream = stream
        self._download = bandwidth.download
        self._recent = Recent()
        with contextlib.suppress(OSError):  # the peer may be gone already
            self.local_host = str(stream.socket.getsockname()[0])
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOT_SENT)
            if self._download is not None:
                # The kernel would take megabytes before the peer noticed that we read slowly.
                size = max(4 * self._download.turn_size, _LEAST_RECEIVED)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def send_nowait(self, data: bytes) -> int:
        if os.name != "posix":
            return 0
        try:
            return os.write(self._stream.socket.fileno(), data)
        except BlockingIOError:
            return 0

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError("the connection is gone") from error

    async def receive(self, n: int = READ_SIZE) -> bytes:
        try:
            if self._download is not None:
                return await self._receive_in_turn(n, self._download)
            return bytes(await self._stream.receive_some(n))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError("the connection is gone") from error

    async def _receive_in_turn(self, n: int, download: Throttle) -> bytes:
        await trio.lowlevel.wait_readable(self._stream.socket)
        await download.turn(self, urgent=self._recent.bytes() < _QUIET)
        data = bytes(await self._stream.receive_some(min(n, download.turn_size)))
        download.spend(len(data))
        self._recent.add(len(data))
        return data

    async def drain(self) -> None:
        # A socket closed with something unread in it sends a reset, which may destroy what the peer has yet to read.
        with (
            trio.move_on_after(_DRAIN),
            contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            await self._stream.send_eof()
            while await self._stream.receive_some(READ_SIZE):
                pass

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        try:
            host, port = self._stream.socket.getpeername()[:2]
        except OSError:
            return None
        return str(host), int(port)


class CircuitWire(Wire):
    """A stream that a relay has connected with another peer's."""

    is_socket = False

    def __init__(self, stream: StreamBytes, path: Path) -> None:
        super().__init__(path)
        self._stream = stream

    def send_nowait(self, data: bytes) -> int:
        return len(data) if self._stream.write_nowait(data) else 0

    async def send(self, data: bytes) -> None:
        await self._stream.write(data)

    async def receive(self, n: int = READ_SIZE) -> bytes:
        return await self._stream.read(n)

    def divert(self, take: Callable[[bytes], None]) -> None:
        def taken(data: bytes) -> bool:
            take(data)
            return True

        self._stream.divert(taken)

    async def close(self) -> None:
        await self._stream.close()


def remote_multiaddr(stream: trio.SocketStream) -> str | None:
    """Where the other end of a TCP connection is."""
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return None
    if host.startswith("::ffff:") and "." in host:  # an IPv4 peer of a socket for both
        host = host.removeprefix("::ffff:")
    return f"/{'ip6' if ':' in host else 'ip4'}/{host.split('%')[0]}/tcp/{port}"
