"""Model versions that an attacker makes so that a client with embeddings and head only takes his instead of the one
that is meant: the same two digests, other blocks; and names of models that nobody should download."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import trio

from petalnode.node.cli import model_choice
from petalnode.node.cli.model_choice import is_here, served_model
from petalnode.node.cli.output import Output
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.swarm_model import SwarmModel, identify_model
from petalnode.node.errors import BadInput, ModelError
from petalnode.node.models import Manifest, compute_manifest, held_weights, resolve
from petalnode.node.models.folder import ModelFolder
from petalnode.node.models.manifest import MANIFEST_FILE, MAX_FILE_BYTES, write_manifest
from petalnode.node.server.lifecycle.options import ServerOptions
from petalnode.node.server.lifecycle.source import find_source
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.swarm.versions import VERSIONS, versions_named
from petalnode.node.testing import MemoryNetwork, MemoryNode, open_network, run_autojumping
from petalnode.node.trust.store import TrustStore
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span
from tests.tiny_models import NUM_BLOCKS, save_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole") / "tiny-llama", shards="60KB")


@pytest.fixture(scope="module")
def part(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards with embeddings and head only, as on a laptop."""
    path = tmp_path_factory.mktemp("part") / "tiny-llama"
    shutil.copytree(whole, path)
    shard_of = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in set(shard_of.values()) - {shard_of[key] for key in shard_of if ".layers." not in key}:
        (path / shard).unlink()
    return path


@pytest.fixture(scope="module")
def manifest(whole: Path) -> Manifest:
    return compute_manifest(resolve(whole))


def lower(manifest: Manifest) -> Manifest:
    """Another version with the same embeddings and head, before the true one in byte order. It takes few tries."""
    made = (replace(manifest, blocks=(os.urandom(32), *manifest.blocks[1:])) for _ in range(10_000))
    return next(one for one in made if one.version < manifest.version)


def announce(network: MemoryNetwork, manifest: Manifest, count: int = 1, name: str = "tiny-llama") -> list[MemoryNode]:
    nodes = [network.node() for _ in range(count)]
    for node in nodes:
        span = Span(0, NUM_BLOCKS)
        content = Announcement(node.peer_id, manifest.version, name, NUM_BLOCKS, span, ServerState.ONLINE)
        network.publish(node, content)
        node.serve_manifest(manifest.version, manifest.to_wire())
    return nodes


def identified(
    folder: ModelFolder,
    *served: tuple[Manifest, int],
    proven: Sequence[Manifest] = (),
    trust: TrustStore | None = None,
) -> SwarmModel:
    """As a client finds it where these versions have some servers, one of each `proven` one known from before, and
    `trust` is what it remembers."""
    return run_autojumping(_identify, folder, served, proven, trust)


async def _identify(
    folder: ModelFolder, served: Sequence[tuple[Manifest, int]], proven: Sequence[Manifest], trust: TrustStore | None
) -> SwarmModel:
    async with open_network() as network:
        client = network.node(trust=trust)
        for manifest, count in served:
            nodes = announce(network, manifest, count)
            if manifest in proven:
                client.trust.note_tokens(nodes[0].peer_id, 1)
        return await identify_model(cast(Swarm, client), folder)


def test_the_only_version_that_fits_is_taken(part: Path, manifest: Manifest) -> None:
    assert identified(resolve(part, need="client"), (manifest, 1)).version == manifest.version


def test_lower_version_does_not_win_by_byte_order(part: Path, manifest: Manifest) -> None:
    """Nor for its hundred servers: nobody knows which is meant, so a person is asked."""
    false = lower(manifest)
    with pytest.raises(ModelError) as caught:
        identified(resolve(part, need="client"), (false, 100), (manifest, 1))
    text = str(caught.value)
    assert false.version.hex()[:16] in text and manifest.version.hex()[:16] in text and "tiny-llama@" in text


def test_servers_that_have_computed_for_this_node_decide(part: Path, manifest: Manifest) -> None:
    false = lower(manifest)
    assert (
        identified(resolve(part, need="client"), (false, 100), (manifest, 1), proven=[manifest]).version
        == manifest.version
    )


def used(folder: ModelFolder, manifest: Manifest) -> TrustStore:
    """What a client remembers that has used this version with the weights of `folder`."""
    trust = TrustStore()
    trust.note_version(held_weights(folder, "client"), manifest.version)
    return trust


