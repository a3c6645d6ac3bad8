from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.errors import BadInput, MachineError, memory_needed
from petalnode.node.models import Checkpoint
from petalnode.node.server.lifecycle.memory import (
    MEMORY_SHARES,
    Memory,
    blocks_that_fit,
    cache_bytes_per_block,
    cache_tokens_that_fit,
    check_blocks_fit,
    check_cache_fits,
    fit_blocks,
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
        "19 of 80 blocks (4 more machines like this one would hold the rest): 8.0 GiB of memory are free, a block "
        "takes 256 MiB and 64 MiB for a cache of 8192 tokens; "
        "384 MiB are for computing and 1.6 GiB stay free"
    )
    assert blocks_that_fit(Memory(800 * GIB, 999 * GIB), 256 << 20, 80).reason.startswith("the whole model: ")
    with pytest.raises(MachineError, match=r"one block .* takes 300 MiB .* 300 MiB of memory are free"):
        blocks_that_fit(Memory(300 << 20, GIB), 300 << 20, 8)


MEMORY = Memory(8 * GIB, 16 * GIB)
COMPUTING = 2048 * 4096 * 4 * 12


def test_blocks_that_a_person_chose_need_no_reserve() -> None:
    """All that is free may be taken: blocks, what computing needs, and the smallest cache."""
    left = MEMORY.free - COMPUTING - 3 * GIB
    fits = left // (MEMORY_SHARES.min_cache_tokens * 3)
    taken = check_blocks_fit(MEMORY, [GIB] * 3, token_bytes=fits, cache_tokens=None, hidden_size=4096)
    assert taken == 3 * GIB + COMPUTING + fits * 3 * MEMORY_SHARES.min_cache_tokens <= MEMORY.free
    with pytest.raises(MachineError):
        check_blocks_fit(MEMORY, [GIB] * 3, token_bytes=fits + 1, cache_tokens=None, hidden_size=4096)
    asked = check_blocks_fit(MEMORY, [GIB], token_bytes=1024, cache_tokens=1000, hidden_size=4096)
    assert asked == GIB + COMPUTING + 1000 * 1024


