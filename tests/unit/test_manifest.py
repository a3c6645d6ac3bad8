"""The model version: the same however a model was saved, another for any other model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from petalnode.node.errors import ModelError
from petalnode.node.models import Manifest, ModelFolder, compute_manifest, resolve, verify_part
from petalnode.node.models.manifest import MAX_WIRE_BYTES, canonical_architecture
from petalnode.protocols.ids import Span
from petalnode.protocols.wire_pb2 import Manifest as WireManifest
from tests.mtp_heads import save_with_head
from tests.tiny_models import NUM_BLOCKS, save_tiny
from tests.tiny_pictures import save_seeing

DIGEST = bytes(range(32))


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "llama")


def opened(folder: Path) -> ModelFolder:
    return resolve(folder)


def version(folder: Path) -> bytes:
    return compute_manifest(opened(folder)).version


def change(folder: Path, key: str) -> None:
    """Changes the last bit of one value of one weight."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[key].view(torch.int32).view(-1)[-1] ^= 1
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gpt_neox", "bloom"])
def test_sharding_does_not_change_the_version(tmp_path: Path, architecture: str) -> None:
    whole = save_tiny(architecture, tmp_path / "whole")
    sharded = save_tiny(architecture, tmp_path / "sharded", shards="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert version(whole) == version(sharded)


def test_base_models_prefix_does_not_change_version(tmp_path: Path) -> None:
    folder = save_tiny("gpt2", tmp_path / "with")
    weights = load_file(folder / "model.safetensors")
    bare = shutil.copytree(folder, tmp_path / "without")
    save_file({key.removeprefix("transformer."): weight for key, weight in weights.items()}, bare / "model.safetensors")
    assert version(folder) == version(bare)


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("model.embed_tokens.weight", "the embeddings"),
        ("model.layers.4.mlp.down_proj.weight", "block 4"),
        ("model.norm.weight", "the final norm and head"),
        ("lm_head.weight", "the final norm and head"),
    ],
)
def test_one_changed_bit_changes_version_and_is_located(tmp_path: Path, llama: Path, key: str, part: str) -> None:
    manifest = compute_manifest(opened(llama))
    other = shutil.copytree(llama, tmp_path / "other")
    change(other, key)
    assert version(other) != manifest.version
    with pytest.raises(ModelError, match=f": {part} differs"):
        verify_part(opened(other), manifest, "all")


def test_an_encoder_of_pictures_counts_as_embeddings(tmp_path: Path) -> None:
    save_seeing("qwen3_vl", tmp_path / "seeing")
    manifest = compute_manifest(opened(tmp_path / "seeing"))
    other = shutil.copytree(tmp_path / "seeing", tmp_path / "other")
    change(other, next(key for key in load_file(other / "model.safetensors") if "visual.blocks" in key))
    assert version(other) != manifest.version
    with pytest.raises(ModelError, match="the embeddings differs"):
        verify_part(opened(other), manifest, "client")


def test_mtp_head_counts_and_older_manifests_stay_valid(tmp_path: Path) -> None:
    """Its copies of the embeddings and the head do not count: nothing reads them."""
    folder = save_with_head("deepseek_v3", tmp_path / "with")
    manifest = compute_manifest(opened(folder))
    bare, copied, other = (shutil.copytree(folder, tmp_path / name) for name in ("bare", "copied", "other"))
    weights, place = load_file(folder / "model.safetensors"), f"model.layers.{NUM_BLOCKS}."
    copies = {
        f"{place}{name}": weights["lm_head.weight"].clone()
        for name in ("embed_tokens.weight", "shared_head.head.weight")
    }
    without = {key: weight for key, weight in weights.items() if not key.startswith(place)}
    save_file(weights | copies, copied / "model.safetensors", {"format": "pt"})
    save_file(without, bare / "model.safetensors", {"format": "pt"})
    change(other, f"{place}hnorm.weight")
    assert version(copied) == manifest.version and len({manifest.version, version(bare), version(other)}) == 3
    with pytest.raises(ModelError, match="the embeddings differs"):
        verify_part(opened(other), manifest, "client")
    for need in ("client", "all"):
        verify_part(opened(folder), compute_manifest(opened(bare)), need)
    change(folder, "model.embed_tokens.weight")
    with pytest.raises(ModelError, match="the embeddings differs"):
        verify_part(opened(folder), compute_manifest(opened(bare)), "client")


def test_a_node_answers_for_its_own_part_only(tmp_path: Path, llama: Path) -> None:
    manifest = compute_manifest(opened(llama))
    other = shutil.copytree(llama, tmp_path / "other")
    change(other, "model.layers.4.mlp.down_proj.weight")
    verify_part(opened(other), manifest, Span(0, 4))
    verify_part(opened(other), manifest, "client")
    with pytest.raises(ModelError, match="block 4 differs"):
        verify_part(opened(other), manifest, Span(3, NUM_BLOCKS))


