"""The client's end of one stream of batch requests at one server."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from ....crypto.receipts import Receipt
from ....protocols import wire_pb2 as wire
from ....protocols.framing import PeerError, all_finite
from ....protocols.ids import ALIKE, PROTOCOL_VERSION, Boundaries
from ....protocols.inference import Refusal
from ....protocols.training import (
    BACKWARD,
    FORWARD,
    KEPT_SETS,
    BatchFrames,
    BatchProtocol,
    KeptSet,
    MicroBatch,
    hash_of_payloads,
    narrower,
    receive_pieces,
    send_in_pieces,
)
from ...swarm.routing import Hop
from ...trust.receipt_log import LoggedBatch, ReceiptArchive
from ..deadlines import DEADLINES
from ..request import ServerClaims, ServerRefused, ServerStream, WireTensor, close_stream, has_code, server_refused

MAX_CREDITS: Final = 64
"""No more requests are under way at one server, whatever it grants."""


@dataclass(frozen=True)
class BatchSpec:
    """What a stream of batch requests is opened for, whoever the server is. `boundaries`: of the model's blocks."""

    model_version: bytes
    codec: str = "none"
    dtype: str = "float32"
    boundaries: Boundaries = ALIKE


def micro_batch(
    chunks: Sequence[WireTensor], kept: KeptSet | None = None, mask: bytes = b"", positions: Sequence[int] = ()
) -> MicroBatch:
    """Of hidden states and, for a backward pass, the gradient of what came of them."""
    message = wire.BatchRequest(tensors=[chunk.tensor for chunk in chunks], mask=mask, positions=positions)
    return MicroBatch(message, tuple(chunk.payload for chunk in chunks), kept)


@dataclass(eq=False)
class PendingBatch:
    """One that has gone out, without its gradient if `begun`. `turn` comes when the next answer is its own."""

    asked: MicroBatch
    begun: bool = False
    turn: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True)
class BatchOutput:
    """The checked answer to a request. `compute` is what it took the server, in seconds."""

    tensors: list[WireTensor]
    compute: float


class StreamBroken(Exception):
    """Another request has failed, or was cut off, on this stream; that says nothing of this one."""


