"""The one thread that owns the device.

Bytes in, bytes out: steps arrive from the trio thread as they stood on the wire, and leave the same way, hashed. So the
trio thread never computes, and this thread could be a process. The queue is bounded by its callers: a session has at
most one step in it.

Passes of whole batches (training) run one after the other when no step waits, and pause after each block. So a step
waits for one block of one batch at most. A pass waits for as long as there are steps. While sessions generate, passes
have half of the time. Passes, and calls that clients cause, are served by address and peer, as `accounts.py` has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch
import trio

from ...protocols import wire_pb2 as wire
from ...protocols.inference import Refusal, SessionTerms
from ..blocks.passes import PassGenerator
from ..blocks.span import BlockSpan
from ..blocks.span_adapter import SpanAdapter
from ..errors import unwrapped
from ..network.shares import ONE_BY_ONE, Origins
from .prefixes import PrefixUse
from .steps import ComputeSession, CoreTime, QueuedStep, StepInput, StepOutput, StepRunner, synchronise
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
    """`client`: the address and the peer that cause it; none for the server's own."""

    function: Callable[[], object] = field(kw_only=True)
    client: tuple[str, str] | None = None
    abandoned: bool = False


@dataclass(eq=False)
class _PassRequest(_Pending):
    passing: PassGenerator[Any] = field(kw_only=True)
    client: tuple[str, str] = ("", "")
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


class StepCheck(Protocol):
    """What is checked of a step while it is computed."""

    def check(self) -> object:
        """Raises Refusal: the step is not in order."""


class StepClient(Protocol):
    """Who waits for a step."""

    async def wait_lost(self) -> None:
        """Returns when the client waits no more."""


