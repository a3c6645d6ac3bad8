"""A line that a test can cut, freeze and mend: a TCP proxy in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_SIZE = 1 << 16


class Line:
    """The way to one server, by way of `port` of this machine. Made by `line_to`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="line", daemon=True)
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread.start()
        self._call(self._start)

    def cut(self) -> None:
        """Ends every connection; new ones can be made."""
        self._call(self._abort)

    def take_down(self) -> None:
        """Ends every connection and refuses new ones, until `mend`."""
        self._call(self._stop)

    def freeze(self) -> None:
        """Lets nothing through, and tells nobody, until `mend`. New connections are made and stay silent."""
        self._call(self._shut)

    def mend(self) -> None:
        """As it was at first."""
        self._call(self._start)

    def end(self) -> None:
        self._call(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(function(), self._loop).result(30)

    # --- below here: the thread

    async def _start(self) -> None:
        self._open.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_address=True)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _shut(self) -> None:
        self._open.clear()

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._abort()

    async def _abort(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.ensure_future(self._pass_on(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(_SIZE):
                await self._open.wait()
                target.write(data)
                await target.drain()
            target.close()
        except OSError:
            target.transport.abort()


@contextmanager
def line_to(host: str, port: int) -> Iterator[Line]:
    line = Line((host, port))
    try:
        yield line
    finally:
        line.end()