class BatchStream(ServerStream[wire.BatchFrame]):
    """One stream of forward or backward requests at one server. Several tasks may `run` requests on it.

    Once a request has failed or was given up on the way the stream is of no use: `broken`.
    """

    _granted: wire.BatchGranted

    def __init__(
        self,
        stream: BatchFrames,
        hop: Hop,
        spec: BatchSpec,
        client: str,
        protocol: BatchProtocol,
        *,
        claims: ServerClaims | None = None,
        archive: ReceiptArchive | None = None,
    ) -> None:
        super().__init__(stream, hop, spec.model_version, client, claims)
        self.protocol = protocol
        self.broken = False
        self._spec = spec
        self._archive = archive
        self._granted = wire.BatchGranted()
        self._credits = trio.Semaphore(0)
        self._sending = trio.Lock()
        self._unanswered: deque[PendingBatch] = deque()
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._kept_number = 0

    async def open(self) -> None:
        """
        Raises:
            ServerRefused: the server will not, and says why.
            ServerFailed: it does not answer, or answers nonsense.
        """
        message = wire.BatchOpen(
            protocol_version=PROTOCOL_VERSION,
            model_version=self._spec.model_version,
            span=wire.Span(start=self.hop.span.start, end=self.hop.span.end),
            codec=self._spec.codec,
            activation_dtype=self._spec.dtype,
            nonce=self.nonce,
        )
        async with self._breaks_unless_done():
            granted = (await self._ask(self._stream, wire.BatchFrame(open=message), DEADLINES.batch_open)).granted
            if not granted.credits:
                raise self._failed("it granted no credits")
            self._check_pledge(granted)
        self._granted = granted
        self._credits = trio.Semaphore(min(granted.credits, MAX_CREDITS))

    async def run(self, request: MicroBatch, timeout: float) -> BatchOutput:
        """Sends one request and returns the checked reply.

        `timeout` counts from the reply to the request before this one, or from when this one was sent.

        Raises:
            ServerFailed: the server is gone, silent, refuses or cheats.
            StreamBroken: another call has failed.
        """
        async with self._credits, self._breaks_unless_done():
            return await self._answered(await self._send(request, timeout), timeout)

    @property
    def takes_gradients_later(self) -> bool:
        return self._granted.gradient_may_follow

    async def begin(self, request: MicroBatch, timeout: float) -> PendingBatch:
        """Sends a backward request without its gradient, which `finish` must bring, or `abandon` be called.

        Of the gradient in `request` only the description is used. Errors as `run`.
        """
        await self._credits.acquire()
        try:
            async with self._breaks_unless_done():
                return await self._send(request, timeout, gradient_follows=True)
        except BaseException:
            self._credits.release()
            raise

    async def finish(self, pending: PendingBatch, request: MicroBatch, timeout: float) -> BatchOutput:
        """Sends the gradient of a request that was begun, and returns the checked reply.

        Raises:
            ServerFailed, StreamBroken: as `run`. StreamBroken also if the server has given the request up, or the
                stream was lost in the meantime.
        """
        pending.begun, pending.asked = False, replace(pending.asked, payloads=request.payloads)
        try:
            async with self._breaks_unless_done():
                async with self._sending:
                    self._check_whole()
                    frame = wire.BatchFrame(gradient=wire.Gradient(sequence=pending.asked.message.sequence))
                    try:
                        await send_in_pieces(self._stream, frame, request.payloads[1:], timeout=timeout)
                    except PeerError:
                        raise StreamBroken from None  # while nobody waited for it; whether it is back will show
                return await self._answered(pending, timeout)
        except ServerRefused as refused:
            if has_code(refused, wire.ERROR_BUSY):
                raise StreamBroken from None
            raise
        finally:
            self._credits.release()

    async def abandon(self, pending: PendingBatch) -> None:
        """Gives up a request that was begun, and with it all others of the stream."""
        pending.begun = False
        self._credits.release()
        await self._break()

    async def close(self) -> None:
        """Ends the stream, so that what the server keeps is free at once. Never raises."""
        if not self.broken:
            self.broken = True
            await close_stream(self._stream, wire.BatchFrame(close=wire.Close()))

    @asynccontextmanager
    async def _breaks_unless_done(self) -> AsyncIterator[None]:
        """What is left half done inside breaks the stream."""
        self._check_whole()
        done = False
        try:
            yield
            done = True
        except PeerError as error:
            self._check_whole()
            raise self._lost(error) from error
        except Refusal as refusal:
            raise server_refused(self.hop, refusal) from None
        finally:
            if not done:
                await self._break()

    async def _break(self) -> None:
        if self.broken:
            return
        self.broken = True
        for pending in self._unanswered:
            pending.turn.set()
        with trio.CancelScope(shield=True):
            await self._stream.reset()

    def _check_whole(self) -> None:
        if self.broken:
            raise StreamBroken

    # --- sending

    async def _send(self, request: MicroBatch, timeout: float, *, gradient_follows: bool = False) -> PendingBatch:
        async with self._sending:
            self._check_whole()
            number = 0
            if request.kept is not None:
                number = self._kept.get(request.kept.hash) or await self._keep(request.kept, timeout)
            message = wire.BatchRequest()
            message.CopyFrom(request.message)
            message.sequence, message.kept = self.next_sequence(), number
            frame = wire.BatchFrame(work=message)
            frame.work.gradient_follows = gradient_follows
            payloads = request.payloads[:1] if gradient_follows else request.payloads
            await send_in_pieces(self._stream, frame, payloads, timeout=timeout)
            pending = PendingBatch(replace(request, message=message), gradient_follows)
            self._unanswered.append(pending)
            if len(self._unanswered) == 1:
                pending.turn.set()
            return pending

    async def _keep(self, kept: KeptSet, timeout: float) -> int:
        self._kept_number += 1
        frame = wire.BatchFrame(keep=kept.keep)
        frame.keep.number = self._kept_number
        await send_in_pieces(self._stream, frame, kept.payloads, timeout=timeout)
        self._kept[kept.hash] = self._kept_number
        if len(self._kept) > KEPT_SETS:
            self._kept.popitem(last=False)
        return self._kept_number

    # --- answers

    async def _answered(self, pending: PendingBatch, timeout: float) -> BatchOutput:
        await pending.turn.wait()
        self._check_whole()
        reply, payloads = await self._receive(pending, timeout)
        # The chain of receipts goes on before this one is checked: others are received meanwhile.
        previous, self._last_receipt = self._last_receipt, self._receipt_of(reply.receipt).hash()
        self._unanswered.popleft()
        if self._unanswered:
            self._unanswered[0].turn.set()
        tensors = [WireTensor(tensor, payload) for tensor, payload in zip(reply.tensors, payloads, strict=True)]
        receipt = await trio.to_thread.run_sync(self._verify, reply, pending, tensors, previous)
        if self._archive is not None and self._archive.shares:
            outputs = tuple(answer.payload for answer in tensors)
            pledge = self._granted.pledge if self._granted.HasField("pledge") else None
            logged = LoggedBatch(self.hop.peer_id, self.protocol.id, receipt, pending.asked, outputs, pledge)
            self._archive.add_batch(logged)
        return BatchOutput(tensors, reply.compute_us / 1e6)

    async def _receive(self, pending: PendingBatch, timeout: float) -> tuple[wire.BatchReply, list[bytearray]]:
        message, kept = pending.asked.message, pending.asked.kept
        frame, _ = await self._stream.receive(timeout=timeout)
        self._raise_refusal(frame)
        reply = frame.reply
        if frame.WhichOneof("body") != "reply" or reply.sequence != message.sequence:
            raise self._failed("it answered a batch request with something else than its reply")
        own = self._spec.boundaries.left_by(self.hop.span) if self.protocol == FORWARD else 0
        wanted = [narrower(message.tensors[0], own)]
        if self.protocol == BACKWARD and kept is not None:
            wanted += kept.keep.tensors
        if list(reply.tensors) != wanted:
            raise self._failed("it answered tensors of another form than were asked for")
        return reply, await receive_pieces(self._stream, [tensor.nbytes for tensor in wanted], timeout=timeout)

    def _verify(
        self, reply: wire.BatchReply, pending: PendingBatch, tensors: Sequence[WireTensor], previous: bytes
    ) -> Receipt:
        """Hashes what was sent and came back, and checks the receipt for it: off the trio thread.

        Raises:
            ServerFailed: nothing of this server can be used.
        """
        if not all(all_finite(answer.tensor, answer.payload) for answer in tensors):
            raise self._failed("it answered NaN or infinity")
        return self._check_receipt(
            reply.receipt,
            sequence=pending.asked.message.sequence,
            request_hash=pending.asked.hash(self.protocol.id),
            reply_hash=hash_of_payloads(answer.payload for answer in tensors),
            previous=previous,
        )
