"""The HTTP server of `petalnode api`: what a client may hold, and what ends when it goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from petalnode.node.api.http.server import HttpLimits, HttpServer, listen, serve_http, url_of
from petalnode.node.errors import MachineError

GET = b"GET /some%20place?a=1 HTTP/1.1\r\nHost: here\r\n\r\n"
LIMITS = HttpLimits(connections=2, head_seconds=10, idle_seconds=60, body_seconds=120, write_seconds=30)
Pair = Callable[[], tuple[Any, Any]]


def post(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /x HTTP/1.1", b"Host: here", b"Content-Length: %d" % len(body), *headers, b"", body])


class Application:
    """Answers with the body it got; with a path that begins with /wait, never. Notes how each call ended."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.ended: list[str] = []
        self.written = 0
        self.first_end = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        try:
            await self._answer(scope, receive, send)
        except BaseException as error:
            self.ended.append(type(error).__name__)
            self.first_end.set()
            raise
        self.ended.append("done")

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/early":
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        if scope["path"] == "/wait":
            await trio.sleep_forever()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            self.written += 1 << 16
        if scope["path"] == "/fault":
            raise RuntimeError("a fault")
        await send({"type": "http.response.body", "body": body})


async def run(
    client: Callable[[Any, Application], Awaitable[None]], pair: Pair = trio.testing.memory_stream_pair
) -> Application:
    """Runs `client` with one end of a connection until the server has ended the other."""
    application = Application()
    server = HttpServer(application, LIMITS)
    ours, theirs = pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, theirs)
        await client(ours, application)
    return application


async def answer(stream: Any) -> bytes:
    """All that comes until the server closes."""
    received = b""
    while data := await stream.receive_some(1 << 20):
        received += data
    return received


async def some(stream: Any, end: bytes) -> bytes:
    received = b""
    while end not in received:
        data = await stream.receive_some(1 << 20)
        assert data, received
        received += data
    return received


@pytest.mark.virtual_time
async def test_several_requests_on_one_connection() -> None:
    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(GET)
        assert b"HTTP/1.1 200" in await some(stream, b"0\r\n\r\n")
        request = post(b"hello")
        for place in range(len(request)):  # byte by byte
            await stream.send_all(request[place : place + 1])
        assert b"hello" in await some(stream, b"0\r\n\r\n")
        await stream.send_all(post(b"a") + post(b"b"))  # the second before the answer to the first
        assert (await some(stream, b"b\r\n0\r\n\r\n")).count(b"HTTP/1.1 200") == 2
        await stream.aclose()

    application = await run(client)
    assert application.bodies == [b"", b"hello", b"a", b"b"]
    assert application.scopes[0]["path"] == "/some place"
    assert application.scopes[0]["query_string"] == b"a=1"
    assert application.ended == ["done"] * 4


@pytest.mark.virtual_time
async def test_the_answer_to_a_head_has_no_body() -> None:
    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(b"HEAD / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nhello" + GET)
        received = await some(stream, b"0\r\n\r\n")
        assert received.count(b"HTTP/1.1 200") == 2
        assert b"hello" not in received
        await stream.aclose()

    assert (await run(client)).ended == ["done"] * 2


async def _close(stream: Any) -> None:
    await stream.aclose()


async def _half_close(stream: Any) -> None:
    await stream.send_eof()


async def _ask_on(stream: Any) -> None:
    """Another request stands before the end, which a server that waits for the first answer would not read."""
    await stream.send_all(GET)
    await stream.aclose()


async def _flood(stream: Any) -> None:
    await stream.send_all(bytes(1 << 18))


@pytest.mark.virtual_time
@pytest.mark.parametrize("leave", [_close, _half_close, _ask_on, _flood])
async def test_answer_ends_at_once_when_its_client_goes(leave: Callable[[Any], Awaitable[None]]) -> None:
    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(GET.replace(b"/some%20place?a=1", b"/wait"))
        await trio.testing.wait_all_tasks_blocked()
        assert application.ended == []
        begun = trio.current_time()
        await leave(stream)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == begun
        assert application.ended == ["Cancelled"]
        await stream.aclose()

    await run(client)


@pytest.mark.virtual_time
async def test_who_reads_nothing_is_given_up() -> None:
    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(GET.replace(b"/some%20place?a=1", b"/endless"))
        await some(stream, b"\r\n\r\n")
        begun = trio.current_time()
        await application.first_end.wait()
        assert LIMITS.write_seconds <= trio.current_time() - begun <= LIMITS.write_seconds + 2
        assert application.written <= 1 << 17

    assert (await run(client, trio.testing.lockstep_stream_pair)).ended == ["ClientGone"]


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("sent", "seconds", "answered"),
    [
        (b"", LIMITS.head_seconds, b""),
        (GET[:20], LIMITS.head_seconds, b"HTTP/1.1 408"),
        (post(b"12345")[:-1], LIMITS.body_seconds, b"HTTP/1.1 408"),
        (b"POST /x HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n", 0, b"HTTP/1.1 400"),
    ],
)
async def test_who_sends_slowly_or_badly_is_given_up(sent: bytes, seconds: float, answered: bytes) -> None:
    async def client(stream: Any, application: Application) -> None:
        begun = trio.current_time()
        await stream.send_all(sent)
        assert (await some(stream, answered) if answered else b"").startswith(answered)
        assert trio.current_time() - begun <= seconds + 1
        await stream.aclose()

    assert "done" not in (await run(client)).ended


