"""What a session's server answered, and whether it is what was asked for, as its receipt has to say."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import trio

from ....crypto.evidence import NotProven, check_equivocation
from ....crypto.receipts import Receipt
from ....protocols import wire_pb2 as wire
from ....protocols.framing import MessageStream, all_finite, wire_nbytes
from ....protocols.ids import ALIKE, PLAIN, TEXT_NEEDS, Boundaries, Layout, LayoutNeeds, Span
from ....protocols.inference import LOOK_BACK, hash_of_step, pushed_step, sha256
from ...errors import ServerFailed
from ...swarm.routing import Hop
from ...swarm.trusted_servers import TrustedServers
from ...trust.receipt_log import SessionLog
from ..request import PushedOther, ServerClaims, ServerStream, WireTensor

if TYPE_CHECKING:
    from ..session_adapter import SessionAdapter
    from .trace import SessionTrace

InferenceStream = MessageStream[wire.InferenceFrame]
_HASH_INLINE: Final = 64 * 1024
"""Payloads above this are hashed in a worker thread: 64 KiB take 30 us."""


@dataclass(frozen=True)
class SessionSpec:
    """What a session is opened for. Timeouts in seconds.

    `push` lets servers send their outputs to each other, those of `trusted` to each other only. `keep`: closing leaves
    the session at the servers for this number of seconds. When only a stream is lost they keep it for a while in any
    case. `reopen_timeout`: for how long servers are looked for where all that were known are gone; None is
    `REOPEN_TIMEOUT`. `share`: servers may keep what it computes for sessions of this client that begin alike. It uses
    what they have kept, of sessions of the same `prefix_salt`. `original_length`: as `blocks.config` has it. `layout`:
    what steps may say of their tokens, which only servers are asked for that know it. `boundaries`: of the model's
    blocks.
    """

    model_version: bytes
    span: Span
    batch: int
    max_length: int
    left_padding: tuple[int, ...] = ()
    codec: str = "none"
    dtype: str = "float32"
    cache_wait: float = 10.0
    step_timeout: float = 60.0
    push: bool = True
    keep: float = 0.0
    reopen_timeout: float | None = None
    adapter: SessionAdapter | None = None
    trusted: TrustedServers = field(default_factory=TrustedServers)
    trace: SessionTrace | None = field(default=None, compare=False)
    share: bool = False
    prefix_salt: bytes = b""
    original_length: int | None = None
    layout: LayoutNeeds = TEXT_NEEDS
    boundaries: Boundaries = ALIKE

    def salt_at(self, peer_id: str) -> bytes:
        """What a server is told of `prefix_salt`: of no use at others, so that it cannot ask them in our name."""
        return hashlib.sha256(self.prefix_salt + peer_id.encode()).digest() if self.prefix_salt else b""

    def takes_long_factors(self, length: int) -> bool:
        """Whether a call that ends at `length` tokens of a row, padding included, is of a long text (longrope)."""
        return self.original_length is not None and length - min(self.left_padding, default=0) > self.original_length

    @property
    def adapter_hash(self) -> bytes:
        """Empty without an adapter."""
        return self.adapter.hash if self.adapter is not None else b""


@dataclass(frozen=True)
class HopTiming:
    """Where the time of one server's last step went, in seconds. `total` is measured at the client, from the moment
    that the server's input was there to its answer."""

    peer_id: str
    total: float
    queue: float
    compute: float


@dataclass(frozen=True)
class Answer:
    """A checked reply. `chunk` has no bytes where only the receipt came, as was asked. `handed_on`: the server has
    pushed its output to the next one of the chain."""

    chunk: WireTensor
    receipt: Receipt
    handed_on: bool


Checked = tuple[Receipt, bytes, bool]
"""A receipt, its hash, and whether it is for another input than this client has sent."""


class UncheckedAnswer:
    """A reply whose receipt is to be checked: in a thread that is kept warm, from `start_check` on, or where the result
    is asked for.

    Attributes:
        chunk: what was answered; None where only the receipt came.
    """

    def __init__(
        self, checks: AnswerChecks, reply: wire.Reply, chunk: WireTensor | None, step: wire.Step, asked: WireTensor
    ) -> None:
        self.reply = reply
        self.chunk = chunk
        self.step = step
        self.asked = asked
        self._checks = checks
        self._started = False
        self._finished = threading.Event()
        self._outcome: Any = None

    def start_check(self) -> None:
        """Begins the check beside what the trio thread does next. Only the first call does anything."""
        if not self._started:
            self._started = True
            trio.lowlevel.start_thread_soon(self._check, self._deliver)

    def _check(self) -> Checked:
        return self._checks.check(self)

    def _deliver(self, outcome: Any) -> None:
        self._outcome = outcome
        self._finished.set()

    async def checked(self) -> Checked:
        """What `AnswerChecks.check` returned or raised; returns at once if that has ended. Where it was not started, it
        runs here, and in another thread only if there is much to hash."""
        with trio.CancelScope(shield=True):  # what was read has to be counted; it computes for a few milliseconds
            if not self._started:
                long = len(self.asked.payload) > _HASH_INLINE
                return await trio.to_thread.run_sync(self._check) if long else self._check()
            if not self._finished.is_set():
                await trio.to_thread.run_sync(self._finished.wait)
        result: Checked = self._outcome.unwrap()
        return result


