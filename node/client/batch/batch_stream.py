"""The client's end of one stream of works at one server: sequence numbers, credits, receipts, deadlines."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from ....crypto.receipts import NO_RECEIPT, Receipt
from ....protocols import wire_pb2 as wire
from ....protocols.framing import PeerError, all_finite
from ....protocols.ids import BACKWARD, PROTOCOL_VERSION
from ....protocols.inference import EPOCH_BYTES, NONCE_BYTES, Refusal, receipt_from_wire
from ....protocols.training import (
    KEPT_SETS,
    NOTHING_KEPT,
    BatchFrames,
    hash_of_batch,
    hash_of_keep,
    hash_of_payloads,
    receive_pieces,
    send_in_pieces,
)
from ...errors import ServerCheated, ServerFailed
from ...swarm.routing import Hop
from ...trust.receipt_log import LoggedBatch, ReceiptArchive
from ..deadlines import CLOSE_TIMEOUT, SEND_TIMEOUT
from ..request import ServerClaims, ServerRefused, WireTensor, check_time, granted_pledge, now_ms

MAX_CREDITS: Final = 64
"""No more works are under way at one server, whatever it grants."""


@dataclass(frozen=True)
class BatchSpec:
    """What a stream of works is opened for, whoever the server is."""

    model_version: bytes
    codec: str = "none"
    dtype: str = "float32"


@dataclass(frozen=True)
class KeptTensors:
    """Tensors that a server keeps for several works. `hash` names them."""

    names: tuple[str, ...]
    chunks: tuple[WireTensor, ...]
    hash: bytes

    @classmethod
    def of(cls, names: Sequence[str], chunks: Sequence[WireTensor]) -> KeptTensors:
        """Hashes the bytes: off the trio thread."""
        keep = wire.Keep(names=names, tensors=[chunk.tensor for chunk in chunks])
        return cls(tuple(names), tuple(chunks), hash_of_keep(keep, hash_of_payloads(each.payload for each in chunks)))


@dataclass(frozen=True)
class BatchRequest:
    """One work: `chunks` are the hidden states and, for a backward pass, the gradient of what came of them."""

    chunks: tuple[WireTensor, ...]
    mask: bytes = b""
    positions: tuple[int, ...] = ()
    kept: KeptTensors | None = None


@dataclass(eq=False)
class PendingBatch:
    """A work that has gone out, without its gradient if `begun`. `turn` comes when the next answer is its own."""

    message: wire.BatchRequest
    begun: bool = False
    turn: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True)
class BatchReply:
    """The checked answer to a work. `compute` is what it took the server, in seconds."""

    tensors: list[WireTensor]
    compute: float


class StreamBroken(Exception):
    """Another work has failed, or was cut off, on this stream; that says nothing of this one."""


class BatchStream:
    """One stream of works of one kind at one server. Several tasks may `run` works on it.

    Once a work has failed or was given up on the way the stream is of no use: `broken`.
    """

    def __init__(
        self,
        stream: BatchFrames,
        hop: Hop,
        spec: BatchSpec,
        client: str,
        protocol: str,
        *,
        claims: ServerClaims | None = None,
        archive: ReceiptArchive | None = None,
    ) -> None:
        self.hop = hop
        self.protocol = protocol
        self.broken = False
        self._stream = stream
        self._spec = spec
        self._client = client
        self._claims = claims
        self._archive = archive
        self._opened_ms = now_ms()
        self._nonce = os.urandom(NONCE_BYTES)
        self._granted = wire.BatchGranted()
        self._credits = trio.Semaphore(0)
        self._sending = trio.Lock()
        self._unanswered: deque[PendingBatch] = deque()
        self._sequence = 0
        self._last_receipt = NO_RECEIPT
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
            nonce=self._nonce,
        )
        self.broken = True
        try:
            await self._stream.send(wire.BatchFrame(open=message), timeout=SEND_TIMEOUT)
            frame, _ = await self._stream.receive(timeout=SEND_TIMEOUT)
            self._raise_refusal(frame)
            granted = frame.granted
            if frame.WhichOneof("body") != "granted" or len(granted.session_epoch) != EPOCH_BYTES:
                raise self._failed("it answered with something else than BatchGranted")
            if not granted.credits:
                raise self._failed("it granted no credits")
            if self._claims is not None and (broken := self._claims.broken_by_grant(granted)):
                raise self._cheated(broken)
            self._check_pledge(granted)
            self.broken = False
        except PeerError as error:
            raise self._failed(str(error)) from error
        finally:
            if self.broken:
                with trio.CancelScope(shield=True):
                    await self._stream.reset()
        self._granted = granted
        self._credits = trio.Semaphore(min(granted.credits, MAX_CREDITS))

    def _check_pledge(self, granted: wire.BatchGranted) -> None:
        try:
            granted_pledge(granted, self.hop.peer_id, self._spec.model_version, self.hop.span, now_ms())
        except ValueError as error:
            raise self._cheated(str(error)) from None

    async def run(self, task: BatchRequest, timeout: float) -> BatchReply:
        """Sends one work and returns the checked reply.

        `timeout` counts from the reply to the work before this one, or from when this one was sent.

        Raises:
            ServerFailed: the server is gone, silent, refuses or cheats.
            StreamBroken: another call has failed.
        """
        async with self._credits, self._whole():
            return await self._answered(await self._send(task, timeout), task, timeout)

    @property
    def takes_gradients_later(self) -> bool:
        return self._granted.gradient_may_follow

    async def begin(self, task: BatchRequest, timeout: float) -> PendingBatch:
        """Sends a work of a backward pass without its gradient, which `finish` must bring, or `abandon` be called.

        Of the gradient in `task` only the description is used. Errors as `run`.
        """
        await self._credits.acquire()
        try:
            async with self._whole():
                return await self._send(task, timeout, gradient_follows=True)
        except BaseException:
            self._credits.release()
            raise

    async def finish(self, sent: PendingBatch, task: BatchRequest, timeout: float) -> BatchReply:
        """Sends the gradient of a work that was begun, and returns the checked reply.

        Raises:
            ServerFailed, StreamBroken: as `run`. StreamBroken also if the server has given the work up, or the
                stream was lost in the meantime.
        """
        sent.begun = False
        try:
            async with self._whole():
                async with self._sending:
                    self._check_whole()
                    frame = wire.BatchFrame(gradient=wire.Gradient(sequence=sent.message.sequence))
                    try:
                        await send_in_pieces(self._stream, frame, [task.chunks[1].payload], timeout=timeout)
                    except PeerError:
                        raise StreamBroken from None  # while nobody waited for it; whether it is back will show
                return await self._answered(sent, task, timeout)
        except ServerRefused as refused:
            if refused.code == wire.ERROR_BUSY:
                raise StreamBroken from None
            raise
        finally:
            self._credits.release()

    async def abandon(self, sent: PendingBatch) -> None:
        """Gives up a work that was begun, and with it all others of the stream."""
        sent.begun = False
        self._credits.release()
        await self._break()

    @asynccontextmanager
    async def _whole(self) -> AsyncIterator[None]:
        """What is left half done inside breaks the stream."""
        self._check_whole()
        done = False
        try:
            yield
            done = True
        except PeerError as error:
            self._check_whole()
            raise self._failed(str(error)) from error
        except Refusal as refusal:
            raise self._refused(refusal) from None
        finally:
            if not done:
                await self._break()

    async def _break(self) -> None:
        if self.broken:
            return
        self.broken = True
        for each in self._unanswered:
            each.turn.set()
        with trio.CancelScope(shield=True):
            await self._stream.reset()

    def _check_whole(self) -> None:
        if self.broken:
            raise StreamBroken

    async def _send(self, task: BatchRequest, timeout: float, *, gradient_follows: bool = False) -> PendingBatch:
        async with self._sending:
            self._check_whole()
            number = 0
            if task.kept is not None:
                number = self._kept.get(task.kept.hash) or await self._keep(task.kept, timeout)
            self._sequence += 1
            work = wire.BatchRequest(
                sequence=self._sequence,
                tensors=[chunk.tensor for chunk in task.chunks],
                mask=task.mask,
                positions=task.positions,
                kept=number,
            )
            frame = wire.BatchFrame(work=work)
            frame.work.gradient_follows = gradient_follows
            chunks = task.chunks[:1] if gradient_follows else task.chunks
            payloads = [chunk.payload for chunk in chunks]
            await send_in_pieces(self._stream, frame, payloads, timeout=timeout)
            sent = PendingBatch(work, gradient_follows)
            self._unanswered.append(sent)
            if len(self._unanswered) == 1:
                sent.turn.set()
            return sent

    async def _answered(self, sent: PendingBatch, task: BatchRequest, timeout: float) -> BatchReply:
        await sent.turn.wait()
        self._check_whole()
        work = sent.message
        reply, payloads = await self._receive(work, task, timeout)
        previous, self._last_receipt = self._last_receipt, self._hash_of_receipt(reply)
        self._unanswered.popleft()
        if self._unanswered:
            self._unanswered[0].turn.set()
        chunks = [WireTensor(tensor, payload) for tensor, payload in zip(reply.tensors, payloads, strict=True)]
        receipt = await trio.to_thread.run_sync(self._check, reply, work, task, chunks, previous)
        if self._archive is not None and self._archive.shares:
            self._archive.add_batch(self._logged(receipt, work, task, chunks))
        return BatchReply(chunks, reply.compute_us / 1e6)

    async def _keep(self, kept: KeptTensors, timeout: float) -> int:
        self._kept_number += 1
        keep = wire.Keep(number=self._kept_number, names=kept.names, tensors=[chunk.tensor for chunk in kept.chunks])
        await send_in_pieces(
            self._stream, wire.BatchFrame(keep=keep), [chunk.payload for chunk in kept.chunks], timeout=timeout
        )
        self._kept[kept.hash] = self._kept_number
        if len(self._kept) > KEPT_SETS:
            self._kept.popitem(last=False)
        return self._kept_number

    async def _receive(
        self, work: wire.BatchRequest, task: BatchRequest, timeout: float
    ) -> tuple[wire.BatchReply, list[bytearray]]:
        frame, _ = await self._stream.receive(timeout=timeout)
        self._raise_refusal(frame)
        reply = frame.reply
        if frame.WhichOneof("body") != "reply" or reply.sequence != work.sequence:
            raise self._failed("it answered a work with something else than its reply")
        wanted = [task.chunks[0].tensor]
        if self.protocol == BACKWARD and task.kept is not None:
            wanted += [chunk.tensor for chunk in task.kept.chunks]
        if list(reply.tensors) != wanted:
            raise self._failed("it answered tensors of another form than were asked for")
        return reply, await receive_pieces(self._stream, [each.nbytes for each in wanted], timeout=timeout)

    def _check(
        self,
        reply: wire.BatchReply,
        work: wire.BatchRequest,
        task: BatchRequest,
        answers: Sequence[WireTensor],
        previous: bytes,
    ) -> Receipt:
        """Checks that the receipt is this server's, and for exactly what was sent and came back.

        Raises:
            ServerFailed: if it is not; nothing of this server can be used then.
        """
        if not all(all_finite(chunk.tensor, chunk.payload) for chunk in answers):
            raise self._failed("it answered NaN or infinity")
        if not reply.receipt.signature:
            raise self._cheated("it does not sign what it answers")
        receipt = receipt_from_wire(reply.receipt)
        expected = replace(
            receipt,
            protocol_version=PROTOCOL_VERSION,
            model_version=self._spec.model_version,
            span=(self.hop.span.start, self.hop.span.end),
            dtype=self._granted.dtype,
            quantisation=self._granted.quantisation,
            client=self._client,
            nonce=self._nonce,
            session_epoch=self._granted.session_epoch,
            sequence=work.sequence,
            request_hash=hash_of_batch(
                self.protocol,
                work,
                hash_of_payloads(chunk.payload for chunk in task.chunks),
                task.kept.hash if task.kept else NOTHING_KEPT,
            ),
            reply_hash=hash_of_payloads(chunk.payload for chunk in answers),
            previous_receipt=previous,
            upstream_receipt=b"",
            adapter=b"",
        )
        if receipt != expected:
            raise self._cheated("its receipt is for something else than what was sent and came back")
        if not receipt.is_signed_by(self.hop.peer_id):
            raise self._cheated("its receipt is not signed by its key")
        wrong = check_time(receipt, self._opened_ms, now_ms())
        if wrong is None and self._claims is not None:
            wrong = self._claims.broken_by(receipt)
        if wrong is not None:
            raise self._cheated(wrong)
        return receipt

    def _logged(
        self, receipt: Receipt, work: wire.BatchRequest, task: BatchRequest, answers: Sequence[WireTensor]
    ) -> LoggedBatch:
        kept = task.kept
        return LoggedBatch(
            self.hop.peer_id,
            self.protocol,
            receipt,
            work,
            tuple(chunk.payload for chunk in task.chunks),
            None if kept is None else wire.Keep(names=kept.names, tensors=[chunk.tensor for chunk in kept.chunks]),
            () if kept is None else tuple(chunk.payload for chunk in kept.chunks),
            tuple(chunk.payload for chunk in answers),
            self._granted.pledge if self._granted.HasField("pledge") else None,
        )

    def _hash_of_receipt(self, reply: wire.BatchReply) -> bytes:
        try:
            return receipt_from_wire(reply.receipt).hash()
        except ValueError as error:
            raise self._cheated(f"its receipt cannot be read: {error}") from None

    async def close(self) -> None:
        """Says goodbye, so that what the server keeps is free at once. Never raises."""
        with trio.CancelScope(shield=True):
            if self.broken:
                return
            self.broken = True
            try:
                await self._stream.send(wire.BatchFrame(close=wire.Close()), timeout=CLOSE_TIMEOUT)
                await self._stream.close()
            except PeerError:
                await self._stream.reset()

    def _raise_refusal(self, frame: wire.BatchFrame) -> None:
        if frame.WhichOneof("body") == "error":
            raise self._refused(Refusal.from_wire(frame.error))

    def _refused(self, refusal: Refusal) -> ServerRefused:
        return ServerRefused(
            f"server {self.hop.peer_id} (blocks {self.hop.span}) refused: {refusal.message}",
            self.hop.peer_id,
            refusal.code,
        )

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(f"server {self.hop.peer_id} (blocks {self.hop.span}) failed: {what}", self.hop.peer_id)

    def _cheated(self, what: str) -> ServerCheated:
        return ServerCheated(
            f"server {self.hop.peer_id} (blocks {self.hop.span}) cannot be believed: {what}", self.hop.peer_id
        )
