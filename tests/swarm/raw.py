"""A client of `/petalnode/inference/1` that says what it is told to, right or wrong."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.client.api.runtime import TrioThread
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm, open_swarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.inference import INFERENCE
from tests.messages import opening

if TYPE_CHECKING:
    from petalnode.node.testing.memory_servers import MemorySwarm

TIMEOUT = 120.0
T = TypeVar("T")
HIDDEN = 64
Stream = MessageStream[wire.InferenceFrame]


@asynccontextmanager
async def raw_swarm(address: str) -> AsyncIterator[Swarm]:
    async with open_swarm(SwarmConfig(Identity.generate(), peers=(address,), serve_dht=False)) as swarm:
        yield swarm


@dataclass(frozen=True)
class Run:
    """Runs async functions on a node, in its loop: that of `caller`."""

    node: Swarm
    caller: TrioThread[Any] | MemorySwarm

    def __call__(self, function: Callable[[Swarm], Awaitable[T]]) -> T:
        async def bounded() -> T:
            with trio.fail_after(2 * TIMEOUT):
                return await function(self.node)

        return self.caller.call(bounded)  # type: ignore[no-any-return]


@contextmanager
def raw_client(address: str) -> Iterator[Run]:
    """On a node that has joined at `address`."""
    runtime = TrioThread(raw_swarm(address), "raw-client")
    try:
        yield Run(runtime.value, runtime)
    finally:
        runtime.close()


def values(tokens: int, rows: int = 1, seed: int = 0) -> bytes:
    """float32 hidden states of [rows, tokens, HIDDEN] as bytes."""
    import torch

    states = torch.randn(rows, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return states.numpy().tobytes()


class RawSession:
    """One stream to the server `ready` speaks of (its ready event)."""

    def __init__(self, stream: Stream, ready: dict[str, Any]) -> None:
        self.stream = stream
        self.ready = ready
        self.nonce = os.urandom(16)
        self.granted = wire.Granted()
        self.terms = wire.Open()

    @classmethod
    async def connect(cls, swarm: Swarm, ready: dict[str, Any]) -> RawSession:
        swarm.host.remember(ready["peer_id"], ready["addrs"])
        stream = await swarm.new_stream(ready["peer_id"], INFERENCE, timeout=TIMEOUT)
        return cls(stream, ready)

    @classmethod
    async def opened(cls, swarm: Swarm, ready: dict[str, Any], **fields: Any) -> RawSession:
        session = await cls.connect(swarm, ready)
        answer = await session.open(**fields)
        assert answer.WhichOneof("body") == "granted", answer
        return session

    async def open(self, **fields: Any) -> wire.InferenceFrame:
        """Sends Open with everything right but `fields`; returns the answer."""
        await self.send_open(**fields)
        frame, _ = await self.receive()
        self.granted.CopyFrom(frame.granted)
        return frame

    async def send_open(self, **fields: Any) -> None:
        start, end = fields.pop("span", self.ready["blocks"])
        usual = {"model_version": bytes.fromhex(self.ready["model_version"]), "nonce": self.nonce}
        self.terms = opening(span=wire.Span(start=start, end=end), **usual | fields)
        await self.stream.send(wire.InferenceFrame(open=self.terms), timeout=TIMEOUT)

    async def send_step(
        self,
        sequence: int,
        position: int,
        payload: bytes,
        *,
        shape: Sequence[int] | None = None,
        dtype: str = "float32",
        codec: str = "none",
        **fields: Any,
    ) -> None:
        rows = self.terms.batch or 1
        shape = [rows, len(payload) // (4 * HIDDEN * rows), HIDDEN] if shape is None else shape
        tensor = wire.Tensor(shape=shape, dtype=dtype, codec=codec, nbytes=len(payload))
        step = wire.Step(**{"sequence": sequence, "position": position, "route_epoch": 1} | fields)
        await self.stream.send(wire.InferenceFrame(step=step, tensors=[tensor]), [payload], timeout=TIMEOUT)

    async def step(
        self, sequence: int, position: int, payload: bytes, **how: Any
    ) -> tuple[wire.InferenceFrame, list[bytes]]:
        await self.send_step(sequence, position, payload, **how)
        return await self.receive()

    async def receive(self) -> tuple[wire.InferenceFrame, list[bytes]]:
        return await self.stream.receive(timeout=TIMEOUT)

    async def close(self) -> None:
        await self.stream.send(wire.InferenceFrame(close=wire.Close()), timeout=TIMEOUT)
        await self.stream.close()
