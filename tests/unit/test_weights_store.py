"""Parts of a model that came from peers, on this disk: resumed, locked, complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from petalnode.node.errors import MachineError, ModelError
from petalnode.node.models import EMBEDDINGS, HEAD, Manifest, compute_manifest, no_progress, resolve, verify_part
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.models.digests import PartReader, known_trees, part_trees
from petalnode.node.models.folder import open_folder
from petalnode.node.models.parts import parts_of_need
from petalnode.node.weights import store
from petalnode.node.weights.holder import bare_names, may_hand_on, read_texts
from petalnode.node.weights.store import (
    PeerFolder,
    config_of,
    gguf_header,
    number_of_part,
    part_of_number,
    safetensors_header,
)
from petalnode.protocols.ids import Span
from petalnode.protocols.weights import PIECE_BYTES, WEIGHTS_LIMITS, Offer, Tree, TreeEntry
from tests.full_disk import full_disk
from tests.mtp_heads import save_with_head
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import NUM_BLOCKS, save_tiny

NAME = "tiny"
OFFER = Offer(frozenset(), "model.layers.", "model.", ("lm_head.weight",))


pytestmark = pytest.mark.usefixtures("cache")


class Source:
    """A whole model, as a peer holds it."""

    def __init__(self, path: Path) -> None:
        self.folder = resolve(path)
        self.manifest = compute_manifest(self.folder)
        self.checkpoint = Checkpoint(self.folder.path, self.folder.num_blocks)
        count = self.folder.num_blocks
        trees = part_trees(self.checkpoint, parts_of_need("all", count))
        self.trees = {number_of_part(part, count): tree for part, tree in trees.items()}

    def pieces(self, number: int) -> list[bytes]:
        reader = PartReader(self.checkpoint, part_of_number(number, self.folder.num_blocks))
        return [bytes(reader.read(piece)) for piece in range(len(self.trees[number]))]

    def opened(self, offer: Offer = OFFER) -> PeerFolder:
        path = PeerFolder.create(NAME, self.manifest, self.trees, offer, no_progress)
        return PeerFolder.open(NAME, self.manifest, path)

    def put(self, folder: PeerFolder, number: int) -> None:
        for piece, data in enumerate(self.pieces(number)):
            assert folder.put(number, piece, data)
        folder.finish(number)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(save_tiny("llama", tmp_path / "llama", hidden_size=256, intermediate_size=512))


def test_numbers_of_parts() -> None:
    parts = parts_of_need("all", NUM_BLOCKS)
    assert [number_of_part(part, NUM_BLOCKS) for part in parts] == list(range(NUM_BLOCKS + 2))
    assert [part_of_number(number, NUM_BLOCKS) for number in range(NUM_BLOCKS + 2)] == list(parts)


def test_parts_are_known_without_reading(source: Source) -> None:
    folder = source.opened()
    assert folder.lacking(Span(0, 2)) == [1, 2]
    assert folder.lacking("client") == [0, NUM_BLOCKS + 1]
    for number in (1, 2):
        source.put(folder, number)
    found = folder.model_folder()
    assert folder.lacking(Span(0, 2)) == []
    assert known_trees(Checkpoint(found.path), [0, 1, 2, HEAD, EMBEDDINGS]).keys() == {0, 1}
    verify_part(found, source.manifest, Span(0, 2))
    with pytest.raises(ModelError, match="missing"):
        verify_part(found, source.manifest, Span(0, 3))
    with pytest.raises(ModelError, match="missing"):
        compute_manifest(found)
    for number in (0, *range(3, NUM_BLOCKS + 2)):
        source.put(folder, number)
    assert compute_manifest(found).version == source.manifest.version


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_parts_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    source = Source(write_tiny_gguf(tmp_path / "few.gguf", kind))
    folder = source.opened(Offer(frozenset(), "nonsense.", "more.", ("x",)))  # the keys of a GGUF file are its own
    found = folder.model_folder()
    source.put(folder, 2)
    verify_part(found, source.manifest, Span(1, 2))
    with pytest.raises(ModelError, match="missing"):
        verify_part(found, source.manifest, Span(0, 2))
    for number in (0, 1, 3, 4):
        source.put(folder, number)
    assert compute_manifest(found).version == source.manifest.version
    assert found.config["dtype"] == source.folder.config["dtype"]


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next", "mimo_v2_flash"])
def test_head_for_further_tokens_comes_with_embeddings(architecture: str, tmp_path: Path) -> None:
    """Which are as they were at the peer only with it: who hands on other weights of it is noticed."""
    fields = {"num_experts": 24} if architecture == "qwen3_next" else {}
    source = Source(save_with_head(architecture, tmp_path / "source", **fields))
    layout, bare = source.checkpoint.layout, bare_names(source.checkpoint)
    assert len(bare) <= WEIGHTS_LIMITS.max_bare
    folder = source.opened(Offer(frozenset(), layout.blocks, layout.base, bare))
    assert not folder.put(0, 0, bytes(byte ^ 1 for byte in source.pieces(0)[0]))
    for number in (0, NUM_BLOCKS + 1):
        source.put(folder, number)
    found = Checkpoint(folder.path, NUM_BLOCKS)
    behind = ("mtp.", f"layers.{NUM_BLOCKS}.")
    keys = {key for key in found.parts[EMBEDDINGS] if any(part in key for part in behind)}
    assert len(keys) > 8 and keys == {key for key in source.checkpoint.keys if any(part in key for part in behind)}
    verify_part(folder.model_folder(), source.manifest, "client")


def test_what_was_half_written_is_checked_again(source: Source) -> None:
    folder = source.opened()
    number = 1
    pieces = source.pieces(number)
    assert len(pieces) > 2
    assert folder.missing(number) == set(range(len(pieces)))
    assert not folder.put(number, 0, pieces[1])
    assert not folder.put(number, 0, pieces[0][:-1] + bytes([pieces[0][-1] ^ 1]))
    assert not folder.put(number, 0, pieces[0][:-1])
    assert folder.missing(number) == set(range(len(pieces)))
    assert folder.put(number, len(pieces) - 1, pieces[-1])
    assert folder.put(number, 0, pieces[0])
    again = PeerFolder.open(NAME, source.manifest, folder.path)
    assert again.missing(number) == set(range(1, len(pieces) - 1))
    (partial,) = folder.path.glob("*.partial")
    with partial.open("r+b") as stream:  # as a machine that lost its power may leave it
        stream.seek(-PIECE_BYTES // 8, 2)
        stream.write(bytes(100))
    assert again.missing(number) == set(range(1, len(pieces)))
    partial.write_bytes(b"")
    assert again.missing(number) == set(range(len(pieces)))
    assert not again.has(number)


def test_one_process_at_a_time_writes(source: Source) -> None:
    folder = source.opened()
    other = PeerFolder.open(NAME, source.manifest, folder.path)
    assert other.writer() == "another process"
    with folder.locked() as alone:
        assert alone
        with other.locked() as second:
            assert not second
            assert other.writer() == f"process {os.getpid()}"
    before = other.written()
    folder.put(1, 0, source.pieces(1)[0])
    assert other.written() > before
    with other.locked() as alone:
        assert alone


def test_filling_disk_is_said_and_loses_nothing(source: Source) -> None:
    folder = source.opened()
    pieces = source.pieces(1)
    assert folder.put(1, 0, pieces[0])
    with full_disk(PIECE_BYTES + PIECE_BYTES // 2), pytest.raises(MachineError, match="Fetching tiny failed"):
        folder.put(1, 1, pieces[1])
    assert not folder.has(1)
    assert folder.missing(1) == set(range(1, len(pieces)))
    source.put(folder, 1)
    verify_part(folder.model_folder(), source.manifest, Span(0, 1))


def test_a_damaged_folder_is_said(source: Source) -> None:
    folder = source.opened()
    (folder.path / "trees" / "3").write_bytes(b"x")
    with pytest.raises(ModelError, match="damaged"):
        PeerFolder.open(NAME, source.manifest, folder.path)
    (folder.path / "trees" / "3").write_bytes((folder.path / "trees" / "4").read_bytes())
    with pytest.raises(ModelError, match="damaged"):
        PeerFolder.open(NAME, source.manifest, folder.path)


def test_unserved_model_is_found_by_its_name(source: Source) -> None:
    assert PeerFolder.kept(NAME, "") == []
    folder = source.opened()
    assert PeerFolder.kept(NAME, "") == [source.manifest]
    assert PeerFolder.kept(NAME, source.manifest.version.hex()[:12]) == [source.manifest]
    assert PeerFolder.kept(NAME, "0" * 12) == []
    assert PeerFolder.kept("other", "") == []
    (folder.path / "petalnode-manifest.json").write_text("{}")
    assert PeerFolder.kept(NAME, "") == []


def test_what_was_handed_on_against_usual_stays_so(source: Source) -> None:
    folder = source.opened(replace(OFFER, restricted=True))
    assert not may_hand_on(folder.model_folder())


def test_what_is_shared_goes_on(source: Source) -> None:
    assert may_hand_on(source.opened().model_folder())
    assert may_hand_on(source.folder)


def test_hubs_private_files_are_not_shared(source: Source, tmp_path: Path) -> None:
    snapshot = Path(shutil.copytree(source.folder.path, tmp_path / "models--org--name" / "snapshots" / "1"))
    assert not may_hand_on(replace(source.folder, path=snapshot))


# --- nobody's word is taken for what decides the computation


def test_the_configuration_follows_from_the_version(source: Source) -> None:
    config = open_folder(source.opened().path, NAME).config
    theirs = source.folder.config
    for name in ("model_type", "hidden_size", "rms_norm_eps", "num_key_value_heads", "tie_word_embeddings"):
        assert config.get(name) == theirs.get(name), name
    assert config["dtype"] == "float32"


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"model_type": "llama"}',  # with a blank: no canonical form
        b'{"auto_map":{"AutoConfig":"evil--code.Config"},"model_type":"llama"}',
        b'{"_attn_implementation":"evil/kernel","model_type":"llama"}',
        b'{"model_type":"llama","model_type":"gpt2"}',
    ],
)
def test_a_configuration_that_says_more_is_refused(text: bytes, source: Source) -> None:
    manifest = Manifest(text, bytes(32), (bytes(32),), bytes(32))
    with pytest.raises(ModelError, match="configuration"):
        config_of(manifest, source.trees)


def tree(form: str, *entries: tuple[str, str, tuple[int, ...], int]) -> Tree:
    made = tuple(TreeEntry(*entry) for entry in entries)
    return Tree(form, made, bytes(32 * -(-sum(entry.nbytes for entry in made) // PIECE_BYTES)))


CONFIG = Manifest(b'{"model_type":"llama"}', bytes(32), (bytes(32),), bytes(32))


@pytest.mark.parametrize(
    ("form", "held", "dtype"),
    [
        ("safetensors", {"BF16": 100, "F32": 8}, "bfloat16"),
        ("safetensors", {"F16": 100, "F32": 8}, "float16"),
        ("safetensors", {"BF16": 8, "F32": 100}, "float32"),
        ("safetensors", {"BF16": 100, "I64": 8}, "bfloat16"),
        ("safetensors", {"BF16": 100, "F16": 90}, "bfloat16"),
        ("gguf llama", {"BF16": 100, "F32": 8}, "bfloat16"),
        ("gguf llama", {"Q4_0": 100, "F16": 200}, "float32"),
        ("gguf llama", {"BF16": 100, "F16": 90}, "float32"),
        ("gguf llama", {"F32": 100}, "float32"),
    ],
)
def test_the_type_is_that_of_the_weights(form: str, held: dict[str, int], dtype: str) -> None:
    made = tree(form, *((kind, kind, (), nbytes) for kind, nbytes in sorted(held.items())))
    assert config_of(CONFIG, {0: made})["dtype"] == dtype


@pytest.mark.parametrize("length", range(1, 10))
def test_parts_bytes_begin_aligned(length: int) -> None:
    header = safetensors_header(tree("safetensors", ("a", "F32", (1,), 4)).entries, ["a" * length])
    assert len(header) % 8 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8


def test_headers_that_cannot_be() -> None:
    for entries in ([("a", "F32", (2, 2), 8)], [("a", "PICKLE", (2, 2), 16)]):
        with pytest.raises(ModelError, match="cannot be read"):
            safetensors_header(tree("safetensors", *entries).entries, ["a"])
    two = tree("safetensors", ("a", "F32", (1,), 4), ("b", "F32", (1,), 4))
    with pytest.raises(ModelError, match="cannot be read"):
        safetensors_header(two.entries, ["same", "same"])
    empty = tree("safetensors", ("a", "F32", (0,), 0), ("b", "F32", (0,), 0))
    with pytest.raises(ModelError, match="one name"):
        safetensors_header(empty.entries, ["same", "same"])
    for entries in ([("a", "Q4_0", (32,), 17)], [("a", "Q4_0", (33,), 18)], [("a", "F32", (), 4)]):
        with pytest.raises(ModelError, match="impossible shape"):
            gguf_header(tree("gguf llama", *entries).entries, ["a"], "llama")
    with pytest.raises(ModelError, match="not known here"):
        gguf_header(tree("gguf llama", ("a", "Q99", (32,), 4)).entries, ["a"], "llama")


def test_model_without_a_block_is_refused_early(source: Source) -> None:
    trees = {number: tree for number, tree in source.trees.items() if number != 2}
    with pytest.raises(ModelError, match="lacks block 1"):
        PeerFolder.create(NAME, source.manifest, trees, OFFER, no_progress)


def test_few_bare_names_are_told_as_they_are(source: Source) -> None:
    assert bare_names(source.checkpoint) == OFFER.bare


def test_parts_of_different_forms_are_no_model(source: Source) -> None:
    trees = {**source.trees, 2: replace(source.trees[2], form="gguf llama")}
    with pytest.raises(ModelError, match="different ways"):
        PeerFolder.create(NAME, source.manifest, trees, OFFER, no_progress)


# --- the tokenizer's files


def test_only_a_folder_with_a_tokenizer_has_texts(source: Source) -> None:
    path = source.folder.path
    (path / "generation_config.json").unlink(missing_ok=True)
    (path / "chat_template.jinja").write_text("x")
    assert read_texts(source.folder) is None
    (path / "tokenizer.json").write_text("{}")
    texts = read_texts(replace(source.folder, config={"eos_token_id": 7}))
    assert texts is not None
    names = [entry.name for entry in texts.tree.entries]
    assert names == ["chat_template.jinja", "generation_config.json", "tokenizer.json"]
    folder = source.opened()
    assert not folder.has_texts
    folder.write_texts(texts.tree, texts.data)
    assert folder.has_texts
    assert json.loads((folder.path / "generation_config.json").read_text()) == {"eos_token_id": 7}
    assert (folder.path / "tokenizer.json").read_text() == "{}"
    assert not list(folder.path.glob("*.new"))


def tokenizer(source: Source) -> tuple[Tree, bytes]:
    (source.folder.path / "tokenizer.json").write_text("x" * 100_000)
    texts = read_texts(source.folder)
    assert texts is not None
    return texts.tree, texts.data


def test_processes_that_write_a_tokenizer_at_once(source: Source) -> None:
    folder, texts = source.opened(), tokenizer(source)
    wrong: list[Exception] = []

    def write() -> None:
        try:
            for _ in range(30):
                folder.write_texts(*texts)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and (folder.path / "tokenizer.json").stat().st_size == 100_000


def test_tokenizer_is_on_disk_before_it_counts(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, texts = source.opened(), tokenizer(source)
    synced: list[str] = []
    monkeypatch.setattr(store, "sync_one", lambda path: synced.append(path.name) if not folder.has_texts else None)
    folder.write_texts(*texts)
    assert synced == [*(f"{entry.name}.new" for entry in texts[0].entries), folder.path.name]
