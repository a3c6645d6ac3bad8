"""Steps of sessions on the device: who is next, bytes to tensors, a ragged batch of decode steps or a chunk of a
prefill, tensors to bytes. All of it runs on the compute thread.

`turns.py` decides which are next, `gathering.py` whether to wait a moment for more of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ...protocols import wire_pb2 as wire
from ...protocols.framing import TensorError
from ...protocols.ids import PLAIN, Layout
from ...protocols.inference import Refusal, bad_request, layout_of, sha256
from ...protocols.prefix import token_digests
from ...protocols.tensors import DTYPES, arrives_finite, decode, dtype_name, encode
from ..blocks.cache import SpanCache
from ..blocks.caches.states import StatesLost
from ..blocks.span import BlockSpan
from ..blocks.span_adapter import SpanAdapter
from .accounts import Accounts, Client
from .gathering import Gathering
from .prefixes import PrefixStore, PrefixUse
from .tallies import ServerTallies
from .turns import Shares, Turn, Waiting, next_turn, pass_wait

log = logging.getLogger(__name__)

_SCHEDSTAT: Final = "/proc/thread-self/schedstat"
_LARGE: Final = 1 << 16
"""Bytes of a step from which on hashing and unpacking it counts."""
OnComputed = Callable[[int, float, float], None]


@dataclass(eq=False)
class ComputeSession:
    """A session of `peer` at `address` as the compute thread sees it. Only that thread touches `cache`; `adapter`
    changes its blocks. `paid`: it has priority. `shared`: what it shares with other sessions, None for nothing.
    `begun`: tokens of a row that it began with."""

    cache: SpanCache
    codec: str
    adapter: SpanAdapter | None = None
    paid: bool = False
    peer: str = ""
    closed: bool = False
    shared: PrefixUse | None = None
    begun: int = 0
    address: str = ""

    @property
    def client(self) -> Client:
        return self.address or self.peer, self.peer

    def close(self) -> None:
        self.closed = True
        self.cache.free()
        self.adapter = None
        self.shared = None

    def roll_back(self, position: int, reorder: Sequence[int]) -> None:
        """Brings the cache to where a step starts."""
        if position < self.cache.length:
            self.cache.rollback(position)
            if self.shared is not None:
                self.shared.rollback(position)
        if reorder:
            self.cache.reorder(reorder)
            if list(reorder) != list(range(len(reorder))):
                self.shared = None  # a row's cache does not follow from the inputs of that row any more


@dataclass(frozen=True)
class StepInput:
    """A checked step: `tensor` describes `payload`, hidden states of [batch, tokens, hidden].

    `payload_hash`: what SHA-256 of the payload has to be; empty if it may be anything.
    `long_factors`: as `wire.Step` has it. `layout`: of its tokens.
    """

    position: int
    reorder: tuple[int, ...]
    tensor: wire.Tensor
    payload: bytes
    payload_hash: bytes = b""
    long_factors: bool = False
    layout: Layout = PLAIN

    @classmethod
    def of(cls, step: wire.Step, tensor: wire.Tensor, payload: bytes, payload_hash: bytes) -> StepInput:
        reorder, layout = tuple(step.reorder), layout_of(step)
        return cls(step.position, reorder, tensor, payload, payload_hash, step.long_factors, layout)


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


@dataclass(eq=False)
class QueuedStep:
    """A step on its way through the device. `answer` is called once, with its output or why there is none; `begin`
    before the blocks compute a token of it. `given_up`: nobody waits for it any more, and what is not computed of it
    never is. Such a step has rolled back and reordered nothing."""

    session: ComputeSession
    input: StepInput
    answer: Callable[[StepOutput | Refusal], None]
    begin: Callable[[], None] = lambda: None
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    seconds: float = 0.0
    given_up: bool = False
    input_hash: bytes = b""
    digests: list[bytes] = field(default_factory=list)
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    outputs: list[torch.Tensor] = field(default_factory=list)
    done: int = 0
    """Tokens of each row that are computed."""

    def undo(self) -> None:
        """Forgets its tokens. It must have rolled back and reordered nothing."""
        if not self.session.closed:
            self.session.roll_back(self.input.position, ())


class StepRunner:
    """Runs steps of many sessions through `blocks`, some at each turn.

    Attributes:
        accounts: who has had what of the device; for all that is done there.
        prefixes: what sessions have left for later ones.
        on_decode: told of decode steps: their rows, the share of the blocks that they went through on average, and
            their seconds together.
        on_prefill: told likewise of each part of a prefill: its tokens (of all rows), share, and seconds.
    """

    def __init__(
        self,
        blocks: BlockSpan,
        tallies: ServerTallies | None = None,
    ) -> None:
        self._blocks = blocks
        self._tallies = tallies or ServerTallies()
        self._waiting: list[QueuedStep] = []
        self.accounts = Accounts()
        self._gathering = Gathering()
        self._overtaken = 0  # prefills by those of sessions that have paid
        self.prefixes = PrefixStore()
        self.on_decode: OnComputed = lambda rows, share, seconds: None
        self.on_prefill: OnComputed = lambda tokens, share, seconds: None

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    @property
    def clients(self) -> set[Client]:
        """Whose steps wait."""
        return {step.session.client for step in self._waiting}

    def add(self, step: QueuedStep) -> None:
        """Unpacks a step, which then waits for its turn; answers it at once if that fails."""
        begun = time.perf_counter()
        core = CoreTime(self._blocks.device) if len(step.input.payload) >= _LARGE else None
        try:
            self._unpack(step)
        except Exception as error:
            step.answer(_refusal(error))
        else:
            self._waiting.append(step)
            self._gathering.came(step.session, step.arrived)
        if core is not None:
            now = time.perf_counter()
            self.accounts.note_other(step.session.client, now - begun, now, core.part())

    def _unpack(self, step: QueuedStep) -> None:
        """Bytes to tensor, and the cache to where the step starts; ERROR_BAD_REQUEST: the cache is untouched."""
        if step.session.closed or step.given_up:
            raise _ended()
        step.started = time.perf_counter()
        try:
            step.input_hash = sha256(step.input.payload)
            if step.input.payload_hash not in (b"", step.input_hash):
                raise bad_request("the pusher's receipt is not for what it pushed")
            hidden = decode(step.input.tensor, step.input.payload)
            # After the cast: what is finite in the session's dtype may be too large for that of the blocks.
            step.hidden = hidden.to(self._blocks.device, self._blocks.dtype)
            if not torch.isfinite(step.hidden).all():
                raise bad_request(f"the hidden states hold NaN, infinity, or more than {self._blocks.dtype} holds")
        except (TensorError, ValueError) as error:
            raise bad_request(str(error)) from None
        try:
            step.session.roll_back(step.input.position, step.input.reorder)
        except StatesLost as error:
            raise Refusal(wire.ERROR_NOT_FOUND, str(error)) from None
        cache = step.session.cache
        self._blocks.stack.begin_step(cache, hidden.shape[1], step.input.long_factors, step.input.layout)
        if step.session.shared is not None:
            rows, tokens = hidden.shape[:2]
            step.digests = token_digests(
                step.input.payload, rows, tokens, long_factors=cache.long_factors, layout=step.input.layout
            )

    def close(self, session: ComputeSession) -> None:
        self._gathering.gone(session)
        session.close()

    def run_turn(self) -> float:
        """Runs waiting decode steps as one batch, and then a chunk of one prefill, as `next_turn` has it. Returns the
        seconds for which it is better to do nothing: steps are about to come, or all that are here rest."""
        self._drop_given_up()
        left = self._gathering.left(len(self._waiting), time.perf_counter())
        if left and all(step.hidden.shape[1] == 1 for step in self._waiting):
            return left
        waiting, shares, turn = self._next_turn()
        if turn.prefill is None and not turn.decode:
            return self.accounts.rest(time.perf_counter())
        sessions = [step.session for step in self._waiting]
        seconds = self._gathering.time(waiting, sessions, turn, shares, time.perf_counter())
        if not seconds:
            self._run(turn)
        return seconds

    def pass_wait(self, took: float, ended: float) -> float:
        """Seconds for which no pass may run, after a part of one that took `took` until `ended`."""
        now = time.perf_counter()
        return pass_wait(took, now - ended, self._gathering.generating(now))

    def _next_turn(self) -> tuple[list[Waiting], Shares, Turn]:
        waiting = [
            Waiting(rows, tokens, step.done, step.session.paid, step.session.peer, step.session.address)
            for step in self._waiting
            for rows, tokens in [step.hidden.shape[:2]]
        ]
        shares = self.accounts.shares(waiting, time.perf_counter())
        return waiting, shares, next_turn(waiting, self._overtaken, shares)

    def _run(self, turn: Turn) -> None:
        self._overtaken = turn.overtaken
        decodes = [self._waiting[index] for index in turn.decode]
        prefill = None if turn.prefill is None else self._waiting[turn.prefill]
        if decodes:
            self._decode(decodes)
            before = self.clients
            self._waiting = [step for step in self._waiting if step not in decodes]
            self.accounts.note_left(before - self.clients, time.perf_counter())
        if prefill is not None and self._prefill(prefill, self._blocks.chunk_tokens(turn.chunk)):
            self._waiting.remove(prefill)

    def _drop_given_up(self) -> None:
        for step in [step for step in self._waiting if step.session.closed or step.given_up]:
            self._waiting.remove(step)
            step.undo()
            step.answer(_ended())
            if step.given_up:
                self.accounts.note_given_up(step.session.client)

    def _decode(self, batch: list[QueuedStep]) -> None:
        lengths = [step.session.cache.length for step in batch]
        for step in batch:
            step.begin()
        begun, core = time.perf_counter(), CoreTime(self._blocks.device)
        try:
            outputs = self._blocks.decode(
                [(step.hidden, step.session.cache) for step in batch], [step.session.adapter for step in batch]
            )
            synchronise(self._blocks.device)  # or the time would be that of giving the order
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer(_refusal(error))
                return
            # One bad session must not take the others down: each for itself, from where it stood.
            log.warning("a batch of %d decode steps failed; running them one by one", len(batch))
            for step, length in zip(batch, lengths, strict=True):
                step.session.cache.rollback(length)
                self._decode([step])
            return
        now = time.perf_counter()
        seconds = now - begun
        rows_of: Counter[str] = Counter()
        for step in batch:
            rows_of[step.session.peer] += step.session.cache.batch
        self.accounts.note_decode(rows_of, seconds, now, core.part())
        self._gathering.note_decode(rows_of, seconds, now)
        blocks = sum(len(step.session.cache.specs) for step in batch)
        rows = rows_of.total()
        self._tallies.batch_rows.add(rows)
        self.on_decode(rows, blocks / len(batch) / len(self._blocks.span), seconds)
        for step, output in zip(batch, outputs, strict=True):
            step.seconds = seconds
            self._answer(step, output)
            self._gathering.answered(step.session, step.session.peer, step.session.cache.batch, time.perf_counter())

    def _prefill(self, step: QueuedStep, chunk: int) -> bool:
        """Computes the next `chunk` tokens; true once the step is answered."""
        cache = step.session.cache
        end = step.done + cache.whole_groups(min(chunk, step.hidden.shape[1] - step.done))
        chunk = end - step.done
        begun, core = time.perf_counter(), CoreTime(self._blocks.device)
        try:
            step.outputs.append(self._blocks.forward(step.hidden[:, step.done : end], cache, step.session.adapter))
            synchronise(self._blocks.device)
        except Exception as error:
            step.answer(_refusal(error))
            return True
        seconds = time.perf_counter() - begun
        self.accounts.note_prefill(step.session.peer, seconds, begun + seconds, core.part())
        self._gathering.worked(begun + seconds)
        step.done = end
        step.seconds += seconds
        self.on_prefill(chunk * step.hidden.shape[0], len(cache.specs) / len(self._blocks.span), seconds)
        if end < step.hidden.shape[1]:
            return False
        self._answer(step, torch.cat(step.outputs, 1) if len(step.outputs) > 1 else step.outputs[0])
        return True

    def _answer(self, step: QueuedStep, output: torch.Tensor) -> None:
        try:
            packed = _packed(step, output)
        except Exception as error:
            step.answer(_refusal(error))
            return
        rows, tokens = step.hidden.shape[:2]
        kind = self._tallies.decode if tokens == 1 else self._tallies.prefill
        kind.add(rows * tokens, packed.queue_seconds, packed.compute_seconds)
        step.answer(packed)
        shared = step.session.shared
        if shared is not None:
            shared.names.append(step.digests)
            try:
                self.prefixes.offer(shared, step.session.cache)
            except Exception:  # memory is full, say: the session goes on, and leaves nothing more
                log.exception("a session's blocks were not kept for later ones")
                step.session.shared = None


def _packed(step: QueuedStep, output: torch.Tensor) -> StepOutput:
    dtype = step.input.tensor.dtype
    if not arrives_finite(output, step.session.codec, DTYPES[dtype]):
        # The cache holds the step by now, so the session ends.
        message = "what the blocks make of these hidden states is not finite, or too large for the session"
        raise Refusal(wire.ERROR_INTERNAL, message)
    if dtype_name(output.dtype) != dtype:
        output = output.to(getattr(torch, dtype))
    tensor, payload = encode(output, step.session.codec)
    return StepOutput(
        tensor=tensor,
        payload=payload,
        input_hash=step.input_hash,
        output_hash=sha256(payload),
        position=step.session.cache.length,
        queue_seconds=step.started - step.arrived,
        compute_seconds=step.seconds,
    )


def _refusal(error: Exception) -> Refusal:
    """What the client is told of an error of a step."""
    if isinstance(error, Refusal):
        return error
    log.error("a step failed in the blocks", exc_info=error)
    return Refusal(wire.ERROR_INTERNAL, "the server failed on this step; try it on another server")


def _ended() -> Refusal:
    return Refusal(wire.ERROR_NOT_FOUND, "the session has ended")


class CoreTime:
    """For which part of the time since it was made this thread did not wait for a processor: all of it, unless `device`
    is one and the system tells. What it waits for its own threads is none of it."""

    def __init__(self, device: torch.device) -> None:
        self._counts = device.type == "cpu"
        self._begun = time.perf_counter(), self._waited()

    def part(self) -> float:
        seconds = time.perf_counter() - self._begun[0]
        return 1.0 - min(max((self._waited() - self._begun[1]) / seconds, 0.0), 0.99) if seconds > 0.0 else 1.0

    def _waited(self) -> float:
        """Seconds for which this thread could have run and others did: the second field of `schedstat` of Linux."""
        if not self._counts:
            return 0.0
        try:
            file = os.open(_SCHEDSTAT, os.O_RDONLY)  # a third of the time of `Path.read_bytes`; each step does it twice
            try:
                return int(os.read(file, 64).split()[1]) / 1e9
            finally:
                os.close(file)
        except (OSError, ValueError, IndexError):
            return 0.0


def synchronise(device: torch.device) -> None:
    """Returns when the device has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
