"""HTTP/1.1 for one ASGI application, on trio: h11 on sockets, and a bound on whatever a client can hold.

It cancels the application as soon as its client is gone, and gives up a client that reads nothing. Other servers for
trio do neither (docs/decisions/http-server.md).
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import h11
import trio

from ...errors import MachineError
from ...network.shares import ShareCount, origin_of_ip

log = logging.getLogger(__name__)

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""As ASGI 3 has it: of scope, receive and send."""
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""The hosts by which programs of this machine ask it."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection may have, and how long it may linger."""

    receive_bytes: int = 64 << 10
    max_head: int = 64 << 10
    max_ahead: int = 64 << 10
    write_bytes: int = 64 << 10
    linger_seconds: float = 2.0


HTTP: Final = ConnectionLimits()
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class HttpLimits:
    """What a client may hold. Seconds and bytes.

    Attributes:
        connections: open at once; others are told to come back. One address has no more of them than are left for
            others. It may have `connections_of_address` while there are any.
        head_seconds: for a request's line and headers, from its first byte or that of the connection on.
        idle_seconds: between two requests of a connection.
        body_seconds: for a request's body.
        write_seconds: in which a client has to read 64 KiB of an answer, or all that is there of it.
    """

    connections: int = 512
    connections_of_address: int = 32
    head_seconds: float = 10.0
    idle_seconds: float = 60.0
    body_seconds: float = 120.0
    write_seconds: float = 30.0


class ClientGone(OSError):
    """Nobody reads the response any more."""


async def serve_http(
    application: Application, listeners: Sequence[trio.SocketListener], limits: HttpLimits | None = None
) -> None:
    """Serves `application` until cancelled.

    A client may close its connection, or only its sending side, while a request of it is answered. That cancels the
    application's task. The application need not listen for `http.disconnect`. There is no `lifespan`, no WebSocket.
    """
    server = HttpServer(application, limits or HttpLimits())
    await trio.serve_listeners(server.serve, list(listeners))


async def listen(host: str, port: int, option: str) -> list[trio.SocketListener]:
    """Listeners for an endpoint; `option` is named in errors.

    Raises:
        MachineError: the port is taken, or this machine has no such address.
    """
    try:
        return list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        what = f"{option} {port} at {host}"
        if error.errno == errno.EADDRINUSE:
            raise MachineError(f"{what} is in use by another program: give another port, or 0 for any") from None
        raise MachineError(f"{what} cannot be used: {error.strerror or error}") from None


def url_of(host: str, listeners: Sequence[trio.SocketListener]) -> str:
    """Where an endpoint is reached, without a path."""
    port = listeners[0].socket.getsockname()[1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer:
    """Serves connections; `serve_http` does so with those of listeners."""

    def __init__(self, application: Application, limits: HttpLimits) -> None:
        self.application = application
        self.limits = limits
        self._open = ShareCount(limits.connections, limits.connections_of_address)

    async def serve(self, stream: trio.abc.HalfCloseableStream) -> None:
        """One connection, to its end. Never raises but for cancellation."""
        origin = _origin(stream)
        counted = self._open.add(origin)
        try:
            if not counted:
                with trio.move_on_after(1):
                    await stream.send_all(_FULL)
                return
            await _HttpConnection(self, stream).run()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError):
            pass
        except Exception:
            log.exception("a request has failed in a way that nobody expected")
        finally:
            if counted:
                self._open.remove(origin)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)


def _origin(stream: trio.abc.HalfCloseableStream) -> str:
    """The address that a connection counts for; one that has none counts for itself."""
    with suppress(OSError):
        if isinstance(stream, trio.SocketStream):
            return origin_of_ip(str(stream.socket.getpeername()[0]))
    return str(id(stream))