@pytest.mark.virtual_time
async def test_byte_now_and_then_does_not_hold_connection() -> None:
    async def client(stream: Any, application: Application) -> None:
        begun = trio.current_time()

        async def drip() -> None:
            for byte in GET * 10:
                await stream.send_all(bytes([byte]))
                await trio.sleep(LIMITS.head_seconds / 3)

        with pytest.raises(trio.BrokenResourceError):
            await drip()
        assert trio.current_time() - begun < 3 * LIMITS.head_seconds

    await run(client)


@pytest.mark.virtual_time
async def test_an_idle_connection_is_closed() -> None:
    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(GET)
        await some(stream, b"0\r\n\r\n")
        begun = trio.current_time()
        assert await answer(stream) == b""
        assert trio.current_time() - begun == pytest.approx(LIMITS.idle_seconds)

    await run(client)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: here\r\nX: " + bytes(b"x" * (1 << 17)), b"431"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (post(b"", b"Content-Length: 7"), b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
    ],
)
async def test_what_is_no_request_is_refused(sent: bytes, status: bytes) -> None:
    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(sent)
        assert (await some(stream, b"\r\n\r\n")).startswith((b"HTTP/1.1 " + status, b"HTTP/1.1 400"))
        await stream.aclose()

    assert (await run(client)).scopes == []


@pytest.mark.virtual_time
async def test_answer_before_body_is_read_reaches_its_client() -> None:
    """Closing at once would reset the connection, and take the answer away before it is read."""

    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(b"POST /early HTTP/1.1\r\nHost: here\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(20):
            await stream.send_all(bytes(1 << 16))
        received = await some(stream, b"\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in received.lower()
        await stream.aclose()

    await run(client)


@pytest.mark.virtual_time
async def test_client_waiting_to_send_gets_permission() -> None:
    async def client(stream: Any, application: Application) -> None:
        request = post(b"hello", b"Expect: 100-continue")
        await stream.send_all(request[:-5])
        assert (await some(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await stream.send_all(b"hello")
        assert b"hello" in await some(stream, b"0\r\n\r\n")
        await stream.aclose()

    assert (await run(client)).bodies == [b"hello"]


@pytest.mark.virtual_time
async def test_fault_of_application_ends_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async def client(stream: Any, application: Application) -> None:
        await stream.send_all(GET.replace(b"/some%20place?a=1", b"/fault"))
        assert (await answer(stream)).startswith(b"HTTP/1.1 200")

    assert (await run(client)).ended == ["RuntimeError"]
    assert "a fault" in caplog.text


@pytest.mark.virtual_time
async def test_more_connections_than_allowed_must_come_back() -> None:
    server = HttpServer(Application(), LIMITS)
    async with trio.open_nursery() as nursery:
        ends = []
        for _ in range(LIMITS.connections + 1):
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(server.serve, theirs)
            await trio.testing.wait_all_tasks_blocked()
            ends.append(ours)
        assert (await answer(ends[-1])).startswith(b"HTTP/1.1 503")
        for end in ends[:-1]:
            await end.send_all(GET)
            assert b"200" in await some(end, b"0\r\n\r\n")
            await end.aclose()
        await trio.testing.wait_all_tasks_blocked()
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(server.serve, theirs)
        await ours.send_all(GET)
        assert b"200" in await some(ours, b"0\r\n\r\n")
        await ours.aclose()


async def test_slow_connections_of_one_address_leave_places() -> None:
    listeners = await listen("127.0.0.1", 0, "--http-port")
    port = listeners[0].socket.getsockname()[1]
    limits = HttpLimits(connections=8, connections_of_address=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, Application(), listeners, limits)
        send, refused = trio.open_memory_channel[bytes](20)

        async def wait_in_silence() -> None:
            slow = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
            await send.send(await slow.receive_some())

        for _ in range(20):
            nursery.start_soon(wait_in_silence)
        for _ in range(16):
            assert (await refused.receive()).startswith(b"HTTP/1.1 503")
        honest = await trio.open_tcp_stream("127.0.0.1", port)
        await honest.send_all(GET)
        assert b"200" in await some(honest, b"0\r\n\r\n")
        nursery.cancel_scope.cancel()


async def test_taken_port_is_named_with_advice() -> None:
    (listener,) = await listen("127.0.0.1", 0, "--http-port")
    port = listener.socket.getsockname()[1]
    assert url_of("127.0.0.1", [listener]) == f"http://127.0.0.1:{port}"
    with pytest.raises(MachineError, match=f"--http-port {port} at 127.0.0.1 is in use by another program"):
        await listen("127.0.0.1", port, "--http-port")
    with pytest.raises(MachineError, match=r"--http-port 0 at 192\.0\.2\.1 cannot be used"):
        await listen("192.0.2.1", 0, "--http-port")
    await listener.aclose()
