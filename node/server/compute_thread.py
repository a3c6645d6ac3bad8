"""The one thread that owns the device.

Bytes in, bytes out: steps arrive from the trio thread as they stood on the wire and leave the same way, hashed, so that
the trio thread never computes and the thread may one day become a process. The queue is bounded by its callers: a
session has at most one step in it.

Passes of whole batches (training) run one after the other when no step waits, and pause after each block: so a step
waits for one block of one batch at most, and a pass for as long as there are steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch
import trio

from ...protocols import wire_pb2 as wire
from ...protocols.ids import Span
from ...protocols.inference import Refusal
from ..blocks.passes import PassGenerator
from ..blocks.span import BlockSpan
from ..blocks.span_adapter import SpanAdapter
from .prefixes import PrefixUse
from .steps import ComputeSession, Step, StepInput, StepOutput, StepRunner, synchronise
from .tallies import ServerTallies

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending:
    """A result that a trio task waits for. `counts`: in the depth of the queue. `begun`: the blocks compute, or it is
    done already."""

    counts: bool = True
    begun: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    value: object = None


@dataclass(eq=False)
class _Call(_Pending):
    function: Callable[[], object] = field(kw_only=True)


@dataclass(eq=False)
class _PassRequest(_Pending):
    passing: PassGenerator[Any] = field(kw_only=True)
    resumed: bool = False
    abandoned: bool = False
    seconds: float = 0.0
    arrived: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class PassResult(Generic[T]):
    """What a pass ended with. `queue_seconds` includes the time it gave way to steps."""

    value: T
    queue_seconds: float
    compute_seconds: float


class ComputeThread:
    """Runs steps of many sessions on one device, and counts them. Start it inside trio; `stop` ends the thread.

    Attributes:
        steps: what runs steps, on the compute thread; whoever wants to hear of their times sets its callbacks.
    """

    def __init__(self, blocks: BlockSpan, tallies: ServerTallies | None = None) -> None:
        self.blocks = blocks
        self.steps = StepRunner(blocks, tallies)
        self._queue: SimpleQueue[Step | _Call | _PassRequest | None] = SimpleQueue()
        self._passes: deque[_PassRequest] = deque()
        self._resumed: deque[_PassRequest] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name="petalnode-compute", daemon=True)
        self._depth = 0

    @property
    def depth(self) -> int:
        """Steps and calls that wait or run. Passes are none of it: nobody waits for more than a block of one."""
        return self._depth

    def start(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the turn it is in. What still waits is never answered."""
        self._queue.put(None)
        with trio.CancelScope(shield=True), trio.move_on_after(10):
            await trio.to_thread.run_sync(self._thread.join, abandon_on_cancel=True)

    async def open(
        self,
        batch: int,
        max_length: int,
        left_padding: Sequence[int],
        codec: str,
        span: Span,
        adapter: SpanAdapter | None = None,
        paid: bool = False,
        shared: PrefixUse | None = None,
        prefix: Sequence[bytes] = (),
        peer: str = "",
    ) -> ComputeSession:
        """A session of `peer` with a cache of `batch` x `max_length` tokens for `span`: an empty one, or `shared`
        begins with as much of the blocks named `prefix` as is kept here."""
        padding = list(left_padding) or None

        def make() -> ComputeSession:
            cache = self.blocks.make_cache(batch, max_length, padding, span)
            if shared is not None:
                self.steps.prefixes.begin(shared, prefix, cache)
            return ComputeSession(cache, codec, adapter, paid, peer, shared=shared, begun=cache.length)

        return await self.call(make)

    def close(self, session: ComputeSession) -> None:
        """Frees the session's cache as soon as the thread is between two turns. Does not wait."""
        self._post(partial(self.steps.close, session))

    def limit_prefixes(self, room: int) -> None:
        """Has at most so many cache tokens kept for later sessions. Does not wait: who opens a session after this finds
        what is more than that gone."""
        self._post(partial(self.steps.prefixes.limit, room))

    def _post(self, function: Callable[[], object]) -> None:
        self._depth += 1
        self._queue.put(_Call(function=function))

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the compute thread, before the steps that wait."""
        call = _Call(function=function)
        result: T = await self._result(call, call)
        return result

    async def step(
        self, session: ComputeSession, step: StepInput, check: Callable[[], object] | None = None
    ) -> StepOutput:
        """Rolls back, reorders and runs one step. If cancelled, the step still runs and its result is dropped.

        `check` runs in the caller's thread while the blocks compute, which Python's lock allows then. What it raises
        counts before all else, and the session is then where the step began; it must not have rolled back or reordered.

        Raises:
            Refusal: ERROR_BAD_REQUEST for a payload that cannot be used, ERROR_INTERNAL if the blocks fail; that of
                `check`.
        """
        pending = _Pending()
        computing = Step(session, step, partial(self._finish, pending))
        if check is None:
            output = await self._result(pending, computing)
        else:
            computing.begin = partial(self._soon, pending.begun.set)
            output = await self._checked(pending, computing, check)
        assert isinstance(output, StepOutput)
        return output

    async def _checked(self, pending: _Pending, step: Step, check: Callable[[], object]) -> Any:
        self._depth += pending.counts
        self._queue.put(step)
        await pending.begun.wait()
        try:
            check()
        except Exception:
            await pending.done.wait()
            await self.call(partial(_undo, step))
            raise
        return await self._outcome(pending)

    async def run_pass(self, passing: PassGenerator[T], *, resumed: bool = False) -> PassResult[T]:
        """Runs `passing` to its end, whenever no step waits. If cancelled, it ends at its next pause.

        `resumed`: it is the second half of a pass, which frees memory and for which others wait; so it goes before all
        that have not got so far.

        Raises:
            Refusal: that of `passing`; ERROR_BUSY if memory runs out, ERROR_INTERNAL if the blocks fail.
        """
        request = _PassRequest(passing=passing, resumed=resumed, counts=False)
        try:
            result: PassResult[T] = await self._result(request, request)
            return result
        except trio.Cancelled:
            request.abandoned = True
            raise

    async def _result(self, pending: _Pending, item: Step | _Call | _PassRequest) -> Any:
        self._depth += pending.counts
        self._queue.put(item)
        return await self._outcome(pending)

    async def _outcome(self, pending: _Pending) -> Any:
        await pending.done.wait()
        if isinstance(pending.value, BaseException):
            raise pending.value
        return pending.value

    # --- below here: the compute thread ---

    def _finish(self, pending: _Pending, value: object) -> None:
        """Wakes who waits for `pending`; a `value` that is an exception is raised there."""
        pending.value = value

        def wake() -> None:
            self._depth -= pending.counts
            pending.begun.set()
            pending.done.set()

        self._soon(wake)

    def _soon(self, function: Callable[[], object]) -> None:
        """Has the trio thread call it."""
        assert self._token is not None
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            pass  # the node has stopped; nobody waits any more

    def _run(self) -> None:
        wait = 0.0
        while self._drain_queue(wait):
            wait = 0.0
            if self.steps.is_waited_for:
                wait = self.steps.run_turn()
            elif self._resumed or self._passes:
                self._continue_pass(self._resumed or self._passes)

    def _drain_queue(self, wait: float = 0.0) -> bool:
        """Takes all that has come, and waits: without end if there is nothing to do, else for `wait` seconds at most.
        False when the thread is to end."""
        busy = self.steps.is_waited_for or self._passes or self._resumed
        block, timeout = not busy or wait > 0, wait if busy else None
        try:
            while True:
                item = self._queue.get(block, timeout)
                if item is None:
                    return False
                if isinstance(item, Step):
                    self.steps.add(item)
                elif isinstance(item, _Call):
                    self._run_call(item)
                else:
                    (self._resumed if item.resumed else self._passes).append(item)
                block = False
        except Empty:
            return True

    def _run_call(self, call: _Call) -> None:
        try:
            self._finish(call, call.function())
        except Exception as error:
            self._finish(call, error)

    def _continue_pass(self, passes: deque[_PassRequest]) -> None:
        """Runs the first pass that somebody still wants to its next pause, or ends it."""
        running = passes[0]
        if running.abandoned:
            passes.popleft().passing.close()
            return
        begun = time.perf_counter()
        result: object
        try:
            next(running.passing)
            synchronise(self.blocks.device)  # what is only queued there would hold up the next step
            running.seconds += time.perf_counter() - begun
            return
        except StopIteration as end:
            now = time.perf_counter()
            seconds = running.seconds + now - begun
            result = PassResult(end.value, now - running.arrived - seconds, seconds)
        except Refusal as refusal:
            result = refusal
        except (torch.OutOfMemoryError, MemoryError):
            result = Refusal(wire.ERROR_BUSY, "the server's memory does not hold this pass; send fewer tokens at once")
        except Exception:
            log.exception("a pass failed in the blocks")
            result = Refusal(wire.ERROR_INTERNAL, "the server failed on this pass; try it on another server")
        passes.popleft()
        self._finish(running, result)


def _undo(step: Step) -> None:
    """Forgets the tokens of a step, which has rolled back and reordered nothing."""
    if not step.session.closed:
        step.session.roll_back(step.input.position, ())
