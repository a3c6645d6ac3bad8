"""The server's side of `/petalnode/inference/1`: admits sessions, checks steps, signs receipts."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from ...crypto.identity import Identity
from ...crypto.receipts import NO_RECEIPT, Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.framing import MessageStream, PeerError, StreamClosed
from ...protocols.ids import PROTOCOL_VERSION, Span
from ...protocols.inference import (
    EPOCH_BYTES,
    MAX_STEP_BYTES,
    Refusal,
    SessionTerms,
    bad_request,
    hash_of_step,
    receipt_to_wire,
    sha256,
    terms_of,
)
from ...protocols.tensors import CODECS, DTYPES, TensorError, wire_nbytes
from .cache_budget import CacheBudget, CacheFull
from .compute import ComputeSession, ComputeThread, StepInput, StepOutput

InferenceStream = MessageStream[wire.InferenceFrame]

OPEN_TIMEOUT: Final = 10.0
IDLE_TIMEOUT: Final = 1800.0
"""A session that asks nothing for this long gives its cache back; a dead connection is noticed far sooner."""
SEND_TIMEOUT: Final = 30.0
MAX_WAIT: Final = 60.0
MAX_SESSIONS: Final = 512
CREDITS: Final = 4
STEP_TOKENS: Final = 2048
"""Rows times positions of one step."""


@dataclass(frozen=True)
class Hosted:
    """What this server holds and stands for in its receipts."""

    model_version: bytes
    model_name: str
    num_blocks: int
    span: Span
    hidden_size: int
    dtype: str
    quantisation: str
    max_length: int


def check_terms(terms: SessionTerms, hosted: Hosted, adapter: str) -> None:
    """Whether this server can hold such a session at all.

    Raises:
        Refusal: with the code and a sentence for the client.
    """
    if terms.model_version != hosted.model_version:
        raise Refusal(
            wire.ERROR_UNKNOWN_MODEL,
            f"this server holds {hosted.model_name} version {hosted.model_version.hex()[:12]}, "
            f"not version {terms.model_version.hex()[:12]}",
        )
    if not hosted.span.covers(terms.span):
        raise Refusal(wire.ERROR_SPAN_NOT_HOSTED, f"blocks {terms.span} are wanted, {hosted.span} are here")
    if terms.codec not in CODECS:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"unknown codec {terms.codec!r}; known are {', '.join(CODECS)}")
    if terms.dtype not in DTYPES:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"unknown dtype {terms.dtype!r}; known are {', '.join(DTYPES)}")
    if adapter:
        raise Refusal(wire.ERROR_UNSUPPORTED, f"adapter {adapter!r} is not loaded here")
    if terms.max_length > hosted.max_length:
        raise Refusal(
            wire.ERROR_TOO_LONG, f"the model takes {hosted.max_length} tokens, not {terms.max_length}"
        )


def check_step(
    step: wire.Step, tensors: list[wire.Tensor], terms: SessionTerms, hosted: Hosted, *, last: int, position: int
) -> None:
    """Whether a step fits its session, before any byte of it is interpreted.

    `last` is the sequence number of the last step done, `position` the tokens held.

    Raises:
        Refusal: ERROR_TOO_LONG leaves the session usable; every other ends it.
    """
    if step.sequence != last + 1:
        raise bad_request(f"step {step.sequence} came after step {last}")
    if step.route_epoch != terms.route_epoch:
        raise bad_request(f"route epoch {step.route_epoch} is not the session's {terms.route_epoch}")
    if len(tensors) != 1:
        raise bad_request(f"a step carries one tensor, not {len(tensors)}")
    tensor = tensors[0]
    shape = tuple(tensor.shape)
    if len(shape) != 3 or shape[0] != terms.batch or shape[2] != hosted.hidden_size or shape[1] < 1:
        raise bad_request(f"shape {shape} is not [{terms.batch}, tokens, {hosted.hidden_size}]")
    if tensor.codec != terms.codec or tensor.dtype != terms.dtype:
        raise bad_request(
            f"{tensor.dtype} with codec {tensor.codec!r} came; the session speaks {terms.dtype} with {terms.codec!r}"
        )
    try:
        if tensor.nbytes != wire_nbytes(shape, tensor.dtype, tensor.codec) or tensor.nbytes > MAX_STEP_BYTES:
            raise bad_request(f"{tensor.nbytes} bytes cannot be shape {shape} as {tensor.dtype}")
    except TensorError as error:
        raise bad_request(str(error)) from None
    if shape[1] > step_tokens(terms.batch):
        raise bad_request(f"{shape[1]} tokens in one step; at most {step_tokens(terms.batch)} were granted")
    if step.position > position:
        raise bad_request(f"position {step.position} is ahead of the {position} tokens held")
    if step.reorder and (len(step.reorder) != terms.batch or max(step.reorder) >= terms.batch):
        raise bad_request(f"reorder takes a row for each of the {terms.batch} rows")
    if step.position + shape[1] > terms.max_length:
        raise Refusal(
            wire.ERROR_TOO_LONG,
            f"{step.position} tokens and {shape[1]} more pass the session's max_length of {terms.max_length}",
        )


def step_tokens(batch: int) -> int:
    """Tokens of a row that one step may carry."""
    return max(1, STEP_TOKENS // batch)


class InferenceService:
    """Serves sessions of one hosted span. `on_change` is called when free cache or queue depth have changed."""

    def __init__(
        self,
        hosted: Hosted,
        compute: ComputeThread,
        budget: CacheBudget,
        identity: Identity,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.hosted = hosted
        self.budget = budget
        self.sessions = 0
        self._compute = compute
        self._identity = identity
        self._on_change = on_change

    async def handle(self, stream: InferenceStream) -> None:
        """One session from Open to its end. Never raises for anything that the client did."""
        try:
            frame, _ = await stream.receive(timeout=OPEN_TIMEOUT)
            try:
                await self._serve(stream, frame)
            except Refusal as refusal:
                await stream.send(wire.InferenceFrame(error=refusal.to_wire()), timeout=SEND_TIMEOUT)
            await stream.close()
        except PeerError:
            # The client is gone, silent or speaks nonsense; its cache has been given back on the way here.
            await stream.reset()

    async def _serve(self, stream: InferenceStream, frame: wire.InferenceFrame) -> None:
        if frame.WhichOneof("body") != "open":
            raise bad_request("a session begins with Open")
        terms = terms_of(frame.open)
        check_terms(terms, self.hosted, frame.open.adapter)
        if self.sessions >= MAX_SESSIONS:
            raise Refusal(wire.ERROR_BUSY, f"this server already has {self.sessions} sessions")
        self.sessions += 1
        try:
            await self._acquire(stream, terms.cache_tokens, min(frame.open.wait_ms / 1000, MAX_WAIT))
            try:
                await self._run(stream, terms)
            finally:
                self.budget.release(terms.cache_tokens)
        finally:
            self.sessions -= 1
            self._on_change()

    async def _acquire(self, stream: InferenceStream, tokens: int, wait: float) -> None:
        """Takes cache for a session. A client that dies in the queue loses its place at once.

        Raises:
            Refusal: ERROR_CACHE_FULL after `wait` seconds.
            PeerError: the client is gone.
        """
        full: CacheFull | None = None
        held = lost = False
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal lost
                await stream.wait_lost()
                lost = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                await self.budget.acquire(tokens, wait)
                held = True
            except CacheFull as error:
                full = error
            nursery.cancel_scope.cancel()
        if full is not None:
            raise Refusal(wire.ERROR_CACHE_FULL, str(full))
        if lost:
            if held:
                self.budget.release(tokens)
            raise StreamClosed(f"{stream.peer_id} left while it waited for cache", stream.peer_id)

    async def _run(self, stream: InferenceStream, terms: SessionTerms) -> None:
        self._on_change()
        compute = await self._compute.open(
            terms.batch, terms.max_length, terms.left_padding, terms.codec, terms.span
        )
        session = _Session(self, stream, terms, compute)
        try:
            await session.run()
        finally:
            self._compute.close(compute)


class _Session:
    """One granted session: reads steps, has them computed, answers with receipts."""

    def __init__(
        self, service: InferenceService, stream: InferenceStream, terms: SessionTerms, compute: ComputeSession
    ) -> None:
        self._service = service
        self._stream = stream
        self._terms = terms
        self._compute = compute
        self._epoch = os.urandom(EPOCH_BYTES)
        self._sequence = 0
        self._position = 0
        self._last_receipt = NO_RECEIPT
        self._replies: deque[_SentReply] = deque(maxlen=CREDITS)

    async def run(self) -> None:
        hosted = self._service.hosted
        granted = wire.Granted(
            session_epoch=self._epoch,
            cache_tokens=self._terms.cache_tokens,
            codec=self._terms.codec,
            dtype=hosted.dtype,
            quantisation=hosted.quantisation,
            credits=CREDITS,
            max_step_tokens=step_tokens(self._terms.batch),
        )
        await self._stream.send(wire.InferenceFrame(granted=granted), timeout=SEND_TIMEOUT)
        while True:
            frame, payloads = await self._stream.receive(timeout=IDLE_TIMEOUT)
            body = frame.WhichOneof("body")
            if body == "close":
                return
            if body != "step":
                raise bad_request(f"an open session takes Step or Close, not {body}")
            try:
                await self._step(frame.step, list(frame.tensors), payloads)
            except Refusal as refusal:
                if refusal.code != wire.ERROR_TOO_LONG:
                    raise
                await self._stream.send(wire.InferenceFrame(error=refusal.to_wire()), timeout=SEND_TIMEOUT)

    async def _step(self, step: wire.Step, tensors: list[wire.Tensor], payloads: list[bytes]) -> None:
        if step.sequence <= self._sequence and len(tensors) == 1:
            await self._repeat(step, tensors[0], payloads[0])
            return
        check_step(
            step, tensors, self._terms, self._service.hosted, last=self._sequence, position=self._position
        )
        output = await self._service._compute.step(
            self._compute, StepInput(step.position, tuple(step.reorder), tensors[0], payloads[0])
        )
        self._sequence = step.sequence
        self._position = output.position
        request = hash_of_step(step, tensors[0], output.input_hash)
        receipt = self._receipt(step, request, output)
        self._last_receipt = receipt.hash()
        reply = wire.Reply(
            sequence=step.sequence,
            position=output.position,
            receipt=receipt_to_wire(receipt),
            queue_us=round(output.queue_seconds * 1e6),
            compute_us=round(output.compute_seconds * 1e6),
        )
        sent = _SentReply(
            request, wire.InferenceFrame(reply=reply, tensors=[output.tensor]), output.payload, step.sequence
        )
        self._replies.append(sent)
        await self._stream.send(sent.frame, [sent.payload], timeout=SEND_TIMEOUT)

    async def _repeat(self, step: wire.Step, tensor: wire.Tensor, payload: bytes) -> None:
        request = hash_of_step(step, tensor, await trio.to_thread.run_sync(sha256, payload))
        for sent in self._replies:
            if sent.sequence == step.sequence and sent.request_hash == request:
                await self._stream.send(sent.frame, [sent.payload], timeout=SEND_TIMEOUT)
                return
        raise bad_request(f"step {step.sequence} is over, and was another request or is too old to be repeated")

    def _receipt(self, step: wire.Step, request: bytes, output: StepOutput) -> Receipt:
        hosted = self._service.hosted
        return Receipt(
            protocol_version=PROTOCOL_VERSION,
            model_version=hosted.model_version,
            span=(self._terms.span.start, self._terms.span.end),
            dtype=hosted.dtype,
            quantisation=hosted.quantisation,
            client=self._stream.peer_id,
            nonce=self._terms.nonce,
            session_epoch=self._epoch,
            sequence=step.sequence,
            request_hash=request,
            reply_hash=output.output_hash,
            previous_receipt=self._last_receipt,
            upstream_receipt=step.previous_receipt,
            time_ms=time.time_ns() // 1_000_000,
        ).signed(self._service._identity)


@dataclass(frozen=True)
class _SentReply:
    request_hash: bytes
    frame: wire.InferenceFrame
    payload: bytes
    sequence: int
