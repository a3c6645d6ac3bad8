"""Servers that take virtual time only: no threads, no torch, real messages and receipts on streams in memory.

With the clock that jumps (`run_autojumping`) a test of what is waited for takes as long as its messages do, and every
run of it is the same. A server's blocks are a sum over all tokens so far, so that a cache that was not rebuilt shows.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import trio

from petalnode.crypto.identity import Identity, peer_id_from_bytes
from petalnode.node.client.core import ClientOptions, SwarmClient, open_client
from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.session import ClientSession
from petalnode.node.client.session.stream import SessionSpec
from petalnode.node.models.folder import ModelFolder
from petalnode.node.testing import MemoryNetwork, MemoryNode
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.framing import MessageStream, StreamTimeout
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import INFERENCE, pushed_step, receipt_to_wire, root_of
from tests.receipts import of_answer

VERSION = b"v" * 32
HIDDEN = 8
BLOCKS = 6
MAX_LENGTH = 4096
STEP_SECONDS = 0.02
"""That a server announces for a token; what it takes is another matter."""
Stream = MessageStream[wire.InferenceFrame]


def blocks_of(hidden: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """What `count` blocks make of [tokens, hidden], all tokens from the first on."""
    for _ in range(count):
        hidden = (hidden + 0.5 * np.cumsum(hidden, axis=0) / np.arange(1, len(hidden) + 1)[:, None]).astype(np.float32)
    return hidden


def wire_tensor(hidden: np.ndarray[Any, Any]) -> WireTensor:
    payload = hidden.astype(np.float32).tobytes()
    shape = [1, *hidden.shape]
    return WireTensor(wire.Tensor(shape=shape, dtype="float32", codec="none", nbytes=len(payload)), payload)


def values_of(chunk: WireTensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(chunk.payload, dtype=np.float32).reshape(-1, HIDDEN)


@dataclass
class _Held:
    """A session at a server."""

    opening: wire.Open
    client: str
    epoch: bytes
    previous: bytes
    stream: Stream
    inputs: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((0, HIDDEN), np.float32))
    last: int = 0
    replies: dict[int, tuple[wire.InferenceFrame, bytes]] = field(default_factory=dict)
    lock: trio.Lock = field(default_factory=trio.Lock)


class VirtualServer:
    """One server; what it does may change at any time.

    Attributes:
        seconds: that it computes for a token.
        grants, answers, reads: false, and it keeps its peace instead, on streams that stay open.
        answers_left: steps that it answers before it keeps its peace.
        answered: steps that it has answered. opened: how often a session was asked of it; asked: of which blocks.
    """

    def __init__(self, network: MemoryNetwork, blocks: str, seconds: float = STEP_SECONDS) -> None:
        first, _, end = blocks.partition(":")
        self.node = network.node()
        self.peer_id = self.node.peer_id
        self.span = Span(int(first), int(end))
        self.seconds = seconds
        self.grants = self.answers = self.reads = True
        self.draining = False
        self.answers_left = math.inf
        self.answered = self.opened = 0
        self.asked: set[Span] = set()
        self.others: dict[str, VirtualServer] = {}
        self._held: dict[bytes, _Held] = {}
        self.node.set_handler(INFERENCE, self._serve)

    @property
    def sessions(self) -> int:
        """That it holds."""
        return len(self._held)

    def announce(self, step_seconds: float = STEP_SECONDS) -> None:
        self.node.announce(
            Announcement(
                self.peer_id,
                VERSION,
                "virtual",
                BLOCKS,
                self.span,
                ServerState.ONLINE,
                step_seconds=step_seconds,
                forward_tokens_per_second=10 / step_seconds,
                dtype="float32",
                cache_tokens=100_000,
                cache_tokens_free=100_000,
                max_session_length=MAX_LENGTH,
            )
        )

    def fall_silent(self) -> None:
        """Connected, and says nothing any more."""
        self.grants = self.answers = self.reads = False

    async def _serve(self, stream: Stream) -> None:
        held: _Held | None = None
        try:
            while True:
                if not self.reads:
                    await trio.sleep_forever()
                frame, payloads = await stream.receive(timeout=None)
                match frame.WhichOneof("body"):
                    case "open":
                        self.opened += 1
                        self.asked.add(Span(frame.open.span.start, frame.open.span.end))
                        if not self.grants:
                            await trio.sleep_forever()
                        held = await self._grant(stream, frame.open)
                    case "step" if held is not None:
                        await self._step(held, frame.step, WireTensor(frame.tensors[0], payloads[0]))
                    case _:
                        return
        finally:
            if held is not None:
                self._held.pop(held.opening.nonce, None)

    async def _grant(self, stream: Stream, opening: wire.Open) -> _Held:
        granted = wire.Granted(
            session_epoch=os.urandom(16),
            codec=opening.codec,
            dtype="float32",
            quantisation="none",
            credits=8,
            max_step_tokens=512,
        )
        message = wire.Open.FromString(opening.SerializeToString())
        held = _Held(message, stream.peer_id, granted.session_epoch, b"", stream)
        held.previous = root_of(opening, stream.peer_id, granted.session_epoch)
        self._held[opening.nonce] = held
        await stream.send(wire.InferenceFrame(granted=granted), timeout=60)
        return held

    async def _step(self, held: _Held, step: wire.Step, chunk: WireTensor, *, pushed: bool = False) -> None:
        if not self.answers or self.answers_left <= 0:
            await trio.sleep_forever()
        self.answers_left -= 1
        async with held.lock:
            if step.sequence not in held.replies:
                held.replies[step.sequence] = await self._computed(held, step, chunk, pushed)
            frame, payload = held.replies[step.sequence]
            await held.stream.send(frame, [payload], timeout=60)

    async def _computed(
        self, held: _Held, step: wire.Step, chunk: WireTensor, pushed: bool
    ) -> tuple[wire.InferenceFrame, bytes]:
        await trio.sleep(self.seconds * (1 + chunk.tokens / 10))
        held.inputs = np.concatenate([held.inputs[: step.position], values_of(chunk)])
        out = wire_tensor(blocks_of(held.inputs, held.opening.span.end - held.opening.span.start)[step.position :])
        asked = chunk.tensor, bytes(chunk.payload)
        receipt = of_answer(held.opening, held.client, held.epoch, step, asked, bytes(out.payload))
        receipt = replace(receipt, previous_receipt=held.previous).signed(self.node.identity)
        held.previous = receipt.hash()
        handed_on = False
        if step.targets:
            target = self.others.get(peer_id_from_bytes(step.targets[0].peer_id))
            if target is not None:
                handed_on = True
                nonce, following = step.targets[0].nonce, pushed_step(step, receipt.hash())
                self.node.nursery.start_soon(target.take_push, nonce, following, out)
        reply = wire.Reply(
            sequence=step.sequence,
            position=step.position + chunk.tokens,
            receipt=receipt_to_wire(receipt),
            pushed=pushed,
            handed_on=handed_on,
            draining=self.draining,
        )
        self.answered += 1
        return wire.InferenceFrame(reply=reply, tensors=[out.tensor]), bytes(out.payload)

    async def take_push(self, nonce: bytes, step: wire.Step, chunk: WireTensor) -> None:
        held = self._held.get(nonce)
        if held is not None and self.reads:
            await self._step(held, step, chunk, pushed=True)


class VirtualSwarm:
    """Servers, and clients that reach them; made by `in_virtual_swarm`.

    Attributes:
        slow: how many times as long as usual everything takes, from now on.
        look_seconds: that directories need to answer.
        mute: peers that do not answer pings. unreachable: whose dials do not end.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.network = MemoryNetwork(nursery)
        self.servers: list[VirtualServer] = []
        self.look_seconds = 0.0
        self.mute: set[str] = set()
        self.unreachable: set[str] = set()
        self.looks = 0

    def start(self, blocks: str, *, announced: float = STEP_SECONDS, told: bool = True) -> VirtualServer:
        """A server of these blocks that announces its seconds for a token; routes prefer the quick ones."""
        server = VirtualServer(self.network, blocks)
        self.servers.append(server)
        for other in self.servers:
            other.others[server.peer_id] = server
            server.others[other.peer_id] = other
        if told:
            server.announce(announced)
        return server

    def of(self, session: ClientSession, position: int) -> VirtualServer:
        """The server at a position of the chain."""
        return next(server for server in self.servers if server.peer_id == session.route[position].peer_id)

    def slow_down(self, client: SwarmClient, factor: float) -> None:
        """Everything takes a multiple of its time from now on: servers, and the way to those that are opened yet."""
        for server in self.servers:
            server.seconds *= factor
            self.network.link(client.peer_id, server.peer_id).delay = 0.01 * factor

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[SwarmClient]:
        """`options` are those of `ClientOptions`."""
        node: Any = _ClientNode(self)
        self.network.nodes[node.peer_id] = node
        folder = ModelFolder("virtual", Path(), {}, BLOCKS, HIDDEN)
        from petalnode.node.client.swarm_model import SwarmModel

        async with open_client(node, SwarmModel(VERSION, folder), ClientOptions(**options)) as client:
            for server in self.servers:
                self.network.link(client.peer_id, server.peer_id).delay = 0.01
            yield client


