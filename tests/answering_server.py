"""A server's end of one session, which says what a test has it say, and the client's end of it."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import Receipt
from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.stream import Answer, SessionSpec, SessionStream
from petalnode.node.swarm.routing import Hop
from petalnode.node.testing import message_streams
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import INFERENCE, receipt_to_wire, root_of
from tests.receipts import of_answer

SERVER, CLIENT, BEFORE, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in range(41, 45))
SPEC = SessionSpec(b"m" * 32, Span(2, 4), batch=1, max_length=64, cache_wait=3.0, step_timeout=20.0)
HOP = Hop(SERVER.peer_id, SPEC.span)
EPOCH = b"e" * 16
GRANT: dict[str, Any] = {
    "session_epoch": EPOCH,
    "codec": "none",
    "dtype": "float32",
    "quantisation": "none",
    "max_step_tokens": 8,
    "keep_ms": 5000,
}


def chunk_of(*values: float, tokens: int = 1) -> WireTensor:
    payload = struct.pack(f"{4 * tokens}f", *(values or (1.0, 2.0, 3.0, 4.0) * tokens))
    tensor = wire.Tensor(shape=[1, tokens, 4], dtype="float32", codec="none", nbytes=len(payload))
    return WireTensor(tensor, payload)


class Server:
    """The other end of a session; its blocks change nothing.

    Attributes:
        previous: the hash of its last receipt.
        heard: what the client said, in order.
    """

    def __init__(self) -> None:
        self.ours, self.stream = message_streams(INFERENCE, CLIENT.peer_id, SERVER.peer_id)
        self.previous = b""
        self.heard: list[wire.InferenceFrame] = []
        span = wire.Span(start=SPEC.span.start, end=SPEC.span.end)
        self.opened = wire.Open(model_version=SPEC.model_version, span=span)

    async def hear(self) -> wire.InferenceFrame:
        frame, _ = await self.stream.receive(timeout=10)
        self.heard.append(frame)
        return frame

    async def say(self, frame: wire.InferenceFrame, *payloads: bytes | bytearray) -> None:
        await self.stream.send(frame, payloads, timeout=10)

    async def grant(self, **changed: Any) -> None:
        frame = await self.hear()
        if frame.WhichOneof("body") == "open":
            self.opened.CopyFrom(frame.open)
            self.previous = root_of(self.opened, CLIENT.peer_id, EPOCH)
        await self.say(wire.InferenceFrame(granted=wire.Granted(**GRANT | changed)))

    def receipt(self, step: wire.Step, chunk: WireTensor, output: bytes, **changed: Any) -> Receipt:
        signer = changed.pop("signer", SERVER)
        made = of_answer(self.opened, CLIENT.peer_id, EPOCH, step, (chunk.tensor, bytes(chunk.payload)), output)
        return replace(made, **{"previous_receipt": self.previous} | changed).signed(signer)

    async def answer(
        self, step: wire.Step, chunk: WireTensor, output: WireTensor | None = None, **changed: Any
    ) -> Receipt:
        """A reply to `step`, with other fields of the reply or, in `signed`, of the receipt; without the output if
        `receipt_alone`."""
        output, payloads = output or chunk, [] if changed.pop("receipt_alone", False) else [(output or chunk).payload]
        receipt = self.receipt(step, chunk, bytes(output.payload), **changed.pop("signed", {}))
        self.previous = receipt.hash()
        usual = {"sequence": step.sequence, "position": step.position + chunk.tokens}
        reply = wire.Reply(**{**usual, "receipt": receipt_to_wire(receipt), **changed})
        await self.say(wire.InferenceFrame(reply=reply, tensors=[output.tensor] * len(payloads)), *payloads)
        return receipt


def session_with(server: Server, spec: SessionSpec = SPEC, **options: Any) -> SessionStream:
    return SessionStream(server.ours, HOP, spec, CLIENT.peer_id, **options)


async def opened(server: Server, session: SessionStream, **granted: Any) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.grant(**granted))
        await session.open(1, None, None)


@asynccontextmanager
async def talking(**options: Any) -> AsyncIterator[tuple[Server, SessionStream]]:
    """A server, and a session with it that is open."""
    server = Server()
    session = session_with(server, **options)
    await opened(server, session)
    yield server, session


async def asked(session: SessionStream, chunk: WireTensor, position: int = 0, **fields: Any) -> wire.Step:
    step = wire.Step(sequence=session.next_sequence(), position=position, route_epoch=1, **fields)
    await session.send(step, chunk)
    return step


async def received(session: SessionStream, step: wire.Step, chunk: WireTensor) -> Answer:
    answer = await session.receive(step, chunk, 5.0)
    assert answer is not None
    return answer