class _HttpConnection:
    def __init__(self, server: HttpServer, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self.limits = server.limits
        self.h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HTTP.max_head)
        self._application = server.application
        self.eof = False
        self.broken = False

    async def run(self) -> None:
        seconds = self.limits.head_seconds
        while True:
            request = await self._next_request(seconds)
            if request is None:
                return
            exchange = _HttpExchange(self, request)
            await exchange.run(self._application)
            if exchange.refused:
                await self._refuse(exchange.refused)
            if self.broken or not (self.h11.our_state is h11.DONE and self.h11.their_state is h11.DONE):
                await self._linger()
                return
            self.h11.start_next_cycle()
            seconds = self.limits.idle_seconds

    async def _next_request(self, seconds: float) -> h11.Request | None:
        """None if there is no more, or none that can be understood, which the client is told."""
        deadline = trio.current_time() + seconds
        begun = False
        while True:
            try:
                event = self.h11.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint)
                return None
            if isinstance(event, h11.Request):
                if event.http_version in (b"1.0", b"1.1"):
                    return event
                await self._refuse(505)
                return None
            if event is not h11.NEED_DATA:
                return None
            if not begun and self.h11.trailing_data[0]:
                begun = True
                deadline = min(deadline, trio.current_time() + self.limits.head_seconds)
            with trio.move_on_at(deadline):
                await self.receive()
                continue
            if begun:
                await self._refuse(408)
            return None

    async def _refuse(self, status: int) -> None:
        if self.h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        with suppress(h11.LocalProtocolError):
            await self.send(h11.Response(status_code=status, headers=headers))
            await self.send(h11.EndOfMessage())

    async def _linger(self) -> None:
        """Lets the client read what it was told while it was still sending: closing at once would take it away."""
        if self.broken or self.eof:
            return
        with trio.move_on_after(HTTP.linger_seconds):
            await self.stream.send_eof()
            while await self.stream.receive_some(HTTP.receive_bytes):
                pass

    async def receive(self) -> None:
        """Hands what comes next to h11. Raises OSError if the connection is broken."""
        try:
            data = await self.stream.receive_some(HTTP.receive_bytes)
        except trio.BrokenResourceError:
            data = b""
        self.eof = self.eof or not data
        self.h11.receive_data(bytes(data))

    async def send(self, event: h11.Event) -> None:
        """
        Raises:
            ClientGone: the client has closed the connection, or reads nothing.
        """
        data = self.h11.send(event) or b""
        with memoryview(data) as view:
            for start in range(0, len(data), HTTP.write_bytes):
                with trio.move_on_after(self.limits.write_seconds) as deadline:
                    try:
                        await self.stream.send_all(view[start : start + HTTP.write_bytes])
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        self.broken = True
                        raise ClientGone("the client has closed the connection") from None
                    except trio.Cancelled:
                        self.broken = True  # nobody knows how much of it was sent
                        raise
                if deadline.cancelled_caught:
                    raise ClientGone(f"the client has read nothing for {self.limits.write_seconds:g} s")


class _HttpExchange:
    """One request and its response.

    Attributes:
        refused: the status of what is wrong with the body, such as that it did not come in time; 0 so far.
    """

    def __init__(self, connection: _HttpConnection, request: h11.Request) -> None:
        self._connection = connection
        self._h11 = connection.h11
        self._request = request
        self._body, self._received = trio.open_memory_channel[dict[str, Any]](1)
        self._asked = trio.Event()
        self._ended = False
        self.refused = 0
        self._sending = trio.Lock()

    async def run(self, application: Application) -> None:
        with trio.CancelScope() as scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read, scope)
                    await application(self._scope(), self._receive, self._send)
                    nursery.cancel_scope.cancel()
            except* ClientGone:
                pass

    def _scope(self) -> dict[str, Any]:
        path, _, query = self._request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": self._request.http_version.decode(),
            "method": self._request.method.decode("ascii").upper(),
            "scheme": "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(bytes(name), bytes(value)) for name, value in self._request.headers],
            "client": _address(self._connection.stream, "getpeername"),
            "server": _address(self._connection.stream, "getsockname"),
        }

    async def _read(self, scope: trio.CancelScope) -> None:
        """Reads the body, then on until the client closes: that cancels `scope`."""
        deadline = trio.current_time() + self._connection.limits.body_seconds
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                self.refused = error.error_status_hint
                break
            if isinstance(event, h11.Data):
                await self._body.send({"type": "http.request", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await self._body.send({"type": "http.request", "body": b"", "more_body": False})
                deadline = math.inf
            elif isinstance(event, h11.ConnectionClosed) or self._connection.eof:
                break
            else:
                if self._h11.they_are_waiting_for_100_continue:
                    await self._asked.wait()
                    await self._transmit(h11.InformationalResponse(status_code=100, headers=[]))
                if event is h11.PAUSED and len(self._h11.trailing_data[0]) > HTTP.max_ahead:
                    break  # it has sent more requests than anybody wants to keep
                with trio.move_on_at(deadline):
                    await self._connection.receive()
                    continue
                self.refused = 408
                break
        scope.cancel()

    async def _receive(self) -> dict[str, Any]:
        self._asked.set()
        if self._ended:
            return {"type": "http.disconnect"}
        # A client that goes cancels this task, so after the body there is nothing to be told.
        return await self._received.receive()

    async def _send(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            headers = list(message.get("headers", ()))
            if self._h11.their_state is h11.SEND_BODY:
                headers.append((b"connection", b"close"))  # the rest of the body is not worth reading
            await self._transmit(h11.Response(status_code=message["status"], headers=headers))
        elif kind == "http.response.body":
            body = message.get("body", b"")
            if body and self._request.method != b"HEAD":  # which has the headers of a body, and none
                await self._transmit(h11.Data(data=body))
            if not message.get("more_body", False):
                self._ended = True
                await self._transmit(h11.EndOfMessage())

    async def _transmit(self, event: h11.Event) -> None:
        async with self._sending:
            await self._connection.send(event)


def host_name(host: str) -> str:
    """The name in a Host header, without the port; "" if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _address(stream: trio.abc.HalfCloseableStream, which: str) -> tuple[str, int] | None:
    try:
        address = getattr(stream.socket, which)() if isinstance(stream, trio.SocketStream) else None
    except OSError:
        return None
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
