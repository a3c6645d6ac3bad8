"""The server's side of `/petalnode/forward/1` and `/petalnode/backward/1`: who gets a stream of works."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import psutil
import torch
import trio

from ....crypto.identity import Identity
from ....protocols import wire_pb2 as wire
from ....protocols.framing import PeerError
from ....protocols.ids import BACKWARD, FORWARD
from ....protocols.inference import Refusal, bad_request
from ....protocols.training import MICRO_BATCH_TOKENS, BatchFrames, batch_terms_of
from ...blocks.passes import SpanPasses
from ..budget import CacheBudget
from ..compute_thread import ComputeThread
from ..lifecycle.pledging import Pledger
from .admission import Hosted, check_client, check_terms
from .batch_stream import TrainingStream

OPEN_TIMEOUT: Final = 10.0
SEND_TIMEOUT: Final = 30.0
MAX_STREAMS: Final = 256
WORK_SHARE: Final = 0.05
"""Parts of the free memory: for works under way, for what clients want kept, and for what autograd keeps of a pass."""
KEPT_SHARE: Final = 0.05
ACTIVATION_SHARE: Final = 0.15


class TrainingService:
    """Forward and backward passes through one hosted span, for whoever asks; anyone's chat goes before them.

    The memory is bounded: `budget` holds the tensors of all works from the moment that they are read until they are
    answered (room for two of the largest micro-batches at least), `kept_budget` what streams keep, and one pass at a
    time computes within its share for what autograd keeps.

    Attributes:
        draining: set it and no new work is taken.
    """

    def __init__(
        self,
        hosted: Hosted,
        compute: ComputeThread,
        identity: Identity,
        refuses_backward: str | None,
        allowed_clients: Collection[str] = (),
        pledger: Pledger = lambda: None,
    ) -> None:
        """
        Args:
            refuses_backward: why there are no gradients here; None if there are.
            allowed_clients: the peer ids that are served; none lets everybody.
            pledger: gives the pledge for a stream that is opened.
        """
        memory = psutil.virtual_memory().available
        self.hosted = hosted
        self.compute = compute
        self.identity = identity
        largest = 4 * MICRO_BATCH_TOKENS * hosted.hidden_size * 4  # a backward pass and its reply, in float32
        self.budget = CacheBudget(max(int(WORK_SHARE * memory), 2 * largest))
        self.kept_budget = CacheBudget(int(KEPT_SHARE * memory))
        self.passes = SpanPasses(compute.blocks, int(ACTIVATION_SHARE * _free_memory(compute.blocks.device, memory)))
        self.pledger = pledger
        self.draining = False
        self._refuses_backward = refuses_backward
        self._allowed_clients = frozenset(allowed_clients)
        self._streams = 0
        self._works = 0
        self._idle = trio.Event()

    def note(self, works: int) -> None:
        """Hears of works that have come (more than 0) or are answered or given up (less)."""
        self._works += works
        if not self._works:
            self._idle.set()
            self._idle = trio.Event()

    async def wait_idle(self) -> None:
        """Returns once no work is under way."""
        while self._works:
            await self._idle.wait()

    async def handle_forward(self, stream: BatchFrames) -> None:
        """One stream of forward passes. Never raises for anything that the client did."""
        await self._handle(stream, FORWARD)

    async def handle_backward(self, stream: BatchFrames) -> None:
        """One stream of backward passes. Never raises for anything that the client did."""
        await self._handle(stream, BACKWARD)

    async def _handle(self, stream: BatchFrames, protocol: str) -> None:
        self._streams += 1
        try:
            frame, _ = await stream.receive(timeout=OPEN_TIMEOUT)
            try:
                await self._serve(stream, frame, protocol)
            except Refusal as refusal:
                await stream.send(wire.BatchFrame(error=refusal.to_wire()), timeout=SEND_TIMEOUT)
            await stream.close()
        except PeerError:
            # The client is gone, silent or speaks nonsense; what it held has been given back on the way here.
            await stream.reset()
        finally:
            self._streams -= 1

    async def _serve(self, stream: BatchFrames, frame: wire.BatchFrame, protocol: str) -> None:
        if frame.WhichOneof("body") != "open":
            raise bad_request("a stream of works begins with BatchOpen")
        check_client(stream.peer_id, self._allowed_clients)
        terms = batch_terms_of(frame.open)
        check_terms(terms, self.hosted)
        if protocol == BACKWARD and self._refuses_backward is not None:
            raise Refusal(wire.ERROR_UNSUPPORTED, f"no gradients from this server: {self._refuses_backward}")
        if self.draining:
            raise Refusal(wire.ERROR_DRAINING, "this server is about to stop")
        if self._streams > MAX_STREAMS:
            raise Refusal(wire.ERROR_BUSY, f"this server has {MAX_STREAMS} streams of works already")
        await TrainingStream(self, stream, terms, protocol).run()


def _free_memory(device: torch.device, of_machine: int) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else of_machine
