"""One stream of batches at a server: reads ahead, has them computed one behind the other, answers with receipts.

The gradient of a batch may come later than its input: the server computes forward while another batch goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
import trio

from ....protocols import wire_pb2 as wire
from ....protocols.framing import PeerError, StreamTimeout
from ....protocols.inference import Refusal, bad_request, receipt_to_wire
from ....protocols.training import (
    BACKWARD,
    KEPT_SETS,
    BatchFrames,
    BatchProtocol,
    BatchTerms,
    MicroBatch,
    raw_bytes,
    receive_pieces,
    send_in_pieces,
)
from ...blocks.batch_request import (
    BatchRequest,
    KeptTensors,
    pack,
    run_request,
    unpack_keep,
    unpack_request,
    with_gradient,
)
from ...blocks.passes import SavedActivations, SpanPasses
from ...errors import unwrapped
from ..budget import Lease, MemoryBudget
from ..compute_thread import ComputeThread, PassResult
from .admission import batch_bytes, check_batch, check_keep
from .request import REQUESTS, OpenCount, ReceiptChain, RequestContext, open_window, reserve


@dataclass(frozen=True)
class BatchPolicy:
    """What a stream of batches may have under way, and how long it waits, in seconds."""

    credits: int = 4
    idle: float = 60.0  # After which a stream that asks for nothing is ended; its client opens another
    gradient: float = 60.0  # For which a batch whose turn it is waits for its gradient


BATCHES: Final = BatchPolicy()


class DeferredBackward:
    """Waits for a gradient with what `SpanPasses.recompute` has kept.

    It may be given up at any time until the gradient is there. The memory that it takes is lent, so whoever has need of
    it takes it. The client then sends the whole request.
    """

    def __init__(self, request: BatchRequest) -> None:
        self.request: BatchRequest | None = request  # None once it was given up
        self._recomputed: PassResult[SavedActivations] | None = None
        self._refusal: Refusal | None = None
        self._settled = trio.Event()
        self._done = trio.Event()
        self._scope = trio.CancelScope()
        self._lease: Lease | None = None

    def lend(self, lease: Lease) -> None:
        """Offers the memory that it holds to others."""
        self._lease = lease
        lease.lend(lambda: self.give_up("its memory was needed for others"))

    def _recall(self) -> bool:
        return self._lease is None or self._lease.recall()

    def give_up(self, why: str) -> None:
        """Drops what it holds. Does nothing once the gradient is there."""
        self._recall()
        if not self._settled.is_set():
            assert self.request is not None
            what = f"batch request {self.request.asked.message.sequence} was given up: {why}; send all of it"
            self._refusal = Refusal(wire.ERROR_BUSY, what)
            self.request = self._recomputed = None
            self._scope.cancel()
            self._settled.set()

    def checked(self) -> BatchRequest:
        """
        Raises:
            Refusal: it was given up.
        """
        if self._refusal is not None:
            raise self._refusal
        assert self.request is not None
        return self.request

    def settle(self, request: BatchRequest) -> None:
        """The gradient is there. Does nothing if it was given up."""
        if self._recall() and not self._settled.is_set():
            self.request = request
            self._settled.set()

    async def recompute(self, compute: ComputeThread, passes: SpanPasses, peer: str = "") -> None:
        """Runs the first half of the pass. Raises nothing; `ready` does."""
        try:
            with self._scope:
                if self.request is not None:
                    self._recomputed = await compute.run_pass(passes.recompute(self.request.batch), peer=peer)
        except Refusal as refusal:
            self._refusal = refusal
        self._done.set()

    async def ready(self) -> tuple[BatchRequest, PassResult[SavedActivations]]:
        """The whole batch and its first half, once both are there.

        Raises:
            Refusal: it was given up, its gradient did not come, or the first half failed.
        """
        with trio.move_on_after(BATCHES.gradient):
            await self._settled.wait()
        self.give_up(f"its gradient did not come for {BATCHES.gradient:.0f} s")
        if self.request is not None:
            await self._done.wait()
        request, recomputed = self.checked(), self._recomputed
        assert recomputed is not None
        self._recomputed = None  # what is kept is free as the second half goes on
        return request, recomputed


@dataclass(frozen=True)
class BatchMemory:
    """What all streams share: for `requests` under way, for what clients want `kept`, and the one who runs passes."""

    requests: MemoryBudget
    kept: MemoryBudget
    passes: SpanPasses


@dataclass(frozen=True)
class _Requested:
    """A request on its way to be computed."""

    batch: BatchRequest | DeferredBackward
    lease: Lease


@dataclass(frozen=True)
class _Computed:
    request: BatchRequest
    result: PassResult[list[torch.Tensor]]
    lease: Lease


@dataclass(eq=False)
class BatchRequests:
    """Serves one stream of batches that was admitted.

    Three tasks hand requests on to each other: one reads, one computes, one answers. An error of any of them goes the
    same way, so that the answers before it are not lost.
    """

    _context: RequestContext
    _memory: BatchMemory
    _open_requests: OpenCount
    _stream: BatchFrames
    _terms: BatchTerms
    _protocol: BatchProtocol

    def __post_init__(self) -> None:
        self._receipts = ReceiptChain(self._context, self._stream.peer_id, self._terms)
        self._kept: OrderedDict[int, tuple[KeptTensors, Lease]] = OrderedDict()
        self._kept_number = 0
        self._sequence = 0
        self._under_way = 0  # requests that count against the credits
        self._unanswered = 0
        self._deferred: dict[int, DeferredBackward] = {}  # by their numbers, those whose gradients have not come
        self._leases: set[Lease] = set()

    async def run(self) -> None:
        """Serves until the client closes, leaves, breaks the protocol or says nothing for long.

        Raises:
            PeerError: the client is gone.
        """
        granted = wire.BatchGranted(
            **self._receipts.granted(), credits=BATCHES.credits, gradient_may_follow=self._protocol == BACKWARD
        )
        open_window(self._stream, served=False)
        await self._stream.send(wire.BatchFrame(granted=granted), timeout=REQUESTS.piece)
        try:
            with unwrapped(PeerError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    to_compute, computing = trio.open_memory_channel[_Requested | Refusal](BATCHES.credits)
                    to_answer, answering = trio.open_memory_channel[_Computed | Refusal](BATCHES.credits)
                    nursery.start_soon(self._read, to_compute, nursery)
                    nursery.start_soon(self._compute, computing, to_answer)
                    await self._answer(answering)
                    nursery.cancel_scope.cancel()
        finally:
            self._open_requests.remove(self._stream.peer_id, self._unanswered)
            self._give_up("the stream is over")
            for lease in self._leases:
                lease.release()

    async def _watch(self, scope: trio.CancelScope) -> None:
        """The requests of a client that is gone are given up at once."""
        await self._stream.wait_lost()
        scope.cancel()

    def _give_up(self, why: str) -> None:
        for deferred in self._deferred.values():
            deferred.give_up(why)
        self._deferred.clear()

    async def _read(self, requested: trio.MemorySendChannel[_Requested | Refusal], nursery: trio.Nursery) -> None:
        async with requested:
            try:
                while (frame := await self._next_frame()) is not None:
                    one = await self._take_frame(frame)
                    if one is None:
                        continue
                    if isinstance(one.batch, DeferredBackward):
                        peer = self._stream.peer_id
                        nursery.start_soon(one.batch.recompute, self._context.compute, self._memory.passes, peer)
                    await requested.send(one)
            except Refusal as refusal:
                with suppress(trio.BrokenResourceError):
                    await requested.send(refusal)
            except trio.BrokenResourceError:
                pass  # a pass has failed: nobody takes requests any more, and the answering task ends the stream
            finally:
                self._give_up("nothing more is read from its stream")

    async def _next_frame(self) -> wire.BatchFrame | None:
        """None when the client has closed the stream, or asks for nothing any more."""
        while True:
            try:
                frame, _ = await self._stream.receive(timeout=BATCHES.idle)
                return None if frame.WhichOneof("body") == "close" else frame
            except StreamTimeout:
                if not self._under_way:
                    return None

    async def _take_frame(self, frame: wire.BatchFrame) -> _Requested | None:
        """What is to be computed next, if the frame brings that."""
        body = frame.WhichOneof("body")
        if body == "gradient":
            await self._take_gradient(frame.gradient)
            return None
        if self._context.draining:
            raise Refusal(wire.ERROR_DRAINING, "this server is about to stop")
        if body == "keep":
            await self._take_kept(frame.keep)
            return None
        if body != "work":
            raise bad_request(f"a stream of batch requests takes Keep, BatchRequest, Gradient or Close, not {body}")
        return await self._take_request(frame.work)

    async def _take_kept(self, keep: wire.Keep) -> None:
        context = self._context
        check_keep(keep, self._terms, context.hosted, context.compute.blocks.linears, last=self._kept_number)
        if len(self._kept) == KEPT_SETS:
            _, (_, lease) = self._kept.popitem(last=False)
            self._release(lease)
        lease = await self._reserve(self._memory.kept, raw_bytes(keep.tensors))
        sizes = [tensor.nbytes for tensor in keep.tensors]
        payloads = await receive_pieces(self._stream, sizes, timeout=REQUESTS.piece)
        self._kept_number = keep.number
        self._kept[keep.number] = await trio.to_thread.run_sync(unpack_keep, keep, payloads), lease

    async def _take_request(self, message: wire.BatchRequest) -> _Requested:
        check_batch(
            message,
            self._terms,
            self._context.hosted,
            {number: kept.keep for number, (kept, _) in self._kept.items()},
            backward=self._protocol == BACKWARD,
            last=self._sequence,
        )
        if self._under_way >= BATCHES.credits:
            raise Refusal(wire.ERROR_BUSY, f"{BATCHES.credits} batch requests may be under way at once, not more")
        kept, _ = self._kept.get(message.kept, (None, None))
        self._sequence = message.sequence
        self._under_way += 1
        self._unanswered += 1
        self._open_requests.add(self._stream.peer_id)
        lease = await self._reserve(self._memory.requests, batch_bytes(message, kept.keep if kept else None))
        here = message.tensors[:1] if message.gradient_follows else message.tensors
        payloads = await receive_pieces(self._stream, [tensor.nbytes for tensor in here], timeout=REQUESTS.piece)
        asked = MicroBatch(message, tuple(payloads), kept)
        request = await trio.to_thread.run_sync(unpack_request, self._protocol.id, self._terms, asked)
        if not message.gradient_follows:
            return _Requested(request, lease)
        deferred = self._deferred[message.sequence] = DeferredBackward(request)
        deferred.lend(lease)
        return _Requested(deferred, lease)

    async def _take_gradient(self, gradient: wire.Gradient) -> None:
        deferred = self._deferred.get(gradient.sequence)
        if deferred is None:
            raise bad_request(f"no batch request {gradient.sequence} waits for its gradient")
        size = deferred.checked().asked.message.tensors[1].nbytes
        [payload] = await receive_pieces(self._stream, [size], timeout=REQUESTS.piece)
        deferred.settle(await trio.to_thread.run_sync(with_gradient, self._protocol.id, deferred.checked(), payload))
        self._deferred.pop(gradient.sequence, None)

    async def _reserve(self, budget: MemoryBudget, nbytes: int) -> Lease:
        lease = await reserve(budget, nbytes, never=wire.ERROR_TOO_LONG, holder=self._stream.peer_id)
        self._leases.add(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        self._leases.discard(lease)
        lease.release()

    async def _compute(
        self,
        requested: trio.MemoryReceiveChannel[_Requested | Refusal],
        answers: trio.MemorySendChannel[_Computed | Refusal],
    ) -> None:
        async with requested, answers:
            async for one in requested:
                if isinstance(one, Refusal):
                    await answers.send(one)
                    return
                try:
                    request, result = await self._run(one.batch)
                except Refusal as refusal:
                    await answers.send(refusal)
                    return
                await answers.send(_Computed(request, result, one.lease))

    async def _run(self, batch: BatchRequest | DeferredBackward) -> tuple[BatchRequest, PassResult[list[torch.Tensor]]]:
        run_pass = partial(self._context.compute.run_pass, peer=self._stream.peer_id)
        passes = self._memory.passes
        if isinstance(batch, BatchRequest):
            return batch, await run_pass(run_request(batch, passes))
        request, first = await batch.ready()
        second = await run_pass(run_request(request, passes, first.value), resumed=True)
        return request, replace(second, compute_seconds=first.compute_seconds + second.compute_seconds)

    async def _answer(self, answers: trio.MemoryReceiveChannel[_Computed | Refusal]) -> None:
        async for done in answers:
            if isinstance(done, Refusal):
                await self._stream.send(wire.BatchFrame(error=done.to_wire()), timeout=REQUESTS.piece)
                return
            packed = await trio.to_thread.run_sync(pack, done.request, done.result.value)
            message = done.request.asked.message
            kind = "backward" if self._protocol == BACKWARD else "forward"
            rows, tokens = message.tensors[0].shape[:2]
            self._context.tallies.batches[kind] += 1
            self._context.tallies.batch_tokens[kind] += rows * tokens
            reply = wire.BatchReply(
                sequence=message.sequence,
                receipt=receipt_to_wire(self._receipts.sign(message.sequence, done.request.request_hash, packed.hash)),
                tensors=packed.tensors,
                queue_us=round(done.result.queue_seconds * 1e6),
                compute_us=round(done.result.compute_seconds * 1e6),
            )
            # Before the last byte is out, because the client may send the next request at once.
            self._under_way -= 1
            await send_in_pieces(self._stream, wire.BatchFrame(reply=reply), packed.payloads, timeout=REQUESTS.piece)
            open_window(self._stream, served=True)
            self._release(done.lease)
            self._unanswered -= 1
            self._open_requests.remove(self._stream.peer_id)
