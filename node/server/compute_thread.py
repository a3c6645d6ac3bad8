"""The one thread that owns the device.

Bytes in, bytes out: steps arrive from the trio thread as they stood on the wire and leave the same way, hashed, so that
the trio thread never computes and the thread may one day become a process. What runs next is decided by
`batching.next_turn`. The queue is bounded by its callers: a session has at most one step in it.

SpanPasses of whole batches (training) run one after the other when no step waits, and pause after each block: so a step
waits for one block of one batch at most, and a pass for as long as there are steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch
import trio

from ...protocols import wire_pb2 as wire
from ...protocols.framing import TensorError
from ...protocols.ids import Span
from ...protocols.inference import Refusal, bad_request, sha256
from ...protocols.tensors import decode, dtype_name, encode
from ..blocks.cache import SpanCache
from ..blocks.passes import PassGenerator
from ..blocks.span import BlockSpan
from ..blocks.span_adapter import SpanAdapter
from .turns import Waiting, next_turn

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class ComputeSession:
    """A session as the compute thread sees it. Only that thread touches `cache`; `adapter` changes its blocks.
    `paid`: it has priority."""

    cache: SpanCache
    codec: str
    adapter: SpanAdapter | None = None
    paid: bool = False
    closed: bool = False


@dataclass(frozen=True)
class StepInput:
    """A checked step: `tensor` describes `payload`, hidden states of [batch, tokens, hidden]."""

    position: int
    reorder: tuple[int, ...]
    tensor: wire.Tensor
    payload: bytes


@dataclass(frozen=True)
class StepOutput:
    """`payload` is the span's output under the session's codec. Times in seconds."""

    tensor: wire.Tensor
    payload: bytes
    input_hash: bytes
    output_hash: bytes
    position: int
    queue_seconds: float
    compute_seconds: float


@dataclass
class _Pending:
    """What waits in the queue: a result slot and the trio task to wake."""

    done: trio.Event = field(default_factory=trio.Event)
    value: object = None
    error: BaseException | None = None
    arrived: float = field(default_factory=time.perf_counter)


@dataclass
class _Step(_Pending):
    session: ComputeSession = field(kw_only=True)
    input: StepInput = field(kw_only=True)
    hidden: torch.Tensor | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    input_hash: bytes = b""
    started: float = 0.0
    computed: float = 0.0
    progress: int = 0

    @property
    def ready_hidden(self) -> torch.Tensor:
        assert self.hidden is not None, "a step is unpacked before it is planned"
        return self.hidden


@dataclass
class _Call(_Pending):
    function: Callable[[], object] = field(kw_only=True)


@dataclass
class PassRequest(_Pending):
    passing: PassGenerator[Any] = field(kw_only=True)
    resumed: bool = False
    abandoned: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class PassResult(Generic[T]):
    """What a pass ended with. `queue_seconds` includes the time it gave way to steps."""

    value: T
    queue_seconds: float
    compute_seconds: float


class ComputeThread:
    """Runs steps of many sessions on one device. Start it inside trio; `stop` ends the thread.

    Attributes:
        on_decode: told, on the compute thread, of decode steps: their rows, the share of the blocks that they went
            through (on average), and the seconds that they took together.
        on_prefill: told likewise of each part of a prefill: its tokens (of all rows), share, and seconds.
    """

    def __init__(self, blocks: BlockSpan) -> None:
        self.blocks = blocks
        self._queue: SimpleQueue[_Step | _Call | PassRequest | None] = SimpleQueue()
        self._passes: deque[PassRequest] = deque()
        self._resumed: deque[PassRequest] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name="petalnode-compute", daemon=True)
        self._depth = 0
        self._overtaken = 0  # prefills by those of sessions that have paid
        self.on_decode: Callable[[int, float, float], None] | None = None
        self.on_prefill: Callable[[int, float, float], None] | None = None

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
    ) -> ComputeSession:
        """A session with an empty cache of `batch` x `max_length` tokens for the blocks of `span`."""
        return await self.call(
            lambda: ComputeSession(
                self.blocks.make_cache(batch, max_length, list(left_padding) or None, span), codec, adapter, paid
            )
        )

    def close(self, session: ComputeSession) -> None:
        """Frees the session's cache as soon as the thread is between two turns. Does not wait."""

        def free() -> None:
            session.closed = True
            session.cache.free()
            session.adapter = None

        self._depth += 1
        self._queue.put(_Call(function=free))

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the compute thread, before the steps that wait."""
        pending = _Call(function=function)
        await self._submit(pending)
        return pending.value  # type: ignore[return-value]

    async def step(self, session: ComputeSession, step: StepInput) -> StepOutput:
        """Rolls back, reorders and runs one step. If cancelled, the step still runs and its result is dropped.

        Raises:
            Refusal: ERROR_BAD_REQUEST for a payload that cannot be used, ERROR_INTERNAL if the blocks fail.
        """
        pending = _Step(session=session, input=step)
        await self._submit(pending)
        assert isinstance(pending.value, StepOutput)
        return pending.value

    async def run_pass(self, passing: PassGenerator[T], *, resumed: bool = False) -> PassResult[T]:
        """Runs `passing` to its end, whenever no step waits. If cancelled, it ends at its next pause.

        `resumed`: it is the second half of a pass, which frees memory and for which others wait; so it goes before all
        that have not got so far.

        Raises:
            Refusal: ERROR_BUSY if memory runs out, ERROR_INTERNAL if the blocks fail.
        """
        pending = PassRequest(passing=passing, resumed=resumed)
        try:
            await self._submit(pending)
        except trio.Cancelled:
            pending.abandoned = True
            raise
        return pending.value  # type: ignore[return-value]

    async def _submit(self, pending: _Step | _Call | PassRequest) -> None:
        self._depth += not isinstance(pending, PassRequest)
        self._queue.put(pending)
        await pending.done.wait()
        if pending.error is not None:
            raise pending.error

    # --- below here: the compute thread ---

    def _finish(self, pending: _Pending, value: object, error: BaseException | None = None) -> None:
        pending.value, pending.error = value, error
        assert self._token is not None

        def wake() -> None:
            self._depth -= not isinstance(pending, PassRequest)
            pending.done.set()

        try:
            self._token.run_sync_soon(wake)
        except trio.RunFinishedError:
            pass  # the node has stopped; nobody waits any more

    def _run(self) -> None:
        steps: list[_Step] = []
        while True:
            try:
                item = self._queue.get_nowait() if steps or self._passes or self._resumed else self._queue.get()
                while True:
                    if item is None:
                        return
                    if isinstance(item, _Call):
                        self._run_call(item)
                    elif isinstance(item, PassRequest):
                        (self._resumed if item.resumed else self._passes).append(item)
                    elif not self._ended(item) and self._unpack(item):
                        steps.append(item)
                    item = self._queue.get_nowait()
            except Empty:
                pass
            steps = [step for step in steps if not self._ended(step)]
            if steps:
                steps = self._run_turn(steps)
            elif self._resumed or self._passes:
                self._continue_pass(self._resumed or self._passes)

    def _run_call(self, call: _Call) -> None:
        try:
            self._finish(call, call.function())
        except Exception as error:
            self._finish(call, None, error)

    def _continue_pass(self, passes: deque[PassRequest]) -> None:
        """Runs the first pass that somebody still wants to its next pause, or ends it."""
        running = passes[0]
        if running.abandoned:
            passes.popleft().passing.close()
            return
        begun = time.perf_counter()
        done: PassResult[Any] | None = None
        refusal: Refusal | None = None
        try:
            next(running.passing)
            synchronise(self.blocks.device)  # what is only queued there would hold up the next step
            running.seconds += time.perf_counter() - begun
            return
        except StopIteration as end:
            now = time.perf_counter()
            seconds = running.seconds + now - begun
            done = PassResult(end.value, now - running.arrived - seconds, seconds)
        except (torch.OutOfMemoryError, MemoryError):
            refusal = Refusal(wire.ERROR_BUSY, "the server's memory does not hold this pass; send fewer tokens at once")
        except Exception:
            logger.exception("a pass failed in the blocks")
            refusal = Refusal(wire.ERROR_INTERNAL, "the server failed on this pass; try it on another server")
        passes.popleft()
        self._finish(running, done, refusal)

    def _ended(self, step: _Step) -> bool:
        """Whether the step's session was closed meanwhile; whoever waits for the step is told."""
        if step.session.closed:
            self._finish(step, None, Refusal(wire.ERROR_NOT_FOUND, "the session has ended"))
        return step.session.closed

    def _unpack(self, step: _Step) -> bool:
        """Bytes to tensor, and the cache to where the step starts. Answers the step itself if that fails."""
        step.started = time.perf_counter()
        cache = step.session.cache
        try:
            step.input_hash = sha256(step.input.payload)
            hidden = decode(step.input.tensor, step.input.payload)
            if not torch.isfinite(hidden).all():
                raise bad_request("the hidden states hold NaN or infinity")
            if step.input.position < cache.length:
                cache.rollback(step.input.position)
            if step.input.reorder:
                cache.reorder(step.input.reorder)
            step.hidden = hidden.to(self.blocks.device, self.blocks.dtype)
        except (TensorError, ValueError) as error:
            self._finish(step, None, bad_request(str(error)))
            return False
        except Refusal as refusal:
            self._finish(step, None, refusal)
            return False
        except Exception:
            self._fail(step)
            return False
        return True

    def _fail(self, step: _Step) -> None:
        logger.exception("a step failed in the blocks")
        self._finish(
            step, None, Refusal(wire.ERROR_INTERNAL, "the server failed on this step; try it on another server")
        )

    def _run_turn(self, steps: list[_Step]) -> list[_Step]:
        waiting = [
            Waiting(step.ready_hidden.shape[0], step.ready_hidden.shape[1], step.progress, step.session.paid)
            for step in steps
        ]
        turn = next_turn(waiting, self._overtaken)
        self._overtaken = turn.overtaken
        answered: set[int] = set()
        if turn.decode:
            self._decode([steps[index] for index in turn.decode])
            answered.update(turn.decode)
        if turn.prefill is not None and self._prefill(steps[turn.prefill], turn.chunk):
            answered.add(turn.prefill)
        return [step for index, step in enumerate(steps) if index not in answered]

    def _decode(self, batch: list[_Step]) -> None:
        before = [step.session.cache.length for step in batch]
        begun = time.perf_counter()
        try:
            outputs = self.blocks.decode(
                [(step.ready_hidden, step.session.cache) for step in batch], [step.session.adapter for step in batch]
            )
            synchronise(self.blocks.device)  # or the time would be that of giving the order
        except Exception:
            if len(batch) == 1:
                self._fail(batch[0])
                return
            # One bad session must not take the others down: each for itself, from where it stood.
            logger.warning("a batch of %d decode steps failed; running them one by one", len(batch))
            for step, length in zip(batch, before, strict=True):
                step.session.cache.rollback(length)
                self._decode([step])
            return
        seconds = time.perf_counter() - begun
        if self.on_decode is not None:
            blocks = sum(len(step.session.cache.specs) for step in batch)
            rows = sum(step.session.cache.batch for step in batch)
            self.on_decode(rows, blocks / len(batch) / len(self.blocks.span), seconds)
        for step, output in zip(batch, outputs, strict=True):
            step.computed = seconds
            self._answer(step, output)

    def _prefill(self, step: _Step, chunk: int) -> bool:
        """Computes the next `chunk` tokens; true once the step is answered."""
        begun = time.perf_counter()
        hidden = step.ready_hidden
        end = step.progress + chunk
        try:
            session = step.session
            step.outputs.append(self.blocks.forward(hidden[:, step.progress : end], session.cache, session.adapter))
            synchronise(self.blocks.device)
        except Exception:
            self._fail(step)
            return True
        step.progress = end
        seconds = time.perf_counter() - begun
        step.computed += seconds
        if self.on_prefill is not None:
            share = len(step.session.cache.specs) / len(self.blocks.span)
            self.on_prefill(chunk * hidden.shape[0], share, seconds)
        if end < hidden.shape[1]:
            return False
        self._answer(step, torch.cat(step.outputs, 1) if len(step.outputs) > 1 else step.outputs[0])
        return True

    def _answer(self, step: _Step, output: torch.Tensor) -> None:
        try:
            dtype = step.input.tensor.dtype
            tensor, payload = encode(
                output if dtype_name(output.dtype) == dtype else output.to(getattr(torch, dtype)), step.session.codec
            )
            self._finish(
                step,
                StepOutput(
                    tensor=tensor,
                    payload=payload,
                    input_hash=step.input_hash,
                    output_hash=sha256(payload),
                    position=step.session.cache.length,
                    queue_seconds=step.started - step.arrived,
                    compute_seconds=step.computed,
                ),
            )
        except Exception:
            self._fail(step)


def synchronise(device: torch.device) -> None:
    """Returns when the device has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
