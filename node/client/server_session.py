"""The client's end of one stream to one server: sequence numbers, receipts, deadlines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import trio

from ...crypto.receipts import NO_RECEIPT
from ...protocols import wire_pb2 as wire
from ...protocols.framing import MessageStream, PeerError
from ...protocols.ids import PROTOCOL_VERSION, Span
from ...protocols.inference import (
    EPOCH_BYTES,
    NONCE_BYTES,
    Refusal,
    hash_of_step,
    receipt_from_wire,
    sha256,
)
from ..errors import ServerFailed
from .routing import Hop

InferenceStream = MessageStream[wire.InferenceFrame]

SEND_TIMEOUT: Final = 30.0
CLOSE_TIMEOUT: Final = 1.0
_HASH_INLINE: Final = 64 * 1024
"""Payloads above this are hashed in a worker thread: 64 KiB take 30 us."""


@dataclass(frozen=True)
class SessionSpec:
    """What a session is opened for. Timeouts in seconds."""

    model_version: bytes
    span: Span
    batch: int
    max_length: int
    left_padding: tuple[int, ...] = ()
    codec: str = "none"
    dtype: str = "float32"
    cache_wait: float = 10.0
    step_timeout: float = 60.0


@dataclass(frozen=True)
class Chunk:
    """Hidden states of [batch, tokens, hidden] as they stand on the wire."""

    tensor: wire.Tensor
    payload: bytes

    @property
    def tokens(self) -> int:
        return self.tensor.shape[1]


@dataclass(frozen=True)
class HopTiming:
    """Where the time of one server's last step went, in seconds; `total` is measured at the client."""

    peer_id: str
    total: float
    queue: float
    compute: float


class ServerRefused(ServerFailed):
    """A server answered with an error; `code` is the protocol's."""

    def __init__(self, message: str, peer_id: str, code: wire.ErrorCode.ValueType) -> None:
        super().__init__(message, peer_id)
        self.code = code


