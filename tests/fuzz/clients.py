"""Targets that are a client's ends of sessions and batches: the server answers what it likes, and signs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import torch
import trio

from petalnode.crypto.receipts import NO_RECEIPT
from petalnode.node.client.batch.batch_stream import BatchSpec, BatchStream, StreamBroken, micro_batch
from petalnode.node.client.request import ServerClaims, WireTensor
from petalnode.node.client.session.history import Input
from petalnode.node.client.session.stream import SessionSpec, SessionStream
from petalnode.node.errors import ServerFailed
from petalnode.node.swarm.routing import Hop
from petalnode.node.testing import message_streams
from petalnode.node.trust.receipt_log import ReceiptArchive, SessionLog
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import Span, StreamProtocol
from petalnode.protocols.inference import INFERENCE, hash_of_step, pledge_to_wire, receipt_to_wire, root_of, sha256
from petalnode.protocols.tensors import encode
from petalnode.protocols.training import (
    FORWARD,
    NOTHING_KEPT,
    KeptSet,
    hash_of_batch,
    hash_of_keep,
    hash_of_payloads,
    receive_pieces,
)
from tests.fuzz import corpus
from tests.fuzz.corpus import ATTACKER, EPOCH, OTHER, VERSION
from tests.fuzz.harness import Target
from tests.fuzz.mutation import Mutator, frame
from tests.fuzz.streams import ENDINGS
from tests.node_inspection import raw_of

_HIDDEN: Final = 8
_SPAN: Final = Span(0, 6)
_TIMEOUT: Final = 60.0
_PLEDGE: Final = corpus.pledge_of(ATTACKER)
_CLAIMS: Final = ServerClaims(VERSION, _SPAN, "float32", "none", _PLEDGE)


def _chunk(tokens: int, seed: int = 0) -> WireTensor:
    values = torch.randn(2, tokens, _HIDDEN, generator=torch.Generator().manual_seed(seed))
    return WireTensor(*encode(values, "none"))


class _Server:
    """Answers as a server that is right, but for what the mutator changes."""

    def __init__(self, mutator: Mutator, stream: Any) -> None:
        self._mutator = mutator
        self._stream = stream
        self._previous = NO_RECEIPT
        self._kept = NOTHING_KEPT
        self._share = mutator.random.choice((0.1, 0.3, 1.0))

    async def run(self) -> None:
        try:
            while True:
                message, payloads = await self._stream.receive(timeout=None)
                await self._answer(message, payloads)
        except (PeerError, OSError):
            return

    async def _say(self, message: Any, payload: bytes = b"") -> None:
        mutator = self._mutator
        header = message.SerializeToString()
        if mutator.chance(self._share):
            header = mutator.message(message)
        if payload and mutator.chance(self._share / 4):
            payload = mutator.random.choice((mutator.bytes(payload), b"\xff" * len(payload)))
        data = frame(header, payload)
        if mutator.chance(self._share / 4):
            data = mutator.bytes(data)
        for _ in range(2 if mutator.chance(self._share / 4) else 1):
            for portion in mutator.split(data):
                await raw_of(self._stream).write(portion)
        ending = mutator.random.choice(ENDINGS) if mutator.chance(self._share / 8) else ""
        if ending == "close":
            await self._stream.close()
        elif ending:
            await self._stream.reset()

    def _receipt(self, sequence: int, nonce: bytes, request: bytes, reply: bytes) -> wire.Receipt:
        fields: dict[str, Any] = {"sequence": sequence, "nonce": nonce, "request_hash": request, "reply_hash": reply}
        receipt = corpus.receipt(ATTACKER, previous_receipt=self._previous, adapter=b"", **fields)
        if self._mutator.chance(self._share / 4):
            name = self._mutator.random.choice(sorted(fields))
            receipt = corpus.changed(receipt, ATTACKER, **{name: 7 if name == "sequence" else b"other"})
        self._previous = receipt.hash()
        return receipt_to_wire(receipt)

    async def _answer(self, message: Any, payloads: list[bytes]) -> None:
        body = message.WhichOneof("body")
        granted = {"session_epoch": EPOCH, "dtype": "float32", "quantisation": "none", "credits": 4}
        if body == "open":
            self._nonce = message.open.nonce
            if isinstance(message, wire.InferenceFrame):
                self._previous = root_of(message.open, OTHER.peer_id, EPOCH, _PLEDGE.hash())
                grant = wire.Granted(**granted, codec="none", max_step_tokens=100, pledge=pledge_to_wire(_PLEDGE))
                await self._say(wire.InferenceFrame(granted=grant))
            else:
                opened = wire.BatchGranted(**granted, pledge=pledge_to_wire(_PLEDGE), gradient_may_follow=True)
                await self._say(wire.BatchFrame(granted=opened))
        elif body == "step":
            [tensor], [payload] = message.tensors, payloads
            request = hash_of_step(message.step, tensor, sha256(payload))
            reply = wire.Reply(
                sequence=message.step.sequence,
                position=message.step.position + tensor.shape[1],
                receipt=self._receipt(message.step.sequence, self._nonce, request, sha256(payload)),
            )
            await self._say(wire.InferenceFrame(reply=reply, tensors=[tensor]), payload)
        elif body == "keep":
            held = await receive_pieces(self._stream, [tensor.nbytes for tensor in message.keep.tensors], timeout=9.0)
            self._kept = hash_of_keep(message.keep, hash_of_payloads(held))
        elif body == "work":
            work = message.work
            sent = await receive_pieces(self._stream, [tensor.nbytes for tensor in work.tensors], timeout=9.0)
            request = hash_of_batch(FORWARD.id, work, hash_of_payloads(sent), self._kept if work.kept else NOTHING_KEPT)
            answer = bytes(sent[0])
            receipt = self._receipt(work.sequence, self._nonce, request, sha256(answer))
            reply = wire.BatchReply(sequence=work.sequence, receipt=receipt, tensors=work.tensors[:1])
            await self._say(wire.BatchFrame(reply=reply))
            piece = wire.BatchFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=len(answer))])
            await self._say(piece, answer)


async def _session(stream: Any) -> None:
    log = SessionLog(ATTACKER.peer_id, keeps_tensors=True)
    spec = SessionSpec(VERSION, _SPAN, 2, 64, step_timeout=_TIMEOUT)
    session = SessionStream(
        stream, Hop(ATTACKER.peer_id, _SPAN), spec, OTHER.peer_id, bytes(16), claims=_CLAIMS, log=log
    )
    await session.open(1, None, None)
    await session.exchange(Input(0, (), _chunk(3)), 1)
    await session.exchange(Input(3, (1, 0), _chunk(1, 1)), 1)
    await session.exchange(Input(2, (), _chunk(1, 2)), 1)
    await session.close()


async def _batches(stream: Any) -> None:
    spec = BatchSpec(VERSION)
    batches = BatchStream(
        stream, Hop(ATTACKER.peer_id, _SPAN), spec, OTHER.peer_id, FORWARD, claims=_CLAIMS, archive=ReceiptArchive()
    )
    await batches.open()
    tensor, payload = encode(torch.ones(6, 1, 2, _HIDDEN), "none")
    kept = KeptSet.of(wire.Keep(names=["prompts"], tensors=[tensor]), [payload])
    await batches.run(micro_batch([_chunk(3)], kept), _TIMEOUT)
    await batches.run(micro_batch([_chunk(3, 1)], mask=b"\xff"), _TIMEOUT)
    await batches.close()


class _Client:
    def __init__(self, talk: Callable[[Any], Awaitable[None]], protocol: StreamProtocol[Any]) -> None:
        self._talk = talk
        self._protocol = protocol

    def held(self) -> Mapping[str, int]:
        return {}

    async def feed(self, given: Mutator) -> None:
        ours, theirs = message_streams(self._protocol, OTHER.peer_id, ATTACKER.peer_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_Server(given, theirs).run)
            try:
                await self._talk(ours)
            except (ServerFailed, StreamBroken):
                pass
            nursery.cancel_scope.cancel()


def _target(name: str, share: int, talk: Callable[[Any], Awaitable[None]], protocol: StreamProtocol[Any]) -> Target:
    @asynccontextmanager
    async def opened() -> AsyncIterator[_Client]:
        yield _Client(talk, protocol)

    return Target(name, share, lambda mutator: mutator, opened, seconds=1000.0, peak=4 << 20)


TARGETS: Final[tuple[Target, ...]] = (
    _target("answers to steps", 4, _session, INFERENCE),
    _target("answers to batches", 4, _batches, FORWARD),
)
