"""Batches through the swarm and back: forward and backward passes over chains of servers, any of which may die.

Fine-tuning of Petals (NeurIPS 2023, section 3.4): servers keep nothing between two passes, so what failed is simply
done again elsewhere. The client keeps what entered every server of a chain (its junctions); a backward pass gives each
server its own input back with the gradient, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from ....protocols.ids import Span
from ....protocols.training import BACKWARD, FORWARD, BatchProtocol, KeptSet, MicroBatch, narrower
from ...errors import ServerFailed, SwarmError, unwrapped
from ...swarm.routing import Hop
from ..request import MAX_FAILURES, WireTensor, blames_request
from .batch_client import BatchClient, StartedBackward
from .batch_stream import BatchSpec, micro_batch
from .chains import Chain

T = TypeVar("T")


@dataclass(frozen=True)
class PassSpec:
    """What a batch goes through.

    `kept` gives what servers of these blocks shall keep for these rows, or for all rows if not `kept_by_row`; it is
    called in a worker thread. `timeout` is of one micro-batch at one server, in seconds; None goes by its speed.
    """

    span: Span
    stream: BatchSpec
    kept: Callable[[Span, slice], KeptSet | None] | None = None
    kept_by_row: bool = False
    timeout: float | None = None
    wait: bool = False


@dataclass(frozen=True)
class Junction:
    """A server that a micro-batch went through, and what entered it."""

    hop: Hop
    entered: WireTensor


@dataclass(frozen=True)
class PartGradients:
    """Of one micro-batch: with respect to what entered the first block, and to what servers of some blocks kept."""

    hidden: WireTensor
    kept: tuple[tuple[Span, dict[str, WireTensor]], ...]


@dataclass
class BatchPass:
    """One batch on its way forward, and perhaps back.

    Attributes:
        parts: the micro-batches, as they enter the first block; `rows` of the batch that each has.
        chains: for each micro-batch the servers that it was planned for.
        junctions: for each micro-batch the servers that it went through, once it did.
    """

    client: BatchClient
    spec: PassSpec
    parts: Sequence[MicroBatch]
    rows: Sequence[slice]
    chains: Sequence[Chain]
    junctions: list[list[Junction]] = field(default_factory=list)
    _kept: dict[tuple[int, int, int, int], KeptSet | None] = field(default_factory=dict)
    _making: trio.Lock = field(default_factory=trio.Lock)

    async def forward(self) -> list[WireTensor]:
        """What the blocks make of each micro-batch.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            SwarmError: several servers refused the same thing.
        """
        self.junctions = [[] for _ in self.parts]
        return await _each(len(self.parts), self._forward)

    async def _forward(self, index: int) -> WireTensor:
        part = self.parts[index]
        entering = WireTensor(part.message.tensors[0], part.payloads[0])
        return await self._along(index, self.chains[index], entering, self.junctions[index])

    async def backward(self, gradients: Sequence[WireTensor]) -> list[PartGradients]:
        """
        Args:
            gradients: for each micro-batch, with respect to what `forward` returned for it.

        Raises:
            NoChainError, SwarmError: as `forward`.
        """
        return await _each(len(self.parts), partial(self._backward, gradients))

    async def _backward(self, gradients: Sequence[WireTensor], index: int) -> PartGradients:
        kept: list[tuple[Span, dict[str, WireTensor]]] = []
        gradient = gradients[index]
        *before, last = self.junctions[index]
        ahead = [_EarlyBackward() for _ in before]
        try:
            async with trio.open_nursery() as nursery:
                for junction, early in zip(before, ahead, strict=True):
                    nursery.start_soon(self._begin, index, junction, early)
                gradient = await self._back(index, last, gradient, kept)
                for junction, early in zip(reversed(before), reversed(ahead), strict=True):
                    gradient = await self._back(index, junction, gradient, kept, await early.ready())
        finally:
            for early in ahead:
                await early.abandon()
        return PartGradients(gradient, tuple(kept))

    async def _along(self, index: int, chain: Chain, chunk: WireTensor, junctions: list[Junction]) -> WireTensor:
        """Takes a micro-batch through `chain`, and others in the place of servers that fail."""
        hops = list(chain)
        failures = _Failures()
        while hops:
            hop = hops[0]
            try:
                [output] = await self._run(FORWARD, hop, index, (chunk,))
            except ServerFailed as error:
                failures.add(error)
                hops[:1] = await self._instead(hop.span, failures)
                continue
            junctions.append(Junction(hop, chunk))
            chunk = output
            failures.clear()
            del hops[0]
        return chunk

    async def _begin(self, index: int, junction: Junction, ahead: _EarlyBackward) -> None:
        """Lets the server compute forward again while those behind it go back. A gradient has the form of an output."""
        entered, own = junction.entered, self.spec.stream.boundaries.left_by(junction.hop.span)
        gradient = WireTensor(narrower(entered.tensor, own), entered.payload)
        request = await self._request(junction.hop, index, (entered, gradient))
        ahead.settle(await self.client.begin(junction.hop, self.spec.stream, request, self.spec.timeout))

    async def _back(
        self,
        index: int,
        junction: Junction,
        gradient: WireTensor,
        kept: list[tuple[Span, dict[str, WireTensor]]],
        begun: StartedBackward | None = None,
    ) -> WireTensor:
        """Takes a gradient back through the blocks of one junction, wherever they are now."""
        hop = junction.hop
        failures = _Failures()
        while True:
            try:
                hidden, *others = await self._run(BACKWARD, hop, index, (junction.entered, gradient), begun)
            except ServerFailed as error:
                begun = None
                failures.add(error)
                chain = await self._instead(hop.span, failures, backward=True)
            else:
                given = await self._kept_for(hop.span, self.rows[index])
                if given is not None:
                    kept.append((hop.span, dict(zip(given.keep.names, others, strict=True))))
                return hidden
            if len(chain) > 1:
                # Other boundaries: what enters the servers behind the first must be made first.
                junctions: list[Junction] = []
                entered = await self._along(index, chain[:-1], junction.entered, junctions)
                for part in reversed([*junctions, Junction(chain[-1], entered)]):
                    gradient = await self._back(index, part, gradient, kept)
                return gradient
            hop = chain[0]

    async def _run(
        self,
        protocol: BatchProtocol,
        hop: Hop,
        index: int,
        chunks: tuple[WireTensor, ...],
        begun: StartedBackward | None = None,
    ) -> list[WireTensor]:
        request = await self._request(hop, index, chunks)
        return await self.client.run(protocol, hop, self.spec.stream, request, self.spec.timeout, begun)

    async def _request(self, hop: Hop, index: int, chunks: tuple[WireTensor, ...]) -> MicroBatch:
        message = self.parts[index].message
        return micro_batch(chunks, await self._kept_for(hop.span, self.rows[index]), message.mask, message.positions)

    async def _kept_for(self, span: Span, rows: slice) -> KeptSet | None:
        if self.spec.kept is None:
            return None
        rows = rows if self.spec.kept_by_row else slice(0, 0)
        key = (span.start, span.end, rows.start, rows.stop)
        async with self._making:  # all micro-batches want the same at the same time
            if key not in self._kept:
                self._kept[key] = await trio.to_thread.run_sync(self.spec.kept, span, rows)
        return self._kept[key]

    async def _instead(self, span: Span, failures: _Failures, *, backward: bool = False) -> Chain:
        """Servers for `span` in the place of those that failed.

        Raises:
            NoChainError: nobody else holds these blocks.
        """
        return await self.client.instead(
            span, failures.by_peer, backward=backward, wait=self.spec.wait, since=failures.since
        )


class _EarlyBackward:
    """A backward request that may go out ahead of its gradient."""

    def __init__(self) -> None:
        self._settled = trio.Event()
        self._begun: StartedBackward | None = None

    def settle(self, begun: StartedBackward | None) -> None:
        """What has gone out is known."""
        self._begun = begun
        self._settled.set()

    async def ready(self) -> StartedBackward | None:
        """What has gone out, once that is known."""
        await self._settled.wait()
        return self._begun

    async def abandon(self) -> None:
        """Gives it up, if nobody has begun to finish it."""
        if self._begun is not None:
            await self._begun.abandon()


class _Failures:
    """Of servers for the same blocks, at one micro-batch. `since` when."""

    def __init__(self) -> None:
        self.since = 0.0
        self.by_peer: dict[str, ServerFailed] = {}

    def add(self, error: ServerFailed) -> None:
        """
        Raises:
            SwarmError: it is the batch that is at fault, not the servers.
        """
        self.since = self.since if self.by_peer else trio.current_time()
        self.by_peer[error.peer_id] = error
        refusals = sum(map(blames_request, self.by_peer.values()))
        if refusals > 1 or len(self.by_peer) > MAX_FAILURES:
            raise SwarmError(f"{len(self.by_peer)} servers in a row failed at one micro-batch: {error}")

    def clear(self) -> None:
        self.by_peer.clear()


async def _each(count: int, one: Callable[[int], Awaitable[T]]) -> list[T]:
    """Runs `one` for 0 .. count-1 side by side; streams and servers let them in one by one."""
    results: dict[int, T] = {}

    async def run(index: int) -> None:
        results[index] = await one(index)

    with unwrapped(SwarmError):
        async with trio.open_nursery() as nursery:
            for index in range(count):
                nursery.start_soon(run, index)
                await trio.lowlevel.checkpoint()  # or trio starts them in any order, and the first shall be the first
    return [results[index] for index in range(count)]
