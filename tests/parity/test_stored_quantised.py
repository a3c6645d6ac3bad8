"""Checkpoints with quantised matrices compute exactly what the values that these stand for do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.quantisation.stored import StoredQuantised
from petalnode.node.blocks.span import load_span
from petalnode.node.errors import ModelError
from petalnode.node.models import compute_manifest, resolve
from petalnode.node.models.checkpoint import Checkpoint
from petalnode.node.models.stored_scheme import stored_scheme
from petalnode.protocols.ids import Span
from tests.quantised_checkpoints import IN_FEW_BITS, LAYOUTS, save_quantised
from tests.tiny_models import save_tiny

BLOCKS = Span(1, 3)


def output(folder: Path, **options: Any) -> tuple[torch.Tensor, Any]:
    span = load_span(folder, BLOCKS, dtype="float32", **options)
    hidden = torch.randn(1, 7, span.hidden_size, generator=torch.Generator().manual_seed(3))
    return span.forward(hidden, span.make_cache(1, 8)), span


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "plain", intermediate_size=288)  # rows are opened 256 at a time


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_compute_with_the_values_that_are_stored(layout: str, plain: Path, tmp_path: Path) -> None:
    quantised, opened = save_quantised(plain, tmp_path, layout)
    given, _ = output(quantised, kernels="torch")
    expected, _ = output(opened, kernels="torch")
    assert torch.equal(given, expected)
    resolve(quantised)
    if library() is None:
        return
    given, span = output(quantised, kernels="native")
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    few_bits = span.weight_bytes < load_span(opened, BLOCKS, dtype="float32", kernels="torch").weight_bytes / 2
    assert few_bits == (layout in IN_FEW_BITS)
    if layout == "packed, wide scales":
        return  # which no configuration tells
    sizes = block_sizes(quantised, "float32", "none", "native").held
    assert abs(sum(sizes[BLOCKS.start : BLOCKS.end]) - span.weight_bytes) < span.weight_bytes / 10


@pytest.mark.parametrize("layout", ["fp8 blocks", "gptq"])
def test_the_client_and_the_version(layout: str, plain: Path, tmp_path: Path) -> None:
    quantised, opened = save_quantised(plain, tmp_path, layout)
    ids = torch.tensor([[3, 5, 9]])
    assert torch.equal(load_client(quantised).embed(ids), load_client(opened).embed(ids))
    assert compute_manifest(resolve(quantised)).version != compute_manifest(resolve(opened)).version


def test_fp8_blocks_open_as_in_transformers(plain: Path, tmp_path: Path) -> None:
    quantised, _ = save_quantised(plain, tmp_path, "fp8 blocks")
    file = quantised / "model.safetensors"
    held = load_file(file)
    for key in [key for key in held if key.endswith("_scale_inv")]:  # transformers wants whole blocks
        rows, width = held[key.removesuffix("_scale_inv")].shape
        held[key] = torch.rand(rows // 16, width // 32) * 0.01
    save_file(held, file)
    scheme = stored_scheme({"quant_method": "fp8", "weight_block_size": [16, 32]})
    with Checkpoint(quantised) as weights:
        stored = StoredQuantised(weights, scheme)
        for key in stored.sources:
            if f"{key}_scale_inv" in held:
                expected = Fp8Dequantize(None)._dequantize_one(held[key], held[f"{key}_scale_inv"], torch.float32)
                assert torch.equal(stored.values(key), expected)


@pytest.mark.parametrize(
    ("layout", "lost", "says"),
    [
        ("fp8 blocks", "weight_scale_inv", "lacks .*weight_scale"),
        ("packed", "weight_scale", "lacks .*weight_scale"),
        ("packed", "weight_shape", "lacks .*weight_shape"),
        ("gptq", "qzeros", "lacks .*qzeros"),
    ],
)
def test_what_is_missing_is_named(layout: str, lost: str, says: str, plain: Path, tmp_path: Path) -> None:
    quantised, _ = save_quantised(plain, tmp_path, layout)
    file = quantised / "model.safetensors"
    save_file({key: held for key, held in load_file(file).items() if not key.endswith(lost)}, file)
    with pytest.raises(ModelError, match=says):
        load_span(quantised, BLOCKS, dtype="float32", kernels="torch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_that_do_not_fit_are_said(layout: str, plain: Path, tmp_path: Path) -> None:
    """Each tensor beside a matrix, in another shape or type."""
    quantised, _ = save_quantised(plain, tmp_path, layout)
    file = quantised / "model.safetensors"
    held = load_file(file)
    module = "model.layers.1.mlp.down_proj."
    for key in [key for key in held if key.startswith(module) and held[key].dim() == 2]:
        changed = held[key][:-1, :-1] if min(held[key].shape) > 1 else torch.ones(3, 7).to(held[key].dtype)
        save_file(held | {key: changed.contiguous()}, file)
        with pytest.raises(ModelError):
            load_span(quantised, BLOCKS, dtype="float32", kernels="torch")


REFUSED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "3 bits": {"quant_method": "gptq", "bits": 3},
    "marlin": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "gemv": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "sparse": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 4}}}, "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}},
    },
    "several": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
    },
    "blocks": {"quant_method": "fp8", "weight_block_size": [0, 128]},
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name(kind: str, plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": REFUSED[kind]}))
    with pytest.raises(ModelError, match="petalnode does not load"):
        resolve(plain)