def test_version_used_before_is_taken_whatever_is_announced(part: Path, manifest: Manifest) -> None:
    """Else announcing another one, which costs nothing, stops every client that has not named a version."""
    folder, false = resolve(part, need="client"), lower(manifest)
    assert identified(folder, (false, 100), (manifest, 1), trust=used(folder, manifest)).version == manifest.version


def test_servers_that_computed_for_this_node_mislead_nobody(part: Path, manifest: Manifest) -> None:
    """They served well for a while, under keys that now announce another version."""
    folder, false = resolve(part, need="client"), lower(manifest)
    trust = used(folder, manifest)
    assert identified(folder, (false, 9), (manifest, 1), proven=[false], trust=trust).version == manifest.version
    with pytest.raises(ModelError, match="nobody serves the version") as caught:
        identified(folder, (false, 9), proven=[false], trust=trust)
    to_type = f"{part}@{false.version.hex()[:16]}"
    assert to_type in str(caught.value) and manifest.version.hex()[:16] in str(caught.value)
    asked_for = resolve(to_type, need="client")
    assert identified(asked_for, (false, 9), trust=trust).version == false.version


@pytest.mark.virtual_time
async def test_a_version_is_remembered_once_it_has_computed(part: Path, manifest: Manifest) -> None:
    folder = resolve(part, need="client")
    held = held_weights(folder, "client")
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        (server,) = announce(network, manifest)
        swarm = cast(Swarm, network.node())
        client = SwarmClient(swarm, await identify_model(swarm, folder), nursery)
        before = swarm.trust.version_used(held)
        client.note_tokens(server.peer_id, 1)
        nursery.cancel_scope.cancel()
        found = before, swarm.trust.version_used(held)
    assert found == (None, manifest.version)


def test_use_with_other_weights_does_not_count(part: Path, manifest: Manifest) -> None:
    folder, false = resolve(part, need="client"), lower(manifest)
    trust = used(replace(folder, revision="another commit"), false)
    assert identified(folder, (manifest, 1), trust=trust).version == manifest.version


def test_manifest_of_repository_says_which_version_is_meant(part: Path, manifest: Manifest, tmp_path: Path) -> None:
    """Whoever has published the model has put it beside the weights, so nobody else is asked."""
    folder = shutil.copytree(part, tmp_path / "tiny-llama")
    write_manifest(manifest, folder)
    false = lower(manifest)
    resolved = resolve(folder, need="client")
    assert identified(resolved, (false, 100), proven=[false], trust=used(resolved, false)).version == manifest.version
    pinned = resolve(f"{folder}@{false.version.hex()[:16]}", need="client")
    assert identified(pinned, (false, 1)).version == false.version  # the person has said so


def test_manifest_of_other_weights_or_none_is_refused(part: Path, manifest: Manifest, tmp_path: Path) -> None:
    folder = shutil.copytree(part, tmp_path / "tiny-llama")
    forged = json.loads(manifest.to_json()) | {"model_version": lower(manifest).version.hex()}
    for text in (
        replace(manifest, head=bytes(32)).to_json(),
        json.dumps(forged),
        "[" * 100_000,
        "[]",
        "{}",
        " " * (MAX_FILE_BYTES + 1),
    ):
        (folder / MANIFEST_FILE).write_text(text)
        with pytest.raises(ModelError, match=f"{MANIFEST_FILE} is .*remove that file"):
            identified(resolve(folder, need="client"), (manifest, 1))


def test_the_version_that_was_asked_for_is_taken(part: Path, manifest: Manifest) -> None:
    pinned = resolve(f"{part}@{manifest.version.hex()[:12]}", need="client")
    assert pinned.name == "tiny-llama"
    false = lower(manifest)
    assert identified(pinned, (false, 100), (manifest, 1), proven=[false]).version == manifest.version


def test_another_version_never_replaces_the_asked_one(part: Path, whole: Path, manifest: Manifest) -> None:
    wrong = lower(manifest)
    with pytest.raises(Exception, match=f"in version {wrong.version.hex()[:16]}"):
        identified(resolve(f"{part}@{wrong.version.hex()[:16]}", need="client"), (manifest, 1))
    with pytest.raises(ModelError, match=f"is model version {manifest.version.hex()[:16]}, not"):
        identified(resolve(f"{whole}@{wrong.version.hex()[:16]}"), (manifest, 1))
    assert identified(resolve(f"{whole}@{manifest.version.hex()}"), (wrong, 9)).version == manifest.version


