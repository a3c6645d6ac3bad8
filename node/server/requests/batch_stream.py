"""One stream of works at a server: reads ahead, has them computed one behind the other, answers with receipts."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
import trio

from ....crypto.receipts import NO_RECEIPT, Receipt
from ....protocols import wire_pb2 as wire
from ....protocols.announcement import pledge_to_wire
from ....protocols.framing import PeerError, StreamTimeout
from ....protocols.ids import BACKWARD, PROTOCOL_VERSION
from ....protocols.inference import EPOCH_BYTES, Refusal, bad_request, receipt_to_wire
from ....protocols.training import (
    KEPT_SETS,
    BatchFrames,
    BatchTerms,
    raw_bytes,
    receive_pieces,
    send_in_pieces,
)
from ...blocks.batch_job import (
    BatchJob,
    KeptTensors,
    PackedReply,
    pack,
    run_job,
    unpack_batch,
    unpack_keep,
    unpack_work,
)
from ...errors import unwrapped
from ..budget import CacheBudget, CacheFull
from ..compute_thread import PassResult
from .admission import batch_bytes, check_batch, check_keep
from .deferred_backward import DeferredBackward

if TYPE_CHECKING:
    from .batch_service import TrainingService

CREDITS: Final = 4
IDLE_TIMEOUT: Final = 60.0
"""A stream that asks for nothing so long is ended; its client opens another."""
PIECE_TIMEOUT: Final = 30.0
MEMORY_WAIT: Final = 20.0
"""How long a work waits for others to give memory back."""


@dataclass(frozen=True)
class _Item:
    """A work on its way to be computed."""

    work: BatchJob | DeferredBackward
    nbytes: int


@dataclass(frozen=True)
class _Done:
    job: BatchJob
    passed: PassResult[list[torch.Tensor]]
    nbytes: int


class TrainingStream:
    """Serves one stream that was granted.

    Three tasks hand works on to each other: one reads, one computes, one answers. An error of any of them goes the same
    way, so that the answers before it are not lost.
    """

    def __init__(self, service: TrainingService, stream: BatchFrames, terms: BatchTerms, protocol: str) -> None:
        self._service = service
        self._stream = stream
        self._terms = terms
        self._protocol = protocol
        self._epoch = os.urandom(EPOCH_BYTES)
        self._kept: OrderedDict[int, KeptTensors] = OrderedDict()
        self._kept_number = 0
        self._sequence = 0
        self._under_way = 0  # works that count against the credits
        self._unanswered = 0
        self._last_receipt = NO_RECEIPT
        self._late: dict[int, DeferredBackward] = {}  # by their numbers, those whose gradients have not come
        self._held: dict[CacheBudget, int] = {service.budget: 0, service.kept_budget: 0}

    async def run(self) -> None:
        """Serves until the client closes, leaves, breaks the protocol or says nothing for long.

        Raises:
            PeerError: the client is gone.
        """
        hosted, pledge = self._service.hosted, self._service.pledger()
        granted = wire.BatchGranted(
            session_epoch=self._epoch,
            dtype=hosted.dtype,
            quantisation=hosted.quantisation,
            credits=CREDITS,
            pledge=pledge_to_wire(pledge) if pledge is not None else None,
            gradient_may_follow=self._protocol == BACKWARD,
        )
        await self._stream.send(wire.BatchFrame(granted=granted), timeout=PIECE_TIMEOUT)
        try:
            with unwrapped(PeerError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    to_compute, computing = trio.open_memory_channel[_Item | Refusal](CREDITS)
                    to_answer, answering = trio.open_memory_channel[_Done | Refusal](CREDITS)
                    nursery.start_soon(self._read, to_compute, nursery)
                    nursery.start_soon(self._compute, computing, to_answer)
                    await self._answer(answering)
                    nursery.cancel_scope.cancel()
        finally:
            self._service.note(-self._unanswered)
            self._give_up("the stream is over")
            for budget, nbytes in self._held.items():
                budget.release(nbytes)

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Works of a client that is gone are given up at once."""
        await self._stream.wait_lost()
        scope.cancel()

    def _give_up(self, why: str) -> None:
        for late in self._late.values():
            late.give_up(why)
        self._late.clear()

    async def _read(self, works: trio.MemorySendChannel[_Item | Refusal], nursery: trio.Nursery) -> None:
        async with works:
            try:
                while True:
                    try:
                        frame, _ = await self._stream.receive(timeout=IDLE_TIMEOUT)
                    except StreamTimeout:
                        if self._under_way:
                            continue
                        return
                    body = frame.WhichOneof("body")
                    if body == "close":
                        return
                    if body == "gradient":
                        await self._gradient(frame.gradient)
                        continue
                    if self._service.draining:
                        raise Refusal(wire.ERROR_DRAINING, "this server is about to stop")
                    if body == "keep":
                        await self._keep(frame.keep)
                    elif body == "work":
                        item = await self._work(frame.work)
                        if isinstance(item.work, DeferredBackward):
                            nursery.start_soon(item.work.recompute, self._service.compute, self._service.passes)
                        await works.send(item)
                    else:
                        raise bad_request(f"a stream of works takes Keep, Work, Gradient or Close, not {body}")
            except Refusal as refusal:
                with suppress(trio.BrokenResourceError):
                    await works.send(refusal)
            except trio.BrokenResourceError:
                pass  # a pass has failed: nobody takes works any more, and the answering task ends the stream
            finally:
                self._give_up("nothing more is read from its stream")

    async def _keep(self, keep: wire.Keep) -> None:
        check_keep(
            keep, self._terms, self._service.hosted, self._service.compute.blocks.linears, last=self._kept_number
        )
        if len(self._kept) == KEPT_SETS:
            _, oldest = self._kept.popitem(last=False)
            self._give_back(self._service.kept_budget, raw_bytes(oldest.keep.tensors))
        await self._take(self._service.kept_budget, raw_bytes(keep.tensors))
        payloads = await receive_pieces(self._stream, [tensor.nbytes for tensor in keep.tensors], timeout=PIECE_TIMEOUT)
        self._kept_number = keep.number
        self._kept[keep.number] = await trio.to_thread.run_sync(unpack_keep, keep, payloads)

    async def _work(self, work: wire.BatchRequest) -> _Item:
        check_batch(
            work,
            self._terms,
            self._service.hosted,
            {number: kept.keep for number, kept in self._kept.items()},
            backward=self._protocol == BACKWARD,
            last=self._sequence,
        )
        if self._under_way >= CREDITS:
            raise Refusal(wire.ERROR_BUSY, f"{CREDITS} works may be under way at once, not more")
        kept = self._kept.get(work.kept)
        nbytes = batch_bytes(work, kept.keep if kept else None)
        self._sequence = work.sequence
        self._under_way += 1
        self._unanswered += 1
        self._service.note(1)
        await self._take(self._service.budget, nbytes)
        here = work.tensors[:1] if work.gradient_follows else work.tensors
        payloads = await receive_pieces(self._stream, [each.nbytes for each in here], timeout=PIECE_TIMEOUT)
        if not work.gradient_follows:
            return _Item(await self._unpack(work, payloads, kept), nbytes)
        batch = await trio.to_thread.run_sync(unpack_batch, self._terms, work, payloads[0], kept)
        late = self._late[work.sequence] = DeferredBackward(work, payloads[0], kept, batch)
        budget = self._service.budget

        def taken() -> None:
            self._held[budget] -= nbytes

        late.lend(budget, nbytes, taken)
        return _Item(late, nbytes)

    async def _gradient(self, gradient: wire.Gradient) -> None:
        late = self._late.get(gradient.sequence)
        if late is None:
            raise bad_request(f"no work {gradient.sequence} waits for its gradient")
        late.check()
        [payload] = await receive_pieces(self._stream, [late.work.tensors[1].nbytes], timeout=PIECE_TIMEOUT)
        late.check()
        job = await self._unpack(late.work, [late.payload, payload], late.kept)
        late.settle(job)
        self._late.pop(gradient.sequence, None)

    async def _unpack(
        self, work: wire.BatchRequest, payloads: Sequence[bytearray], kept: KeptTensors | None
    ) -> BatchJob:
        return await trio.to_thread.run_sync(unpack_work, self._protocol, self._terms, work, payloads, kept)

    async def _take(self, budget: CacheBudget, nbytes: int) -> None:
        try:
            await budget.acquire(nbytes, MEMORY_WAIT)
        except CacheFull:
            if nbytes > budget.tokens:
                raise Refusal(
                    wire.ERROR_TOO_LONG,
                    f"{nbytes >> 20} MiB are wanted and the server has {budget.tokens >> 20} MiB: send less at once",
                ) from None
            raise Refusal(wire.ERROR_BUSY, "the server's memory for training is taken by others") from None
        self._held[budget] += nbytes

    def _give_back(self, budget: CacheBudget, nbytes: int) -> None:
        self._held[budget] -= nbytes
        budget.release(nbytes)

    async def _compute(
        self,
        works: trio.MemoryReceiveChannel[_Item | Refusal],
        answers: trio.MemorySendChannel[_Done | Refusal],
    ) -> None:
        async with works, answers:
            async for item in works:
                if isinstance(item, Refusal):
                    await answers.send(item)
                    return
                try:
                    job, passed = await self._pass(item.work)
                except Refusal as refusal:
                    await answers.send(refusal)
                    return
                await answers.send(_Done(job, passed, item.nbytes))

    async def _pass(self, work: BatchJob | DeferredBackward) -> tuple[BatchJob, PassResult[list[torch.Tensor]]]:
        run, passes = self._service.compute.run_pass, self._service.passes
        if isinstance(work, BatchJob):
            return work, await run(run_job(work, passes))
        job, first = await work.ready()
        second = await run(run_job(job, passes, first.value), resumed=True)
        return job, replace(second, compute_seconds=first.compute_seconds + second.compute_seconds)

    async def _answer(self, answers: trio.MemoryReceiveChannel[_Done | Refusal]) -> None:
        async for done in answers:
            if isinstance(done, Refusal):
                await self._stream.send(wire.BatchFrame(error=done.to_wire()), timeout=PIECE_TIMEOUT)
                return
            result = await trio.to_thread.run_sync(pack, done.job, done.passed.value)
            reply = wire.BatchReply(
                sequence=done.job.work.sequence,
                receipt=receipt_to_wire(self._receipt(done.job, result)),
                tensors=result.tensors,
                queue_us=round(done.passed.queue_seconds * 1e6),
                compute_us=round(done.passed.compute_seconds * 1e6),
            )
            # Before the last byte is out, because the client may send the next work at once.
            self._under_way -= 1
            await send_in_pieces(self._stream, wire.BatchFrame(reply=reply), result.payloads, timeout=PIECE_TIMEOUT)
            self._give_back(self._service.budget, done.nbytes)
            self._unanswered -= 1
            self._service.note(-1)

    def _receipt(self, job: BatchJob, result: PackedReply) -> Receipt:
        hosted = self._service.hosted
        receipt = Receipt(
            protocol_version=PROTOCOL_VERSION,
            model_version=hosted.model_version,
            span=(self._terms.span.start, self._terms.span.end),
            dtype=hosted.dtype,
            quantisation=hosted.quantisation,
            client=self._stream.peer_id,
            nonce=self._terms.nonce,
            session_epoch=self._epoch,
            sequence=job.work.sequence,
            request_hash=job.request_hash,
            reply_hash=result.hash,
            previous_receipt=self._last_receipt,
            upstream_receipt=b"",
            time_ms=time.time_ns() // 1_000_000,
        ).signed(self._service.identity)
        self._last_receipt = receipt.hash()
        return receipt
