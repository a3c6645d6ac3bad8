"""`petalnode models`: what is on this disk, and whether it is whole; what is in use or half written is not touched."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from petalnode.node.cli import app
from petalnode.node.cli.commands.models import size_in_words, swarm_row
from petalnode.node.errors import BadInput, ModelError
from petalnode.node.models import ALIASES, EMBEDDINGS, HEAD, Checkpoint, compute_manifest, digests, resolve
from petalnode.node.models.cache_dir import cache_dir
from petalnode.node.models.disk_limit import note_use, users_of
from petalnode.node.models.inventory import find_local, local_models, open_local
from petalnode.node.models.manifest import write_manifest
from petalnode.node.models.sources.gguf_files import packaged_key
from tests.tiny_models import save_tiny

Command = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), shards="50KB")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache in which nothing is."""
    from huggingface_hub import constants

    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (cache_dir() / "models").mkdir()
    return cache_dir() / "models"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """In a pipe, which has no width."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        code = app.run(["models", *arguments])
        said = capsys.readouterr()
        return code, [json.loads(line) for line in said.out.splitlines() if "--json" in arguments], said.out + said.err

    return call


def kept(disk: Path, tiny: Path, name: str = "org/tiny", key: str = "peers-one-1", *, manifest: bool = True) -> Path:
    shutil.copytree(tiny, disk / key)
    (disk / key / "name").write_text(name)
    if manifest:
        write_manifest(compute_manifest(resolve(tiny)), disk / key)
    return disk / key


def test_models_are_listed_with_their_parts(disk: Path, tiny: Path, command: Command) -> None:
    assert command() == (0, [], "no models are on this disk yet: the first `petalnode demo` or `serve` fetches one\n")
    whole = kept(disk, tiny)
    part = kept(disk, tiny, "org/part", "peers-two-1", manifest=False)
    index = json.loads((part / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in {file for key, file in index.items() if ".layers.3." in key or "embed" in key}:
        (part / shard).unlink()
    (disk / "gguf-three-2.partial").mkdir()
    code, found, _ = command("--json")
    by_name = {model["name"]: model for model in found}
    version = compute_manifest(resolve(tiny)).version.hex()
    assert code == 0 and by_name["org/tiny"]["complete"] and by_name["org/tiny"]["model_version"] == version
    assert by_name["org/tiny"]["bytes"] == sum(file.stat().st_size for file in whole.iterdir())
    partly = by_name["org/part"]
    assert not partly["complete"] and not partly["ends"] and 3 not in partly["blocks"] and 5 in partly["blocks"]
    assert partly["model_version"] == "" and "half written" in by_name["gguf-three-2"]["complaint"]
    assert command("list", "--json")[1] == found


@pytest.mark.parametrize("seed", range(6))
def test_inventory_is_what_the_files_hold(seed: int, disk: Path, tiny: Path) -> None:
    chance = random.Random(seed)
    folder = kept(disk, tiny, "org/part", f"peers-{seed}-1", manifest=False)
    file_of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(file_of.values()))
    gone = set(chance.sample(shards, chance.randrange(1, len(shards))))
    for shard in gone:
        (folder / shard).unlink()
    os.utime(folder, (seed, seed))
    whole = Checkpoint(tiny)
    here = [part for part, keys in whole.parts.items() if not gone.intersection(file_of[key] for key in keys)]
    (model,) = local_models()
    assert (model.name, model.path, model.used, model.num_blocks) == ("org/part", folder, seed, 6)
    assert model.nbytes == sum(file.stat().st_size for file in folder.iterdir())
    assert (list(model.held), model.ends) == (here, EMBEDDINGS in here and HEAD in here)
    assert not model.whole and not model.complaint and model.version == ""


def test_what_cannot_be_used_is_listed_with_reason(disk: Path, tiny: Path, tmp_path: Path) -> None:
    packaged = next(iter(ALIASES.items()))
    damaged, empty = kept(disk, tiny, "org/damaged"), kept(disk, tiny, "org/empty", "peers-two-1")
    asked, other = (tmp_path / "hub" / f"models--org--{name}" / "snapshots" / ("a" * 40) for name in ("asked", "other"))
    for folder, config in (
        (asked, tiny / "config.json"),
        (other, None),
        (disk / packaged_key(packaged[1].sha256), None),
    ):
        folder.mkdir(parents=True)
        (folder / ("config.json" if config else "tokenizer.json")).write_text(config.read_text() if config else "{}")
    (damaged / "config.json").write_text("{")
    for file in empty.glob("*.safetensors*"):
        file.unlink()
    found = {model.name: model for model in local_models()}
    assert found.keys() == {"org/damaged", "org/empty", "org/asked", packaged[0]}  # without a configuration: no model
    for model in found.values():
        assert model.nbytes == sum(file.stat().st_size for file in model.path.iterdir()) and model.used > 10**9
        assert not model.held and not model.ends and not model.whole
    assert {name: bool(model.complaint) for name, model in found.items()} == {
        "org/damaged": True, "org/empty": True, "org/asked": False, packaged[0]: True,
    }  # fmt: skip
    assert found["org/empty"].num_blocks == found["org/asked"].num_blocks == 6
    for name in ("org/damaged", packaged[0]):
        with pytest.raises(ModelError, match=name):
            open_local(found[name])


def test_the_table_survives_80_columns(
    disk: Path, tiny: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-publisher-with-a-long-name/Some-Model-of-70B-Instruct-with-a-long-name"
    kept(disk, tiny, name)
    shown = command()[2]
    *table, last = shown.splitlines()
    assert max(map(len, table)) <= 80 and "all 6 blocks" in shown and "today" in shown
    assert last.endswith(f"is in {disk.parent}")
    monkeypatch.delenv("COLUMNS")
    assert name in command()[2]  # a pipe gets each model in a line


def test_a_name_may_be_a_strangers_text(disk: Path, tiny: Path, command: Command) -> None:
    kept(disk, tiny, "org/\x1b[2Jtiny\nfake  all 6 blocks")
    assert "\x1b" not in command()[2] and len(command()[2].splitlines()) == 3


@pytest.mark.parametrize("manifest", [True, False])
def test_damage_is_found_and_named(
    manifest: bool, disk: Path, tiny: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the manifest, or by what was hashed here before: a disk that rots changes no times."""
    if not manifest:
        monkeypatch.setattr(digests, "file_stamp", lambda file: [1])
    folder = kept(disk, tiny, manifest=manifest)
    assert command("verify", "org/tiny", "--json")[0] == 0
    compute_manifest(resolve(folder))  # what was hashed before does not stand for what is there
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folder / next(file for key, file in index.items() if ".layers.2." in key)
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    code, (found,), _ = command("verify", "org/tiny", "--json")
    assert code == 1 and not found["ok"] and len(found["damaged"]) == 1
    assert "is damaged: " in command("verify", "org/tiny")[2]