def test_too_many_versions_to_choose_from_are_refused() -> None:
    """The one that is meant may be left out of those that are asked for."""
    made = [
        Announcement("peer", number.to_bytes(32, "big"), "tiny-llama", 6, Span(0, 6), ServerState.ONLINE)
        for number in range(VERSIONS.asked + 1)
    ]
    with pytest.raises(ModelError, match="several versions of tiny-llama"):
        versions_named(made, "tiny-llama", 6)
    assert versions_named(made, "tiny-llama", 6, pinned=made[7].model_version.hex()) == [made[7]]


def test_thousands_of_versions_hide_no_used_one() -> None:
    made = [
        Announcement(f"peer {number}", number.to_bytes(32, "big"), "tiny-llama", 6, Span(0, 6), ServerState.ONLINE)
        for number in range(3000)
    ]
    assert versions_named(made, "tiny-llama", 6, proven={"peer 7"}) == [made[7]]


@pytest.mark.virtual_time
async def test_server_does_not_load_the_first_version_either(part: Path, manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((part / "config.json").read_bytes())
    folder = replace(resolve(tmp_path, need="config"), name="tiny-llama")
    trust = TrustStore()

    async def loaded(pinned: str | None = None) -> bytes:
        async with open_network() as network:
            announce(network, lower(manifest), 9)
            announce(network, manifest)
            node = cast(Swarm, network.node(trust=trust))
            options = ServerOptions(model=str(tmp_path))
            source = await find_source(node, replace(folder, pinned=pinned), options, lambda *_: None)
            return source.manifest.version

    assert await loaded(manifest.version.hex()[:12]) == manifest.version
    with pytest.raises(ModelError, match="several versions"):
        await loaded()
    trust.note_version(held_weights(folder, "config"), manifest.version)
    assert await loaded() == manifest.version  # whose blocks it has checked before
    trust.note_version(held_weights(folder, "config"), bytes(32))
    write_manifest(manifest, tmp_path)
    assert await loaded() == manifest.version


# --- which model, where none is named


class Announced:
    """A swarm in which servers say that they serve models of these names."""

    named: frozenset[str] = frozenset()

    def __init__(self, *names: str) -> None:
        self._names = names

    async def refresh(self, **_: object) -> Announced:
        return self

    def models(self, *, now: float) -> dict[bytes, tuple[str, int]]:
        assert now <= time.time()
        return {number.to_bytes(32, "big"): (name, 6) for number, name in enumerate(self._names)}

    def servers(self, *, now: float) -> list[Announcement]:
        assert now <= time.time()
        return []


def chosen(*names: str) -> str:
    return run_autojumping(served_model, cast(Swarm, Announced(*names)), Output(as_json=True))


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, bool]]:
    """What was looked for, and whether offline; none of it is there."""
    asked: list[tuple[str, bool]] = []

    def resolve(name: str, *, need: str, offline: bool) -> None:
        asked.append((name, offline))
        raise ModelError("not here")

    monkeypatch.setattr(model_choice, "resolve", resolve)
    return asked


def test_what_strangers_name_is_not_downloaded(resolved: list[tuple[str, bool]]) -> None:
    with pytest.raises(BadInput, match="attacker/miner, which is not on this machine"):
        chosen("attacker/miner")
    assert resolved == [("attacker/miner", True)]


@pytest.mark.parametrize("name", ["/etc", "../secrets", "~/models", "C:\\models", "model.gguf", "a/b/c", "", ".hidden"])
def test_nor_looked_for_anywhere_on_this_machine(name: str, resolved: list[tuple[str, bool]]) -> None:
    assert not is_here(name)
    assert not resolved


def test_alias_is_what_this_software_says(resolved: list[tuple[str, bool]]) -> None:
    assert chosen("smollm2") == "smollm2"
    assert not resolved


def test_thousands_of_names_are_listed_in_part_only(resolved: list[tuple[str, bool]]) -> None:
    with pytest.raises(BadInput, match=r"name one of smollm2, [^ ]+, .* and 1993 more") as caught:
        chosen("smollm2", *(f"attacker/{number}" for number in range(2000)))
    assert len(str(caught.value)) < 500
    assert len(resolved) <= 64


def test_a_model_in_the_working_folder_is_used(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    assert chosen("tiny-llama") == "tiny-llama"
