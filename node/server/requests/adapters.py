"""The adapters that sessions of a server may name: those of its owner, and those that clients have brought."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import psutil
import torch
import trio

from ....protocols import wire_pb2 as wire
from ....protocols.adapter import AnnouncedAdapter, digests_match
from ....protocols.framing import PeerError, TensorError
from ....protocols.ids import Span
from ....protocols.inference import Refusal, bad_request
from ....protocols.tensors import decode
from ....protocols.training import BatchFrames, receive_pieces
from ...blocks.span_adapter import SpanAdapter
from ...models.adapter import Adapter, digests_of
from ..budget import CacheBudget, CacheFull
from ..compute_thread import ComputeThread
from .admission import Hosted, check_adapter, check_client

MAX_STREAMS: Final = 64
BROUGHT_SHARE: Final = 0.05
"""Of the free memory, for what clients bring."""
OPEN_TIMEOUT: Final = 10.0
SEND_TIMEOUT: Final = 30.0
PIECE_TIMEOUT: Final = 30.0
BRING_TIMEOUT: Final = 600.0
"""For all of an adapter to come."""
MEMORY_WAIT: Final = 20.0
HOLD_TIMEOUT: Final = 120.0
"""For which an adapter that was brought waits for its first session."""


@dataclass(eq=False)
class Borrowed:
    """An adapter that sessions use; `users` are those and the stream on which it came. None of the owner's counts."""

    adapter: SpanAdapter
    span: Span
    key: tuple[str, bytes] | None = None
    nbytes: int = 0
    users: int = 0


