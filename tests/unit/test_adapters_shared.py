"""`petalnode adapters` with a folder, git repositories on this disk, and a hub on loopback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from petalnode.node.errors import BadInput, MachineError
from petalnode.node.models.adapter_note import AdapterNote
from petalnode.node.tuning import repository
from petalnode.node.tuning.adapter_files import FILES, SharedAdapter, check_adapter, files_of
from petalnode.node.tuning.adapter_folder import card_of, tags_of
from petalnode.node.tuning.repository import FolderRepository, GitRepository, HubRepository, of_tags, repository_of
from tests.model_hub import serve_hub
from tests.swarm.processes import environment, run_to_end

NOTE = AdapterNote("lora", "org/m", "0123456789ab" + "cd" * 26, "language", tags=("poems",))


def adapter(folder: Path, note: AdapterNote = NOTE) -> Path:
    folder.mkdir(parents=True)
    save_file({"base_model.model.a.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (folder / "README.md").write_text(card_of(note))
    note.write(folder)
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    (folder / ".secret").write_text("of somebody")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SHARED = sorted({*FILES} - {"deep_prompts.safetensors"})


def test_only_what_an_adapter_needs_travels(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "mine")
    (folder / "deep_prompts.safetensors").symlink_to("/etc/passwd")
    place = FolderRepository(tmp_path / "shelf")
    place.push(folder, "mine", replace=False)
    assert names_in(tmp_path / "shelf" / "mine") == SHARED
    found = place.pull("mine", tmp_path / "pulled")
    assert names_in(tmp_path / "pulled") == SHARED
    assert found == SharedAdapter("mine", "lora", "org/m", NOTE.model_version, "language", ("poems",))
    place.push(folder, "mine", replace=False)  # the same again
    replace(NOTE, tags=()).write(folder)
    with pytest.raises(BadInput, match="--replace"):
        place.push(folder, "mine", replace=False)
    place.push(folder, "mine", replace=True)
    assert place.search(None, ())[0].tags == ()


def test_copy_onto_itself_or_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, mine = FolderRepository(tmp_path), adapter(tmp_path / "mine")
    before = {path: path.read_bytes() for path in files_of(mine)}
    place.push(mine, "mine", replace=False)
    place.pull("mine", mine)
    other = adapter(tmp_path / "other", replace(NOTE, tags=("other",)))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError):
        place.push(other, "mine", replace=True)
    assert {path: path.read_bytes() for path in files_of(mine)} == before


def test_searching_a_folder(tmp_path: Path) -> None:
    adapter(tmp_path / "shelf" / "a")
    adapter(tmp_path / "shelf" / "b", replace(NOTE, model="smollm2", model_version="ff" * 32, method="prompt"))
    damaged = adapter(tmp_path / "shelf" / "c")
    (damaged / "adapter_model.safetensors").write_bytes(b"\xff" * 9)
    (tmp_path / "shelf" / "d").mkdir()
    place = FolderRepository(tmp_path / "shelf")

    def names(model: str | None = None, *tags: str) -> str:
        return "".join(listing.name for listing in place.search(model, tags))

    assert names() == names(None, "poems") == "ab" and names("smollm2") == names("ffffffff") == "b"
    assert names("01234567") == names("org/m") == names(None, "lora") == "a" and names("0123") == names("x") == ""
    with pytest.raises(BadInput, match="it has a, b"):
        place.pull("x", tmp_path / "x")
    for name in ("../a", ".git", "a/b", ""):
        with pytest.raises(BadInput, match="no name for an adapter"):
            place.pull(name, tmp_path / "x")
    with pytest.raises(BadInput, match="no safetensors"):
        check_adapter(damaged)
    with pytest.raises(BadInput, match="is no adapter"):
        check_adapter(tmp_path / "shelf")
    assert files_of(tmp_path) == []


def test_places(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path / "bare")], check=True)
    kinds: dict[str, type] = {
        "hub": HubRepository,
        "org/name": HubRepository,
        str(tmp_path): FolderRepository,
        str(tmp_path / "new"): FolderRepository,
        "./new": FolderRepository,
        str(tmp_path / "bare"): GitRepository,
        "https://host.example/a/b": GitRepository,
        "git@host.example:a/b.git": GitRepository,
    }
    for where, kind in kinds.items():
        assert type(repository_of(where)) is kind, where
    (tmp_path / "file").touch()
    for where in ("", "--upload-pack=x", "ext://sh", str(tmp_path / "none.git"), str(tmp_path / "file")):
        with pytest.raises(BadInput):
            repository_of(where)


def test_a_git_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)  # nobody's name and address
    bare = tmp_path / "bare"
    subprocess.run(["git", "init", "--quiet", "--bare", str(bare)], check=True)
    place = repository_of(str(bare))
    assert place.search(None, ()) == []
    folder = adapter(tmp_path / "mine")
    place.push(folder, "mine", replace=False)
    assert "just so" in place.push(folder, "mine", replace=False)
    place.push(folder, "other", replace=False)
    assert [listing.name for listing in place.search("org/m", ())] == ["mine", "other"]
    place.pull("other", tmp_path / "pulled")
    assert names_in(tmp_path / "pulled") == SHARED
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", "HEAD"], cwd=bare, capture_output=True, check=True)
    assert sorted(listed.stdout.decode().split()) == [f"{name}/{file}" for name in ("mine", "other") for file in SHARED]
    with pytest.raises(BadInput, match=r"it has mine, other") as missing:
        place.pull("x", tmp_path / "x")
    assert str(bare) in str(missing.value) and "petalnode-git" not in str(missing.value)
    with pytest.raises(BadInput, match="git clone failed"):
        GitRepository((tmp_path / "none").as_uri()).search(None, ())
    monkeypatch.setattr(repository, "REPOSITORY", replace(repository.REPOSITORY, git_timeout=1e-4))
    with pytest.raises(MachineError, match="took longer"):
        place.search(None, ())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="git is not installed"):
        place.search(None, ())


# huggingface_hub reads its settings when it is imported: a process for all commands with the same ones.
SCRIPT = """
import contextlib, io, json, sys
from petalnode.node.cli import app
for command in map(json.loads, sys.argv[1:]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(["adapters", *command])
    print(json.dumps([code, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()]))
"""


def test_the_hub(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "mine")

    def adapters(url: str, *commands: str, **settings: str) -> list[Any]:
        env = environment(tmp_path / "home", **{"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", **settings})
        given = [json.dumps([*command.split(), "--json"]) for command in commands]
        command = [sys.executable, "-c", SCRIPT, *given]
        done = run_to_end(command, env, tmp_path)
        assert done.code == 0, done
        return done.objects

    with serve_hub(tmp_path) as hub:
        hub.token = "secret"
        pushed, again, found, by_version, others, pulled, nothing = adapters(
            hub.url,
            f"push {folder} --to me/poems",
            f"push {folder} --to me/poems",
            "search --model org/m --tag poems",
            f"search --model {NOTE.model_version}",
            "search --model other/m",
            "pull me/poems",
            "pull me/nothing",
            HF_TOKEN="secret",
        )
        assert pushed[0] == 0 and pushed[1][0]["where"] == f"{hub.url}/me/poems", pushed
        assert sorted(hub.uploaded["me/poems"]) == SHARED
        assert again[0] == 2 and "give another name, or --replace" in again[2]
        assert [(entry["name"], entry["method"], entry["model"]) for entry in found[1]] == [
            ("me/poems", "lora", "org/m")
        ]
        assert by_version[1] == [{**found[1][0]}] and others[:2] == [0, []]
        assert pulled[0] == 0 and names_in(tmp_path / "poems") == SHARED
        assert nothing[0] == 2 and "no such repository" in nothing[2]
        [refused] = adapters(hub.url, f"push {folder} --to me/new", HF_TOKEN="wrong")
        assert refused[0] == 2 and "HF_TOKEN" in refused[2]
        [offline] = adapters(hub.url, "search", HF_HUB_OFFLINE="1")
        assert offline[0] == 2 and "HF_HUB_OFFLINE" in offline[2]
    [gone] = adapters(hub.url, "search")
    assert gone[0] == 2 and "cannot be reached" in gone[2]


def test_what_tags_say() -> None:
    found = of_tags("me/x", ["peft", *tags_of(NOTE), "base_model:adapter:org/m", "region:us"])
    assert found == SharedAdapter("me/x", "lora", "org/m", NOTE.model_version[:16], tags=("poems",))
