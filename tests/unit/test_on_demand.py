"""A validator that can keep a block or two of a model: the others come from peers while they are recomputed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import trio
import trio.testing

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.client_part import ClientModel
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.client.sharing import share_receipts
from petalnode.node.client.swarm_model import SwarmModel
from petalnode.node.errors import BadInput
from petalnode.node.models import Manifest, ModelFolder, compute_manifest, no_progress
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.swarm.config import SwarmConfig
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing import MemoryNode, open_network
from petalnode.node.trust.receipt_log import ReceiptArchive
from petalnode.node.validator.history import History
from petalnode.node.validator.probe_inputs import ProbeModel
from petalnode.node.validator.service import Validator, ValidatorOptions
from petalnode.node.verification.observed import Observed
from petalnode.node.verification.recomputation import Recomputation, RecordedStep, SessionAnswer, SessionQuestion
from petalnode.node.verification.verdicts import Judge, Verdict
from petalnode.node.weights import fetching, on_demand
from petalnode.node.weights.fetching import FETCHING
from petalnode.node.weights.on_demand import OnDemandFolder
from petalnode.node.weights.remote_model import RemoteModel, find_remote_model
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.evidence import RECEIPTS
from petalnode.protocols.framing import PeerError
from petalnode.protocols.ids import Span
from tests.signing_server import SigningServer, spoiled
from tests.swarm.processes import LOOPBACK
from tests.tiny_models import NUM_BLOCKS
from tests.weights_network import NAME, WIDE, Spoil, hands_on, honest, saved_model

ENDS = [0, NUM_BLOCKS + 1]
SPAN = Span(0, NUM_BLOCKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return saved_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def manifest(folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """On a machine whose cache is empty."""
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    return compute_manifest(folder)


def size_of(folder: ModelFolder, blocks: int) -> int:
    """Bytes of the ends and so many blocks."""
    held = Checkpoint(folder.path)
    return held.nbytes("embeddings") + held.nbytes("head") + blocks * held.nbytes(0)


def question() -> SessionQuestion:
    hidden = torch.randn(1, 7, WIDE["hidden_size"], generator=torch.Generator().manual_seed(1))
    return SessionQuestion(SPAN, (RecordedStep(0, hidden[:, :6]), RecordedStep(6, hidden[:, 6:])))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Which torch rounds by where the weights lie in memory."""
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3)


class Watched(Recomputation):
    """Notes which parts are on the disk while a block is loaded."""

    def __init__(self, folder: OnDemandFolder) -> None:
        super().__init__(folder, "float32", "none")
        self.held: list[tuple[Span, list[int]]] = []
        self.on_demand = folder

    def _load(self, group: Span) -> BlockSpan:
        self.held.append((group, parts_of(self.on_demand.remote)))
        return super()._load(group)


def parts_of(remote: RemoteModel) -> list[int]:
    return [number for number in remote.stored.trees if remote.stored.has(number)]


@asynccontextmanager
async def in_swarm(
    folder: ModelFolder, manifest: Manifest, blocks: int, spoil: Spoil = honest
) -> AsyncIterator[tuple[MemoryNode, OnDemandFolder]]:
    """A node, and its folder that keeps so many blocks of a model that a peer hands on."""
    async with open_network() as network:
        hands_on(network, folder, manifest, spoil)
        asker = network.node(Identity.generate())
        asker.named = [peer for peer in network.nodes if peer != asker.peer_id]
        remote = await find_remote_model(cast(Swarm, asker), NAME, no_progress)
        found = await OnDemandFolder.of(remote, size_of(folder, blocks), no_progress)
        assert parts_of(remote) == ENDS
        yield asker, found


async def used_in_swarm(
    folder: ModelFolder, manifest: Manifest, blocks: int, use: Callable[[OnDemandFolder], None], spoil: Spoil = honest
) -> None:
    """Calls `use` with such a folder, in a thread."""
    async with in_swarm(folder, manifest, blocks, spoil) as (_, found):
        await trio.to_thread.run_sync(use, found)


