from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.errors import BadInput
from petalnode.node.models.disk_limit import Kept, keep_within, note_use, parse_size, to_remove

kept = st.lists(
    st.builds(Kept, st.integers(0, 20).map(lambda number: Path(f"/m/{number}")), st.integers(0, 100), st.floats(0, 9)),
    unique_by=lambda each: each.path,
)


@given(kept, st.integers(0, 500), st.sets(st.integers(0, 20).map(lambda number: Path(f"/m/{number}"))))
def test_what_was_not_used_for_longest_goes_until_the_rest_fits(found, limit, keep) -> None:
    going = to_remove(found, limit, keep)
    staying = [each for each in found if each not in going]
    assert not keep & {each.path for each in going}
    spare = [each for each in staying if each.path not in keep]
    assert sum(each.nbytes for each in staying) <= limit or not spare
    if going:
        assert sum(each.nbytes for each in [*staying, going[-1]]) > limit
        assert all(each.used >= going[-1].used for each in spare)


def model(folder: Path, nbytes: int, used: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(nbytes))
    os.utime(folder, (used, used))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_imported_models_and_quantised_blocks_are_kept_within_the_limit(cache: Path) -> None:
    old = model(cache / "models" / "old", 1000, 1e9)
    used = model(cache / "models" / "used", 1000, 1e9)
    new = model(cache / "models" / "new", 1000, 2e9)
    block = cache / "quantised" / "int8-x.safetensors"
    block.parent.mkdir()
    block.write_bytes(bytes(500))
    os.utime(block, (1.5e9, 1.5e9))
    (cache / "models" / "other.lock").touch()
    note_use(used)
    assert keep_within(10_000) == 3500 and old.exists()
    assert keep_within(2500, [new]) == 2500
    assert not old.exists() and block.exists()
    assert keep_within(100, [new]) == 1000
    assert new.exists() and not used.exists() and not block.exists()


def test_of_the_hubs_cache_only_what_petalnode_fetched_goes(cache: Path, tmp_path: Path) -> None:
    def snapshot(name: str, *commits: str) -> list[Path]:
        root = tmp_path / "hub" / f"models--org--{name}"
        (root / "blobs").mkdir(parents=True)
        (root / "blobs" / "shared").write_bytes(bytes(100))
        found = []
        for commit in commits:
            folder = root / "snapshots" / commit
            folder.mkdir(parents=True)
            (root / "blobs" / commit).write_bytes(bytes(1000))
            (folder / "model.safetensors").symlink_to(Path("../../blobs") / commit)
            (folder / "config.json").symlink_to(Path("../../blobs/shared"))
            found.append(folder)
        return found

    (foreign,) = snapshot("foreign", "a" * 40)
    first, second = snapshot("ours", "b" * 40, "c" * 40)
    note_use(first)
    assert keep_within(0) == 0
    assert (foreign / "model.safetensors").exists()
    assert not first.exists() and not (first.parent.parent / "blobs" / ("b" * 40)).exists()
    assert (second / "model.safetensors").exists() and (second / "config.json").exists()


def test_a_note_about_any_other_folder_removes_nothing(cache: Path, tmp_path: Path) -> None:
    own = model(tmp_path / "my models" / "precious", 1000, 1e9)
    note_use(own)
    assert keep_within(0) == 0
    assert own.exists()


def test_sizes() -> None:
    assert parse_size("500", "--max-disk") == 500
    assert parse_size("1.5g", "--max-disk") == 3 << 29
    assert parse_size("2 MiB", "--max-disk") == parse_size("2M", "--max-disk") == 2 << 20
    for text in ("", "much", "-1G", "0", "1Q", "G"):
        with pytest.raises(BadInput, match=r"--max-disk .*such as"):
            parse_size(text, "--max-disk")
