"""Of large safetensors files on a hub only the bytes of the needed parts come; whole files where it has no ranges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

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


def test_an_index_that_names_a_file_that_is_nowhere(model: Path, tmp_path: Path) -> None:
    """The parts that are needed are not in it."""
    incomplete = shutil.copytree(model, tmp_path / "incomplete")
    keys = safe_open(incomplete / WEIGHTS, "pt").keys()
    file_of = {key: "gone.safetensors" if ".layers.5." in key else WEIGHTS for key in keys}
    (incomplete / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    with serve_hub(incomplete) as hub:
        found = Person(tmp_path / "home", hub.url).fetch(need="1:3")
    assert "gone.safetensors is missing" in found["error"]
