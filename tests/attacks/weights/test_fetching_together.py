"""Several that fetch the same model at the same time: processes of one machine, and machines that have it in part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.errors import MachineError
from petalnode.node.models import Manifest, ModelFolder, compute_manifest, no_progress, resolve, verify_part
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing import open_network
from petalnode.node.weights.fetching import FETCHING
from petalnode.node.weights.holder import WeightsHolder
from petalnode.node.weights.remote_model import RemoteModel, find_remote_model
from petalnode.node.weights.store import PeerFolder
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from petalnode.protocols.weights import count_pieces
from tests.tiny_models import NUM_BLOCKS, save_tiny
from tests.weights_network import NAME, hands_on

BLOCKS = Span(0, NUM_BLOCKS)


class Asked:
    """The pieces of blocks that a holder was asked for, each of which takes it a while."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def __call__(self, asked: wire.WeightsFrame, answer: wire.WeightsFrame, payloads: list[bytes]) -> list[bytes]:
        if asked.HasField("piece_query") and 0 < asked.piece_query.part <= NUM_BLOCKS:
            self.pieces.append((asked.piece_query.part, asked.piece_query.piece))
        return payloads


def slowly(asked: wire.WeightsFrame) -> float:
    return 0.5 if asked.HasField("piece_query") else 0.0


def all_pieces(folder: ModelFolder) -> Iterator[tuple[int, int]]:
    checkpoint = Checkpoint(folder.path)
    for block in range(NUM_BLOCKS):
        for piece in range(count_pieces(checkpoint.nbytes(block))):
            yield block + 1, piece


@pytest.mark.virtual_time
async def test_two_processes_of_a_machine_fetch_once(folder: ModelFolder, manifest: Manifest) -> None:
    asked = Asked()
    said: list[str] = []
    told: list[tuple[int, int | None]] = []

    def note(what: str, done: int, total: int | None) -> None:
        if what.startswith("Fetching"):
            told.append((done, total))
        said.append(what)

    async with open_network() as network:
        hands_on(network, folder, manifest, asked, slowly)
        one, two = [cast(Swarm, network.node(Identity.generate())) for _ in range(2)]
        async with trio.open_nursery() as fetching:
            for swarm in (one, two):
                remote = await find_remote_model(swarm, NAME, no_progress)
                fetching.start_soon(remote.fetch, BLOCKS, note)
    assert sorted(asked.pieces) == sorted(all_pieces(folder))
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 0
    assert any(what.startswith("Waiting for process") and NAME in what for what in said)


@pytest.mark.virtual_time
async def test_a_process_that_writes_nothing_is_named(folder: ModelFolder, manifest: Manifest) -> None:
    await trio.sleep(FETCHING.lonely)  # it counts from the time when this process has to wait
    async with open_network() as network:
        hands_on(network, folder, manifest)
        remote = await find_remote_model(cast(Swarm, network.node(Identity.generate())), NAME, no_progress)
        stuck = PeerFolder.open(NAME, manifest, remote.stored.path)
        begun, named = trio.current_time(), r"process \d+ fetches tiny-llama, too, and has written nothing for 5 min"
        with stuck.locked() as alone:
            assert alone
            with pytest.raises(MachineError, match=named):
                await remote.fetch(BLOCKS, no_progress)
        assert FETCHING.lonely < trio.current_time() - begun < FETCHING.lonely + 10


@pytest.mark.virtual_time
async def test_two_machines_exchange_parts_before_having_all(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins with other parts, and takes from the other what that has completed."""
    folder = resolve(save_tiny("llama", tmp_path / NAME, hidden_size=256, intermediate_size=4096))
    manifest = compute_manifest(folder)
    asked = Asked()
    found: list[ModelFolder] = []
    async with open_network() as network:
        hands_on(network, folder, manifest, asked, slowly)

        async def fetch(remote: RemoteModel) -> None:
            found.append(await remote.fetch(BLOCKS, no_progress))

        remotes = []
        for number in range(2):
            machine = tmp_path / f"machine-{number}"
            machine.mkdir()
            (machine / "hashes").symlink_to(empty_machine / "hashes")  # by path: they may share these
            monkeypatch.setenv("PETALNODE_CACHE", str(machine))
            node = network.node(Identity.from_seed(bytes([number + 1]) * 32))
            remotes.append(await find_remote_model(cast(Swarm, node), NAME, no_progress))
            WeightsHolder(cast(Swarm, node), manifest, remotes[-1].stored.model_folder()).start()
            node.announce(
                Announcement(
                    node.peer_id, manifest.version, NAME, NUM_BLOCKS, BLOCKS, ServerState.JOINING,
                    sequence=time.time_ns(), expires=time.time() + 3600,
                )
            )  # fmt: skip
        async with trio.open_nursery() as fetching:
            for remote in remotes:
                fetching.start_soon(fetch, remote)
    assert found[0].path != found[1].path
    for one in found:
        verify_part(one, manifest, BLOCKS)
    pieces = len(list(all_pieces(folder)))
    print(f"{len(asked.pieces)} of {2 * pieces} pieces came from the only one that had all")
    assert len(asked.pieces) < 1.7 * pieces
