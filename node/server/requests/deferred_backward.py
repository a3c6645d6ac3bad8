"""A batch whose gradient comes later than its input: the server computes forward while another batch goes back."""

from __future__ import annotations

from typing import Final

import trio

from ....protocols import wire_pb2 as wire
from ....protocols.inference import Refusal
from ...blocks.batch_job import BatchJob, KeptTensors
from ...blocks.passes import Batch, SavedActivations, SpanPasses
from ..budget import Lease
from ..compute_thread import ComputeThread, PassResult

GRADIENT_TIMEOUT: Final = 60.0
"""How long a batch whose turn it is waits for its gradient."""


class DeferredBackward:
    """Waits for a gradient with what `SpanPasses.recompute` has kept.

    It may be given up at any time until the gradient is there: the memory that it takes is lent, so whoever has need of
    it takes it. The client then sends the whole request.
    """

    def __init__(self, request: wire.BatchRequest, payload: bytearray, kept: KeptTensors | None, batch: Batch) -> None:
        self.request = request
        self.payload = payload
        self.kept = kept
        self._batch: Batch | None = batch
        self._job: BatchJob | None = None
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
            self._refusal = Refusal(
                wire.ERROR_BUSY, f"work {self.request.sequence} was given up: {why}; send all of it"
            )
            self.payload, self._batch, self._recomputed = bytearray(), None, None
            self._scope.cancel()
            self._settled.set()

    def check(self) -> None:
        """
        Raises:
            Refusal: it was given up.
        """
        if self._refusal is not None:
            raise self._refusal

    def settle(self, job: BatchJob) -> None:
        """The gradient is there. Does nothing if it was given up."""
        if self._recall() and not self._settled.is_set():
            self._job = job
            self._settled.set()

    async def recompute(self, compute: ComputeThread, passes: SpanPasses) -> None:
        """Runs the first half of the pass. Raises nothing; `ready` does."""
        try:
            with self._scope:
                if self._batch is not None:
                    self._recomputed = await compute.run_pass(passes.recompute(self._batch))
        except Refusal as refusal:
            self._refusal = refusal
        self._done.set()

    async def ready(self) -> tuple[BatchJob, PassResult[SavedActivations]]:
        """The whole batch and its first half, once both are there.

        Raises:
            Refusal: it was given up, its gradient did not come, or the first half failed.
        """
        with trio.move_on_after(GRADIENT_TIMEOUT):
            await self._settled.wait()
        self.give_up(f"its gradient did not come for {GRADIENT_TIMEOUT:.0f} s")
        if self._job is not None:
            await self._done.wait()
        self.check()
        assert self._job is not None and self._recomputed is not None
        job, recomputed = self._job, self._recomputed
        self._recomputed = None  # what is kept is free as the second half goes on
        return job, recomputed
