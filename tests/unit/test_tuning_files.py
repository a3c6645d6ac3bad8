"""Checkpoints, notes and model cards."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from petalnode.node.errors import BadInput, MachineError
from petalnode.node.models.adapter_note import NOTE, AdapterNote, read_note
from petalnode.node.models.cache_dir import check_writable
from petalnode.node.tuning.adapter_files import ResultFolder
from petalnode.node.tuning.adapter_folder import card_of, tags_of
from petalnode.node.tuning.recipe import EarlyStop, Recipe
from petalnode.node.tuning.trainer import CHECKPOINT, TrainingCheckpoint, differences, load_checkpoint, save_checkpoint

TENSORS = {"a": torch.randn(2, 3), "b/c": torch.tensor(4.0)}
CHECKPOINTED = TrainingCheckpoint(
    Recipe(9).fixed(), 3, 2, EarlyStop(4, 0.5, 1), 0.1, TENSORS, {"a/step": torch.tensor(3.0)}, {}
)
NOTED = AdapterNote("lora", "org/m@v1", "ab" * 32, "classification", ("no", "ja|nein"), ("mine",), {"loss": 0.5})


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", replace(CHECKPOINTED, step=1, early_stop=EarlyStop(), loss=math.nan))
    assert load_checkpoint(tmp_path / "out").early_stop.best == math.inf
    save_checkpoint(tmp_path / "out", CHECKPOINTED)
    found = load_checkpoint(tmp_path / "out")
    assert replace(found, weights={}, optimiser={}) == replace(CHECKPOINTED, weights={}, optimiser={})
    for held, given in ((found.weights, CHECKPOINTED.weights), (found.optimiser, CHECKPOINTED.optimiser)):
        assert held.keys() == given.keys() and all(torch.equal(held[name], given[name]) for name in held)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [CHECKPOINT]
    assert not differences(found.recipe, json.loads(json.dumps(Recipe(9).fixed())))


def test_unwritable_checkpoint_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, nowhere, other = tmp_path / "out", tmp_path / "file" / "sub", tmp_path / "other"
    nowhere.parent.write_text("no folder")
    told: list[str] = []
    results = ResultFolder(wanted, [nowhere, other], told.append)

    def save(step: int) -> Path:
        return results.save(lambda folder: save_checkpoint(folder, replace(CHECKPOINTED, step=step)))

    assert save(1) == wanted / CHECKPOINT
    sync, full = os.fsync, [wanted]

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert save(2) == other / CHECKPOINT
    assert len(told) == 1 and str(other) in told[0] and "No space left on device" in told[0] and str(wanted) in told[0]
    assert (load_checkpoint(wanted).step, load_checkpoint(other).step) == (1, 2)
    assert [path.name for path in wanted.iterdir()] == [CHECKPOINT]
    save(3)
    assert len(told) == 1 and results.path == other
    full[:] = []
    assert save(4) == wanted / CHECKPOINT and results.path == wanted and len(told) == 2
    full[:] = [wanted, other]
    with pytest.raises(MachineError, match=re.escape(f"({wanted})") + ".*could not be written either"):
        save(5)
    assert load_checkpoint(wanted).step == 4


def test_folder_is_tried_before_training_and_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    assert check_writable(tmp_path / "a" / "b", "Saving") == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(MachineError, match="Not a directory"):
        check_writable(tmp_path / "file" / "sub", "Saving")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space left"):
        check_writable(tmp_path / "a", "Saving")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_training_is_told_by_what_differs() -> None:
    assert differences(Recipe(9).fixed(), Recipe(9, checkpoint_every=1).fixed()) == []
    assert differences(Recipe(9, seed=1).fixed(), Recipe(9).fixed()) == ["seed: was 0, is 1"]


def test_checkpoints_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="start without --resume"):
        load_checkpoint(tmp_path)
    path = save_checkpoint(tmp_path, CHECKPOINTED)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-5], whole.replace(b"early_stop", b"early_stap")):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="damaged"):
            load_checkpoint(tmp_path)


def test_a_note_comes_back(tmp_path: Path) -> None:
    assert read_note(tmp_path) is None
    NOTED.write(tmp_path)
    assert read_note(tmp_path) == NOTED
    text = (tmp_path / NOTE).read_text()
    for damaged, says in (
        (text[:-9], "does not say"),
        (text.replace("lora", "magic"), "unknown method"),
        (text.replace("ab" * 32, "ab"), "64 hex"),
        (text.replace('"format": 1', '"format": 2'), "newer"),
        ("[]", "does not say"),
    ):
        (tmp_path / NOTE).write_text(damaged)
        with pytest.raises(BadInput, match=says):
            read_note(tmp_path)


def test_a_model_card_says_what_there_is() -> None:
    card = card_of(NOTED)
    assert 'base_model: "org/m"' in card and "| labels | no, ja\\|nein |" in card and "| loss | 0.5 |" in card
    assert "num_labels=2" in card and "PeftModel" in card and "chat" not in card
    assert tags_of(NOTED) == ["petalnode", "lora", "model-version:" + "ab" * 8, "mine", "base_model:org/m"]
    deep = card_of(replace(NOTED, method="deep-prompt", task="language", labels=(), model="smollm2"))
    assert "no equal in peft" in deep and "PeftModel" not in deep and "base_model:" not in deep
