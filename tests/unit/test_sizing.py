from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.errors import MachineError
from petalnode.node.models import Checkpoint
from petalnode.node.server.lifecycle.memory import (
    MAX_CACHE_TOKENS,
    MIN_CACHE_TOKENS,
    Memory,
    blocks_that_fit,
    cache_bytes_per_block,
    cache_tokens_that_fit,
)
from tests.tiny_models import save_tiny

GIB = 1 << 30
sizes = st.integers(0, 1 << 40)


@given(sizes, sizes, st.integers(1, 1 << 34), st.integers(1, 200), st.integers(0, 1 << 30), st.integers(0, 16384))
def test_what_is_taken_leaves_a_reserve(free: int, more: int, block: int, blocks: int, cache: int, hidden: int) -> None:
    memory = Memory(free, free + more)
    try:
        sizing = blocks_that_fit(memory, block, blocks, cache_bytes=cache, hidden_size=hidden)
    except MachineError:
        assert block + cache > (free - free // 4) // 2 or hidden or more
        return
    assert 1 <= sizing.count <= blocks
    assert sizing.count * (block + cache) <= free - min(memory.total // 10, free // 4)


def test_it_says_what_was_decided_and_why() -> None:
    sizing = blocks_that_fit(Memory(8 * GIB, 16 * GIB), 256 << 20, 80, cache_bytes=64 << 20, hidden_size=4096)
    assert sizing.count == 19  # (8 - 1.6 of reserve - 0.4 for computing) GiB by 320 MiB
    assert sizing.reason == (
        "19 of 80 blocks: 8.0 GiB of memory are free, a block takes 256 MiB and 64 MiB for a cache of 8192 tokens; "
        "384 MiB are for computing and 1.6 GiB stay free"
    )
    assert blocks_that_fit(Memory(800 * GIB, 999 * GIB), 256 << 20, 80).reason.startswith("the whole model: ")
    with pytest.raises(MachineError, match=r"one block .* takes 300 MiB .* 300 MiB of memory are free"):
        blocks_that_fit(Memory(300 << 20, GIB), 300 << 20, 8)


def test_a_cache_by_the_words_of_several_configurations() -> None:
    llama = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert cache_bytes_per_block(llama, 2, 1000) == 2 * 8 * 128 * 2 * 1000
    assert cache_bytes_per_block({"text_config": llama | {"head_dim": 256}}, 2, 1000) == 2 * 8 * 256 * 2 * 1000
    assert cache_bytes_per_block({"n_embd": 768, "n_head": 12}, 4, 10) == 2 * 12 * 64 * 4 * 10
    assert cache_bytes_per_block({}, 4, 10) == 0
    assert cache_bytes_per_block(llama, 4, 1000, "bfloat16") == 2 * 8 * 128 * 2 * 1000
    assert cache_bytes_per_block(llama, 4, 1000, "int8") == 2 * 8 * (128 + 2 * 4) * 1000


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 24))
def test_the_cache_has_bounds(free: int, per_token: int) -> None:
    assert MIN_CACHE_TOKENS <= cache_tokens_that_fit(free, per_token) <= MAX_CACHE_TOKENS


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_the_size_of_each_block_is_known_from_the_configuration_alone(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny(architecture, tmp_path / "model")
    checkpoint = Checkpoint(folder)
    stored = [sum(tensor.nbytes for tensor in checkpoint.tensors(block)) for block in range(6)]
    for file in folder.glob("*.safetensors"):
        file.unlink()
    whole = block_sizes(folder, "auto", "none")
    assert (whole.held, whole.whole, whole.item) == (tuple(stored), tuple(stored), 4)
    assert block_sizes(folder, "bfloat16", "none").held == tuple(size // 2 for size in stored)
    coarse = block_sizes(folder, "auto", "int8")
    assert coarse.whole == tuple(stored)
    assert all(size / 4 <= held < size / 2 for held, size in zip(coarse.held, stored, strict=True))
