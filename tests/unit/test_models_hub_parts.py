"""Of large safetensors files on a hub only the bytes of the needed parts come; whole files where it has no ranges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from petalnode.node.models import compute_manifest, resolve
from petalnode.node.models.manifest import write_manifest
from tests.model_hub import Hub, serve_hub
from tests.tiny_models import save_tiny
from tests.unit.test_models_hub import Person

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embeddings are large, in one file with all of its blocks."""
    path = save_tiny("llama", tmp_path_factory.mktemp("model"), vocab_size=300_000)
    write_manifest(compute_manifest(resolve(path)), path)
    return path


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with serve_hub(model) as found:
        yield found


@pytest.fixture
def person(hub: Hub, tmp_path: Path) -> Person:
    return Person(tmp_path / "home", hub.url)


def test_a_server_gets_the_bytes_of_its_blocks(hub: Hub, person: Person) -> None:
    found = person.fetch(need="1:3")
    assert found["name"] == "org/tiny" and "petalnode-manifest.json" in found["files"], found
    assert [name for name in found["files"] if name.endswith(".safetensors")] == [
        "part-00002.safetensors",
        "part-00003.safetensors",
    ]
    assert 0 < hub.sent[WEIGHTS] < 2 << 20
    sent = hub.sent[WEIGHTS]
    assert person.fetch(need="1:3")["path"] == found["path"] == person.fetch(need="1:3", offline=True)["path"]
    assert hub.sent[WEIGHTS] == sent


def test_where_there_are_no_ranges_the_whole_file_comes(hub: Hub, person: Person) -> None:
    hub.no_ranges = True
    found = person.fetch(need="1:3")
    assert WEIGHTS in found["files"] and Path(found["path"]).parent.name == "snapshots"
