"""One server of all blocks of a tiny model, on streams in memory, for those who attack it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from google.protobuf.message import Message

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.server.budget import MemoryBudget
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.node.server.requests.adapters import Adapters
from petalnode.node.server.requests.admission import Hosted
from petalnode.node.server.requests.pushes import PushStream
from petalnode.node.server.requests.request import RequestContext
from petalnode.node.server.requests.service import RequestService
from petalnode.node.testing import MemoryStream, message_streams, stream_pair
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream, PeerError, StreamClosed, varint
from petalnode.protocols.ids import StreamProtocol
from petalnode.protocols.inference import INFERENCE, PUSH, receipt_to_wire, sha256
from tests.receipts import unsigned
from tests.swarm.raw import RawSession
from tests.tiny_models import HIDDEN, NUM_BLOCKS

VERSION = b"v" * 32
F = TypeVar("F", bound=Message)


class NobodyNext:
    """No server comes after this one."""

    async def open_push(self, peer_id: str, *, direct: bool = False) -> PushStream:
        raise StreamClosed("nobody is there", peer_id)

    def watch_direct(self, peer_id: str) -> trio.Event:
        return trio.Event()


class OneServer:
    """Streams to the service of one server, each handled in a task of its own."""

    def __init__(self, service: RequestService, nursery: trio.Nursery) -> None:
        self.service = service
        self._nursery = nursery

    def session(self, client: Identity) -> RawSession:
        stream, _ = self.connect(INFERENCE, self.service.handle_session, client)
        return RawSession(stream, {"blocks": [0, NUM_BLOCKS], "model_version": VERSION.hex()})

    def kept_tokens(self) -> int:
        """What it keeps for later sessions; for its compute thread."""
        return self.service.context.compute.steps.prefixes.tokens

    def pusher(self, pusher: Identity) -> PushStream:
        return self.connect(PUSH, self.service.handle_push, pusher)[0]

    def connect(
        self, protocol: StreamProtocol[F], handler: Callable[[MessageStream[F]], Awaitable[None]], peer: Identity
    ) -> tuple[MessageStream[F], MemoryStream]:
        """The end of `peer`, with and without framing."""
        ends = stream_pair()
        ours, theirs = message_streams(protocol, peer.peer_id, "server", ends=ends)

        async def handle() -> None:
            try:
                await handler(theirs)
                await theirs.close()
            except PeerError:
                await theirs.reset()

        self._nursery.start_soon(handle)
        return ours, ends[0]


@asynccontextmanager
async def one_server(blocks: BlockSpan, **options: Any) -> AsyncIterator[OneServer]:
    """`options` are fields of `RequestContext`."""
    compute = ComputeThread(blocks)
    compute.start()
    hosted = Hosted(VERSION, "tiny", NUM_BLOCKS, blocks.span, HIDDEN, "float32", "none", blocks.max_positions)
    context = RequestContext(hosted, compute, Identity.generate(), **options)
    service = RequestService(context, MemoryBudget(10_000), NobodyNext(), Adapters(context))
    try:
        async with trio.open_nursery() as nursery:
            yield OneServer(service, nursery)
            nursery.cancel_scope.cancel()
    finally:
        await compute.stop()


def pushed(
    session: RawSession, owner: Identity, pusher: Identity, sequence: int, position: int, payload: bytes, **lies: Any
) -> wire.PushFrame:
    """A step of the client `owner` as `pusher` hands it on, with its receipt, in which some fields are `lies`."""
    fields = {"nonce": os.urandom(16), "sequence": sequence, "reply_hash": sha256(payload)}
    receipt = unsigned(**{"model_version": VERSION, "client": owner.peer_id} | fields | lies).signed(pusher)
    step = wire.Step(sequence=sequence, position=position, route_epoch=1, previous_receipt=receipt.hash())
    shape = [1, len(payload) // (4 * HIDDEN), HIDDEN]
    push = wire.Push(
        client=peer_id_to_bytes(owner.peer_id), nonce=session.nonce, step=step, receipt=receipt_to_wire(receipt)
    )
    tensor = wire.Tensor(shape=shape, dtype="float32", codec="none", nbytes=len(payload))
    return wire.PushFrame(push=push, tensors=[tensor])


def header_of(frame: Message) -> bytes:
    """The bytes of a message whose tensors never come."""
    data = frame.SerializeToString()
    return varint(len(data)) + data