def test_a_part_is_checked_without_the_rest(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "sharded", shards="50KB")
    whole = opened(folder)
    manifest = compute_manifest(whole)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for key, file in index.items() if key.startswith(("model.layers.1.", "model.layers.2."))}
    for file in folder.glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    verify_part(resolve(folder, need=Span(1, 3)), manifest, Span(1, 3))
    with pytest.raises(ModelError, match="is missing"):
        compute_manifest(whole)


def test_transposed_weights_of_same_bytes_are_another_model(tmp_path: Path, llama: Path) -> None:
    other = shutil.copytree(llama, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    key = "model.layers.0.self_attn.k_proj.weight"
    weights[key] = weights[key].reshape(weights[key].shape[::-1])
    save_file(weights, other / "model.safetensors")
    assert version(other) != version(llama)


def test_swapped_blocks_are_another_model(tmp_path: Path, llama: Path) -> None:
    other = shutil.copytree(llama, tmp_path / "other")
    names = {"0": "1", "1": "0"}
    weights = {}
    for key, weight in load_file(other / "model.safetensors").items():
        words = key.split(".")
        if words[1] == "layers":
            words[2] = names.get(words[2], words[2])
        weights[".".join(words)] = weight
    save_file(weights, other / "model.safetensors")
    first, second = compute_manifest(opened(llama)), compute_manifest(opened(other))
    assert first.blocks[:2] == second.blocks[1::-1]
    assert first.version != second.version


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [
        ("transformers_version", "9.9", True),
        ("_name_or_path", "/somewhere", True),
        ("torch_dtype", "bfloat16", True),
        ("dtype", "bfloat16", True),
        ("use_cache", False, True),
        ("eos_token_id", [2, 7], True),
        ("rms_norm_eps", 1e-7, False),
        ("num_attention_heads", 8, False),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, False),
        ("sliding_window", None, False),
    ],
)
def test_what_of_the_configuration_counts(llama: Path, field: str, value: object, same: bool) -> None:
    before = version(llama)
    file = llama / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert (version(llama) == before) is same


def test_numbers_are_compared_by_value() -> None:
    assert canonical_architecture({"b": 10000, "a": 1e-05}) == canonical_architecture({"a": 0.00001, "b": 10000.0})
    assert canonical_architecture({"a": True}) != canonical_architecture({"a": 1})
    assert canonical_architecture({"a": None}) != canonical_architecture({})


def test_another_architecture_is_said(tmp_path: Path, llama: Path) -> None:
    manifest = compute_manifest(opened(llama))
    other = save_tiny("llama", tmp_path / "other", rope_theta=5000.0)
    with pytest.raises(ModelError, match=r"config\.json describes another architecture"):
        verify_part(opened(other), manifest, "client")


def test_weights_are_read_anew_when_they_change(llama: Path) -> None:
    seen: list[tuple[int, int | None]] = []

    def progress(what: str, done: int, total: int | None) -> None:
        seen.append((done, total))

    first = compute_manifest(opened(llama), progress)
    assert seen[-1][0] == seen[-1][1]
    seen.clear()
    assert compute_manifest(opened(llama), progress) == first
    verify_part(opened(llama), first, Span(0, 2), progress)
    assert not seen
    change(llama, "model.norm.weight")
    assert compute_manifest(opened(llama), progress) != first
    assert seen


def test_what_is_remembered_may_be_damaged(llama: Path, cache: Path) -> None:
    first = version(llama)
    for file in (cache / "hashes").iterdir():
        file.write_text('{"format": 1, "hashes": {"0": ["x"]}}')
    assert version(llama) == first


def test_the_wire_form_comes_back(llama: Path) -> None:
    manifest = compute_manifest(opened(llama))
    assert Manifest.from_wire(manifest.to_wire()) == manifest
    assert Manifest.from_wire(manifest.to_wire(), manifest.version).version == manifest.version
    with pytest.raises(ModelError, match="not of 000000000000"):
        Manifest.from_wire(manifest.to_wire(), bytes(32))


@pytest.mark.parametrize(
    "message",
    [
        WireManifest(),
        WireManifest(config=b"{}", embeddings=DIGEST, head=DIGEST),
        WireManifest(config=b"{}", embeddings=DIGEST, head=DIGEST, blocks=[b"short"]),
        WireManifest(config=b"{}", embeddings=DIGEST, head=b"", blocks=[DIGEST]),
        WireManifest(config=b"", embeddings=DIGEST, head=DIGEST, blocks=[DIGEST]),
        WireManifest(config=b"x" * (300 << 10), embeddings=DIGEST, head=DIGEST, blocks=[DIGEST]),
        WireManifest(config=b"{}", embeddings=DIGEST, head=DIGEST, blocks=[DIGEST] * 5000),
    ],
)
def test_a_manifest_of_absurd_sizes_is_refused(message: WireManifest) -> None:
    with pytest.raises(ModelError):
        Manifest.from_wire(message.SerializeToString())


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ModelError):
        Manifest.from_wire(data)


def test_the_largest_manifest_fits_the_limit() -> None:
    largest = Manifest(b"x" * (256 << 10), DIGEST, (DIGEST,) * 4096, DIGEST)
    assert len(largest.to_wire()) <= MAX_WIRE_BYTES
    assert Manifest.from_wire(largest.to_wire()) == largest