def test_it_says_how_many_of_chosen_blocks_fit() -> None:
    with pytest.raises(
        MachineError,
        match=r"80 blocks .* take 80.0 GiB, .* at most 7 fit \(--num-blocks 7\), 11 more machines like this one",
    ) as caught:
        check_blocks_fit(MEMORY, [GIB] * 80, token_bytes=1024, cache_tokens=None, hidden_size=4096)
    assert caught.value.exit_code == 4
    check_blocks_fit(MEMORY, [GIB] * 7, token_bytes=1024, cache_tokens=None, hidden_size=4096)
    with pytest.raises(MachineError, match=r"at most 7 fit .*, 1 more machine like this one would hold the rest"):
        check_blocks_fit(MEMORY, [GIB] * 14, token_bytes=1024, cache_tokens=None, hidden_size=4096)
    with pytest.raises(MachineError, match="at most 6 fit"):  # the largest, as blocks are chosen later
        check_blocks_fit(MEMORY, [GIB] * 79 + [GIB + GIB // 8], token_bytes=0, cache_tokens=None, hidden_size=4096)
    with pytest.raises(MachineError, match="not even one of them fits"):
        check_blocks_fit(MEMORY, [8 * GIB], token_bytes=1024, cache_tokens=None)
    with pytest.raises(MachineError, match="at most 3 fit"):
        check_blocks_fit(MEMORY, [GIB] * 5, token_bytes=0, cache_tokens=None, spare=4 * GIB + 1)


def test_experts_that_do_not_fit_stay_on_disk() -> None:
    """If memory has room for a quarter of them: it says for how many."""
    fitting = fit_blocks(MEMORY, [GIB] * 7, [GIB // 2] * 7, token_bytes=0, cache_tokens=None)
    assert fitting.nbytes == 7 * GIB and not fitting.on_disk and not fitting.reason
    left = fit_blocks(MEMORY, [GIB] * 10, [GIB // 2] * 10, token_bytes=0, cache_tokens=None)
    assert left.on_disk and left.nbytes == MEMORY.free
    assert "8.0 GiB of memory are free and these blocks take 10.0 GiB: their experts, 5.0 GiB, stay" in left.reason
    assert "about 60 % of them in memory" in left.reason  # 3 of 5
    with pytest.raises(MachineError, match=r"14 blocks of this model take 14.0 GiB"):
        fit_blocks(MEMORY, [GIB] * 14, [GIB // 2] * 14, token_bytes=0, cache_tokens=None)
    with pytest.raises(MachineError, match=r"10 blocks of this model take 10.0 GiB"):  # of no mixture
        fit_blocks(MEMORY, [GIB] * 10, [0] * 10, token_bytes=0, cache_tokens=None)
    with pytest.raises(MachineError, match=r"10 blocks of this model take 10.0 GiB"):
        fit_blocks(MEMORY, [GIB] * 10, [], token_bytes=0, cache_tokens=None)


def test_it_says_how_many_tokens_of_cache_fit() -> None:
    at_most = (5 * GIB - COMPUTING) // (3 * 1024)
    check_blocks_fit(MEMORY, [GIB] * 3, token_bytes=1024, cache_tokens=at_most, hidden_size=4096)
    with pytest.raises(MachineError, match=f"cache-tokens {at_most + 1} takes .* at most {at_most} tokens fit"):
        check_blocks_fit(MEMORY, [GIB] * 3, token_bytes=1024, cache_tokens=at_most + 1, hidden_size=4096)
    check_cache_fits(MEMORY, 1000, 10, 100)
    with pytest.raises(MachineError, match="at most 0 tokens fit"):
        check_cache_fits(MEMORY, -5, 10, 100)
    # Whoever leaves the blocks to the server is told as well.
    with pytest.raises(MachineError, match=r"--cache-tokens \d+ is the most that fits one block"):
        blocks_that_fit(MEMORY, GIB, 8, cache_bytes=1024 * 10**9, cache_tokens=10**9)
    fewest = blocks_that_fit(MEMORY, GIB, 8, cache_bytes=1024 * 10**6, cache_tokens=10**6)
    assert fewest.count == 3
    with pytest.raises(MachineError) as caught:
        blocks_that_fit(MEMORY, 8 * GIB, 8, cache_bytes=1024, cache_tokens=10**9)
    assert "--cache-tokens" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("unable to mmap 12884901888 bytes from file </model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_memory_that_runs_out_is_said_in_words(error: Exception) -> None:
    with (
        pytest.raises(MachineError, match=r"^Loading blocks takes more memory than can be had") as caught,
        memory_needed("Loading blocks"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), RuntimeError("shapes"), BadInput("out of memory")])
def test_errors_not_about_memory_stay_so(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, memory_needed("Loading blocks"):
        raise error
    assert caught.value is error


def test_a_cache_by_the_words_of_several_configurations() -> None:
    llama = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert cache_bytes_per_block(llama, 2, 1000) == 2 * 8 * 128 * 2 * 1000
    assert cache_bytes_per_block({"text_config": llama | {"head_dim": 256}}, 2, 1000) == 2 * 8 * 256 * 2 * 1000
    assert cache_bytes_per_block({"n_embd": 768, "n_head": 12}, 4, 10) == 2 * 12 * 64 * 4 * 10
    assert cache_bytes_per_block({}, 4, 10) == 0
    assert cache_bytes_per_block(llama, 4, 1000, "bfloat16") == 2 * 8 * 128 * 2 * 1000
    latent = llama | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}
    assert cache_bytes_per_block(latent, 2, 1000) == (512 + 64) * 2 * 1000
    assert cache_bytes_per_block(llama, 4, 1000, "int8") == 2 * 8 * (128 + 2 * 4) * 1000


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 24))
def test_the_cache_has_bounds(free: int, per_token: int) -> None:
    assert MEMORY_SHARES.min_cache_tokens <= cache_tokens_that_fit(free, per_token) <= MEMORY_SHARES.max_cache_tokens


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_block_sizes_follow_from_the_configuration_alone(tmp_path: Path, architecture: str) -> None:
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
