"""Sessions of the exact kind have the same bits, however they are computed (docs/exact.md)."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.caches.states import StateRing
from petalnode.node.blocks.kernels import choice
from petalnode.node.blocks.kernels.library import ISAS, Library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.errors import MachineError
from petalnode.protocols.ids import Span
from tests.parity.kernel_spans import KNOWN, lora, saved, values
from tests.tiny_models import save_tiny

SPAN = Span(1, 4)
LENGTH = 150  # more than one chunk of a prompt


def exact(folder: Path, numerics: str = "none") -> BlockSpan:
    return load_span(folder, SPAN, device="cpu", dtype="float32", quantisation=f"{numerics}/exact-1")


def one_by_one(blocks: BlockSpan, hidden: torch.Tensor, cache: SpanCache) -> torch.Tensor:
    return torch.cat([blocks.decode([(token, cache)])[0] for token in torch.split(hidden, 1, dim=1)], dim=1)


@pytest.mark.parametrize("name", KNOWN)
def test_prompt_of_any_length_is_its_tokens_singly(name: str, tmp_path: Path, kernels: Library) -> None:
    blocks = exact(saved(name, tmp_path / "model"))
    hidden = values(2, LENGTH)
    expected_cache = blocks.make_cache(2, LENGTH, [0, 5])
    expected = one_by_one(blocks, hidden, expected_cache)
    for sizes in ([LENGTH], [3, 140, 7], [70, 80]):
        cache = blocks.make_cache(2, LENGTH, [0, 5])
        given = [blocks.forward(part, cache) for part in torch.split(hidden, sizes, dim=1)]
        assert torch.equal(torch.cat(given, dim=1), expected)
        assert torch.equal(cache.memory, expected_cache.memory)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_undone_drafts_of_hybrids_change_no_bit(name: str, tmp_path: Path, kernels: Library) -> None:
    """Of one step or several that were under way, with wrong tokens at the end; only rules are computed once more."""
    blocks, random, hidden = exact(saved(name, tmp_path / "model")), Random(name), values(2, LENGTH)
    expected = one_by_one(blocks, hidden, blocks.make_cache(2, LENGTH, [0, 5]))
    cache = blocks.make_cache(2, LENGTH, [0, 5])
    blocks.forward(hidden[:, :1], cache)
    for isa in (isa for isa in ISAS if isa != "plain" and kernels.select(isa)):
        cache.rollback(1)
        while (start := cache.length) < LENGTH:
            drafted = min(random.randint(1, StateRing.rewound), LENGTH - start)
            accepted = random.randint(1, drafted)
            draft = torch.cat([hidden[:, start : start + accepted], values(2, drafted - accepted, seed=start)], dim=1)
            parts = torch.split(draft, random.choice((1, 4, drafted)), dim=1)
            given = torch.cat([blocks.forward(part, cache) for part in parts], dim=1)
            cache.rollback(start + accepted)
            assert torch.equal(given[:, :accepted], expected[:, start : start + accepted]), (isa, start)
            assert cache.states is not None and cache.states.begin(cache.length) is None


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("numerics", ["none", "int8", "none/activations=int8", "none/cache=int8"])
def test_other_sessions_threads_and_instructions_change_no_bit(
    name: str, numerics: str, tmp_path: Path, kernels: Library
) -> None:
    blocks = exact(saved(name, tmp_path / "model"), numerics)
    assert blocks.step is not None
    random, hidden = Random(numerics), values(1, LENGTH)
    expected = one_by_one(blocks, hidden, blocks.make_cache(1, LENGTH))
    for isa in (isa for isa in ISAS if isa != "plain" and kernels.select(isa)):
        cache, crowd = blocks.make_cache(1, LENGTH), blocks.make_cache(37, LENGTH)
        given = []
        while cache.length < LENGTH:
            blocks.step.threads = random.choice((1, 2))
            tokens = min(random.choice((1, 1, 1, 2, 9, 33)), LENGTH - cache.length)
            part = hidden[:, cache.length : cache.length + tokens]
            if tokens > 1:
                given.append(blocks.forward(part, cache))
                continue
            beside = (values(37, 1, seed=cache.length), crowd)
            given.append(blocks.decode([beside, (part, cache)] if random.random() < 0.2 else [(part, cache)])[-1])
        assert torch.equal(torch.cat(given, dim=1), expected), isa


def test_unknown_adapter_changes_no_bit_of_others(tmp_path: Path, kernels: Library) -> None:
    blocks = exact(save_tiny("gpt2", tmp_path / "model"))
    unknown = lora(blocks, ("attn.c_attn",), 1)
    hidden = values(1, 6)
    expected = one_by_one(blocks, hidden, blocks.make_cache(1, 6))
    cache, other = blocks.make_cache(1, 6), blocks.make_cache(1, 6)
    given = [
        blocks.decode([(values(1, 1, seed=place), other), (hidden[:, place : place + 1], cache)], [unknown, None])[1]
        for place in range(6)
    ]
    assert torch.equal(torch.cat(given, dim=1), expected)


@pytest.mark.parametrize("name", ["bloom", "granite"])
def test_unknown_blocks_cannot_be_exact(name: str, tmp_path: Path, kernels: Library) -> None:
    with pytest.raises(MachineError, match="exact-1"):
        exact(save_tiny(name, tmp_path / "model"))


def test_instructions_that_round_otherwise_cannot_be_exact(
    tmp_path: Path, kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    assert kernels.select("plain")
    monkeypatch.setattr(choice, "library", lambda: Library("plain", kernels.functions))
    with pytest.raises(MachineError, match="do not give the bits of exact-1"):
        exact(folder)