class ComputeThread:
    """Runs steps of many sessions on one device, and counts them. Start it inside trio; `stop` ends the thread.

    Attributes:
        steps: what runs steps, on the compute thread; whoever wants to hear of their times sets its callbacks.
    """

    def __init__(
        self,
        blocks: BlockSpan,
        tallies: ServerTallies | None = None,
        origins: Origins = ONE_BY_ONE,
    ) -> None:
        """`origins` are asked in the trio thread."""
        self.blocks = blocks
        self._origins = origins
        self.steps = StepRunner(blocks, tallies)
        self._queue: SimpleQueue[QueuedStep | _Call | _PassRequest | None] = SimpleQueue()
        self._passes: deque[_PassRequest] = deque()
        self._resumed: deque[_PassRequest] = deque()
        self._calls: list[_Call] = []  # of clients
        self._part = 0.0, 0.0  # of a pass: how long the last one took, and when it ended
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
        terms: SessionTerms,
        peer: str = "",
        adapter: SpanAdapter | None = None,
        paid: bool = False,
        shared: PrefixUse | None = None,
    ) -> ComputeSession:
        """A session of `peer` with a cache of its own: an empty one, or `shared` begins with as much of the prefix that
        `terms` name as is kept here."""
        address = self._origins.origin_of(peer)

        def make() -> ComputeSession:
            padding = list(terms.left_padding) or None
            cache = self.blocks.make_cache(terms.batch, terms.max_length, padding, terms.span)
            if shared is not None:
                self.steps.prefixes.begin(shared, terms.prefix, cache)
            begun = cache.length
            return ComputeSession(cache, terms.codec, adapter, paid, peer, shared=shared, begun=begun, address=address)

        return await self.call(make, peer)

    def close(self, session: ComputeSession) -> None:
        """Frees the session's cache as soon as the thread is between two turns. Does not wait."""
        self._put(_Call(function=partial(self.steps.close, session)))

    def limit_prefixes(self, room: int) -> None:
        """Has at most `room` cache tokens kept for later sessions. Does not wait: who opens a session after this finds
        what is more than that gone."""
        self._put(_Call(function=partial(self.steps.prefixes.limit, room)))

    async def call(self, function: Callable[[], T], peer: str | None = None) -> T:
        """Runs `function` on the compute thread, before the steps that wait. Of those that peers cause, one runs
        between two turns; if cancelled before that, it does not run."""
        call = _Call(function=function, client=None if peer is None else self._client(peer))
        try:
            result: T = await self._result(call, call)
            return result
        except trio.Cancelled:
            call.abandoned = True
            raise

    def _client(self, peer: str) -> tuple[str, str]:
        return self._origins.origin_of(peer), peer

    async def step(
        self,
        session: ComputeSession,
        step: StepInput,
        check: StepCheck | None = None,
        client: StepClient | None = None,
    ) -> StepOutput:
        """Rolls back, reorders and runs one step. If cancelled, the step still runs and its result is dropped.

        `check` runs in the caller's thread while the blocks compute, which Python's lock allows then. When `client` is
        lost, nobody waits for the step any more, and no more of it is computed. What `check` raises counts before all
        else. After either the session is where the step began, which must not have rolled back or reordered.

        Raises:
            Refusal: ERROR_BAD_REQUEST for an unusable payload, ERROR_INTERNAL if the blocks fail, or ERROR_NOT_FOUND if
                it was given up; that of `check`.
        """
        pending = _Pending()
        computing = QueuedStep(session, step, partial(self._finish, pending))
        if client is not None:
            output = await self._unless_lost(pending, computing, client)
        elif check is None:
            output = await self._result(pending, computing)
        else:
            computing.begin = partial(self._tell, pending, False)
            output = await self._checked(pending, computing, check)
        assert isinstance(output, StepOutput)
        return output

    async def _unless_lost(self, pending: _Pending, step: QueuedStep, client: StepClient) -> Any:
        async def watch() -> None:
            await client.wait_lost()
            step.given_up = True

        with unwrapped(Refusal):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                output = await self._result(pending, step)
                nursery.cancel_scope.cancel()
        return output

    async def _checked(self, pending: _Pending, step: QueuedStep, check: StepCheck) -> Any:
        self._put(step, pending)
        await pending.begun.wait()
        try:
            check.check()
        except Exception:
            await pending.done.wait()
            await self.call(step.undo)
            raise
        return await self._outcome(pending)

    async def run_pass(self, passing: PassGenerator[T], *, resumed: bool = False, peer: str = "") -> PassResult[T]:
        """Runs `passing` of `peer` to its end, whenever no step waits. If cancelled, it ends at its next pause.

        `resumed`: it is the second half of a pass, which frees memory and for which others wait. So it goes before all
        that have not got so far.

        Raises:
            Refusal: that of `passing`; ERROR_BUSY if memory runs out, ERROR_INTERNAL if the blocks fail.
        """
        request = _PassRequest(passing=passing, resumed=resumed, counts=False, client=self._client(peer))
        try:
            result: PassResult[T] = await self._result(request, request)
            return result
        except trio.Cancelled:
            request.abandoned = True
            raise

    async def _result(self, pending: _Pending, item: QueuedStep | _Call | _PassRequest) -> Any:
        self._put(item, pending)
        return await self._outcome(pending)

    def _put(self, item: QueuedStep | _Call | _PassRequest, pending: _Pending | None = None) -> None:
        self._depth += pending is None or pending.counts
        self._queue.put(item)

    async def _outcome(self, pending: _Pending) -> Any:
        await pending.done.wait()
        if isinstance(pending.value, BaseException):
            raise pending.value
        return pending.value

    # --- below here: the compute thread ---

    def _finish(self, pending: _Pending, value: object) -> None:
        """Wakes who waits for `pending`; a `value` that is an exception is raised there."""
        pending.value = value
        self._tell(pending, True)

    def _wake(self, pending: _Pending, done: bool) -> None:
        """In the trio thread."""
        pending.begun.set()
        if done:
            self._depth -= pending.counts
            pending.done.set()

    def _tell(self, pending: _Pending, done: bool) -> None:
        """Has the trio thread wake who waits for the beginning of `pending`, or that it is done."""
        assert self._token is not None
        try:
            self._token.run_sync_soon(self._wake, pending, done)
        except trio.RunFinishedError:
            pass  # the node has stopped; nobody waits any more

    def _run(self) -> None:
        wait = 0.0
        while self._drain_queue(wait):
            wait = self._run_turn()

    @property
    def _is_busy(self) -> bool:
        """Whether something that was taken from the queue is not done."""
        return bool(self.steps.is_waited_for or self._passes or self._resumed or self._calls)

    def _run_turn(self) -> float:
        """What is between two looks at the queue; returns how many seconds the next one may wait for more."""
        self._drop_abandoned()
        self._note_waiting()
        wait = self._next()
        self._note_waiting()
        return wait

    def _note_waiting(self) -> None:
        requests = [request.client for request in (*self._resumed, *self._passes)]
        calls = [call.client for call in self._calls if call.client is not None]
        self.steps.accounts.note_waiting({*self.steps.clients, *requests, *calls}, time.perf_counter())

    def _next(self) -> float:
        called = not self._calls or self._run_client_call()
        passes = self._resumed or self._passes
        if self.steps.is_waited_for:
            wait = self.steps.run_turn()
        elif passes:
            wait = self._continue_pass(passes)
        else:
            wait = self.steps.accounts.rest(time.perf_counter())
        return 0.0 if self._calls and called else wait

    def _drain_queue(self, wait: float = 0.0) -> bool:
        """Takes all that has come, and waits: without end if there is nothing to do, else for `wait` seconds at most.
        False when the thread is to end."""
        busy = self._is_busy
        block, timeout = not busy or wait > 0, wait if busy else None
        try:
            while True:
                item = self._queue.get(block, timeout)
                if item is None:
                    return False
                if isinstance(item, QueuedStep):
                    self.steps.add(item)
                elif isinstance(item, _Call):
                    if item.client is None:
                        self._run_call(item)
                    else:
                        self._calls.append(item)
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

    def _drop_abandoned(self) -> None:
        """Frees what waits for nobody: in its turn it would be too late, where others come first."""
        for passes in (self._resumed, self._passes):
            for request in [request for request in passes if request.abandoned]:
                passes.remove(request)
                request.passing.close()
        for call in [call for call in self._calls if call.abandoned]:
            self._calls.remove(call)
            self._finish(call, None)

    def _run_client_call(self) -> bool:
        """Runs the call of who has had least; false if all who wait for one rest."""
        begun, core = time.perf_counter(), CoreTime(self.blocks.device)
        place = self.steps.accounts.next_of([call.client or ("", "") for call in self._calls], begun)
        if place is None:
            return False
        call = self._calls.pop(place)
        self._run_call(call)
        ended = time.perf_counter()
        self.steps.accounts.note_other(call.client or ("", ""), ended - begun, ended, core.part())
        return True

    def _continue_pass(self, passes: deque[_PassRequest]) -> float:
        """Runs one pass to its next pause, or ends it: the one that has begun, or that of who has had least. Or does
        nothing, and returns the seconds for which passes have to wait."""
        now = time.perf_counter()
        wait = self.steps.pass_wait(*self._part)
        place = None if wait else self.steps.accounts.next_of([request.client for request in passes], now)
        if place is None:
            return wait or self.steps.accounts.rest(now)
        if not passes[0].seconds:
            chosen = passes[place]
            del passes[place]
            passes.appendleft(chosen)
        self._run_part(passes)
        return 0.0

    def _run_part(self, passes: deque[_PassRequest]) -> None:
        running, begun, core = passes[0], time.perf_counter(), CoreTime(self.blocks.device)
        result: object
        try:
            next(running.passing)
            for part in self.blocks.parts:
                synchronise(part.device)  # what is only queued there would hold up the next step
            running.seconds += self._worked(running, begun, core)
            return
        except StopIteration as end:
            seconds = running.seconds + self._worked(running, begun, core)
            result = PassResult(end.value, self._part[1] - running.arrived - seconds, seconds)
        except Refusal as refusal:
            result = refusal
        except (torch.OutOfMemoryError, MemoryError):
            result = Refusal(wire.ERROR_BUSY, "the server's memory does not hold this pass; send fewer tokens at once")
        except Exception:
            log.exception("a pass failed in the blocks")
            result = Refusal(wire.ERROR_INTERNAL, "the server failed on this pass; try it on another server")
        passes.popleft()
        self._finish(running, result)

    def _worked(self, running: _PassRequest, begun: float, core: CoreTime) -> float:
        """Counts a part of a pass; returns the seconds that it took."""
        ended = time.perf_counter()
        self._part = ended - begun, ended
        self.steps.accounts.note_other(running.client, ended - begun, ended, core.part())
        return ended - begun
