"""Quantised blocks come back from the disk as they were, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.quantisation import quantiser
from petalnode.node.blocks.quantisation.quantiser import QuantisedCache
from petalnode.node.errors import BadInput
from petalnode.node.models.quantisation import (
    QUANTISATIONS,
    Numerics,
    describe_numerics,
    held_bytes,
)

DIGEST = bytes(32)
TENSORS = {
    "mlp.up.weight": torch.arange(64, dtype=torch.uint8).view(8, 8),
    "mlp.up.scale": torch.linspace(-1, 1, 7),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuantisedCache:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path))
    monkeypatch.setattr(quantiser, "KEPT_FREE", 0)
    return QuantisedCache("nf4-float32-cpu", b"{}")


def test_what_was_kept_comes_back(cache: QuantisedCache) -> None:
    assert cache.read(DIGEST) is None
    assert cache.write(DIGEST, TENSORS)
    found = cache.read(DIGEST)
    assert found is not None
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert [file.suffix for file in cache.file(DIGEST).parent.iterdir()] == [".safetensors"]


def test_other_weights_forms_and_architectures_are_other_blocks(cache: QuantisedCache) -> None:
    cache.write(DIGEST, TENSORS)
    assert cache.read(bytes(31) + b"\1") is None
    assert QuantisedCache("nf4-bfloat16-cpu", b"{}").read(DIGEST) is None
    assert QuantisedCache("nf4-float32-cpu", b'{"rope_theta":1}').read(DIGEST) is None


@pytest.mark.parametrize("damage", ["a bit", "its end", "all of it", "its header"])
def test_damage_is_noticed(cache: QuantisedCache, damage: str) -> None:
    cache.write(DIGEST, TENSORS)
    file = cache.file(DIGEST)
    data = bytearray(file.read_bytes())
    if damage == "a bit":
        data[-9] ^= 1
    damaged = {"a bit": data, "its end": data[:-1], "all of it": b"", "its header": b"\xff" * 8 + data[8:]}[damage]
    file.write_bytes(damaged)
    assert cache.read(DIGEST) is None
    assert not file.exists()
    assert cache.write(DIGEST, TENSORS)
    assert cache.read(DIGEST) is not None


def test_a_disk_that_takes_nothing_is_no_error(cache: QuantisedCache, tmp_path: Path) -> None:
    (tmp_path / "quantised").write_text("in the way")
    assert not cache.write(DIGEST, TENSORS)
    assert cache.read(DIGEST) is None


def test_full_disk_loses_old_blocks_and_keeps_none(cache: QuantisedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write(DIGEST, TENSORS)
    monkeypatch.setattr(quantiser, "KEPT_FREE", 1 << 62)
    assert not cache.write(bytes(31) + b"\1", TENSORS)
    assert cache.read(DIGEST) is None


def test_what_a_server_announces_of_its_numerics() -> None:
    assert [str(Numerics(weights)) for weights in QUANTISATIONS] == list(QUANTISATIONS)
    assert str(Numerics("nf4", "int8")) == "nf4/activations=int8"
    assert str(Numerics("int8", cache="bfloat16")) == "int8/cache=bfloat16"
    assert str(Numerics(cache="float32")) == "none"
    caches = ("none/cache=int8", "nf4/activations=int8/cache=bfloat16")
    for text in ("none", "int8", "nf4/activations=int8", *caches):
        assert str(Numerics.parse(text)) == text
    for text in ("", "none/activations=float32", "none/activations=", "none/activations=int4", "none/x=int8", "int8/"):
        with pytest.raises(BadInput):
            Numerics.parse(text)
    for text in ("none/cache=auto", "none/cache=float32", "none/cache=int8/activations=int8", "none/cache=int8/x"):
        with pytest.raises(BadInput):
            Numerics.parse(text)
    for text in ("int4", "none/cache=int4"):
        with pytest.raises(BadInput):
            Numerics.parse(text)
    assert describe_numerics("float32", "none") == "float32"
    assert describe_numerics("float32", "none/cache=int8") == "float32 with int8 keys and values"
    both = describe_numerics("float32", "nf4/activations=int8/cache=int8")
    assert both == "nf4 weights in float32 with int8 activations and int8 keys and values"
    assert describe_numerics("float32", "nf4/activations=int8") == "nf4 weights in float32 with int8 activations"


def test_how_much_room_a_tensor_takes() -> None:
    matrix, bias = (1024, 4096), (4096,)
    assert held_bytes("none", matrix, 1 << 24) == 1 << 24
    assert held_bytes("int8", matrix, 1 << 24) == 1 << 22
    assert held_bytes("nf4", matrix, 1 << 24) == (1 << 21) + (1 << 18)
    assert held_bytes("nf4", bias, 1 << 14) == 1 << 14
