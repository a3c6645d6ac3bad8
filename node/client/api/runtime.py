"""A trio event loop in a daemon thread, for the synchronous Python API.

May be called from any thread, such as those of autograd, but not after a fork. The loop is stopped at exit.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

import trio

from ...errors import PetalnodeError

T = TypeVar("T")
_CLOSE_TIMEOUT = 10.0


class TrioThread(Generic[T]):
    """Holds an async context manager open in a trio thread, and runs async functions there.

    Args:
        resource: entered in the thread; its value is `self.value`, and its errors are raised by the constructor.
    """

    value: T

    def __init__(self, resource: AbstractAsyncContextManager[T], name: str = "petalnode-client") -> None:
        self._pid = os.getpid()
        self._ready: Future[T] = Future()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._stop: trio.Event | None = None
        self._closed = False
        self._thread = threading.Thread(target=trio.run, args=(self._main, resource), name=name, daemon=True)
        self._thread.start()
        try:
            self.value = self._ready.result()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    async def _main(self, resource: AbstractAsyncContextManager[T]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._hold, resource)
                await self._stop.wait()
                nursery.cancel_scope.cancel()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _hold(self, resource: AbstractAsyncContextManager[T]) -> None:
        assert self._stop is not None
        try:
            async with resource as value:
                self._ready.set_result(value)
                await self._stop.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(_only(error))

    def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Runs `await function(*args)` in the thread and returns what it returns.

        Ctrl-C while waiting cancels it there.

        Raises:
            PetalnodeError: if the thread was closed, or belongs to the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise PetalnodeError(
                "this model was opened in another process: connections do not survive a fork. "
                "Call from_pretrained after the fork (for data loaders: num_workers=0, or start method 'spawn')"
            )
        if self._closed or self._token is None:
            raise PetalnodeError("this model is closed; call from_pretrained again")
        result: Future[Any] = Future()
        scope = trio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    result.set_result(await function(*args))
            except Exception as error:
                result.set_exception(_only(error))
            finally:
                if not result.done():
                    result.set_exception(CancelledError())

        def start() -> None:
            assert self._nursery is not None
            try:
                self._nursery.start_soon(run)
            except RuntimeError as error:  # the loop is going down
                result.set_exception(error)

        token = self._token
        try:
            token.run_sync_soon(start)
            return result.result()
        except trio.RunFinishedError:
            raise PetalnodeError("this model is closed; call from_pretrained again") from None
        except CancelledError:
            raise PetalnodeError("the call was cut off because the model was closed") from None
        except KeyboardInterrupt:
            token.run_sync_soon(scope.cancel)
            raise

    def close(self) -> None:
        """Stops the loop and waits for it. Safe to call twice, and in a forked child (where it does nothing)."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._token is not None and self._stop is not None:
            try:
                self._token.run_sync_soon(self._stop.set)
            except trio.RunFinishedError:
                return
            self._thread.join(_CLOSE_TIMEOUT)


def _only(error: BaseException) -> BaseException:
    """The error inside nested exception groups, if it is the only one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