@pytest.mark.parametrize("room", [1, 3])
async def test_a_block_is_there_while_it_is_recomputed(folder: ModelFolder, manifest: Manifest, room: int) -> None:
    (expected,) = Recomputation(folder, "float32", "none").answer([question()])
    assert isinstance(expected, SessionAnswer)

    def use(found: OnDemandFolder) -> None:
        for _ in range(2):
            truth = Watched(found)
            (answer,) = truth.answer([question()])
            assert isinstance(answer, SessionAnswer)
            assert all(map(close, answer.outputs, expected.outputs))
            assert all(set(range(group.start + 1, group.end + 1)) <= set(parts) for group, parts in truth.held)
            assert max(len(parts) for _, parts in truth.held) <= len(ENDS) + room + 1
            assert len(parts_of(found.remote)) == len(ENDS) + room

    await used_in_swarm(folder, manifest, room, use)


async def test_a_block_that_another_process_may_use_stays(
    folder: ModelFolder, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "users_of", lambda path: [os.getpid(), 1])

    def use(found: OnDemandFolder) -> None:
        Recomputation(found, "float32", "none").answer([question()])
        assert len(parts_of(found.remote)) == NUM_BLOCKS + 2

    await used_in_swarm(folder, manifest, 1, use)


async def test_who_cannot_be_recomputed_is_not_called_faulty(
    folder: ModelFolder, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one peer that hands on the blocks sends others."""
    monkeypatch.setattr(fetching, "FETCHING", replace(FETCHING, lonely=0.2))

    def spoil(asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
        of_block = asked.HasField("piece_query") and 0 < asked.piece_query.part <= NUM_BLOCKS
        return [bytes(len(payload)) for payload in payloads] if of_block else payloads

    def use(found: OnDemandFolder) -> None:
        asked = question()
        claimed = tuple(torch.zeros_like(step.hidden) for step in asked.steps)
        seen = [Observed("server", SPAN, "float32", kind, asked, claimed, "cpu") for kind in ("none", "none/exact-1")]
        for verdict in Judge(found).verdicts(seen):
            assert verdict.verdict == "inconclusive" and "no peer hands on block 0" in verdict.reason, verdict
        assert parts_of(found.remote) == ENDS

    await used_in_swarm(folder, manifest, 1, use, spoil)


async def test_too_little_room_is_said_before_fetching(folder: ModelFolder, manifest: Manifest) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(BadInput, match="embeddings, head and a block"), allow_unwrapped=True):
        await used_in_swarm(folder, manifest, 0, lambda found: None)


async def test_strangers_cannot_have_blocks_fetched(folder: ModelFolder, manifest: Manifest, tmp_path: Path) -> None:
    """Receipts and evidence of a few KB are judged by who has the model, and by nobody who would have to fetch it."""
    server = SigningServer(folder.path, manifest.version, SPAN)
    archive = ReceiptArchive(shared_bytes=1 << 20)
    server.session([(0, question().steps[0].hidden, ())], spoil=spoiled, log=archive.session(server.identity.peer_id))

    send, receive = trio.open_memory_channel[Verdict](2)

    async def shown(node: MemoryNode, held: ModelFolder, history: History) -> None:
        """To a validator that has this folder, what a server has answered."""
        model = ProbeModel(SwarmModel(manifest.version, held), cast(ClientModel, None), None)
        options = ValidatorOptions(SwarmConfig(node.identity), model, Judge(held), history, send.send_nowait)
        node.nursery.start_soon(Validator(cast(Swarm, node), options).judge_for_others)
        await trio.testing.wait_all_tasks_blocked()
        client = node.network.node(server.client)
        with trio.CancelScope() as scope:
            scope.cancel()  # it calls once more
            await share_receipts(cast(Swarm, client), archive, [f"{LOOPBACK}/p2p/{node.peer_id}"])

    with History(tmp_path / "history.sqlite") as history:
        async with in_swarm(folder, manifest, 1) as (node, found):
            listening: list[object] = []
            for peer in (node, other := node.network.node(Identity.generate())):
                peer.evidence = SimpleNamespace(on_evidence=listening)  # type: ignore[attr-defined]
            await shown(node, found, history)
            assert not listening
            with pytest.raises(PeerError):
                async with other.open_stream(node.peer_id, RECEIPTS, timeout=60) as stream:
                    await stream.receive(timeout=60)
            await shown(other, folder, history)
            assert len(listening) == 1
            verdict = await receive.receive()
            assert (verdict.peer_id, verdict.verdict) == (server.identity.peer_id, "faulty")
            assert parts_of(found.remote) == ENDS and not receive.statistics().current_buffer_used