class ServerSession:
    """One granted session at one server. `exchange` may be cancelled and repeated; nothing is lost by it."""

    def __init__(self, stream: InferenceStream, hop: Hop, spec: SessionSpec, client: str, route_epoch: int) -> None:
        self.hop = hop
        self.timing = HopTiming(hop.peer_id, 0.0, 0.0, 0.0)
        self.max_step_tokens = 1
        self._stream = stream
        self._spec = spec
        self._client = client
        self._route_epoch = route_epoch
        self._nonce = os.urandom(NONCE_BYTES)
        self._granted = wire.Granted()
        self._sequence = 0
        self._last_receipt = NO_RECEIPT
        self._pending: _Sent | None = None

    async def open(self) -> None:
        """
        Raises:
            ServerRefused: the server will not, and says why.
            ServerFailed: it does not answer, or answers nonsense.
        """
        spec = self._spec
        message = wire.Open(
            protocol_version=PROTOCOL_VERSION,
            model_version=spec.model_version,
            span=wire.Span(start=self.hop.span.start, end=self.hop.span.end),
            max_length=spec.max_length,
            batch=spec.batch,
            left_padding=spec.left_padding,
            codec=spec.codec,
            nonce=self._nonce,
            route_epoch=self._route_epoch,
            wait_ms=round(spec.cache_wait * 1000),
            activation_dtype=spec.dtype,
        )
        try:
            await self._stream.send(wire.InferenceFrame(open=message), timeout=SEND_TIMEOUT)
            frame, _ = await self._stream.receive(timeout=spec.cache_wait + SEND_TIMEOUT)
        except PeerError as error:
            raise self._failed(str(error)) from error
        self._raise_refusal(frame)
        if frame.WhichOneof("body") != "granted" or len(frame.granted.session_epoch) != EPOCH_BYTES:
            raise self._failed("it answered Open with something else than Granted")
        if frame.granted.codec != spec.codec or not frame.granted.max_step_tokens:
            raise self._failed(f"it granted codec {frame.granted.codec!r} instead of {spec.codec!r}")
        self._granted = frame.granted
        self.max_step_tokens = frame.granted.max_step_tokens

    async def exchange(self, chunk: Chunk, position: int, reorder: Sequence[int] = ()) -> Chunk:
        """Sends one step, with `position` tokens of a row before it, and returns the checked answer.

        Raises:
            ServerFailed: the server is gone, silent, refuses or cheats.
        """
        if self._pending is not None:
            # A call that was cut off left an answer on its way: it comes before ours.
            await self._finish(self._pending)
        self._pending = sent = await self._send(chunk, position, reorder)
        return await self._finish(sent)

    async def _finish(self, sent: _Sent) -> Chunk:
        answer = await self._receive(sent)
        self._pending = None
        await self._check(answer)
        return answer.chunk

    async def _send(self, chunk: Chunk, position: int, reorder: Sequence[int]) -> _Sent:
        self._sequence += 1
        step = wire.Step(
            sequence=self._sequence, position=position, reorder=reorder, route_epoch=self._route_epoch
        )
        sent_at = trio.current_time()
        try:
            await self._stream.send(
                wire.InferenceFrame(step=step, tensors=[chunk.tensor]), [chunk.payload], timeout=SEND_TIMEOUT
            )
        except PeerError as error:
            raise self._failed(str(error)) from error
        return _Sent(step, chunk, sent_at)

    async def _receive(self, sent: _Sent) -> _Answer:
        try:
            frame, payloads = await self._stream.receive(timeout=self._spec.step_timeout)
        except PeerError as error:
            raise self._failed(str(error)) from error
        self._raise_refusal(frame)
        reply = frame.reply
        if frame.WhichOneof("body") != "reply" or reply.sequence != sent.step.sequence or len(payloads) != 1:
            raise self._failed(f"it did not answer step {sent.step.sequence} with one reply")
        tensor, asked = frame.tensors[0], sent.chunk.tensor
        if (list(tensor.shape), tensor.dtype, tensor.codec) != (list(asked.shape), asked.dtype, asked.codec):
            raise self._failed(f"it answered a tensor of {list(asked.shape)} with one of {list(tensor.shape)}")
        if reply.position != sent.step.position + sent.chunk.tokens:
            raise self._failed(f"it holds {reply.position} tokens after a step that ends at another position")
        now = trio.current_time()
        self.timing = HopTiming(
            self.hop.peer_id, now - sent.sent_at, reply.queue_us / 1e6, reply.compute_us / 1e6
        )
        return _Answer(sent, reply, Chunk(tensor, payloads[0]))

    async def _check(self, answer: _Answer) -> None:
        """Checks that the receipt is this server's, and for exactly what was sent and came back.

        Raises:
            ServerFailed: if it is not; nothing of this server can be used then.
        """
        sent, reply = answer.sent, answer.reply
        payloads = (sent.chunk.payload, answer.chunk.payload)
        if len(payloads[0]) > _HASH_INLINE:
            input_hash, output_hash = await trio.to_thread.run_sync(
                lambda: (sha256(payloads[0]), sha256(payloads[1]))
            )
        else:
            input_hash, output_hash = sha256(payloads[0]), sha256(payloads[1])
        try:
            receipt = receipt_from_wire(reply.receipt)
        except ValueError as error:
            raise self._failed(f"its receipt cannot be read: {error}") from None
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
            sequence=sent.step.sequence,
            request_hash=hash_of_step(sent.step, sent.chunk.tensor, input_hash),
            reply_hash=output_hash,
            previous_receipt=self._last_receipt,
            upstream_receipt=b"",
        )
        if receipt != expected:
            raise self._failed("its receipt is for something else than what was sent and came back")
        if not receipt.is_signed_by(self.hop.peer_id):
            raise self._failed("its receipt is not signed by its key")
        self._last_receipt = receipt.hash()

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            try:
                await self._stream.send(wire.InferenceFrame(close=wire.Close()), timeout=CLOSE_TIMEOUT)
                await self._stream.close()
            except PeerError:
                await self._stream.reset()  # the server, if it lives, learns by that

    def _raise_refusal(self, frame: wire.InferenceFrame) -> None:
        if frame.WhichOneof("body") == "error":
            refusal = Refusal.from_wire(frame.error)
            raise ServerRefused(
                f"server {self.hop.peer_id} (blocks {self.hop.span}) refused: {refusal.message}",
                self.hop.peer_id,
                refusal.code,
            )

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(f"server {self.hop.peer_id} (blocks {self.hop.span}) failed: {what}", self.hop.peer_id)


@dataclass(frozen=True)
class _Sent:
    step: wire.Step
    chunk: Chunk
    sent_at: float


@dataclass(frozen=True)
class _Answer:
    sent: _Sent
    reply: wire.Reply
    chunk: Chunk
