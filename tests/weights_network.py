"""A network in memory in which peers hand a tiny model on, honestly or not, and a machine that fetches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import trio

from petalnode.crypto.identity import Identity
from petalnode.node.models import Manifest, ModelFolder, Need, no_progress, resolve
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing import MemoryNetwork, MemoryNode, open_network, run_autojumping
from petalnode.node.weights.holder import WeightsHolder
from petalnode.node.weights.remote_model import find_remote_model
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.framing import MessageStream
from petalnode.protocols.ids import Span
from petalnode.protocols.weights import PIECE_BYTES, WEIGHTS
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_models import NUM_BLOCKS, save_tiny

NAME = "tiny-llama"
WIDE = {"hidden_size": 256, "intermediate_size": 512}


def saved_model(under: Path) -> ModelFolder:
    """With a tokenizer, and blocks of several pieces."""
    path = save_tiny("llama", under / NAME, **WIDE)
    save_tokenizer(path)
    return resolve(path)


Spoil = Callable[[wire.WeightsFrame, wire.WeightsFrame, list[bytes]], list[bytes]]
"""Called with a question and the honest answer, which it changes, and the answer's payloads, which it returns."""


Late = Callable[[wire.WeightsFrame], float]
"""Seconds after which a question is answered."""


def honest(asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
    return payloads


class Liar:
    """Stands between the holder and its stream."""

    def __init__(self, stream: MessageStream[wire.WeightsFrame], spoil: Spoil, late: Late) -> None:
        self.peer_id = stream.peer_id
        self._stream, self._spoil, self._late = stream, spoil, late
        self._asked: wire.WeightsFrame | None = None

    @property
    def max_header(self) -> int:
        return self._stream.max_header

    @max_header.setter
    def max_header(self, size: int) -> None:
        self._stream.max_header = size

    async def receive(self, **options: Any) -> Any:
        self._asked, payloads = await self._stream.receive(**options)
        return self._asked, payloads

    async def send(self, frame: wire.WeightsFrame, payloads: Any = (), *, timeout: float) -> None:
        assert self._asked is not None
        await trio.sleep(self._late(self._asked))
        spoiled = self._spoil(self._asked, frame, [bytes(payload) for payload in payloads])
        for tensor, payload in zip(frame.tensors, spoiled, strict=True):
            tensor.nbytes = len(payload)
        await self._stream.send(frame, spoiled, timeout=timeout)


def hands_on(
    network: MemoryNetwork,
    folder: ModelFolder,
    manifest: Manifest,
    spoil: Spoil = honest,
    late: Late | None = None,
) -> tuple[MemoryNode, WeightsHolder]:
    """A server that holds the whole model."""
    node = network.node(Identity.generate())
    node.announce(
        Announcement(
            node.peer_id, manifest.version, NAME, NUM_BLOCKS, Span(0, NUM_BLOCKS), ServerState.ONLINE,
            sequence=time.time_ns(), expires=time.time() + 3600,
        )
    )  # fmt: skip
    network.manifests[manifest.version] = manifest.to_wire()
    held = WeightsHolder(cast(Swarm, node), manifest, folder)
    if spoil is honest and late is None:
        held.start()
    else:

        async def serve(stream: Any) -> None:
            await held.serve(cast(Any, Liar(stream, spoil, late or (lambda asked: 0.0))))

        node.set_handler(replace(WEIGHTS, max_payload=2 * PIECE_BYTES), serve)
    return node, held


def fetched(setting: Callable[[MemoryNetwork, MemoryNode], None], need: Need = "all", name: str = NAME) -> ModelFolder:
    """What a machine that has nothing gets of the network that `setting` makes."""
    return fetched_in_time(setting, need, name)[0]


def fetched_in_time(
    setting: Callable[[MemoryNetwork, MemoryNode], None], need: Need = "all", name: str = NAME
) -> tuple[ModelFolder, float]:
    """The same, and how many seconds of the virtual clock it took."""

    return run_autojumping(_fetch, setting, need, name)


async def _fetch(
    setting: Callable[[MemoryNetwork, MemoryNode], None], need: Need, name: str
) -> tuple[ModelFolder, float]:
    async with open_network() as network:
        asker = network.node(Identity.generate())
        setting(network, asker)
        asker.named = asker.named or [peer for peer in network.nodes if peer != asker.peer_id]
        begun = trio.current_time()
        remote = await find_remote_model(cast(Swarm, asker), name, no_progress)
        found = await remote.fetch(need, no_progress)
        took = trio.current_time() - begun
    return found, took
