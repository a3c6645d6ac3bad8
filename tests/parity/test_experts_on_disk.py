"""Experts that are left on the disk: the same bits, read from files that nobody shrinks, and counted."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.blocks.kernels.library import Range, library
from petalnode.node.blocks.quantisation import quantiser
from petalnode.node.blocks.quantisation.slots import QuantisedExperts
from petalnode.node.blocks.span import BlockSpan, Loading
from petalnode.node.blocks.span import load as load_as
from petalnode.node.errors import MachineError
from petalnode.node.models import resolve
from petalnode.node.models.cache_dir import cache_dir
from petalnode.protocols.ids import Span
from tests.tiny_gguf import BLOCKS, write_model_gguf

needs_kernels = pytest.mark.skipif(
    library() is None, reason="the kernels are not built (make setup, with a C compiler)"
)
PROMPT, EXPERTS, CHOSEN = 40, 4, 2


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return resolve(write_model_gguf(tmp_path / "mixture.gguf", "qwen3_moe")).path


def loaded(folder: Path, *, on_disk: bool) -> BlockSpan:
    how = Loading(dtype="float32", device="cpu", kernels="native", experts_on_disk=on_disk)
    return load_as(folder, Span(0, BLOCKS), how)


def answers(blocks: BlockSpan) -> list[torch.Tensor]:
    """Of a prompt, and of two tokens behind it."""
    hidden = torch.randn(1, PROMPT + 2, blocks.hidden_size, generator=torch.Generator().manual_seed(3))
    cache = blocks.make_cache(1, PROMPT + 2)
    found = [blocks.forward(hidden[:, :PROMPT], cache)]
    for place in (PROMPT, PROMPT + 1):
        found += blocks.decode([(hidden[:, place : place + 1], cache)])
    return found


def kept_files() -> list[Path]:
    return sorted((cache_dir() / "quantised").glob("experts*"))


@needs_kernels
def test_answers_have_the_bits_of_experts_in_memory(folder: Path) -> None:
    expected = answers(loaded(folder, on_disk=False))
    assert not kept_files()
    for _ in range(2):  # made, and found again
        blocks = loaded(folder, on_disk=True)
        assert blocks.step is not None and len(kept_files()) == BLOCKS
        assert all(torch.equal(one, other) for one, other in zip(answers(blocks), expected, strict=True))
        sizes = block_sizes(folder, "float32", "none", "native")
        assert blocks.disk_bytes == sum(sizes.experts) > 0
        assert blocks.weight_bytes == sum(sizes.held)


@needs_kernels
def test_used_experts_are_counted(folder: Path) -> None:
    for on_disk in (False, True):
        blocks = loaded(folder, on_disk=on_disk)
        used, read = blocks.expert_counts
        answers(blocks)
        now, read_now = blocks.expert_counts
        # all of them by a prompt, and those that were chosen by each token behind it
        assert now - used == BLOCKS * (EXPERTS + 2 * CHOSEN)
        assert 0 <= read <= read_now <= now and (on_disk or not read_now)


@needs_kernels
def test_files_that_are_removed_stay_in_use(folder: Path) -> None:
    expected = answers(loaded(folder, on_disk=False))
    blocks = loaded(folder, on_disk=True)
    for file in kept_files():
        assert not file.stat().st_mode & 0o222  # no program writes over it by mistake
        file.unlink()
    assert all(torch.equal(one, other) for one, other in zip(answers(blocks), expected, strict=True))


@needs_kernels
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_damaged_files_are_made_again(folder: Path, damage: str) -> None:
    expected = answers(loaded(folder, on_disk=False))
    loaded(folder, on_disk=True)
    for file in kept_files():
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.unlink()
        file.write_bytes({"cut": data[:-5], "changed": data, "empty": b""}[damage])
    blocks = loaded(folder, on_disk=True)
    assert all(torch.equal(one, other) for one, other in zip(answers(blocks), expected, strict=True))


@needs_kernels
def test_a_full_disk_is_said_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiser, "KEPT_FREE", 1 << 60)
    with pytest.raises(MachineError, match=r"experts of these blocks do not fit .* no room .* serve fewer blocks"):
        loaded(folder, on_disk=True)


@needs_kernels
def test_experts_in_memory_are_not_asked_for(folder: Path) -> None:
    blocks = loaded(folder, on_disk=False)
    experts = [module for module in blocks.stack.blocks[0].modules() if isinstance(module, QuantisedExperts)]
    assert [one.ranges for one in experts] == [None] and blocks.disk_bytes == 0


@needs_kernels
def test_bytes_outside_of_memory_are_asked_for(tmp_path: Path) -> None:
    found = library()
    assert found is not None
    file = tmp_path / "hole"
    with file.open("wb+") as stream:
        stream.truncate(3 << 20)
        with mmap.mmap(stream.fileno(), 0) as view:
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
            ranges = (Range * 2)(Range(start + 100, 5000), Range(start + (1 << 20), 1 << 20))
            assert found.functions.petalnode_ask_for(ctypes.addressof(ranges), 2) == 1
            ctypes.memset(start, 1, 3 << 20)
            assert found.functions.petalnode_ask_for(ctypes.addressof(ranges), 2) == 0
            assert found.functions.petalnode_ask_for(None, 0) == 0
            ctypes.memset(start, 0, 1)
            del ranges