class AnswerChecks(ServerStream[wire.InferenceFrame]):
    """Checks the answers of one session at one server.

    Attributes:
        timing: where the time of its last step went.
        draining: the server has said that it will stop.
        pushed_steps: how many steps came to it from the server before it.
        misled: what it holds is not what it should. A step may have exchanged rows or written over earlier tokens,
            which no further step undoes. Or it has computed something wrong.
        accountable: all that it has signed for is known here, so that its answers follow from what it was sent.
    """

    _granted: wire.Granted

    def __init__(
        self,
        stream: InferenceStream,
        hop: Hop,
        spec: SessionSpec,
        client: str,
        nonce: bytes | None,
        *,
        claims: ServerClaims | None,
        log: SessionLog | None,
    ) -> None:
        super().__init__(stream, hop, spec.model_version, client, claims, nonce)
        self.timing = HopTiming(hop.peer_id, 0.0, 0.0, 0.0)
        self.draining = False
        self.misled = False
        self.accountable = True
        self.pushed_steps = 0
        self._spec = spec
        self._granted = wire.Granted()
        self._answered = 0
        self._skipped = False  # whether nobody wanted the last answer
        self._targeted = False  # another server was told where to push steps of this session to
        self._upstreams: deque[bytes] = deque(maxlen=LOOK_BACK)  # receipts that came with steps
        self._log = log

    @property
    def log(self) -> SessionLog | None:
        """Its receipts; None if nobody keeps them."""
        return self._log

    def _skip(self, reply: wire.Reply, answer: WireTensor | None = None) -> None:
        """An answer that nobody wants any more still is a part of the chain of receipts."""
        receipt = self._receipt_of(reply.receipt)
        if reply.sequence <= self._answered:
            self._check_copy(receipt)
            return
        if receipt.previous_receipt != self._last_receipt or not receipt.is_signed_by(self.hop.peer_id):
            raise self._cheated("its receipts do not follow each other")
        self._answered, self._skipped = reply.sequence, True
        self._last_receipt = receipt.hash()
        self.accountable = self.accountable and not reply.pushed  # by whom, and what, nobody has looked at
        if self._log is not None:
            self._note_request(self._log, reply, receipt, answer)
            self._log.answered(reply.sequence, receipt, None)

    def _note_request(self, log: SessionLog, reply: wire.Reply, receipt: Receipt, answer: WireTensor | None) -> None:
        """Checks for what a server signs an answer that nobody wants, as far as that is known: with another request in
        its chain of receipts, nobody could audit what it answers later. Where it has pushed, that is what the next
        server was asked.

        Raises:
            ServerCheated: it signs for something else than it was sent.
        """
        waiting = log.waiting(reply.sequence)
        if waiting is None:
            return
        step, tensor, payload = waiting
        if payload is not None and hash_of_step(step, tensor, sha256(payload)) != receipt.request_hash:
            log.forget(reply.sequence)  # who pushed has answered or was asked something else, or this server lies
            if not (reply.pushed and step.previous_receipt):
                raise self._cheated("its receipt is for something else than it was asked")
            self.misled = self._spec.batch > 1 or step.receipt_only
            return
        if not step.targets or answer is None or sha256(answer.payload) != receipt.reply_hash:
            return
        told, asked = answer.tensor, tensor
        form = self._shape_of_answer(asked, PLAIN), asked.dtype, asked.codec
        if (list(told.shape), told.dtype, told.codec) == form:
            log.pushed_on(step.targets[0].nonce, pushed_step(step, receipt.hash()), told, answer.payload)

    def _shape_of_answer(self, asked: wire.Tensor, layout: Layout) -> list[int]:
        """Without what was for this server's blocks alone."""
        rows, tokens, width = asked.shape
        width = width * (1 + layout.behind(len(self.hop.span)).features) // (1 + layout.features)
        return [rows, tokens, width - self._spec.boundaries.left_by(self.hop.span)]

    def _check_copy(self, receipt: Receipt) -> None:
        """A reply that comes once more has to be the one that came."""
        first = self._log.find(receipt.sequence) if self._log is not None else None
        if first is None or first == receipt:
            return
        try:
            what = check_equivocation(self.hop.peer_id, first, receipt)
        except NotProven:
            raise self._cheated("what it sends once more is not what it sent before") from None
        raise self._cheated(what, (first, receipt))

    def _unchecked(
        self, reply: wire.Reply, answer: WireTensor | None, step: wire.Step, chunk: WireTensor, begun: float
    ) -> UncheckedAnswer:
        """A reply that has come for a step since `begun`, and has the form that was asked for."""
        if answer is None and not step.receipt_only and not (reply.pushed and self._targeted):
            raise self._failed("it answered a step with something else than one reply")
        self._check_form(reply, answer, step, chunk)
        total = trio.current_time() - begun
        self.timing = HopTiming(self.hop.peer_id, total, reply.queue_us / 1e6, reply.compute_us / 1e6)
        return UncheckedAnswer(self, reply, answer, step, chunk)

    async def checked(self, answer: UncheckedAnswer) -> Answer:
        """The answer, of which everything is in order. Called once for each that was read, and before the next is.

        Raises:
            PushedOther: it is for what the server before has pushed, which is not what this client has.
            ServerFailed: the server cheats.
        """
        reply, receipt = answer.reply, await self._verify(answer)
        if answer.chunk is None and not answer.step.receipt_only:
            what = self._failed("it was told by the server before it that a receipt is enough")
            shown = self._receipt_of(reply.upstream) if reply.HasField("upstream") else None
            raise PushedOther(str(what), self.hop.peer_id, shown)
        self.draining = reply.draining
        self.pushed_steps += reply.pushed
        chunk, layout = answer.chunk or WireTensor(answer.asked.tensor, b""), answer.asked.layout
        if layout != PLAIN:
            chunk = replace(chunk, layout=layout.behind(len(self.hop.span)))
        return Answer(chunk, receipt, reply.handed_on)

    async def _verify(self, answer: UncheckedAnswer) -> Receipt:
        """Hashes what was sent and came back, and checks the receipt for it."""
        step, chunk = answer.step, answer.asked
        receipt, hashed, other = await answer.checked()
        self._last_receipt, self._answered, self._skipped = hashed, answer.reply.sequence, False
        if self._log is not None:
            if not other:
                self._log.asked(step, chunk.tensor, chunk.payload)
            payload = None if other or answer.chunk is None else answer.chunk.payload
            self._log.answered(step.sequence, receipt, payload)
        if other:
            self.accountable = False
            raise self._pushed_other(answer.reply, receipt)
        self._upstreams.append(step.previous_receipt)
        return receipt

    def check(self, unchecked: UncheckedAnswer) -> Checked:
        """The receipt, its hash, and whether it is for another input, which the server before has pushed. Changes
        nothing, and may run in a thread. Without an answer, the receipt's word for it is taken.

        Raises:
            ServerCheated: the receipt is not this server's for what was sent and came back.
            ServerFailed: values that are none.
        """
        reply, answer, step, chunk = unchecked.reply, unchecked.chunk, unchecked.step, unchecked.asked
        if answer is not None and not all_finite(answer.tensor, answer.payload):
            raise self._failed("it answered NaN or infinity")
        pushed = self._receipt_of(reply.receipt) if reply.pushed and step.previous_receipt else None
        asked = hash_of_step(step, chunk.tensor, sha256(chunk.payload))
        # The pusher has signed for the payload, by the same receipt, and nobody but it for what it says of the step.
        other = pushed is not None and (
            pushed.upstream_receipt not in (b"", step.previous_receipt)
            or (pushed.upstream_receipt == step.previous_receipt and pushed.request_hash != asked)
        )
        receipt = self._check_receipt(
            reply.receipt,
            sequence=step.sequence,
            request_hash=pushed.request_hash if pushed and other else asked,
            reply_hash=reply.receipt.reply_hash if answer is None else sha256(answer.payload),
            previous=self._last_receipt,
            upstream=pushed.upstream_receipt if pushed and other else step.previous_receipt,
            adapter=self._spec.adapter_hash,
        )
        return receipt, receipt.hash(), other

    def _pushed_other(self, reply: wire.Reply, receipt: Receipt) -> ServerFailed:
        """The error of a server that signs for another input than the server before it has answered."""
        shown = self._receipt_of(reply.upstream) if reply.HasField("upstream") else None
        if not self._targeted or receipt.upstream_receipt in self._upstreams:
            return self._cheated("it signs for a push that nobody can have made, or for an earlier one once more")
        if shown is not None and shown.hash() != receipt.upstream_receipt:
            return self._cheated("the receipt that it shows of the server before it is not the one that it signed for")
        what = self._failed("it was pushed something else than the server before it has answered")
        return PushedOther(str(what), self.hop.peer_id, shown)

    def _check_form(self, reply: wire.Reply, answer: WireTensor | None, step: wire.Step, chunk: WireTensor) -> None:
        """Checks what needs no receipt: step, position, shape, size.

        Raises:
            ServerFailed: nobody has signed this, so it proves nothing; but it is of no use.
        """
        if reply.sequence != step.sequence:
            raise self._failed(f"it answered step {reply.sequence}, which nobody has sent")
        if reply.position != step.position + chunk.tokens:
            raise self._failed(f"it holds {reply.position} tokens after a step that ends at another position")
        if answer is None:
            return
        tensor, asked = answer.tensor, chunk.tensor
        shape = self._shape_of_answer(asked, chunk.layout)
        if (list(tensor.shape), tensor.dtype, tensor.codec) != (shape, asked.dtype, asked.codec):
            raise self._failed(f"it answered a tensor of {list(asked.shape)} with one of {list(tensor.shape)}")
        nbytes = wire_nbytes(shape, asked.dtype, asked.codec)
        if len(answer.payload) != nbytes:
            raise self._failed(f"it answered {len(answer.payload)} bytes for a tensor of {nbytes}")
