"""Of large safetensors files on a hub only the bytes of the needed parts come; whole files where it has no ranges."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from petalnode.node.errors import MachineError, ModelError
from petalnode.node.models import EMBEDDINGS, HEAD, Checkpoint, Part, compute_manifest, resolve
from petalnode.node.models.disk_limit import no_disk_limit
from petalnode.node.models.folder import open_folder
from petalnode.node.models.gguf.header import read_gguf_header
from petalnode.node.models.inventory import local_models
from petalnode.node.models.manifest import write_manifest
from petalnode.node.models.progress import no_progress
from petalnode.node.models.sources import hub_parts, ranges
from petalnode.node.models.sources.hub_parts import HubParts
from petalnode.node.weights.holder import may_hand_on
from tests.attacks.lying_hub import Server
from tests.model_hub import COMMIT, Hub, serve_hub
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import NUM_BLOCKS, save_tiny
from tests.unit.hub_person import Person

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


def test_where_there_are_no_ranges_whole_file_comes(hub: Hub, person: Person) -> None:
    hub.no_ranges = True
    found = person.fetch(need="1:3")
    assert WEIGHTS in found["files"] and Path(found["path"]).parent.name == "snapshots"


def test_index_that_names_file_that_is_nowhere(model: Path, tmp_path: Path) -> None:
    """The parts that are needed are not in it."""
    incomplete = shutil.copytree(model, tmp_path / "incomplete")
    keys = safe_open(incomplete / WEIGHTS, "pt").keys()
    file_of = {key: "gone.safetensors" if ".layers.5." in key else WEIGHTS for key in keys}
    (incomplete / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    with serve_hub(incomplete) as hub:
        found = Person(tmp_path / "home", hub.url).fetch(need="1:3")
    assert "gone.safetensors is missing" in found["error"]


# --- the folder of the parts, without a process between

PARTS: tuple[Part, ...] = (EMBEDDINGS, *range(NUM_BLOCKS), HEAD)
ABOUT = {"model": "org/tiny", "commit": COMMIT}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("small"))


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], Server]]:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    with ExitStack() as servers:
        yield lambda data: servers.enter_context(closing(Server(data)))


def shards_of(source: Path, chance: random.Random) -> list[tuple[bytes, list[str]]]:
    """The tensors of a model, in files of any number and in any order, and the keys in each. The tensors of a file may
    begin at the byte at which those of the file before end."""
    whole = Checkpoint(source)
    parts = [whole.tensors(part) for part in chance.sample(PARTS, len(PARTS))]
    tensors = [held for part in parts for held in chance.sample(part, len(part))]
    cuts = chance.sample(range(1, len(tensors)), chance.randrange(4))
    found, before = [], 0
    for first, last in pairwise([0, *sorted(cuts), len(tensors)]):
        entries, body = {}, b""
        for held in tensors[first:last]:
            data = held.file.read_bytes()[held.start : held.end]
            offsets = [len(body), len(body) + len(data)]
            entries[held.key] = {"dtype": held.dtype, "shape": held.shape, "data_offsets": offsets}
            body += data
        header = json.dumps(entries).encode().ljust(before - 8 if chance.random() < 0.7 else 0)
        found.append((len(header).to_bytes(8, "little") + header + body, list(entries)))
        before = len(found[-1][0])
    return found


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_any_files_come_once(
    seed: int, small: Path, serve: Callable[[bytes], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(hub_parts, "PIECE_BYTES", chance.choice((9_000, 40_000, 16 << 20)))
    shards = {f"model-{number}.safetensors": shard for number, shard in enumerate(shards_of(small, chance))}
    servers = {name: serve(data) for name, (data, _) in shards.items()}
    files = {name: server.file(name) for name, server in servers.items()}
    file_of = {key: name for name, (_, keys) in shards.items() for key in keys}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": file_of}))
    parts = HubParts("org/tiny", COMMIT, "safetensors")
    parts.create("org/tiny", ABOUT, list(files.values()), [small / "config.json", index], no_progress)

    def asked() -> int:
        return sum(server.asked for server in servers.values())

    headers = sum(8 + int.from_bytes(data[:8], "little") for data, _ in shards.values())
    assert asked() == headers + 8 * len(shards)  # how long they are is asked first
    said: list[tuple[int, int | None]] = []
    room: list[tuple[int, list[Path]]] = []
    whole = Checkpoint(small)
    wanted = chance.sample(PARTS, 4)
    for needed in (wanted[:2], wanted, PARTS):
        came, here = asked(), {part for part in PARTS if is_here(parts.path, part)}
        said.clear(), room.clear()
        parts.fetch(
            needed,
            files,
            lambda what, done, total: said.append((done, total)),
            lambda coming, beside: room.append((sum(coming.values()), list(beside))),
        )
        nbytes = sum(whole.nbytes(part) for part in needed if part not in here)
        assert asked() - came == nbytes and room == [(nbytes, [parts.path])]
        assert [total for _, total in said] == [nbytes] * len(said) and said[-1][0] == nbytes
        assert [done for done, _ in said] == sorted(done for done, _ in said)
        assert {part for part in PARTS if is_here(parts.path, part)} == here | set(needed)
        parts.fetch(needed, files, no_progress, lambda coming, beside: room.append((0, [])))
        assert asked() - came == nbytes and len(room) == 1
    assert compute_manifest(resolve(parts.path)).version == compute_manifest(resolve(small)).version


def is_here(folder: Path, part: Part) -> bool:
    try:
        return bool(Checkpoint(folder).tensors(part))
    except ModelError:
        return False


def created(model_id: str, commit: str, small: Path, server: Server, **options: bool) -> HubParts:
    parts = HubParts(model_id, commit, "safetensors")
    about = {"model": model_id, "commit": commit}
    files = [server.file("model.safetensors")]
    parts.create(model_id, about, files, [small / "config.json"], no_progress, **options)
    return parts


def test_part_in_one_piece_is_one_question(small: Path, serve: Callable[[bytes], Server]) -> None:
    server = serve((small / "model.safetensors").read_bytes())
    parts = created("org/tiny", COMMIT, small, server)
    before = server.requests
    parts.fetch([3], {"model.safetensors": server.file("model.safetensors")}, no_progress, no_disk_limit)
    assert server.requests == before + 1


def test_kept_part_is_found_by_commit_and_name(small: Path, serve: Callable[[bytes], Server]) -> None:
    server = serve((small / "model.safetensors").read_bytes())
    first, second = created("org/tiny", "a" * 40, small, server), created("org/tiny", "b" * 40, small, server)
    other = created("org/other", "a" * 40, small, server)
    assert len({first.path, second.path, other.path}) == 3
    assert HubParts.kept("org/tiny", "a" * 40) == {"safetensors": first.path}
    assert HubParts.kept("org/tiny", "b" * 40) == {"safetensors": second.path}
    assert sorted(model.name for model in local_models()) == ["org/other", "org/tiny", "org/tiny"]
    for damage in (b"", b"[]", b"{}", b"\xff", b'{"model": "org/tiny"}'):
        (second.path / "hub.json").write_bytes(damage)
        assert HubParts.kept("org/tiny", "b" * 40) == {}
    assert HubParts.kept("org/tiny", "a" * 40) == {"safetensors": first.path}


def test_who_may_have_it_is_said_each_time(small: Path, serve: Callable[[bytes], Server]) -> None:
    server = serve((small / "model.safetensors").read_bytes())
    gated = created("org/gated", COMMIT, small, server, restricted=True)
    assert not may_hand_on(open_folder(gated.path, "org/gated"))
    gated.restrict(False)
    gated.restrict(False)
    assert may_hand_on(open_folder(gated.path, "org/gated"))
    gated.restrict(True)
    assert not may_hand_on(open_folder(gated.path, "org/gated"))
    assert may_hand_on(open_folder(created("org/tiny", COMMIT, small, server).path, "org/tiny"))


def test_files_beside_the_weights_are_added_once(small: Path, serve: Callable[[bytes], Server], tmp_path: Path) -> None:
    parts = created("org/tiny", COMMIT, small, serve((small / "model.safetensors").read_bytes()))
    config = (parts.path / "config.json").read_bytes()
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text("{}")
    parts.add([tmp_path / "tokenizer.json", tmp_path / "config.json"])
    (tmp_path / "tokenizer.json").write_text("other")
    parts.add([tmp_path / "tokenizer.json"])
    assert (parts.path / "tokenizer.json").read_text() == "{}"
    assert (parts.path / "config.json").read_bytes() == config
    assert not list(parts.path.glob("*.new"))


def test_damaged_folder_and_full_disk_are_said_first(
    small: Path, serve: Callable[[bytes], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve((small / "model.safetensors").read_bytes())
    parts = created("org/tiny", COMMIT, small, server)
    files, before = {"model.safetensors": server.file("model.safetensors")}, server.asked
    need = Checkpoint(small).nbytes(1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=need - 1))
        with pytest.raises(MachineError, match="Make room"):
            parts.fetch([1], files, no_progress, no_disk_limit)
    for damage in (b"", b"[]", b'{"form": "safetensors"}', b'{"form": "safetensors", "parts": 3}'):
        (parts.path / "ranges.json").write_bytes(damage)
        with pytest.raises(ModelError, match="is damaged: `petalnode models remove"):
            parts.fetch([1], files, no_progress, no_disk_limit)
    assert server.asked == before and not is_here(parts.path, 1)


def test_disk_that_loses_writes_makes_no_part(
    small: Path, serve: Callable[[bytes], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "DOWNLOADS", replace(ranges.DOWNLOADS, at_once=1))
    monkeypatch.setattr(hub_parts, "PIECE_BYTES", 20_000)
    server = serve((small / "model.safetensors").read_bytes())
    parts = created("org/tiny", COMMIT, small, server)
    files = {"model.safetensors": server.file("model.safetensors")}

    def fails(what: str, done: int, total: int | None) -> None:
        if done == total:  # what came before is on the disk
            (partial,) = parts.path.glob("*.partial")
            with partial.open("r+b") as stream:
                stream.seek((parts.path / "part-00002.safetensors.absent").stat().st_size)
                stream.write(b"\xff" * 100)

    with pytest.raises(ModelError, match="the disk may be failing"):
        parts.fetch([1], files, fails, no_disk_limit)
    assert not is_here(parts.path, 1)
    parts.fetch([1], files, no_progress, no_disk_limit)
    assert is_here(parts.path, 1) and not list(parts.path.glob("*.log"))


@pytest.mark.parametrize("fine_norms", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0"])
def test_gguf_header_comes_with_type_deciding_norms(
    kind: str, fine_norms: bool, serve: Callable[[bytes], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_parts, "_FIRST_BYTES", 1000)  # as long as it takes is asked for, twice as much each time
    source = write_tiny_gguf(tmp_path / "model.gguf", kind, fine_norms=fine_norms)
    server = serve(source.read_bytes())
    parts = HubParts("org/tiny", COMMIT, "model.gguf")
    parts.create("org/tiny:X", ABOUT, [server.file()], (), no_progress)
    header = read_gguf_header(source)
    norms = sum(held.nbytes for held in header.tensors if held.kind == "F32") if kind in ("F16", "BF16") else 0
    assert header.end <= server.asked - norms < 2 * header.end
    assert open_folder(parts.path, "x").config == resolve(source).config
    parts.fetch([0], {"model.gguf": server.file()}, no_progress, no_disk_limit)
    tensors = zip(Checkpoint(resolve(source).path).tensors(0), Checkpoint(parts.path).tensors(0), strict=True)
    for theirs, ours in tensors:
        assert theirs.file.read_bytes()[theirs.start : theirs.end] == ours.file.read_bytes()[ours.start : ours.end]


def test_endless_gguf_header_and_huge_norm_are_refused(
    serve: Callable[[bytes], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_parts, "_FIRST_BYTES", 1000)
    source = write_tiny_gguf(tmp_path / "model.gguf", "F16", extra={"blk.0.more.weight": np.zeros(1 << 16, np.float32)})
    end = read_gguf_header(source).end
    for sent, most, said in ((end // 2, 64 << 20, "damaged in its header"), (None, end // 2, "damaged in its header"),
                             (None, 2 * end, "it is no norm")):  # fmt: skip
        monkeypatch.setattr(hub_parts, "MAX_HEADER_BYTES", most)
        server = serve(source.read_bytes()[:sent])
        with pytest.raises(ModelError, match=said):
            HubParts("org/tiny", COMMIT, "model.gguf").create("x", ABOUT, [server.file()], (), no_progress)
        assert server.asked <= 2 * end
