"""A session of a client: one chain of servers, one stream to each, and the receipts that they sign."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import trio

from ...crypto.receipts import NO_RECEIPT
from ...protocols import wire_pb2 as wire
from ...protocols.framing import MessageStream, PeerError
from ...protocols.ids import INFERENCE, PROTOCOL_VERSION, Span
from ...protocols.inference import (
    EPOCH_BYTES,
    NONCE_BYTES,
    Refusal,
    hash_of_step,
    receipt_from_wire,
    sha256,
)
from ..errors import BadInput, ServerFailed, SwarmError
from ..swarm.swarm import Swarm
from .routing import Hop

InferenceStream = MessageStream[wire.InferenceFrame]

OPEN_TIMEOUT: Final = 10.0
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


class _ServerSession:
    """The client's end of one stream: sequence numbers, receipts, deadlines."""

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
        self._sent_at = 0.0

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

    async def send(self, chunk: Chunk, position: int, reorder: Sequence[int]) -> _Sent:
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

    async def receive(self, sent: _Sent) -> _Answer:
        """The reply, its header checked; `check` does the hashes and the signature, which can wait a little."""
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

    async def check(self, answer: _Answer) -> None:
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


class ClientSession:
    """Hidden states in, hidden states out, through a chain of servers that keep the attention caches.

    One call at a time. After any error but BadInput the session cannot be used any more.
    """

    def __init__(self, spec: SessionSpec, servers: Sequence[_ServerSession]) -> None:
        self.spec = spec
        self._servers = servers
        self._position = 0
        self._failed: Exception | None = None

    @property
    def route(self) -> tuple[Hop, ...]:
        return tuple(server.hop for server in self._servers)

    @property
    def position(self) -> int:
        """Tokens that each row holds. Set it lower to roll back; the servers follow with the next step."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if not 0 <= position <= self._position:
            raise BadInput(f"a session that holds {self._position} tokens cannot go to position {position}")
        self._position = position

    @property
    def usable(self) -> bool:
        """Whether `step` may be called: no server has failed, and no step was cut off in the middle."""
        return self._failed is None

    @property
    def max_step_tokens(self) -> int:
        """Tokens of a row that one chunk may have."""
        return min(server.max_step_tokens for server in self._servers)

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        return tuple(server.timing for server in self._servers)

    async def step(self, chunks: Sequence[Chunk], reorder: Sequence[int] = ()) -> list[Chunk]:
        """Sends chunks of hidden states, in order, through the chain; several are pipelined over the servers.

        `reorder` says for each row whose cache it continues, before the first chunk.

        Raises:
            ServerFailed: a server died, was silent, refused or cheated.
            BadInput: more tokens than the session was opened for; it stays usable.
        """
        if self._failed is not None:
            raise SwarmError(f"this session ended when a server failed ({self._failed}); open another")
        tokens = sum(chunk.tokens for chunk in chunks)
        if self._position + tokens > self.spec.max_length:
            raise BadInput(
                f"{self._position} tokens and {tokens} more pass the session's max_length of {self.spec.max_length}"
            )
        # A step that is cut off in the middle leaves the servers at different positions.
        self._failed = SwarmError("a step was cut off")
        try:
            if len(chunks) == 1:
                out = [await self._relay(chunks[0], reorder)]
            else:
                out = await self._pipeline(chunks, reorder)
        except Exception as error:
            self._failed = error
            raise
        self._failed = None
        self._position += tokens
        return out

    async def _relay(self, chunk: Chunk, reorder: Sequence[int]) -> Chunk:
        unchecked: tuple[_ServerSession, _Answer] | None = None
        for server in self._servers:
            sent = await server.send(chunk, self._position, reorder)
            if unchecked is not None:
                # While the next server computes: the check costs this client time, but not the token.
                await unchecked[0].check(unchecked[1])
            answer = await server.receive(sent)
            chunk, unchecked = answer.chunk, (server, answer)
        assert unchecked is not None
        await unchecked[0].check(unchecked[1])
        return chunk

    async def _pipeline(self, chunks: Sequence[Chunk], reorder: Sequence[int]) -> list[Chunk]:
        out: list[Chunk] = []

        async def stage(
            server: _ServerSession,
            source: trio.MemoryReceiveChannel[Chunk],
            forward: Callable[[Chunk], object],
            done: Callable[[], object],
        ) -> None:
            position, first = self._position, list(reorder)
            async for chunk in source:
                answer = await server.receive(await server.send(chunk, position, first))
                await server.check(answer)
                position, first = position + chunk.tokens, []
                forward(answer.chunk)
            done()

        with unwrapped(ServerFailed):
            async with trio.open_nursery() as nursery:
                # The number of chunks bounds every channel, so no stage waits for the next one's room.
                send, receive = trio.open_memory_channel[Chunk](len(chunks))
                for chunk in chunks:
                    send.send_nowait(chunk)
                send.close()
                for server in self._servers[:-1]:
                    send, following = trio.open_memory_channel[Chunk](len(chunks))
                    nursery.start_soon(stage, server, receive, send.send_nowait, send.close)
                    receive = following
                nursery.start_soon(stage, self._servers[-1], receive, out.append, lambda: None)
        return out


@asynccontextmanager
async def open_session(
    swarm: Swarm, spec: SessionSpec, route: Sequence[Hop], addrs: dict[str, tuple[str, ...]], route_epoch: int = 1
) -> AsyncIterator[ClientSession]:
    """Opens `spec` on every server of `route`, all at once, and closes it on the way out.

    `addrs` holds known multiaddrs by peer id.

    Raises:
        ServerFailed, ServerRefused: the first server that could not be had.
    """
    servers: dict[Hop, _ServerSession] = {}

    async def open_one(hop: Hop) -> None:
        try:
            stream = await swarm.new_stream(
                hop.peer_id, INFERENCE, wire.InferenceFrame, addrs=addrs.get(hop.peer_id, ()), timeout=OPEN_TIMEOUT
            )
        except PeerError as error:
            raise ServerFailed(
                f"server {hop.peer_id} (blocks {hop.span}) cannot be reached: {error}", hop.peer_id
            ) from error
        servers[hop] = _ServerSession(stream, hop, spec, swarm.peer_id, route_epoch)
        await servers[hop].open()

    try:
        with unwrapped(ServerFailed):
            async with trio.open_nursery() as nursery:
                for hop in route:
                    nursery.start_soon(open_one, hop)
        yield ClientSession(spec, [servers[hop] for hop in route])
    finally:
        async with trio.open_nursery() as nursery:
            for server in servers.values():
                nursery.start_soon(server.close)


@contextmanager
def unwrapped(kind: type[Exception]) -> Iterator[None]:
    """Raises the first error of `kind` instead of a nursery's group that holds nothing else."""
    try:
        yield
    except BaseExceptionGroup as group:
        matching, others = group.split(kind)
        if matching is None or others is not None:
            raise
        error: BaseException = matching
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
