"""Raw connections: what carries the bytes below Noise. Here the TCP socket; `websocket.py` has what may be above it,
`stream_bytes.py` the circuit.

Besides what libp2p's handshakes want (read and write), it can be written to without a turn of trio's loop, which costs
more than sending.

In a private swarm every connection is under one key, and a peer of another swarm is recognised at once. The bytes are
those of libp2p's specification (pnet/Private-Networks-PSK-V1.md). Each side sends 24 random bytes and then XSalsa20
under the key with them as its nonce. Py-libp2p's own `PskConn` has Salsa20 with 8 bytes.
Nothing in that says whether the keys are the same, so what comes is checked. Both sides of a connection begin with the
same words of multistream-select. The secrecy of what follows is Noise's; the key only keeps strangers out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from abc import abstractmethod
from dataclasses import dataclass
from typing import Final, Protocol, cast

import trio
from libp2p.abc import ConnectionType, IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP, TCPListener
from libp2p.utils import encode_delim
from multiaddr import Multiaddr

from ....crypto.swarm_key import Salsa20Cipher, xsalsa20
from ..addresses import Endpoint, transport_of
from ..shares import TokenBucket, origin_of_ip
from .bandwidth import THROTTLING, Bandwidth, Recent, Throttle
from .limits import LIMITS, NodeLimits

READ_SIZE: Final = 256 * 1024
_NOT_SENT: Final = 256 * 1024  # bytes that the kernel may hold back unsent
_SPREADING: Final = b"bbr"  # the start of the names of all its versions
_AT_ONCE: Final = (b"cubic", b"reno")  # systems may keep the first from ordinary users, but not the second
# Of accepting, this machine's: any other is one connection's, and not worth the host's end.
_OWN_FAULTS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EBADF, errno.EINVAL)

_FIRST_WORDS: Final = encode_delim(MULTISELECT_PROTOCOL_ID.encode())
_NONCE: Final = 24  # bytes


@dataclass(frozen=True)
class Path:
    """The way of one connection.

    `relay` is the peer id of the relay that carries it, None if `direct`. `remote_addr` is the multiaddr of the other
    end, without peer id, as this machine sees it (a relayed peer's: its circuit address), None if unknown. `inbound`
    says that the peer made the connection.
    """

    direct: bool
    relay: str | None
    remote_addr: str | None
    inbound: bool

    @property
    def endpoint(self) -> Endpoint | None:
        """The other end of the socket; None if that is a relay's, or unknown."""
        return Endpoint.of_socket(self.remote_addr) if self.direct and self.remote_addr else None


class ByteSink(Protocol):
    """Takes bytes in the task that received them. A reader in a task of its own costs a turn of trio's loop."""

    def take(self, data: bytes) -> bool:
        """Whether it took them; else they are left to who reads. It must not raise."""


class RawConnection(IRawConnection):
    """One task may read at a time, and one write. All methods but `close` raise OSError when the connection is gone."""

    # Whose work it counts as: the address of the other end, that of the relay if there is one; "" if unknown.
    origin = ""
    # A gap after which TCP would forget its window is ours to fill (see `yamux.py`).
    is_socket: bool

    def __init__(self, path: Path, upload: Throttle | None = None) -> None:
        self.path = path
        self.upload = upload  # whoever writes much has to wait for its turn there; what a circuit carries, does below
        self.is_initiator = not path.inbound
        self.local_host: str | None = None  # the address of this machine that it runs from

    @abstractmethod
    def send_nowait(self, data: bytes) -> int:
        """Takes as much of `data` as needs no waiting; returns how many bytes that were. `send` takes the rest."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Sends all of it."""

    @abstractmethod
    async def receive(self, n: int = READ_SIZE) -> bytes:
        """1 to `n` bytes, or none at the end. Cancelled, nothing is lost."""

    def divert(self, sink: ByteSink) -> None:
        """Where possible, `sink` gets all that comes from now on without a turn of trio's loop.

        Only the end, and what had come before, is left to `receive`.
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


class SocketConnection(RawConnection):
    """A TCP socket, with no Nagle and little unsent data in the kernel, where nothing can overtake it."""

    is_socket = True

    def __init__(self, stream: trio.SocketStream, path: Path, bandwidth: Bandwidth) -> None:
        super().__init__(path, bandwidth.upload)
        self._stream = stream
        self._download = bandwidth.download
        self._count = bandwidth.sockets
        self._recent = Recent()
        with contextlib.suppress(OSError):  # the peer may be gone already
            self.origin = origin_of_ip(str(stream.socket.getpeername()[0]))
            self.local_host = str(stream.socket.getsockname()[0])
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOT_SENT)
            if self._download is not None:
                # The kernel would take megabytes before the peer noticed that we read slowly.
                size = max(4 * self._download.turn_size, THROTTLING.least_buffer)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def send_nowait(self, data: bytes) -> int:
        if os.name != "posix":
            return 0
        try:
            sent = os.write(self._stream.socket.fileno(), data)
        except BlockingIOError:
            return 0
        self._count.sent += sent
        return sent

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError("the connection is gone") from error
        self._count.sent += len(data)

    async def receive(self, n: int = READ_SIZE) -> bytes:
        try:
            if self._download is not None:
                data = await self._receive_in_turn(n, self._download)
            else:
                data = bytes(await self._stream.receive_some(n))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError("the connection is gone") from error
        self._count.received += len(data)
        return data

    async def _receive_in_turn(self, n: int, download: Throttle) -> bytes:
        await trio.lowlevel.wait_readable(self._stream.socket)
        await download.turn(self, urgent=self._recent.amount() < THROTTLING.quiet)
        data = bytes(await self._stream.receive_some(min(n, download.turn_size)))
        download.spend(len(data))
        self._recent.add(len(data))
        return data

    async def drain(self) -> None:
        # A socket closed with something unread in it sends a reset, which may destroy what the peer has yet to read.
        with (
            trio.move_on_after(LIMITS.farewell),
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


def remote_multiaddr(stream: trio.SocketStream) -> str | None:
    """Where the other end of a TCP connection is."""
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return None
    if host.startswith("::ffff:") and "." in host:  # an IPv4 peer of a socket for both
        host = host.removeprefix("::ffff:")
    return f"/{'ip6' if ':' in host else 'ip4'}/{host.split('%')[0]}/tcp/{port}"


class Listener(trio.abc.Listener[trio.SocketStream]):
    """A socket that peers connect to. The limits say who is worth a task; all others are closed at once.

    trio's own takes a turn of the loop and a task for each connection: ten times what closing costs. Where more are
    refused than may be, the next ones wait in the system's queue, honest peers among them.
    """

    def __init__(self, listening: socket.socket, limits: NodeLimits) -> None:
        self.socket = trio.socket.from_stdlib_socket(listening)
        self._listening = listening
        self._limits = limits
        self._refused = TokenBucket(LIMITS.refused_per_second, LIMITS.refused_at_once)

    async def accept(self) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        while True:
            try:
                accepted, address = self._listening.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.socket)
                continue
            except OSError as error:
                if error.errno in _OWN_FAULTS:
                    raise
                await trio.lowlevel.checkpoint()
                continue  # that connection has ended already, or its network has
            if self._limits.admit(origin_of_ip(address[0] if address else "")):  # macOS: none of who is gone already
                return trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
            accepted.close()
            if not self._refused.take():
                await trio.sleep(LIMITS.refused_at_once / LIMITS.refused_per_second)

    async def aclose(self) -> None:
        self.socket.close()
        await trio.lowlevel.checkpoint()


class _TcpListener(TCPListener):
    """libp2p's, with our `Listener`s."""

    def __init__(self, handler: THandler, limits: NodeLimits) -> None:
        super().__init__(handler)
        self._limits = limits
        self._above = ""  # what follows the port

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return tuple(Multiaddr(f"{addr}{self._above}") for addr in super().get_addrs())

    async def listen(self, maddr: Multiaddr) -> None:
        """
        Raises:
            OpenConnectionError: it was closed, or cannot listen there.
        """
        async with self._lifecycle_lock:
            if self._closed:
                raise OpenConnectionError(f"closed, and asked to listen on {maddr}")
            if self._nursery is None:
                await self._spawn_background_task()
            assert self._nursery is not None
            try:
                listener = Listener(_listening(maddr), self._limits)
            except OSError as error:
                raise OpenConnectionError(f"cannot listen on {maddr}: {error}") from error
            self._above = "".join(f"/{part}" for part in transport_of(maddr) or ())
            self._nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            self.listeners.append(cast(trio.SocketListener, listener))  # of which its address is asked, and `aclose`

    async def _serve(self, stream: trio.SocketStream) -> None:
        await self.handler(TrioTCPStream(stream))


class Tcp(TCP):
    """libp2p's transport, with our `Listener`s."""

    def __init__(self, limits: NodeLimits) -> None:
        super().__init__()
        self._limits = limits

    def create_listener(self, handler_function: THandler) -> TCPListener:
        return _TcpListener(handler_function, self._limits)

    def can_listen(self, maddr: Multiaddr) -> bool:
        return transport_of(maddr) is not None


def _listening(maddr: Multiaddr) -> socket.socket:
    values = {protocol.name: value for protocol, value in maddr.items()}
    made = socket.socket(socket.AF_INET6 if "ip6" in values else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in ("SO_REUSEADDR", "SO_REUSEPORT"):  # hole punches dial from the same port
            if hasattr(socket, option):
                with contextlib.suppress(OSError):
                    made.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        _send_at_once(made)
        made.setblocking(False)
        made.bind((values.get("ip6") or values["ip4"], int(values["tcp"])))
        made.listen(LIMITS.handshakes)
    except OSError:
        made.close()
        raise
    return made


class PromptSockets(trio.abc.SocketFactory):
    """Makes trio's sockets, for `trio.socket.set_custom_socket_factory`: TCP without BBR's pacing.

    BBR, which many servers have as their default, spreads what it sends over time. It knows the rate only after some
    hundred kilobytes sent at once. A connection that carries a hidden state now and then stays in BBR's start-up phase.
    Each message is spread over up to a third of a round trip there. Measured at 100 ms of round trip: 14 ms for 8 KiB,
    26-32 ms for 16 KiB, in each direction, on plain TCP and ours. CUBIC and Reno send at once what their window holds.
    The choice must be made before a socket connects or listens.
    """

    def socket(
        self,
        family: socket.AddressFamily | int = socket.AF_INET,
        type: socket.SocketKind | int = socket.SOCK_STREAM,
        proto: int = 0,
    ) -> trio.socket.SocketType:
        made = socket.socket(family, type, proto)
        if type & socket.SOCK_STREAM and family in (socket.AF_INET, socket.AF_INET6):
            _send_at_once(made)
        return trio.socket.from_stdlib_socket(made)


def _send_at_once(made: socket.socket) -> None:
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    with contextlib.suppress(OSError):  # a kernel that does not let us choose is used as it is
        if not made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(_SPREADING):
            return
    for name in _AT_ONCE:
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


class OtherSwarm(IOException):
    """What is at the other end belongs to another swarm, or to none. The text says which, without its name."""


class PskCipher:
    """The key's cipher, both ways. What is sealed has to be sent, in that order."""

    def __init__(self, psk: str) -> None:
        self._key = bytes.fromhex(psk)
        nonce = os.urandom(_NONCE)
        self._unsent_nonce = nonce
        self._sealing = xsalsa20(self._key, nonce)
        self._nonce = b""  # the peer's, as far as it has come
        self._opening: Salsa20Cipher | None = None

    def seal(self, data: bytes) -> bytes:
        nonce, self._unsent_nonce = self._unsent_nonce, b""
        return nonce + self._sealing.encrypt(data)

    def open(self, data: bytes) -> bytes:
        """What the peer said, nothing as long as its nonce is not complete.

        Raises:
            OtherSwarm: the peer spoke without a key.
        """
        if self._opening is not None:
            return self._opening.decrypt(data)
        self._nonce += data
        if self._nonce.startswith(_FIRST_WORDS):
            raise OtherSwarm("it is not in this private swarm: it has no swarm key")
        if len(self._nonce) < _NONCE:
            return b""
        nonce, data = self._nonce[:_NONCE], self._nonce[_NONCE:]
        self._opening = xsalsa20(self._key, nonce)
        return self._opening.decrypt(data)


class PskConnection(IRawConnection):
    """A raw connection for libp2p's handshakes, under the swarm's key if there is one; checks the first words."""

    def __init__(self, raw: RawConnection, psk: str | None) -> None:
        self.raw = raw
        self.cipher = None if psk is None else PskCipher(psk)
        self.is_initiator = raw.is_initiator
        self._expected = _FIRST_WORDS

    async def read(self, n: int | None = None) -> bytes:
        while True:
            data = await self.raw.read(n)
            if self.cipher is not None and data:
                data = self.cipher.open(data)
            if data or n == 0:
                break
        if self._expected:
            self._check(data)
        return data

    def _check(self, data: bytes) -> None:
        part = data[: len(self._expected)]
        if not self._expected.startswith(part):
            if self.cipher is not None:
                raise OtherSwarm("it has another swarm key")
            raise OtherSwarm("it is no node, or one of a private swarm, which needs its --swarm-key")
        self._expected = self._expected[len(part) :]

    async def write(self, data: bytes) -> None:
        await self.raw.write(data if self.cipher is None else self.cipher.seal(data))

    async def close(self) -> None:
        await self.raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.raw.get_connection_type()
