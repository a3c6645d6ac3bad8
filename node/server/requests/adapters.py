"""The adapters that sessions of a server may name: those of its owner, and those that clients have brought."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psutil
import torch
import trio

from ....protocols import wire_pb2 as wire
from ....protocols.adapter import AnnouncedAdapter, digests_match
from ....protocols.framing import TensorError
from ....protocols.ids import Span
from ....protocols.inference import Refusal, bad_request
from ....protocols.tensors import decode
from ....protocols.training import BatchFrames, receive_pieces
from ...blocks.span_adapter import SpanAdapter
from ...models.adapter import Adapter, digests_of
from ..budget import Lease, MemoryBudget
from .admission import check_adapter, check_client
from .request import REQUESTS, OpenCount, RequestContext, reserve, serve_stream


@dataclass(frozen=True)
class AdapterPolicy:
    """What clients may bring, and how long that may take, in seconds."""

    most_streams: int = 128
    brought_share: float = 0.05  # Of the free memory, for what clients bring
    bring: float = 600.0  # For all of an adapter to come
    hold: float = 120.0  # For which an adapter that was brought waits for its first session


ADAPTERS: Final = AdapterPolicy()


@dataclass(eq=False)
class _Held:
    """An adapter for the blocks of `span`. One that a client has brought holds memory, and goes with its last user."""

    adapter: SpanAdapter
    span: Span
    hash: bytes
    client: str | None = None
    lease: Lease | None = None
    users: int = 0


class Adapters:
    """Holds adapters for one hosted span. All but the tensors is the trio thread's.

    Memory is bounded: the owner's are what the owner has named. What clients bring has a budget, as long as sessions
    use it.
    """

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        room = int(ADAPTERS.brought_share * psutil.virtual_memory().available)
        self._budget = MemoryBudget(room, "MiB for adapters", 1 << 20)
        self._held: list[_Held] = []
        self._names: list[AnnouncedAdapter] = []
        self._streams = OpenCount("adapters on their way", ADAPTERS.most_streams, context.origins)

    async def load(self, adapters: Sequence[Adapter]) -> None:
        """Takes the owner's adapters, which have been checked against the model's version.

        Raises:
            BadInput: one does not fit the blocks.
        """
        hosted, blocks = self._context.hosted, self._context.compute.blocks
        for owned in adapters:
            owned.check_fits(hosted.span, blocks.linears, hosted.hidden_size, hosted.num_blocks)
            adapter = await self._made(owned.part(hosted.span))
            self._held.append(_Held(adapter, hosted.span, owned.hash))
            self._names.append(AnnouncedAdapter(owned.name, owned.hash))

    @property
    def announced(self) -> tuple[str, ...]:
        """The owner's adapters, as an announcement names them."""
        return tuple(str(name) for name in self._names)

    @contextmanager
    def borrowed(self, adapter: bytes, client: str, span: Span) -> Iterator[SpanAdapter | None]:
        """The adapter of this hash for a session of `client` through the blocks of `span`; None for no hash.

        Raises:
            Refusal: ERROR_UNSUPPORTED, it is not here.
        """
        if not adapter:
            yield None
            return
        held = self._find(adapter, client, span)
        if held is None:
            raise Refusal(wire.ERROR_UNSUPPORTED, f"the adapter {adapter.hex()[:12]} is not here")
        with self._used(held):
            yield held.adapter

    @contextmanager
    def _used(self, held: _Held) -> Iterator[None]:
        """The last user of what a client has brought takes it away."""
        held.users += 1
        try:
            yield
        finally:
            held.users -= 1
            if not held.users and held.lease is not None:
                self._held.remove(held)
                held.lease.release()

    def _find(self, adapter: bytes, client: str, span: Span) -> _Held | None:
        fitting = (held for held in self._held if held.hash == adapter and held.client in (None, client))
        return next((held for held in fitting if held.span.covers(span)), None)

    async def handle(self, stream: BatchFrames) -> None:
        """One stream on which a client brings an adapter. Never raises for anything that the client did."""
        await serve_stream(stream, self._serve, self._context)

    async def _serve(self, stream: BatchFrames, frame: wire.BatchFrame) -> None:
        if frame.WhichOneof("body") != "adapter":
            raise bad_request("a stream for an adapter begins with Adapter")
        check_client(stream.peer_id, self._context.allowed_clients)
        self._streams.check(stream.peer_id)
        span = check_adapter(frame.adapter, self._context.hosted, self._context.compute.blocks.linears)
        self._streams.add(stream.peer_id)
        try:
            held = self._find(frame.adapter.hash, stream.peer_id, span)
            if held is None:
                held = await self._receive(stream, frame.adapter, span)
            with self._used(held):
                await _say(stream, held=True)
                # The stream holds it until the client says Close, or leaves: its sessions do by then.
                with trio.move_on_after(ADAPTERS.hold):
                    await stream.receive(timeout=None)
        finally:
            self._streams.remove(stream.peer_id)

    async def _receive(self, stream: BatchFrames, offer: wire.Adapter, span: Span) -> _Held:
        """Raises Refusal if it cannot be taken, PeerError if the client is gone."""
        nbytes = sum(math.prod(tensor.shape) for tensor in offer.tensors) * 4
        lease = await reserve(self._budget, nbytes, holder=stream.peer_id)
        try:
            stream.grant()
            await _say(stream, held=False)
            sizes = [tensor.nbytes for tensor in offer.tensors]
            try:
                with trio.fail_after(ADAPTERS.bring):
                    payloads = await receive_pieces(stream, sizes, timeout=REQUESTS.piece)
            except trio.TooSlowError:
                raise Refusal(wire.ERROR_BUSY, f"the adapter did not come within {ADAPTERS.bring:.0f} s") from None
            tensors = await trio.to_thread.run_sync(_unpack, offer, payloads)
            adapter = await self._made(tensors, stream.peer_id)
        except BaseException:
            lease.release()
            raise
        held = _Held(adapter, span, offer.hash, stream.peer_id, lease)
        self._held.append(held)
        return held

    async def _made(self, tensors: dict[str, torch.Tensor], client: str | None = None) -> SpanAdapter:
        compute = self._context.compute
        return await compute.call(lambda: compute.blocks.make_adapter(tensors), client)


async def _say(stream: BatchFrames, *, held: bool) -> None:
    await stream.send(wire.BatchFrame(adapter_state=wire.AdapterState(held=held)), timeout=REQUESTS.send)


def _unpack(offer: wire.Adapter, payloads: Sequence[bytearray]) -> dict[str, torch.Tensor]:
    """Raises Refusal for values that are not finite, or not those of the hash."""
    tensors: dict[str, torch.Tensor] = {}
    for name, header, payload in zip(offer.names, offer.tensors, payloads, strict=True):
        try:
            tensors[name] = decode(header, payload)
        except TensorError as error:
            raise bad_request(str(error)) from None
        if not torch.isfinite(tensors[name]).all():
            raise bad_request(f"the adapter's {name} holds NaN or infinity")
    if not digests_match(offer, digests_of(tensors)):
        raise bad_request("the adapter's tensors are not those of its hash")
    return tensors