def test_hubs_files_are_held_against_its_hashes(disk: Path, tiny: Path, command: Command, tmp_path: Path) -> None:
    storage = tmp_path / "hub" / "models--org--tiny"
    snapshot = storage / "snapshots" / ("a" * 40)
    (storage / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in tiny.iterdir():
        blob = storage / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    assert command("verify", "org/tiny")[0] == 0
    file_of = json.loads((tiny / "model.safetensors.index.json").read_text())["weight_map"]
    shard = next(file for key, file in file_of.items() if ".layers.2." in key)
    data = bytearray((snapshot / shard).read_bytes())
    data[-1] ^= 1
    (snapshot / shard).resolve().write_bytes(data)
    code, (found,), _ = command("verify", "org/tiny", "--json")
    parts = {part for part, keys in Checkpoint(tiny).parts.items() for key in keys if file_of[key] == shard}
    assert code == 1 and len(found["damaged"]) == len(parts)


def test_model_in_use_is_not_removed(disk: Path, tiny: Path, command: Command) -> None:
    folder = kept(disk, tiny)
    note_use([folder])
    assert users_of(folder) == [os.getpid()]
    code, _, said = command("remove", "org/tiny")
    assert code == 4 and f"in use by process {os.getpid()}" in said and folder.is_dir()
    shutil.rmtree(cache_dir() / "used")
    with FileLock(folder / "writing.lock"):
        code, _, said = command("remove", "org/tiny")
        assert code == 4 and "fetching org/tiny" in said and folder.is_dir()
    code, (gone,), _ = command("remove", "org/tiny", "--json")
    assert code == 0 and gone["path"] == str(folder) and not folder.exists() and not local_models()


def test_half_written_model_alone_can_be_removed(disk: Path, tiny: Path, command: Command) -> None:
    partial = disk / "gguf-x-2.partial"
    partial.mkdir()
    (partial / "model.gguf").write_bytes(bytes(100))
    code, _, said = command("verify", "gguf-x-2")
    assert code == 2 and "half written" in said
    assert command("remove", "gguf-x-2")[0] == 0 and not partial.exists()


def test_hub_caches_model_goes_with_its_own(disk: Path, tiny: Path, command: Command, tmp_path: Path) -> None:
    storage = tmp_path / "hub" / "models--org--tiny"
    snapshots = [storage / "snapshots" / (commit * 40) for commit in "ab"]
    (storage / "blobs").mkdir(parents=True)
    for file in tiny.iterdir():
        (storage / "blobs" / file.name).write_bytes(file.read_bytes())
    for snapshot in snapshots:
        snapshot.mkdir(parents=True)
        for file in tiny.iterdir():
            (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    code, _, said = command("remove", "org/tiny")
    assert code == 2 and "2 times" in said
    assert command("remove", str(snapshots[0]))[0] == 0
    assert not snapshots[0].exists() and resolve(snapshots[1]).num_blocks == 6
    assert command("remove", "org/tiny")[0] == 0 and not storage.exists()


def test_an_unknown_name_says_what_there_is(disk: Path, tiny: Path, command: Command) -> None:
    folder = kept(disk, tiny)
    code, _, said = command("verify", "org/tinny")
    assert code == 2 and "org/tiny)" in said
    (model,) = local_models()
    for name in (f"org/tiny@{model.version[:12]}", str(folder), folder.name):
        assert find_local(name, [model]) == model
    code, _, said = command("remove", f"org/tiny@{'0' * 12}")
    assert code == 2 and folder.is_dir()
    pinned = replace(model, name=f"org/tiny@{model.version[:12]}", path=folder / "other")
    assert find_local(pinned.name, [model, pinned]) == pinned  # what is called so goes before what it could mean
    for name in (f"org/tiny@{model.version[:7]}", f"@{model.version[:12]}"):
        with pytest.raises(BadInput, match="there is no model"):
            find_local(name, [model])


def test_what_a_model_needs_here(disk: Path, tiny: Path, command: Command) -> None:
    kept(disk, tiny)
    code, (found,), _ = command("show", "org/tiny", "--json")
    assert code == 0 and found["num_blocks"] == 6 and found["blocks_that_fit"] >= 6
    assert found["block_bytes"] > 1000 and found["client_bytes"] > 1000 and found["swarm"] is None
    assert found["here"][0]["name"] == "org/tiny" and any(fit["fits"] for fit in found["estimates"])

    assert command("show", "./nothing")[0] == 2
    code, (alias,), _ = command("show", "smollm2", "--json")  # nothing is fetched for it
    assert code == 0 and alias["num_blocks"] == 30 and not alias["here"] and len(alias["estimates"]) == 3


def test_what_a_swarm_has_of_a_model() -> None:
    assert swarm_row(b"v" * 32, 2, []) == {
        "model_version": (b"v" * 32).hex(),
        "num_blocks": 2,
        "servers": 0,
        "coverage": [0, 0],
        "missing": [0, 1],
    }


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (5_000, "5 KB"), (135_400_000, "135 MB"), (4.2e9, "4.2 GB")]
)
def test_sizes_for_people(nbytes: float, text: str) -> None:
    assert size_in_words(nbytes) == text