class _ClientNode(MemoryNode):
    """A client's node whose peers may be slow to answer in more ways."""

    def __init__(self, swarm: VirtualSwarm) -> None:
        super().__init__(swarm.network, Identity.generate(), None)
        self._swarm = swarm

    async def measure_rtt(self, peer_id: str, *, timeout: float) -> float:
        if peer_id in self._swarm.mute:
            await trio.sleep(timeout)
            raise StreamTimeout(f"{peer_id} did not answer a ping within {timeout:g} s", peer_id)
        rtt = await super().measure_rtt(peer_id, timeout=timeout)
        await trio.sleep(rtt)
        return rtt

    async def new_stream(self, peer_id: str, *arguments: Any, timeout: float, **options: Any) -> Any:
        if peer_id in self._swarm.unreachable:
            await trio.sleep(timeout)
            raise StreamTimeout(f"{peer_id} did not open a stream within {timeout:g} s", peer_id)
        return await super().new_stream(peer_id, *arguments, timeout=timeout, **options)

    async def refresh(self, *, model_version: bytes | None = None, sample: bool = False, timeout: float) -> Any:
        self._swarm.looks += 1
        with trio.move_on_after(timeout):
            await trio.sleep(self._swarm.look_seconds)
        return self.view


class Talk:
    """A session whose outputs are checked, and whose steps are timed."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.slowest = 0.0
        self._inputs = np.zeros((0, HIDDEN), np.float32)
        self._random = np.random.default_rng(0)

    async def step(self, tokens: int = 1) -> float:
        """Seconds that a step of some tokens took; its output is what all blocks make of all tokens so far."""
        hidden = self._random.standard_normal((tokens, HIDDEN)).astype(np.float32)
        begun = trio.current_time()
        chunks = [
            wire_tensor(hidden[first : first + self.session.max_step_tokens])
            for first in range(0, tokens, self.session.max_step_tokens)
        ]
        out = np.concatenate([values_of(chunk) for chunk in await self.session.step(chunks)])
        seconds = trio.current_time() - begun
        self.slowest = max(self.slowest, seconds)
        self._inputs = np.concatenate([self._inputs, hidden])
        expected = blocks_of(self._inputs, BLOCKS)[-tokens:]
        assert np.allclose(out, expected, atol=1e-3), "the caches do not hold what they should"
        return seconds


@asynccontextmanager
async def talk(client: SwarmClient, *, push: bool = True, prompt: int = 20) -> AsyncIterator[Talk]:
    """A session that holds a prompt and some tokens."""
    spec = SessionSpec(VERSION, Span(0, BLOCKS), batch=1, max_length=MAX_LENGTH, push=push)
    async with client.session(spec) as session:
        assert isinstance(session, ClientSession)
        talking = Talk(session)
        await talking.step(prompt)
        for _ in range(4):
            await talking.step()
        talking.slowest = 0.0
        yield talking


@asynccontextmanager
async def virtual_swarm() -> AsyncIterator[Any]:
    """Runs `main` with a swarm, in virtual time."""
    async with trio.open_nursery() as nursery:
        yield VirtualSwarm(nursery)
        nursery.cancel_scope.cancel()