class Adapters:
    """Holds adapters for one hosted span. All but the tensors is the trio thread's.

    Memory is bounded: the owner's are what the owner has named, and what clients bring stays within `budget`, which
    counts bytes, as long as sessions use it.
    """

    def __init__(self, hosted: Hosted, compute: ComputeThread, allowed_clients: Collection[str] = ()) -> None:
        self.budget = CacheBudget(int(BROUGHT_SHARE * psutil.virtual_memory().available))
        self._hosted = hosted
        self._compute = compute
        self._allowed_clients = frozenset(allowed_clients)
        self._loaded: dict[bytes, Borrowed] = {}
        self._names: list[AnnouncedAdapter] = []
        self._brought: dict[tuple[str, bytes], list[Borrowed]] = {}
        self._streams = 0

    async def load(self, adapters: Sequence[Adapter]) -> None:
        """Takes the owner's adapters, which have been checked against the model's version.

        Raises:
            BadInput: one does not fit the blocks.
        """
        hosted, blocks = self._hosted, self._compute.blocks
        for each in adapters:
            each.check_fits(hosted.span, blocks.linears, hosted.hidden_size, hosted.num_blocks)
            part = each.part(hosted.span)
            adapter = await self._compute.call(lambda part=part: blocks.make_adapter(part))  # type: ignore[misc]
            self._loaded[each.hash] = Borrowed(adapter, hosted.span)
            self._names.append(AnnouncedAdapter(each.name, each.hash))

    @property
    def announced(self) -> tuple[str, ...]:
        """The owner's adapters, as an announcement names them."""
        return tuple(str(name) for name in self._names)

    def borrow(self, adapter: bytes, client: str, span: Span) -> Borrowed | None:
        """The adapter of this hash for a session of `client` through the blocks of `span`; None for no hash.

        Raises:
            Refusal: ERROR_UNSUPPORTED, it is not here.
        """
        if not adapter:
            return None
        found = self._find(adapter, client, span)
        if found is None:
            raise Refusal(wire.ERROR_UNSUPPORTED, f"the adapter {adapter.hex()[:12]} is not here")
        found.users += 1
        return found

    def give_back(self, borrowed: Borrowed | None) -> None:
        """Ends what `borrow` began; the last user of what a client has brought takes it away."""
        if borrowed is None:
            return
        borrowed.users -= 1
        if not borrowed.users and borrowed.key is not None:
            held = self._brought[borrowed.key]
            held.remove(borrowed)
            if not held:
                del self._brought[borrowed.key]
            self.budget.release(borrowed.nbytes)

    def _find(self, adapter: bytes, client: str, span: Span) -> Borrowed | None:
        candidates = [*self._brought.get((client, adapter), ())]
        if adapter in self._loaded:
            candidates.append(self._loaded[adapter])
        return next((candidate for candidate in candidates if candidate.span.covers(span)), None)

    async def handle(self, stream: BatchFrames) -> None:
        """One stream on which a client brings an adapter. Never raises for anything that the client did."""
        self._streams += 1
        borrowed: Borrowed | None = None
        try:
            frame, _ = await stream.receive(timeout=OPEN_TIMEOUT)
            try:
                borrowed = await self._take(stream, frame)
                await _say(stream, held=True)
                # The stream holds it until the client says Close, or leaves: its sessions do by then.
                with trio.move_on_after(HOLD_TIMEOUT):
                    await stream.receive(timeout=None)
            except Refusal as refusal:
                await stream.send(wire.BatchFrame(error=refusal.to_wire()), timeout=SEND_TIMEOUT)
            await stream.close()
        except PeerError:
            await stream.reset()
        finally:
            self.give_back(borrowed)
            self._streams -= 1

    async def _take(self, stream: BatchFrames, frame: wire.BatchFrame) -> Borrowed:
        """
        Raises:
            Refusal: it cannot be taken.
            PeerError: the client is gone.
        """
        if frame.WhichOneof("body") != "adapter":
            raise bad_request("a stream for an adapter begins with Adapter")
        check_client(stream.peer_id, self._allowed_clients)
        if self._streams > MAX_STREAMS:
            raise Refusal(wire.ERROR_BUSY, f"{MAX_STREAMS} adapters are on their way to this server already")
        offer, span = frame.adapter, check_adapter(frame.adapter, self._hosted, self._compute.blocks.linears)
        if self._find(offer.hash, stream.peer_id, span) is not None:
            found = self.borrow(offer.hash, stream.peer_id, span)
            assert found is not None
            return found
        nbytes = sum(math.prod(tensor.shape) for tensor in offer.tensors) * 4
        try:
            await self.budget.acquire(nbytes, MEMORY_WAIT)
        except CacheFull:
            raise Refusal(
                wire.ERROR_BUSY,
                f"an adapter of {nbytes >> 20} MiB is wanted, {self.budget.free >> 20} of the server's "
                f"{self.budget.tokens >> 20} MiB for adapters are free",
            ) from None
        try:
            await _say(stream, held=False)
            adapter = await self._receive(stream, offer)
        except BaseException:
            self.budget.release(nbytes)
            raise
        key = (stream.peer_id, offer.hash)
        borrowed = Borrowed(adapter, span, key, nbytes, users=1)
        self._brought.setdefault(key, []).append(borrowed)
        return borrowed

    async def _receive(self, stream: BatchFrames, offer: wire.Adapter) -> SpanAdapter:
        payloads: list[bytearray] | None = None
        with trio.move_on_after(BRING_TIMEOUT):
            payloads = await receive_pieces(stream, [tensor.nbytes for tensor in offer.tensors], timeout=PIECE_TIMEOUT)
        if payloads is None:
            raise Refusal(wire.ERROR_BUSY, f"the adapter did not come within {BRING_TIMEOUT:.0f} s")
        tensors = await trio.to_thread.run_sync(_unpack, offer, payloads)
        return await self._compute.call(lambda: self._compute.blocks.make_adapter(tensors))


async def _say(stream: BatchFrames, *, held: bool) -> None:
    await stream.send(wire.BatchFrame(adapter_state=wire.AdapterState(held=held)), timeout=SEND_TIMEOUT)


def _unpack(offer: wire.Adapter, payloads: Sequence[bytearray]) -> dict[str, torch.Tensor]:
    """
    Raises:
        Refusal: values that are not finite, or not those of the hash.
    """
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
