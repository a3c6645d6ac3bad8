"""A model that peers hand on, and a machine that has nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from petalnode.node.models import Manifest, ModelFolder, compute_manifest
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.models.digests import part_digests
from petalnode.node.models.parts import parts_of_need
from tests.tiny_models import NUM_BLOCKS
from tests.weights_network import saved_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return saved_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def manifest(folder: ModelFolder) -> Manifest:
    return compute_manifest(folder)


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: ModelFolder) -> Path:
    """Its cache; the hashes of the holder's folder are there."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("PETALNODE_CACHE", str(cache))
    part_digests(Checkpoint(folder.path), parts_of_need("all", NUM_BLOCKS))
    return cache
