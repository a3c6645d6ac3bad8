"""Feeds targets with hostile inputs, and says what an input must not do: raise past its handler, hold a task beyond its
deadline, leave memory behind, take long to be refused.

Time is virtual, so that a handler that gets silence comes to its deadline at once, and nothing here depends on how fast
the machine is. An input follows from the seed, the target's name and its number alone.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import traceback
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import thread_time
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import trio

from petalnode.node.testing import run_autojumping
from tests.fuzz.mutation import Mutator

T = TypeVar("T")


class Subject(Protocol):
    """What the inputs of a target are given to; lives for many of them."""

    async def feed(self, given: Any) -> None:
        """Raises whatever got past the handler."""

    def held(self) -> Mapping[str, int]:
        """What must be as before once an input was dealt with: entries of tables, memory that is reserved."""


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        share: of a run's inputs, in proportion to the others'.
        make: an input, by the mutator that is given.
        open: the subject, for the length of a block.
        seconds: virtual ones that an input may take at most, silence of the peer included.
        peak: bytes that an input may take while it is dealt with, beside eight times its own.
    """

    name: str
    share: int
    make: Callable[[Mutator], Any]
    open: Callable[[], AbstractAsyncContextManager[Subject]]
    seconds: float = 60.0
    peak: int = 2 << 20


@dataclass(frozen=True)
class Failure:
    target: str
    number: int
    what: str


@dataclass
class Report:
    """How a target's inputs were dealt with; `slowest` in seconds of processor time, by `slowest_number`."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    slowest_number: int = 0
    failures: list[Failure] = field(default_factory=list)


def parser(
    name: str, share: int, make: Callable[[Mutator], T], read: Callable[[T], object], *allowed: type[Exception]
) -> Target:
    """A target that is a plain function, which may raise what it documents."""

    class Reader:
        async def feed(self, given: T) -> None:
            try:
                read(given)
            except allowed:
                pass

        def held(self) -> Mapping[str, int]:
            return {}

    @asynccontextmanager
    async def opened() -> AsyncIterator[Reader]:
        yield Reader()

    return Target(name, share, make, opened)


class _Errors(logging.Handler):
    """Errors that a handler of ours has caught and logged are none that it expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("petalnode"):
            self.seen.append(logging.Formatter().format(record))


@contextmanager
def _errors():  # type: ignore[no-untyped-def]
    errors = _Errors()
    logger = logging.getLogger("petalnode")
    logger.addHandler(errors)
    before, logger.propagate = logger.propagate, False
    try:
        yield errors
    finally:
        logger.propagate = before
        logger.removeHandler(errors)


@contextmanager
def without_threads():  # type: ignore[no-untyped-def]
    """Worker threads would race with a clock that jumps: what they do is done in place, for this thread's loop. And no
    processor time passes: it would be counted for a peer, and hold it up by that clock."""
    ours, in_thread = threading.get_ident(), trio.to_thread.run_sync

    async def run_sync(function: Callable[..., T], *args: Any, **options: Any) -> T:
        if threading.get_ident() != ours:
            return await in_thread(function, *args, **options)  # that of another test's servers
        await trio.lowlevel.checkpoint()
        return function(*args)

    with patch.object(trio.to_thread, "run_sync", run_sync), patch.object(time, "thread_time", float):
        yield


def _untold(target: Target, number: int) -> None:
    """Nobody wants to know which input is next."""


def run(target: Target, seed: int, numbers: Iterable[int], started: Callable[[Target, int], None] = _untold) -> Report:
    """Feeds the inputs of these numbers. `started` is told of each before it is made."""
    with without_threads():
        return run_autojumping(_run, target, seed, numbers, started)


async def _run(target: Target, seed: int, numbers: Iterable[int], started: Callable[[Target, int], None]) -> Report:
    report = Report(target.name)
    begun = thread_time()
    with _errors() as errors:
        async with target.open() as subject:
            before = dict(subject.held())
            for number in numbers:
                started(target, number)
                given = target.make(Mutator((seed, target.name, number)))
                fed = thread_time()
                what = await _fed(target, subject, given)
                took = thread_time() - fed
                if took > report.slowest:
                    report.slowest, report.slowest_number = took, number
                what = what or "\n".join(errors.seen)
                errors.seen.clear()
                if not what and subject.held() != before:
                    what = f"left behind: {subject.held()}, and there was {before}"
                    before = dict(subject.held())
                report.inputs += 1
                if what:
                    report.failures.append(Failure(target.name, number, what))
    report.seconds = thread_time() - begun
    return report


async def _fed(target: Target, subject: Subject, given: Any) -> str:
    try:
        with trio.fail_after(target.seconds):
            await subject.feed(given)
    except trio.TooSlowError:
        return f"not done with it after {target.seconds:g} s"
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


def grown(target: Target, seed: int, inputs: int) -> tuple[int, int, int]:
    """Bytes that are held after the same inputs were fed a second time, more than after the first; and the most bytes
    above its allowance that one took while it was dealt with, with its number."""
    with without_threads():
        return run_autojumping(_grown, target, seed, inputs)


async def _grown(target: Target, seed: int, inputs: int) -> tuple[int, int, int]:
    highest, number_of_highest = -target.peak, 0
    with _errors():
        async with target.open() as subject:
            gc.freeze()  # what there is already need not be looked through again
            tracemalloc.start()
            try:
                sizes = []
                for turn in range(3):
                    for number in range(inputs):
                        given = target.make(Mutator((seed, target.name, number)))
                        held = tracemalloc.get_traced_memory()[0]
                        tracemalloc.reset_peak()
                        with trio.move_on_after(target.seconds):
                            await _quietly(partial(subject.feed, given))
                        above = tracemalloc.get_traced_memory()[1] - held - target.peak - 8 * size_of(given)
                        if turn and above > highest:
                            highest, number_of_highest = above, number
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
            finally:
                tracemalloc.stop()
                gc.unfreeze()
    return min(sizes[2] - sizes[1], sizes[1] - sizes[0]), highest, number_of_highest


async def _quietly(function: Callable[[], Awaitable[None]]) -> None:
    try:
        await function()
    except Exception:
        pass  # told by `run`


def size_of(given: Any) -> int:
    """Bytes of an input."""
    if isinstance(given, bytes | bytearray | str):
        return len(given)
    if isinstance(given, list | tuple):
        return sum(map(size_of, given))
    if isinstance(given, dict):
        return sum(map(size_of, given.values()))
    return 8
