"""GGUF files on a hub: named by kind or by file, and of them only the bytes of the parts that are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petalnode.node.errors import ModelError
from petalnode.node.models import compute_manifest, resolve
from petalnode.node.models.sources.gguf_files import choose_gguf, kind_of, name_of
from tests.model_hub import COMMIT, Hub, serve_hub
from tests.tiny_gguf import BLOCKS, write_tiny_gguf
from tests.unit.gguf_parts import split
from tests.unit.hub_person import Person

FILE = "tiny-Q4_1.gguf"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "files"
    folder.mkdir()
    write_tiny_gguf(folder / FILE)
    write_tiny_gguf(folder / "tiny-Q8_0.gguf", "Q8_0")
    with serve_hub(folder) as found:
        yield found


@pytest.fixture
def person(hub: Hub, tmp_path: Path) -> Person:
    return Person(tmp_path / "home", hub.url)


def parts(found: dict[str, Any]) -> list[str]:
    return [name for name in found["files"] if name.startswith("part-") and name.endswith(".gguf")]


def test_server_gets_bytes_of_its_blocks_and_header(hub: Hub, person: Person) -> None:
    found = person.fetch("org/tiny:q4_1", need="1:2")
    assert found["name"] == "org/tiny:Q4_1" and found["revision"] == COMMIT, found
    assert parts(found) == ["part-00002.gguf"] and "tokenizer.json" in found["files"]
    again = person.fetch("org/tiny:Q4_1", need="0:2")
    assert again["path"] == found["path"] and parts(again) == ["part-00001.gguf", "part-00002.gguf"]
    gets = len(hub.gets)
    assert parts(person.fetch(f"org/tiny/{FILE}", need="0:2")) == parts(again) and len(hub.gets) == gets
    offline = person.fetch("org/tiny:Q4_1", need="0:2", offline=True)
    assert offline["name"] == found["name"] and parts(offline) == parts(again)
    assert "only in part" in person.fetch("org/tiny:Q4_1", need="0:3", offline=True)["error"]
    assert "not on this machine" in person.fetch("org/tiny:Q8_0", offline=True)["error"]


def test_the_parts_are_those_of_the_file(
    hub: Hub, person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = person.fetch("org/tiny:Q4_1")
    assert len(parts(found)) == BLOCKS + 2
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "other"))
    theirs = compute_manifest(resolve(Path(found["path"])))
    assert theirs.version == compute_manifest(resolve(hub.folder / FILE)).version


def test_a_sharded_file_is_one_model(hub: Hub, person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = split(hub.folder / FILE, hub.folder, names="tiny-Q5_K_M-{:05}-of-00003.gguf")
    found = person.fetch("org/tiny:Q5_K_M", need="0:1")
    assert parts(found) == ["part-00001.gguf"] and {name for name, _ in hub.gets} == {shard.name for shard in shards}
    whole = person.fetch(f"org/tiny/{shards[0].name}")
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "other"))
    assert whole["path"] == found["path"]
    theirs = compute_manifest(resolve(Path(whole["path"])))
    assert theirs.version == compute_manifest(resolve(hub.folder / FILE)).version
    shards[1].unlink()
    assert "incomplete" in Person(tmp_path / "new", hub.url).fetch("org/tiny:Q5_K_M")["error"]


def test_expiring_addresses_are_asked_anew_without_token(hub: Hub, person: Person) -> None:
    hub.token, hub.gated, hub.elsewhere = "secret", "auto", 3
    assert "gated" in person.fetch("org/tiny:Q4_1")["error"]
    found = person.fetch("org/tiny:Q4_1", HF_TOKEN="secret")
    assert len(parts(found)) == BLOCKS + 2 and "restricted" in found["files"]


def test_a_cut_goes_on_where_it_was(hub: Hub, person: Person) -> None:
    hub.cut[FILE] = 5000
    found = person.fetch("org/tiny:Q4_1", need="0:1")
    assert parts(found) == ["part-00001.gguf"] and [start for _, start in hub.gets][:2] == [0, 5000]


def test_a_damaged_header_leaves_nothing(hub: Hub, person: Person) -> None:
    data = bytearray((hub.folder / FILE).read_bytes())
    data[8:16] = (1 << 40).to_bytes(8, "little")  # tensors
    (hub.folder / FILE).write_bytes(data)
    found = person.fetch("org/tiny:Q4_1")
    assert "tensors" in found["error"] and found["exit"] == 2
    assert not list((person.home / "petalnode" / "models").glob("hub-*[!k]"))
    (hub.folder / FILE).write_bytes(data[:100])
    assert person.fetch("org/tiny:Q4_1")["exit"] == 2


FILES = (
    "a-Q4_K_M.gguf",
    "a-Q8_0.gguf",
    "b/a.BF16-00001-of-00002.gguf",
    "b/a.BF16-00002-of-00002.gguf",
    "mmproj-F16.gguf",
)


def test_files_are_chosen_by_kind_or_name() -> None:
    assert choose_gguf("o/n", FILES, "q4_k_m") == (FILES[0],)
    assert choose_gguf("o/n", FILES, "BF16") == choose_gguf("o/n", FILES, FILES[2]) == FILES[2:4]
    assert name_of("o/n", FILES, FILES[2]) == "o/n:BF16" and name_of("o/n", ["x.gguf"], "x.gguf") == "o/n/x.gguf"
    assert name_of("o/n", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "b-Q8_0.gguf") == "o/n/b-Q8_0.gguf"
    for wanted, said in (
        ("Q5_0", "no GGUF file 'Q5_0': name one of Q4_K_M, Q8_0, BF16"),
        ("F16", "no GGUF file"),
        ("c.gguf", "no GGUF file"),
    ):
        with pytest.raises(ModelError, match=said):
            choose_gguf("o/n", FILES, wanted)
    with pytest.raises(ModelError, match=r"several GGUF files .* a-Q8_0\.gguf, b-Q8_0\.gguf"):
        choose_gguf("o/n", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")
    with pytest.raises(ModelError, match="incomplete"):
        choose_gguf("o/n", FILES[:3], "BF16")
    with pytest.raises(ModelError, match="incomplete"):
        choose_gguf("o/n", ["a-Q8_0-00001-of-99999.gguf"], "Q8_0")
    with pytest.raises(ModelError, match="name one of none"):
        choose_gguf("o/n", ["a-Q8_0.txt", "README.md"], "Q8_0")
    with pytest.raises(ModelError, match=r"name one of model\.gguf \("):
        choose_gguf("o/n", ["model.gguf", "a-Q8_0.txt"], "Q8_0")


@pytest.mark.parametrize(("count", "whole"), [(0, False), (1, True), (1000, True), (1001, False)])
def test_a_model_in_parts_has_1_to_1000(count: int, whole: bool) -> None:
    names = [f"a-Q8_0-{number:05}-of-{count:05}.gguf" for number in range(1, max(count, 1) + 1)]
    if whole:
        assert choose_gguf("o/n", names, "Q8_0") == tuple(names)
        return
    with pytest.raises(ModelError, match="incomplete"):
        choose_gguf("o/n", names, "Q8_0")


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("x-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m.i1-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("Q.gguf", None),
    ],
)
def test_kinds_in_names(file: str, kind: str | None) -> None:
    assert kind_of(file) == kind
