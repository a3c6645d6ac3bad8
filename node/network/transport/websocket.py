"""WebSocket below Noise: for browsers, and through proxies that let nothing else pass (RFC 6455; with or without TLS).

The payloads of binary messages are the bytes of the connection. As in libp2p's other implementations, where messages
end means nothing. TLS only gets through: whom one talks to, Noise proves, so a certificate is not checked here.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path as File
from typing import Final

import trio
from cryptography import x509
from multiaddr import Multiaddr
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    Request,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from ...errors import BadInput
from ..addresses import host_of, ip_of, transport_of
from ..shares import TokenBucket
from .limits import LIMITS, WORK, NodeLimits
from .raw_connection import READ_SIZE, RawConnection

_NO_MORE: Final = "the connection is gone"


class Certificate:
    """What a node shows at its addresses with /tls/ws; read again when the file has changed, since these are renewed
    every few weeks.

    Raises:
        BadInput: the files are no certificate and its key.
    """

    def __init__(self, certificate: File, key: File) -> None:
        self._files = certificate, key
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._read_at = self._load()

    def _load(self) -> float:
        certificate, key = self._files
        try:
            changed = max(certificate.stat().st_mtime, key.stat().st_mtime)
            self._context.load_cert_chain(certificate, key, password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            raise BadInput(f"the certificate {certificate} with the key {key} cannot be used: {reason}") from error
        return changed

    @property
    def ended(self) -> str | None:
        """The day on which it ended, for a person: browsers refuse it from then on."""
        until = x509.load_pem_x509_certificate(self._files[0].read_bytes()).not_valid_after_utc
        return None if until > datetime.now(UTC) else f"{until:%Y-%m-%d}"

    def context(self) -> ssl.SSLContext:
        """For the next connection. A new file that cannot be used leaves the old one in use."""
        with contextlib.suppress(OSError, BadInput):
            if max(os.stat(file).st_mtime for file in self._files) != self._read_at:
                self._read_at = self._load()
        return self._context


class _Below(trio.abc.Stream):
    """The socket's bytes, with their limits, for TLS."""

    def __init__(self, raw: RawConnection) -> None:
        self._raw = raw

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._raw.send(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._raw.receive(max_bytes or READ_SIZE)

    async def aclose(self) -> None:
        await self._raw.close()


class WebSocketConnection(RawConnection):
    """A connection after the handshakes of `accept` or `connect`. Who reads sends the answers to pings as well.

    Frames that carry little count as those of Yamux do, and for the address: they are parsed in turns with others.
    """

    is_socket = True

    def __init__(self, raw: RawConnection, limits: NodeLimits, *, client: bool) -> None:
        super().__init__(raw.path, raw.upload)
        self.is_initiator, self.origin, self.local_host = raw.is_initiator, raw.origin, raw.local_host
        self._raw = raw
        self._tls: trio.SSLStream[_Below] | None = None
        self._limits, self._address = limits, limits.of_address(raw.origin)
        self._small = TokenBucket(LIMITS.frames_per_second, LIMITS.frames_at_once)
        self._ws = WSConnection(ConnectionType.CLIENT if client else ConnectionType.SERVER)
        self._in_frame = 0  # bytes of the frame that is coming
        self._ready = bytearray()  # payload that nobody has read
        self._ended = False
        self._pong = b""  # the answer to the last ping, which goes before the next frame
        self._unsent = b""  # the rest of what `send_nowait` has begun with
        self._is_begun, self._is_sending = False, False

    # --- the handshakes

    async def shake_hands(self, context: ssl.SSLContext | None, host: str) -> None:
        """TLS if there is a context, then HTTP; `host` is that of who connects.

        Raises:
            OSError: the peer does something else.
        """
        if context is not None:
            self._tls = trio.SSLStream(
                _Below(self._raw), context, server_hostname=host or None, server_side=not self._ws.client
            )
        try:
            await (self._ask(host) if self._ws.client else self._answer())
        except RemoteProtocolError as error:
            if isinstance(error.event_hint, RejectConnection) and not self._ws.client:
                await self._send_all(self._ws.send(error.event_hint))
            raise ConnectionAbortedError(f"what is there speaks no WebSocket: {error}") from error
        except (ValueError, LocalProtocolError) as error:
            raise ConnectionAbortedError(f"no WebSocket: {error}") from error

    async def _ask(self, host: str) -> None:
        await self._send_all(self._ws.send(Request(host=f"[{host}]" if ":" in host else host, target="/")))
        answer = await self._first_event()
        if not isinstance(answer, AcceptConnection):
            status = f" (HTTP {answer.status_code})" if isinstance(answer, RejectConnection) else ""
            raise ConnectionRefusedError(f"what is there takes no WebSocket{status}")

    async def _answer(self) -> None:
        if isinstance(await self._first_event(), Request):
            await self._send_all(self._ws.send(AcceptConnection()))

    async def _first_event(self) -> Event:
        """h11 bounds what may come before it."""
        while (event := next(iter(self._ws.events()), None)) is None:
            data = await self._receive_some()
            if not data:
                raise ConnectionResetError("the peer closed the connection")
            self._ws.receive_data(data)
        return event

    # --- reading

    async def receive(self, n: int = READ_SIZE) -> bytes:
        while not self._ready and not self._ended:
            if not await self._take_frames() and not self._ready:
                data = await self._receive_some()
                self._ended = self._ended or not data
                self._ws.receive_data(data)
        data, self._ready = bytes(self._ready[:n]), self._ready[n:]
        return data

    async def _take_frames(self) -> bool:
        """Handles frames that have come, as many as one turn allows; whether there were any.

        Raises:
            ConnectionAbortedError: of a kind or a number that has no use here.
        """
        handled = small = 0
        for event in self._ws.events():
            handled += 1
            small += self._take(event)
            if self._ended or handled >= WORK.at_once:
                break
        self._answer_ping()
        if small:
            self._limits.worked(self._address, small)
            await self._limits.work_turn(self._address)
        return bool(handled)

    def _take(self, event: Event) -> bool:
        """Handles one frame, or a part of a long one; whether it was a small one that has ended."""
        size = 0
        if isinstance(event, BytesMessage):
            self._ready += event.data
            self._in_frame += len(event.data)
            if not event.frame_finished:
                return False
            size, self._in_frame = self._in_frame, 0
        elif isinstance(event, Ping):
            self._pong = self._ws.send(event.response())
        elif isinstance(event, CloseConnection):
            self._ended = True
        elif not isinstance(event, Pong):
            raise ConnectionAbortedError("the peer sent a message that is not binary")
        if size >= LIMITS.large_frame:
            return False
        if not self._small.take():
            raise ConnectionAbortedError("the peer sent more small frames than any session needs")
        return True

    def _answer_ping(self) -> None:
        if self._pong and self._tls is None and not self._unsent and not self._is_sending:
            pong, self._pong = self._pong, b""
            self._unsent = pong[self._raw.send_nowait(pong) :]

    async def _receive_some(self) -> bytes:
        if self._tls is None:
            return await self._raw.receive()
        try:
            return bytes(await self._tls.receive_some(READ_SIZE))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError(_tls_reason(error)) from error

    # --- writing

    def _framed(self, data: bytes) -> bytes:
        pong, self._pong = self._pong, b""
        try:
            return pong + self._ws.send(BytesMessage(data=data))
        except LocalProtocolError as error:
            raise ConnectionResetError(_NO_MORE) from error

    def send_nowait(self, data: bytes) -> int:
        """All of it or nothing. In the second case `send` has to follow with the same."""
        if self._tls is not None or self._is_sending:
            return 0
        frame = self._unsent + self._framed(data)
        self._unsent = frame[self._raw.send_nowait(frame) :]
        self._is_begun = bool(self._unsent)
        return 0 if self._is_begun else len(data)

    async def send(self, data: bytes) -> None:
        frame = self._unsent if self._is_begun else self._unsent + self._framed(data)
        self._unsent, self._is_begun, self._is_sending = b"", False, True
        try:
            await self._send_all(frame)
        finally:
            self._is_sending = False

    async def _send_all(self, data: bytes) -> None:
        if self._tls is None:
            await self._raw.send(data)
            return
        try:
            await self._tls.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionResetError(_tls_reason(error)) from error

    # --- the end

    async def drain(self) -> None:
        await self._raw.drain()

    async def close(self) -> None:
        if self._tls is None and not self._is_begun and not self._is_sending:
            with contextlib.suppress(OSError, LocalProtocolError):
                self._raw.send_nowait(self._unsent + self._ws.send(CloseConnection(code=1000)))
        await self._raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._raw.get_remote_address()


def _tls_reason(error: BaseException) -> str:
    cause = error.__cause__
    return str(getattr(cause, "reason", None) or cause or _NO_MORE)


async def accept(
    raw: RawConnection, transport: Iterable[str], certificate: Certificate | None, limits: NodeLimits
) -> RawConnection:
    """What a peer speaks that has connected to an address with this `transport` behind its port: none is plain TCP.

    Raises:
        OSError: it speaks something else; `raw` is closed.
    """
    parts = set(transport)
    if not parts:
        return raw
    tls = None if certificate is None or not parts & {"tls", "wss"} else certificate.context()
    return await _upgraded(WebSocketConnection(raw, limits, client=False), tls, "")


async def connect(raw: RawConnection, addr: Multiaddr, limits: NodeLimits) -> RawConnection:
    """The same for who has connected to `addr`.

    Raises:
        OSError: what is there speaks something else; `raw` is closed.
    """
    transport = transport_of(addr)
    if not transport:
        return raw
    values = {protocol.name: value for protocol, value in addr.items()}
    host = str(values.get("sni") or host_of(addr))
    context, above = None, "/ws"
    if transport != ("ws",):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        above = "/tls/ws" if ip_of(addr) and "sni" not in values else f"/tls/sni/{host}/ws"
    raw.path = replace(raw.path, remote_addr=f"{raw.path.remote_addr}{above}")
    return await _upgraded(WebSocketConnection(raw, limits, client=True), context, host)


async def _upgraded(connection: WebSocketConnection, context: ssl.SSLContext | None, host: str) -> RawConnection:
    try:
        await connection.shake_hands(context, host)
    except BaseException as error:
        if isinstance(error, OSError) and connection.path.inbound:
            await connection.drain()  # a browser shall read what was wrong
        await connection.close()
        raise
    return connection
