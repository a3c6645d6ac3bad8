"""Fetching from a hub (a real server on loopback): only what is needed, resumed, and clear when it cannot be had."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petalnode.node.models import Manifest, compute_manifest, resolve
from petalnode.node.models.manifest import MANIFEST_FILE, MAX_FILE_BYTES, write_manifest
from tests.model_hub import COMMIT, Hub, serve_hub
from tests.tiny_models import save_tiny
from tests.unit.hub_person import Person


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("hub") / "model", shards="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    for name in ("pytorch_model.bin", "README.md", "model.onnx"):
        (folder / name).write_text("not needed")
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with serve_hub(model) as hub:
        yield hub


@pytest.fixture
def person(hub: Hub, tmp_path: Path) -> Person:
    return Person(tmp_path / "home", hub.url)


def shards_of(model: Path, *prefixes: str) -> set[str]:
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    return {file for key, file in index.items() if key.startswith(prefixes)}


def partial_of(fetched: dict[str, Any], content: bytes) -> Path:
    """Where a download of `content` is kept until it is complete."""
    return Path(fetched["path"]).parent.parent / "blobs" / f"{hashlib.sha256(content).hexdigest()}.partial"


def test_server_gets_its_spans_shards_only(hub: Hub, person: Person, model: Path) -> None:
    found = person.fetch(need="2:4")
    needed = shards_of(model, "model.layers.2.", "model.layers.3.")
    assert set(found["files"]) == {"config.json", "model.safetensors.index.json", *needed}
    assert {name for name, _ in hub.gets} == set(found["files"])
    assert needed < {file.name for file in model.glob("*.safetensors")}
    assert (found["name"], found["revision"]) == ("org/tiny", COMMIT)
    for name in needed:
        size = (model / name).stat().st_size
        assert found["progress"][f"Downloading {name}"] == [size, size]
        assert (Path(found["path"]) / name).read_bytes() == (model / name).read_bytes()


def test_download_makes_room_of_unneeded_shards(hub: Hub, person: Person, model: Path) -> None:
    first, last = shards_of(model, "model.layers.0."), shards_of(model, "model.layers.5.")
    assert first and last and not first & last
    assert first <= set(person.fetch(need="0:1")["files"])
    both = sum((model / name).stat().st_size for name in first | last)
    assert first | last <= set(person.fetch(need="5:6", limit=str(both))["files"])
    again = sum((model / name).stat().st_size for name in last)
    assert set(person.fetch(need="5:6", limit=str(again))["files"]) >= first | last  # nothing comes, nothing goes
    middle = shards_of(model, "model.layers.3.")
    found = set(person.fetch(need="3:4", limit=str(again))["files"])
    assert middle <= found and not first & found


def test_a_client_gets_tokenizer_embeddings_and_head(person: Person, model: Path) -> None:
    found = person.fetch("org/tiny@v1", need="client")
    needed = shards_of(model, "model.embed_tokens.", "model.norm.", "lm_head.")
    text = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert set(found["files"]) == {"config.json", "model.safetensors.index.json", *text, *needed}
    assert found["name"] == "org/tiny@v1"


def test_manifest_of_repository_comes_with_whatever_is_fetched(tmp_path: Path, model: Path) -> None:
    published = shutil.copytree(model, tmp_path / "published")
    manifest = compute_manifest(resolve(str(model)))
    write_manifest(manifest, published)
    with serve_hub(published) as hub:
        found = Person(tmp_path / "home", hub.url).fetch(need="2:3")
        assert MANIFEST_FILE in found["files"]
        stated = Manifest.from_json((Path(found["path"]) / MANIFEST_FILE).read_bytes())
        assert stated == manifest
        (published / MANIFEST_FILE).write_bytes(b" " * (MAX_FILE_BYTES + 1))
        assert MANIFEST_FILE not in Person(tmp_path / "other", hub.url).fetch(need="config")["files"]


def test_present_shards_serve_without_the_hub(hub: Hub, person: Person) -> None:
    first = person.fetch(need="0:2")
    hub.gets.clear()
    assert person.fetch(need="0:2")["path"] == first["path"]
    assert not hub.gets
    assert person.fetch(need="0:2", offline=True)["path"] == first["path"]
    assert person.fetch(need="0:2", HF_HUB_OFFLINE="1")["path"] == first["path"]
    unreachable = Person(person.home, "http://127.0.0.1:9")
    assert unreachable.fetch(need="0:2")["path"] == first["path"]
    missing = unreachable.fetch(need="all")
    assert missing["exit"] == 2
    assert "only in part" in missing["error"]
    assert "127.0.0.1:9 cannot be reached" in missing["error"]


def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, person: Person, model: Path) -> None:
    (name,) = shards_of(model, "model.norm.")
    hub.cut[name] = 30_000
    person.fetch(need="client")
    assert [start for got, start in hub.gets if got == name] == [0, 30_000]


def test_a_download_goes_on_after_a_restart(hub: Hub, person: Person, model: Path) -> None:
    first = person.fetch(need="config")
    (name,) = shards_of(model, "model.norm.")
    content = (model / name).read_bytes()
    partial_of(first, content).write_bytes(content[:20_000])
    found = person.fetch(need="client")
    assert [start for got, start in hub.gets if got == name] == [20_000]
    assert (Path(found["path"]) / name).read_bytes() == content


def test_damage_on_the_way_is_found(hub: Hub, person: Person, model: Path) -> None:
    first = person.fetch(need="config")
    (name,) = shards_of(model, "model.norm.")
    partial = partial_of(first, (model / name).read_bytes())
    partial.write_bytes(b"not the beginning of it")
    assert "came damaged" in person.fetch(need="client")["error"]
    assert "error" not in person.fetch(need="client")


def test_gated_model_says_how_and_opens_with_token(hub: Hub, person: Person) -> None:
    hub.token = "hf_secret"
    refused = person.fetch()
    assert refused["exit"] == 2
    assert "'org/tiny' is gated" in refused["error"]
    assert "HF_TOKEN" in refused["error"]
    assert "error" not in person.fetch(HF_TOKEN="hf_secret")


def test_only_public_hub_files_are_handed_on(hub: Hub, person: Person) -> None:
    """Also after the model was gated, and not before the hub was asked."""
    from petalnode.node.models.sources.hub import is_for_everybody

    folder = resolve(Path(person.fetch(need="config")["path"]), need="config")
    assert is_for_everybody(folder)
    hub.gated = "manual"
    person.fetch(need="config")
    assert not is_for_everybody(folder)
    hub.gated = False
    person.fetch(need="config", offline=True)
    assert not is_for_everybody(folder)
    person.fetch(need="config")
    assert is_for_everybody(folder)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("org/none", "The hub has no model 'org/none'. If it is private, set HF_TOKEN"),
        ("org/tiny@v7", "'org/tiny' has no revision 'v7'"),
    ],
)
def test_what_the_hub_does_not_have_is_said(person: Person, name: str, complaint: str) -> None:
    found = person.fetch(name)
    assert found["exit"] == 2
    assert complaint in found["error"]


def test_an_unreachable_hub_says_how_to_go_on(person: Person) -> None:
    found = Person(person.home, "http://127.0.0.1:9").fetch()
    assert found["exit"] == 2
    assert "'org/tiny' is not in the hub's cache on this machine" in found["error"]
    assert "a model folder, a .gguf file or an alias such as smollm2" in found["error"]


def test_span_beyond_the_model_is_said_first(hub: Hub, person: Person) -> None:
    assert "has 6 blocks: 0:999 passes its end" in person.fetch(need="0:999")["error"]
    assert not [name for name, _ in hub.gets if name.endswith(".safetensors")]


def test_tokenizer_of_impossible_size_is_not_downloaded(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "large")
    with (tmp_path / "large" / "tokenizer.json").open("wb") as stream:
        stream.truncate(257 << 20)  # a hole
    with serve_hub(tmp_path / "large") as hub:
        found = Person(tmp_path / "home", hub.url).fetch(need="client")
        assert "tokenizer.json of 'org/tiny' has 257 MiB" in found["error"] and found["exit"] == 2
        assert {name for name, _ in hub.gets} == {"config.json"}


def test_models_without_safetensors_are_refused(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with serve_hub(folder) as hub:
        assert "has no safetensors weights" in Person(tmp_path / "home", hub.url).fetch()["error"]
