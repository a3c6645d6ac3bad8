from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.errors import BadInput
from petalnode.node.models.disk_limit import (
    CacheEntry,
    in_use,
    keep_within,
    note_fetched,
    note_use,
    parse_size,
    to_remove,
)
from petalnode.protocols.ids import Span
from tests.tiny_models import save_tiny

kept = st.lists(
    st.builds(
        CacheEntry, st.integers(0, 20).map(lambda number: Path(f"/m/{number}")), st.integers(0, 100), st.floats(0, 9)
    ),
    unique_by=lambda entry: entry.path,
)


@given(kept, st.integers(0, 500), st.sets(st.integers(0, 20).map(lambda number: Path(f"/m/{number}"))))
def test_longest_unused_goes_until_the_rest_fits(found, limit, keep) -> None:
    going = to_remove(found, limit, keep)
    staying = [entry for entry in found if entry not in going]
    assert not keep & {entry.path for entry in going}
    spare = [entry for entry in staying if entry.path not in keep]
    assert sum(entry.nbytes for entry in staying) <= limit or not spare
    if going:
        assert sum(entry.nbytes for entry in [*staying, going[-1]]) > limit
        assert all(entry.used >= going[-1].used for entry in spare)


def model(folder: Path, nbytes: int, used: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(nbytes))
    os.utime(folder, (used, used))
    return folder


def test_imported_models_and_blocks_stay_within_the_limit(cache: Path) -> None:
    old = model(cache / "models" / "old", 1000, 1e9)
    used = model(cache / "models" / "used", 1000, 1e9)
    new = model(cache / "models" / "new", 1000, 2e9)
    block = cache / "quantised" / "int8-x.safetensors"
    block.parent.mkdir()
    block.write_bytes(bytes(500))
    os.utime(block, (1.5e9, 1.5e9))
    (cache / "models" / "other.lock").touch()
    note_use([used])
    assert keep_within(10_000) == 3500 and old.exists()
    assert keep_within(2500, [new]) == 2500
    assert not old.exists() and block.exists()
    assert keep_within(100, [new]) == 1000
    assert new.exists() and not used.exists() and not block.exists()


def snapshot(root: Path, commit: str, **shards: int) -> Path:
    """A model in the hub's cache: links in a folder per commit, to files that commits may share."""
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    for name, nbytes in {"config": 10, **shards}.items():
        (root / "blobs" / name).write_bytes(bytes(nbytes))
        suffix = ".json" if name == "config" else ".safetensors"
        (folder / f"{name}{suffix}").symlink_to(Path("../../blobs") / name)
    return folder


def test_hubs_cache_loses_our_shards_one_by_one(cache: Path, tmp_path: Path) -> None:
    foreign = snapshot(tmp_path / "hub" / "models--org--foreign", "a" * 40, model=1000)
    ours = snapshot(tmp_path / "hub" / "models--org--ours", "b" * 40, first=1000, second=1000, third=1000)
    also = snapshot(tmp_path / "hub" / "models--org--ours", "c" * 40, third=1000)
    blobs = ours.parent.parent / "blobs"
    assert keep_within(0) == 0
    note_use([foreign / "model.safetensors"])
    assert keep_within(0) == 0
    note_fetched([ours / "first.safetensors", ours / "third.safetensors"])
    assert keep_within(2000) == 2000
    note_fetched([ours / "second.safetensors"])
    note_use([ours / "first.safetensors"])  # the third is the oldest
    assert keep_within(2500) == 2000
    assert not (ours / "third.safetensors").is_symlink()
    assert (also / "third.safetensors").exists()  # shared with another commit
    assert keep_within(0, [ours / "first.safetensors"]) == 1000
    assert not (blobs / "second").exists() and (ours / "config.json").exists()
    assert keep_within(0) == 0
    assert not ours.exists() and not (blobs / "first").exists()
    assert (foreign / "model.safetensors").exists() and (also / "config.json").exists()


def test_a_server_uses_the_shards_with_its_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--model" / "snapshots" / ("d" * 40)
    save_tiny("llama", folder, shards="50KB")
    assert in_use(folder.parent, 6, Span(0, 1)) == (folder.parent,)
    every = set(in_use(folder, 6, Span(0, 6)))
    first, last = set(in_use(folder, 6, Span(0, 1))), set(in_use(folder, 6, Span(5, 6)))
    assert first and last and not first & last and first | last < every
    assert all(path.is_file() and path.suffix == ".safetensors" for path in every)


def test_a_note_about_any_other_folder_removes_nothing(cache: Path, tmp_path: Path) -> None:
    own = model(tmp_path / "my models" / "precious", 1000, 1e9)
    note_use([own])
    note_fetched([own / "model.safetensors"])
    assert keep_within(0) == 0
    assert own.exists()


def test_sizes() -> None:
    assert parse_size("500", "--max-disk") == 500
    assert parse_size("1.5g", "--max-disk") == 3 << 29
    assert parse_size("2 MiB", "--max-disk") == parse_size("2M", "--max-disk") == 2 << 20
    for text in ("", "much", "-1G", "0", "1Q", "G"):
        with pytest.raises(BadInput, match=r"--max-disk .*such as"):
            parse_size(text, "--max-disk")
