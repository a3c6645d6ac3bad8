"""What `load_span` and `load_client` say to folders and arguments that they cannot use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.errors import BadInput, MachineError, ModelError
from petalnode.protocols.ids import Span
from tests.tiny_models import save_tiny

WHOLE = Span(0, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "model", num_hidden_layers=2)


def edit_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_span(tmp_path, WHOLE)


def test_a_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated"):
        load_span(folder, WHOLE)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load_client(folder)


def test_missing_weights_are_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"misses model\.layers\.1\.mlp\.up_proj\.weight"):
        load_span(folder, WHOLE)
    load_span(folder, Span(0, 1))


def test_unexpected_weights_are_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.mlp.extra": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"unexpected model\.layers\.0\.mlp\.extra"):
        load_span(folder, WHOLE)


def test_wrong_shapes_are_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=112)
    with pytest.raises(ModelError, match=r"gate_proj\.weight \(96, 64\), not \(112, 64\)"):
        load_span(folder, WHOLE)


def test_a_client_wants_embeddings_norm_and_head(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"misses model\.norm\.weight"):
        load_client(folder)
    load_span(folder, WHOLE)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "decoder"),
        ({"hidden_size": "wide"}, "config"),
        ({"num_hidden_layers": 5}, "block"),
    ],
)
def test_configurations_that_cannot_be_used(folder: Path, fields: dict[str, Any], words: str) -> None:
    edit_config(folder, **fields)
    with pytest.raises(ModelError, match=words):
        load_span(folder, WHOLE)


def test_arguments_that_make_no_sense(folder: Path) -> None:
    with pytest.raises(BadInput, match="0:2"):
        load_span(folder, Span(1, 3))
    with pytest.raises(BadInput, match="dtype"):
        load_span(folder, WHOLE, dtype="int3")
    with pytest.raises(BadInput, match="device"):
        load_span(folder, WHOLE, device="toaster")
    with pytest.raises(MachineError, match="cuda:99"):
        load_span(folder, WHOLE, device="cuda:99")


def test_a_missing_shard_matters_to_its_blocks_only(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", shards="150KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    of_block = {b: {f for key, f in index.items() if f".layers.{b}." in key} for b in range(6)}
    lost = of_block[5] - of_block[0]
    assert lost
    for name in lost:
        (folder / name).unlink()
    load_span(folder, Span(0, 1))
    with pytest.raises(ModelError, match="missing"):
        load_span(folder, Span(5, 6))


def test_shards_make_no_difference(tmp_path: Path) -> None:
    single, sharded = save_tiny("mixtral", tmp_path / "a"), save_tiny("mixtral", tmp_path / "b", shards="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    hidden = torch.randn(1, 5, 64)
    outputs = [run(load_span(folder, Span(2, 5)), hidden) for folder in (single, sharded)]
    assert torch.equal(*outputs)


def run(span: BlockSpan, hidden: torch.Tensor) -> torch.Tensor:
    return span.forward(hidden, span.make_cache(hidden.shape[0], hidden.shape[1]))


def test_the_checkpoint_says_the_dtype(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", dtype=torch.bfloat16)
    span = load_span(folder, WHOLE)
    assert span.dtype == torch.bfloat16
    assert span.cache_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert run(span, torch.randn(1, 2, 64)).dtype == torch.float32  # as it came in
    assert load_span(folder, WHOLE, dtype="float32").dtype == torch.float32
    assert load_client(folder).dtype == torch.bfloat16


def test_cache_bytes_are_those_of_a_cache(folder: Path) -> None:
    span = load_span(folder, WHOLE)
    assert span.make_cache(3, 20).nbytes == 3 * 20 * span.cache_bytes_per_token


def test_hidden_states_that_do_not_fit_are_refused(folder: Path) -> None:
    span = load_span(folder, WHOLE)
    cache = span.make_cache(2, 4)
    for shape in ((1, 1, 64), (2, 1, 63), (2, 5, 64), (2, 0, 64), (2, 64)):
        with pytest.raises(ValueError, match=r"shape|fit"):
            span.forward(torch.zeros(shape), cache)
    with pytest.raises(ValueError, match="one token"):
        span.decode([(torch.zeros(2, 2, 64), cache)])
    assert cache.length == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux to see what is mapped")
def test_weights_stay_mapped_from_the_file(folder: Path) -> None:
    span = load_span(folder, WHOLE)
    run(span, torch.zeros(1, 1, 64))
    assert str((folder / "model.safetensors").resolve()) in Path("/proc/self/maps").read_text()
