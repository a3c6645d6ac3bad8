"""Reading a checkpoint's layout without loading it, and saying what is wrong with a damaged one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from petalnode.node.errors import ModelError
from petalnode.node.models import EMBEDDINGS, HEAD, Checkpoint
from petalnode.node.models.parts import CheckpointLayout, find_layout, parts_of_need
from petalnode.protocols.ids import Span
from tests.tiny_models import ARCHITECTURES, NUM_BLOCKS, save_tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")
    return lambda architecture: (
        root / architecture if (root / architecture).exists() else save_tiny(architecture, root / architecture)
    )


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = save_tiny("llama", tmp_path / "sharded", shards="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_key_of_every_architecture_has_its_part(tiny: Callable[[str], Path], architecture: str) -> None:
    checkpoint = Checkpoint(tiny(architecture))
    weights = load_file(checkpoint.folder / "model.safetensors")
    assert sorted(checkpoint.keys) == sorted(weights)
    assert sum(len(keys) for keys in checkpoint.parts.values()) == len(weights)
    assert list(checkpoint.parts) == [EMBEDDINGS, *range(NUM_BLOCKS), HEAD]
    assert all(checkpoint.parts.values())
    for block in range(NUM_BLOCKS):
        assert all(f".{block}." in key for key in checkpoint.parts[block])
        assert {checkpoint.layout.part_of(key) for key in checkpoint.parts[block]} == {block}
    assert any("emb" in key or "wte" in key for key in checkpoint.parts[EMBEDDINGS])
    assert any("norm" in key or "ln_f" in key for key in checkpoint.parts[HEAD])
    assert not any("norm" in key or "head" in key for key in checkpoint.parts[EMBEDDINGS] if "embedd" not in key)


def test_a_tensor_stands_where_it_is_said_to(tiny: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(tiny("llama"))
    for key, weight in load_file(checkpoint.folder / "model.safetensors").items():
        stored = checkpoint.tensor(key)
        assert (stored.dtype, stored.shape) == ("F32", tuple(weight.shape))
        raw = stored.file.read_bytes()[stored.start : stored.end]
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(weight.shape), weight)


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        (
            ("model.layers.{}.mlp.experts.0.w1", "model.layers.{}.mlp.experts.1.w1"),
            CheckpointLayout("model.", "model.layers.", 2),
        ),
        (("h.{}.attn.weight", "wte.weight"), CheckpointLayout("", "h.", 2)),
        (
            (
                "language_model.model.layers.{}.q",
                "vision_tower.encoder.layers.{}.q",
                "vision_tower.encoder.layers.{}.k",
            ),
            CheckpointLayout("language_model.model.", "language_model.model.layers.", 2),
        ),
        (
            ("model.visual.blocks.{}.a", "model.visual.blocks.{}.b", "model.language_model.layers.{}.a"),
            CheckpointLayout("model.language_model.", "model.language_model.layers.", 2),
        ),
    ],
)
def test_the_list_of_blocks_is_found(keys: tuple[str, ...], layout: CheckpointLayout) -> None:
    assert find_layout([key.format(number) for key in keys for number in range(2)], 2) == layout


def test_layers_beyond_last_block_are_not_models(tmp_path: Path) -> None:
    layout = find_layout([f"model.layers.{number}.weight" for number in range(4)], 3)
    assert [layout.part_of(f"model.layers.{number}.weight") for number in range(4)] == [0, 1, 2, None]


def test_unquantised_mtp_parts_belong_to_the_embeddings() -> None:
    keys = [f"model.layers.{number}.mlp.weight" for number in range(3)]
    head = ["model.layers.2.eh_proj.weight", "model.layers.2.embed_tokens.weight", "model.layers.3.eh_proj.weight"]
    layout = find_layout([*keys, *head], 2)
    assert [layout.part_of(key) for key in (keys[2], *head)] == [EMBEDDINGS, EMBEDDINGS, None, None]
    assert layout.local_name(keys[2]) == "layers.2.mlp.weight" and layout.local_name(keys[1]) == "mlp.weight"
    assert find_layout([*keys, *head, "model.layers.2.mlp.weight_scale_inv"], 2).part_of(head[0]) is None
    apart = find_layout(["mtp.layers.0.mlp.weight", "mtp.fc.weight", keys[0]], 1)
    assert (apart.blocks, apart.part_of("mtp.layers.0.mlp.weight")) == ("model.layers.", EMBEDDINGS)


def test_missing_blocks_are_listed() -> None:
    with pytest.raises(ModelError, match=r"says 5 blocks, but under 'h\.' it lacks blocks 1, 4"):
        find_layout(["h.0.w", "h.2.w", "h.3.w", "wte.weight"], 5)


def test_what_is_needed() -> None:
    assert parts_of_need("client", 3) == (EMBEDDINGS, HEAD)
    assert parts_of_need(Span(1, 3), 3) == (1, 2)
    assert parts_of_need("config", 3) == ()
    assert parts_of_need("all", 2) == (EMBEDDINGS, 0, 1, HEAD)
    with pytest.raises(ModelError, match="has 3 blocks: 1:4 passes its end"):
        parts_of_need(Span(1, 4), 3)


def test_folder_with_a_spans_shards_suffices_for_it(sharded: Path) -> None:
    whole = Checkpoint(sharded)
    kept = {whole.file_of[key] for block in (2, 3) for key in whole.parts[block]}
    for file in sharded.glob("*.safetensors"):
        if file.name not in kept:
            file.unlink()
    part = Checkpoint(sharded)
    part.check((2, 3))
    with pytest.raises(ModelError, match=r"model-0000\d-of-\d+\.safetensors is missing"):
        part.check()


@pytest.mark.parametrize("keep", [0, 5, 300, -1, -5000])
def test_a_truncated_file_is_named(sharded: Path, keep: int) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[2]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(ModelError, match=rf"{victim.name} is truncated") as caught:
        Checkpoint(sharded).check()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\xff" * 64, "is not a safetensors file"),
        ((20).to_bytes(8, "little") + b"[this is not JSON.....", "no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
    ],
)
def test_what_is_no_safetensors_file_is_said(
    tiny: Callable[[str], Path], tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]},
        "text",
    ],
)
def test_a_damaged_header_entry_is_named(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"model.layers.0.w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ModelError, match=r"entry for 'model\.layers\.0\.w' is damaged"):
        Checkpoint(tmp_path, num_blocks=1)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"weight_map": {}}', "lists no weights"),
        ('{"weight_map": {"h.0.w": "../secret.safetensors"}}', "is no safetensors file beside it"),
        ('{"weight_map": {"h.0.w": "/etc/passwd"}}', "is no safetensors file beside it"),
        ('{"weight_map": {"h.0.w": 3}}', "is no safetensors file beside it"),
    ],
)
def test_a_malformed_index_is_said(tmp_path: Path, index: str, complaint: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match=complaint):
        Checkpoint(tmp_path, num_blocks=1)


def test_index_unlike_its_shards_is_said(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"does not hold 'model\.norm\.weight'"):
        Checkpoint(sharded).check((HEAD,))


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (("pytorch_model.bin",), "save_pretrained"),
        (("consolidated.safetensors",), "Rename a single file to model.safetensors"),
        (("model.Q4.gguf",), "give the file"),
        ((), "has no weights"),
    ],
)
def test_folder_without_usable_weights_says_what_to_do(tmp_path: Path, files: tuple[str, ...], complaint: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=complaint):
        Checkpoint(tmp_path, num_blocks=1)


def test_no_torch_is_needed() -> None:
    script = "import sys, petalnode.node.models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_eight_bit_and_packed_weights_are_read(tmp_path: Path) -> None:
    save_file(
        {"h.0.a": torch.zeros(3, 4, dtype=torch.float8_e4m3fn), "h.0.b": torch.zeros(2, dtype=torch.bool)},
        tmp_path / "model.safetensors",
    )
    tensors = Checkpoint(tmp_path, num_blocks=1).tensors(0)
    assert [(tensor.dtype, tensor.nbytes) for tensor in tensors] == [("F8_E4M3", 12), ("BOOL", 2)]
